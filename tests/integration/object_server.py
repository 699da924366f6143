"""An S3 server in a process of its own, for tests: moto's, asked over HTTP like any other."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer(free_port())
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
