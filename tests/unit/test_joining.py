"""Before a Ray is joined: whether anybody listens there, and whether it takes the token that is here."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from chaosrun.cluster import token
from chaosrun.errors import NoClusterError
from chaosrun.supervise.run import expect_listening

grpc: Any = pytest.importorskip("grpc")
TOKEN = "an-only-token"


@pytest.fixture
def head() -> Iterator[str]:
    """Refuses every call without the token, as Ray's head does."""

    class Guard(grpc.ServerInterceptor):
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            if ("authorization", f"Bearer {TOKEN}") in details.invocation_metadata:
                return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
            refuse = lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")  # noqa: E731
            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.server(ThreadPoolExecutor(2), interceptors=[Guard()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


class Loader:
    """Of Ray: what it finds where it keeps a token."""

    def __init__(self, found: str | None) -> None:
        self.found = found

    def instance(self) -> "Loader":
        return self

    def has_token(self, *, ignore_auth_mode: bool) -> bool:
        return self.found is not None

    def get_raw_token(self, *, ignore_auth_mode: bool) -> str | None:
        return self.found


class Config:
    @staticmethod
    def initialize(text: str) -> None:
        pass


def ray_with(found: str | None) -> Any:
    return type("Raylet", (), {"AuthenticationTokenLoader": Loader(found), "Config": Config})


@pytest.mark.parametrize(
    ("found", "error"), [(TOKEN, None), (None, "asks for a token, and there is none"), ("another", "does not take the token")]
)
def test_the_token_of_a_cluster(head: str, monkeypatch: pytest.MonkeyPatch, found: str | None, error: str | None) -> None:
    monkeypatch.setattr(token, "_raylet", ray_with(found))
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    if error is None:
        token.take_token(head)
        assert token.os.environ["RAY_AUTH_MODE"] == "token"
        return
    with pytest.raises(NoClusterError, match=error) as caught:
        token.take_token(head)
    assert "$RAY_AUTH_TOKEN_PATH" in (caught.value.hint or "")


def test_an_address_where_nobody_listens() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        address = f"0.0.0.0:{listening.getsockname()[1]}"  # this host, whatever it is called
        expect_listening(address)
    with pytest.raises(NoClusterError, match=f"no Ray cluster at {address}: Connection refused"):
        expect_listening(address)
    expect_listening("auto")
