"""One node's part of the connections between all nodes: listens on one port and connects to every node, itself included.

One process per node holds all its connections, in threads.
"""

import json
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from msgspec import Struct

from chaosrun.records.codec import convert

AT_ONCE = 128
"""Connections that a node opens at the same time; each one that is dropped takes its whole timeout."""
RETRY_S = 0.05


class Peer(Struct, frozen=True, kw_only=True):
    name: str
    address: str
    port: int
    ports: dict[str, int]
    """Of Ray, by purpose."""


class MeshOrder(Struct, frozen=True, kw_only=True):
    node: str
    port: int
    """The port to listen on, which the others know."""
    peers: tuple[Peer, ...]
    """Itself included."""
    start_s: float
    """Until when the others' processes must have started."""
    connect_s: float
    """For one connection or answer."""


class MeshFailure(Struct, frozen=True, kw_only=True):
    peer: str
    purpose: str
    """The port's purpose: rendezvous, or a service of Ray."""
    port: int
    cause: Literal["refused", "no answer", "other"]
    error: str


class MeshFacts(Struct, frozen=True, kw_only=True):
    taken: str = ""
    """Why listening on the port failed; then nothing else is known."""
    reached: int = 0
    failed: tuple[MeshFailure, ...] = ()


def stays_s(start_s: float, connect_s: float, peers: int) -> float:
    """How long a node listens for missing peers, which timeouts with other nodes may have delayed."""
    return start_s + 4 * connect_s * -(-peers // AT_ONCE)


def probe(**parameters: Any) -> MeshFacts:
    """Parameters: those of `MeshOrder`."""
    asked = convert(parameters, MeshOrder)
    began = time.monotonic()
    try:
        server = _Server(asked)
    except OSError as error:
        return MeshFacts(taken=error.strerror or str(error))
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # Beginning at itself, so that not all nodes begin with the same one.
        own = next(index for index, peer in enumerate(asked.peers) if peer.name == asked.node)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            order = [*asked.peers[own:], *asked.peers[:own]]
            failed = list(pool.map(lambda peer: _meet(asked, peer, began + asked.start_s), order))
        # Only after the other nodes have had time to connect to this one.
        server.wait({peer.name for peer in asked.peers}, began + stays_s(asked.start_s, asked.connect_s, len(asked.peers)))
        server.shutdown()
    reached = sum(not any(each.purpose == "rendezvous" for each in of_peer) for of_peer in failed)
    return MeshFacts(reached=reached, failed=tuple(each for of_peer in failed for each in of_peer))


def _meet(asked: MeshOrder, peer: Peer, deadline: float) -> list[MeshFailure]:
    """Connect to a peer's process and read its name, then to Ray's ports there."""
    failed: list[MeshFailure] = []

    def fail(purpose: str, port: int, error: Exception) -> None:
        cause, said = _cause(error, asked.connect_s)
        failed.append(MeshFailure(peer=peer.name, purpose=purpose, port=port, cause=cause, error=said))

    try:
        with _connect(peer, asked.connect_s, deadline) as connection:
            _exchange(connection, asked.node, peer.name)
    except (OSError, ValueError) as error:
        fail("rendezvous", peer.port, error)
        if isinstance(error, TimeoutError):
            # The other ports would take as much time, with the same result.
            return failed
    for purpose, port in peer.ports.items():
        try:
            socket.create_connection((peer.address, port), timeout=asked.connect_s).close()
        except OSError as error:
            fail(purpose, port, error)
    return failed


def _connect(peer: Peer, limit_s: float, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((peer.address, peer.port), timeout=limit_s)
        except ConnectionRefusedError:
            # Its process may not have started yet.
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)


def _exchange(connection: socket.socket, node: str, peer: str) -> None:
    """Raises ValueError when another process answers."""
    with connection.makefile("rw") as lines:
        lines.write(f"{json.dumps(node)}\n")
        lines.flush()
        answered = json.loads(lines.readline())
    if answered != peer:
        raise ValueError(f"{answered} answers there instead")


class _Server(socketserver.ThreadingTCPServer):
    """Answers every connection in its own thread."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024

    def __init__(self, asked: MeshOrder) -> None:
        super().__init__(("0.0.0.0", asked.port), _Answer)
        self.asked, self.heard, self.changed = asked, set[str](), threading.Condition()

    def wait(self, names: set[str], deadline: float) -> None:
        """Wait until all of these have connected, or the deadline."""
        with self.changed:
            self.changed.wait_for(lambda: self.heard >= names, max(0.0, deadline - time.monotonic()))


class _Answer(socketserver.StreamRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        self.connection.settimeout(self.server.asked.connect_s)
        try:
            name = str(json.loads(self.rfile.readline()))
            self.wfile.write(f"{json.dumps(self.server.asked.node)}\n".encode())
        except (OSError, ValueError):
            # The connecting side reports errors; strangers are ignored.
            return
        with self.server.changed:
            self.server.heard.add(name)
            self.server.changed.notify_all()


def _cause(error: Exception, limit_s: float) -> tuple[Literal["refused", "no answer", "other"], str]:
    """With a sentence."""
    if isinstance(error, TimeoutError):
        return "no answer", f"no answer within {limit_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "refused", "refused"
    return "other", getattr(error, "strerror", None) or str(error)
