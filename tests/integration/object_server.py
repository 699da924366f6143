"""An S3 server in a process of its own, for tests: moto's, asked over HTTP like any other."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIMIT_S = 60.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True, slots=True)
class ObjectServer:
    port: int

    @property
    def env(self) -> dict[str, str]:
        """What a job is told to reach it."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def files(self) -> Any:
        """As a file system of fsspec's."""
        import fsspec

        return fsspec.filesystem(
            "s3",
            skip_instance_cache=True,
            use_listings_cache=False,
            key="test",
            secret="test",
            endpoint_url=self.env["AWS_ENDPOINT_URL"],
            client_kwargs={"region_name": "us-east-1"},
        )


def free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def object_server(open_requests: int | None = None) -> Iterator[ObjectServer]:
    """`open_requests`: so many are done for anybody, later ones for those alone who may."""
    server = ObjectServer(free_port())
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port)]
    strict = {} if open_requests is None else {"INITIAL_NO_AUTH_ACTION_COUNT": str(open_requests)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **strict})
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
                break
            assert process.poll() is None and time.monotonic() < deadline_s, "the server does not answer"
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _served(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """A server of this process, on a port of its own: that port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def answering(status: int) -> Iterator[tuple[ObjectServer, list[str]]]:
    """A store that answers each request with this status alone, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with _served(Handler) as port:
        yield ObjectServer(port), asked


@contextlib.contextmanager
def dropping_conditions(port: int) -> Iterator[int]:
    """A store before the one at `port` that knows no conditional puts, as older ones do; its own port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("if-none-match", "expect")}
            server = http.client.HTTPConnection("127.0.0.1", port)
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            data = answer.read()
            self.send_response(answer.status)
            told = {name: value for name, value in answer.getheaders() if name.lower() != "connection"}
            for name, value in ({"Content-Length": str(len(data))} | told).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            server.close()

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on

        def log_message(self, format: str, *args: object) -> None:
            pass

    with _served(Handler) as own:
        yield own
