"""Checks before a Ray is joined, without importing ray, which takes seconds: whether a process listens at its address, and
whether it accepts this user's token, which `ray start --head` requires by default since Ray 2.60.

Knows where Ray stores its address and token, and how its head refuses a call.
"""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from chaosrun.errors import NoClusterError

ANSWER_S = 1.5
LISTENING_S = 5.0
PLACES = "$RAY_AUTH_TOKEN, the file that $RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"
FOUND_BY_RAY = ("", "auto", "local")
"""Addresses without a port; the empty one is none."""
_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""Any call would do: the head checks the token first."""

on_joined: list[Callable[[str], object]] = []
"""Called with host:port of the head of a Ray that this process has joined, so that a watchdog can watch it, too."""


def expect_joinable(address: str) -> str | None:
    """The token that the head at `address` requires; None if it requires none, or only Ray can find the head. Raises
    NoClusterError if nothing listens there (Ray itself would try for minutes), or if the token is missing or wrong (20 s)."""
    if ":" not in address and address not in FOUND_BY_RAY:
        raise no_cluster(address, "an address is HOST:PORT, or auto for the cluster that was started on this machine")
    host, separator, port = _resolved(address).rpartition(":")
    if not separator or not port.isdecimal() or host.startswith("ray:"):
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENING_S).close()
    except OSError as error:
        raise no_cluster(address, error.strerror or str(error)) from error
    if not _is_refused(f"{host}:{port}", None):
        return None
    if (token := _kept_token()) is None:
        raise NoClusterError(
            f"the Ray cluster at {address} asks for a token, and there is none here",
            hint=f"put what `ray get-auth-token` prints on its head into {PLACES}",
        )
    if _is_refused(f"{host}:{port}", token):
        raise NoClusterError(
            f"the Ray cluster at {address} rejects the token that is here",
            hint=f"put what `ray get-auth-token` prints on its head into {PLACES}; the first that exists is used",
        )
    return token


def no_cluster(address: str, why: str) -> NoClusterError:
    return NoClusterError(
        f"no Ray cluster at {address}: {why}", hint="check --address and $RAY_ADDRESS; without both a private Ray is started"
    )


def _resolved(address: str) -> str:
    """The address as Ray resolves it: "auto" is the cluster that was started last on this machine, at the machine's own
    address."""
    if address == "auto":
        folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        try:
            address = Path(folder, "ray", "ray_current_cluster").read_text().strip()
        except OSError:
            return address
    host, _, port = address.rpartition(":")
    if host == "localhost" or host.startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
            try:
                unused.connect(("8.8.8.8", 53))  # sends nothing
                return f"{unused.getsockname()[0]}:{port}"
            except OSError:
                return address
    return address


def _kept_token() -> str | None:
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return Path(named or os.path.expanduser("~/.ray/auth_token")).read_text().strip() or None
    except OSError:
        return None


def _is_refused(address: str, token: str | None) -> bool:
    """Whether the head refuses this token (None: a call without one)."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        about = () if token is None else (("authorization", f"Bearer {token}"),)
        try:
            channel.unary_unary(_CALL)(b"", timeout=ANSWER_S, metadata=about)
        except grpc.RpcError as error:
            return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False
