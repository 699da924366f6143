"""One node's part of the connections between all nodes: listen on one port and connect to everybody, itself included.

One process a node holds all its connections, in threads.
"""

import errno
import json
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Literal

from msgspec import Struct

from chaosrun.records.codec import convert

AT_ONCE = 16
"""Connections that a node opens at the same time; each that somebody drops costs its whole time."""
RETRY_S = 0.05


class Peer(Struct, frozen=True, kw_only=True):
    name: str
    address: str
    port: int
    ports: dict[str, int]
    """Of Ray, by purpose."""


class Asked(Struct, frozen=True, kw_only=True):
    node: str
    """Own name."""
    port: int
    """To listen on, as the others have been told."""
    peers: tuple[Peer, ...]
    """Itself included."""
    start_s: float
    """Until when the others' processes must have come up."""
    give_up_s: float
    """After this no peer is begun with."""
    connect_s: float
    """For one connection or answer."""
    round_trips: int
    """Of one byte, with each peer."""


class Failure(Struct, frozen=True, kw_only=True):
    peer: str
    purpose: str
    """Of the port: rendezvous, or what Ray has there."""
    port: int
    cause: Literal["refused", "no answer", "other"]
    error: str
    tried: tuple[float, float]
    """From and until, in seconds since the epoch."""


class MeshFacts(Struct, frozen=True, kw_only=True):
    taken: str = ""
    """Why the port could not be listened on; then nothing else is known."""
    listened: tuple[float, float] = (0.0, 0.0)
    """From and until, in seconds since the epoch."""
    reached: int = 0
    untried: int = 0
    """Peers that no time was left for."""
    failed: tuple[Failure, ...] = ()
    round_trip_ms: float | None = None
    """Median over the other nodes; None: it reached none."""


class _Met(Struct, frozen=True, kw_only=True):
    peer: str
    failed: list[Failure]
    round_trip_ms: float | None


def probe(**parameters: Any) -> MeshFacts:
    """Parameters: those of `Asked`."""
    asked = convert(parameters, Asked)
    began = time.monotonic()
    deadline, last = began + asked.start_s, began + asked.give_up_s
    try:
        listener = socket.create_server(("0.0.0.0", asked.port), backlog=1024)
    except OSError as error:
        return MeshFacts(taken=error.strerror or str(error))
    listens_from = time.time()
    with listener:
        server = _Server(listener, asked.node, asked.connect_s)
        threading.Thread(target=server.accept, daemon=True).start()
        # Beginning at itself, so that not all begin with the same.
        own = next(index for index, peer in enumerate(asked.peers) if peer.name == asked.node)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            meetings = pool.map(lambda peer: _meet(asked, peer, deadline, last), [*asked.peers[own:], *asked.peers[:own]])
            met = [each for each in meetings if each is not None]
        reached = {each.peer: each.round_trip_ms for each in met if each.round_trip_ms is not None}
        # Not before the others had their turn with this node.
        server.wait({peer.name for peer in asked.peers}, deadline)
    return MeshFacts(
        listened=(listens_from, time.time()),
        reached=len(reached),
        untried=len(asked.peers) - len(met),
        failed=tuple(failure for each in met for failure in each.failed),
        round_trip_ms=median(others) if (others := [ms for peer, ms in reached.items() if peer != asked.node]) else None,
    )


def _meet(asked: Asked, peer: Peer, deadline: float, last: float) -> _Met | None:
    """Connect to a peer's process and exchange bytes, then to the ports that Ray has there. None: no time was left for it."""
    if time.monotonic() > last:
        return None
    failed: list[Failure] = []
    round_trip_ms = None

    def fail(purpose: str, port: int, error: Exception, began: float) -> None:
        cause, said = _cause(error, asked.connect_s)
        tried = (began, time.time())
        failed.append(Failure(peer=peer.name, purpose=purpose, port=port, cause=cause, error=said, tried=tried))

    began = time.time()
    try:
        with _connect(peer, asked.connect_s, deadline) as connection:
            round_trip_ms = _exchange(connection, asked.node, peer.name, asked.round_trips)
    except (OSError, ValueError) as error:
        fail("rendezvous", peer.port, error, began)
        if isinstance(error, TimeoutError):
            # The other ports would cost as much time, and say the same.
            return _Met(peer=peer.name, failed=failed, round_trip_ms=None)
    for purpose, port in peer.ports.items():
        began = time.time()
        try:
            socket.create_connection((peer.address, port), timeout=asked.connect_s).close()
        except OSError as error:
            fail(purpose, port, error, began)
    return _Met(peer=peer.name, failed=failed, round_trip_ms=round_trip_ms)


def _connect(peer: Peer, limit_s: float, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((peer.address, peer.port), timeout=limit_s)
        except ConnectionRefusedError:
            # Its process may only be about to start.
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)


def _exchange(connection: socket.socket, node: str, peer: str, round_trips: int) -> float:
    """Median round trip in ms. Raises ValueError when somebody else answers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _send_line(connection, {"from": node})
    answered = _read_line(connection).get("node")
    if answered != peer:
        raise ValueError(f"{answered} answers there instead")
    took: list[float] = []
    for _ in range(round_trips):
        began = time.perf_counter()
        connection.sendall(b".")
        _received(connection)
        took.append(time.perf_counter() - began)
    return round(median(took) * 1000, 4)


class _Server:
    """Answers everybody, each in a thread of its own."""

    def __init__(self, listener: socket.socket, node: str, limit_s: float) -> None:
        self.heard: set[str] = set()
        self._listener = listener
        self._node = node
        self._limit_s = limit_s
        self._changed = threading.Condition()

    def wait(self, names: set[str], deadline: float) -> None:
        """Until all of these have talked, or the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self.heard >= names, max(0.0, deadline - time.monotonic()))

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # Closed: the end.
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(self._limit_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                asked = _read_line(connection)
                _send_line(connection, {"node": self._node})
                while byte := connection.recv(1):
                    connection.sendall(byte)
            except (OSError, ValueError):
                # Who connected tells of it; a stranger is none of ours.
                return
            with self._changed:
                self.heard.add(asked["from"])
                self._changed.notify_all()


def _send_line(connection: socket.socket, line: Mapping[str, object]) -> None:
    connection.sendall(json.dumps(line).encode() + b"\n")


def _read_line(connection: socket.socket) -> Any:
    read = b""
    while not read.endswith(b"\n"):
        read += _received(connection)
    return json.loads(read)


def _received(connection: socket.socket) -> bytes:
    if byte := connection.recv(1):
        return byte
    raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")


def _cause(error: Exception, limit_s: float) -> tuple[Literal["refused", "no answer", "other"], str]:
    """With a sentence."""
    if isinstance(error, TimeoutError):
        return "no answer", f"no answer within {limit_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "refused", "refused"
    return "other", getattr(error, "strerror", None) or str(error)
