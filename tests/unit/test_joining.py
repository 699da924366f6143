"""Before a Ray is joined: whether anybody listens there, and whether it takes the token that is here."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from chaosrun.cluster.joining import expect_joinable
from chaosrun.errors import NoClusterError

TOKEN = "an-only-token"


@pytest.fixture
def head() -> Iterator[str]:
    """Refuses every call without the token, as Ray's head does."""

    class Guard(grpc.ServerInterceptor):
        def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
            if ("authorization", f"Bearer {TOKEN}") in handler_call_details.invocation_metadata:
                return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
            refuse = lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")  # noqa: E731
            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.server(ThreadPoolExecutor(2), interceptors=[Guard()])
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    yield f"127.0.0.1:{port}"  # which stands for the machine's own address, as with Ray
    server.stop(None)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds no token yet."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / ".ray").mkdir()
    return tmp_path


@pytest.mark.parametrize("where", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "home"])
def test_the_token_that_lies_where_ray_keeps_it(head: str, home: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    file = home / "token" if where == "RAY_AUTH_TOKEN_PATH" else home / ".ray" / "auth_token"
    file.write_text(f"{TOKEN if where != 'RAY_AUTH_TOKEN' else 'not looked at'}\n")
    if where != "home":
        monkeypatch.setenv(where, TOKEN if where == "RAY_AUTH_TOKEN" else str(file))
    assert expect_joinable(head) == TOKEN


@pytest.mark.parametrize(
    ("found", "error"), [("", "asks for a token, and there is none here"), ("another", "rejects the token that is here")]
)
def test_no_token_or_another(head: str, home: Path, found: str, error: str) -> None:
    (home / ".ray" / "auth_token").write_text(found)
    with pytest.raises(NoClusterError, match=f"{head} {error}") as caught:
        expect_joinable(head)
    assert "$RAY_AUTH_TOKEN_PATH" in (caught.value.hint or "")


def test_the_cluster_that_was_started_last_here(head: str, home: Path) -> None:
    assert expect_joinable("auto") is None, "Ray may find one in another way"
    (home / "tmp" / "ray").mkdir(parents=True)
    (home / "tmp" / "ray" / "ray_current_cluster").write_text(head)
    with pytest.raises(NoClusterError, match="the Ray cluster at auto asks for a token"):
        expect_joinable("auto")


def test_what_is_no_address_is_refused_before_anything_is_made() -> None:
    with pytest.raises(NoClusterError, match="no Ray cluster at nonsense: an address is HOST:PORT, or auto"):
        expect_joinable("nonsense")
    assert expect_joinable("local") is expect_joinable("") is None


def test_an_address_where_nobody_listens() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        address = f"0.0.0.0:{listening.getsockname()[1]}"  # this host, whatever it is called
        assert expect_joinable(address) is None
    with pytest.raises(NoClusterError, match=f"no Ray cluster at {address}: Connection refused"):
        expect_joinable(address)


def test_ray_is_not_imported_for_it() -> None:
    asked = "import sys; from chaosrun.supervise import run; run.expect_joinable('auto'); print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("asks", [True, False], ids=["asks for a token", "asks for none"])
def test_ray_is_told_to_use_a_token_where_one_is_asked_for(
    head: str, home: Path, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    from chaosrun.cluster import connection

    read: list[str] = []
    joined: list[str | None] = []
    monkeypatch.setattr(connection, "_raylet", SimpleNamespace(Config=SimpleNamespace(initialize=read.append)))
    monkeypatch.setattr(connection.ray, "init", lambda **about: joined.append(os.environ.get("RAY_AUTH_MODE")))
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    (home / ".ray" / "auth_token").write_text(TOKEN)
    with socket.create_server(("0.0.0.0", 0)) as listening:
        connection._join(head if asks else f"0.0.0.0:{listening.getsockname()[1]}")
    assert (joined, read) == ((["token"], [""]) if asks else ([""], []))
