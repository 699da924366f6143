"""The token of a Ray that is joined, which `ray start --head` asks for by default since Ray 2.60: found where Ray keeps it.

Knows Ray's variables, and how its head refuses a call; nothing of how Ray is started or joined.
"""

import os
from typing import Any

import ray._raylet

from chaosrun.errors import NoClusterError

_raylet: Any = ray._raylet
ANSWER_S = 1.5
PLACES = "$RAY_AUTH_TOKEN, the file that $RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"
_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""Any call would do: the head looks at the token first."""


def take_token(address: str) -> None:
    """Have Ray use the token that lies where it keeps it, if its head at `address` asks for one: with an address Ray looks for
    it only where RAY_AUTH_MODE says so. Raises NoClusterError when there is none, or the head does not take it."""
    refused = _is_refused(address, None)
    loader = getattr(_raylet, "AuthenticationTokenLoader", None)
    if refused is False or loader is None:  # before Ray 2.52 there are no tokens
        return
    if not loader.instance().has_token(ignore_auth_mode=True):
        if refused:
            raise NoClusterError(
                f"the Ray cluster at {address} asks for a token, and there is none here",
                hint=f"put what `ray get-auth-token` prints on its head into {PLACES}",
            )
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    _raylet.Config.initialize("")  # which has read the variable already
    if _is_refused(address, loader.instance().get_raw_token(ignore_auth_mode=True)):
        raise NoClusterError(
            f"the Ray cluster at {address} does not take the token that is here",
            hint=f"put what `ray get-auth-token` prints on its head into {PLACES}, of which the first that is there counts",
        )


def _is_refused(address: str, token: str | None) -> bool | None:
    """Whether its head says so; Ray itself asks for 20 s. None: it cannot be asked without grpc, which the extra `ray-jobs`
    brings, or did not answer."""
    try:
        import grpc
    except ImportError:
        return None
    with grpc.insecure_channel(address) as channel:
        about = () if token is None else (("authorization", f"Bearer {token}"),)
        try:
            channel.unary_unary(_CALL)(b"", timeout=ANSWER_S, metadata=about)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            return True if code is grpc.StatusCode.UNAUTHENTICATED else None
    return False
