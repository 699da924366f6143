"""One node's part of the connections between all nodes: listen on one port and connect to everybody, itself included.

Parameters:
  node        own name
  port        to listen on, as the others have been told
  peers       [{name, address, port, ports {purpose: port}}]     itself included
  start_s     until when the others' processes must have come up; give_up_s: after this no peer is begun with
  connect_s   for one connection or answer
  round_trips of one byte, with each peer
  streams     names of peers to send to as fast as it goes, one after the other; incoming: how many will send to this node
  stream_s    how long

Facts: listened [from, until] in seconds since the epoch, reached and untried (numbers of peers), failed [{peer, purpose, port,
error, tried [from, until]}], round_trip_ms {median, worst, peer}, streams [{peer, bytes, seconds}]; {taken: error} when the
port cannot be listened on. One process a node holds all its connections, in threads.
"""

import errno
import json
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chaosrun.preflight.model import Facts

AT_ONCE = 16
"""Connections that a node opens at the same time; each that somebody drops costs its whole time."""
BLOCK = memoryview(bytes(1 << 20))
RETRY_S = 0.05


def probe(**parameters: Any) -> Facts:
    began = time.monotonic()
    deadline, last = began + parameters["start_s"], began + parameters["give_up_s"]
    peers: Sequence[Mapping[str, Any]] = parameters["peers"]
    try:
        listener = socket.create_server(("0.0.0.0", parameters["port"]), backlog=1024)
    except OSError as error:
        return {"taken": error.strerror or str(error)}
    listens_from = time.time()
    with listener:
        server = _Server(listener, parameters["node"], parameters["connect_s"])
        server.start()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            meetings = pool.map(
                lambda peer: _meet(parameters, peer, deadline, last), _from_own_place(parameters["node"], peers)
            )
            met = [each for each in meetings if each is not None]
        reached = {each["peer"] for each in met if each["round_trip_ms"] is not None}
        sent = [
            _stream(parameters, peer)
            for name in parameters["streams"]
            for peer in peers
            if peer["name"] == name and name in reached
        ]
        # Not before the others had their turn with this node.
        server.wait({peer["name"] for peer in peers}, parameters["incoming"], deadline + parameters["stream_s"])
    return {
        "listened": [listens_from, time.time()],
        "reached": len(reached),
        "untried": len(peers) - len(met),
        "failed": [failure for each in met for failure in each["failed"]],
        "round_trip_ms": _round_trips(parameters["node"], met),
        "streams": [each for each in sent if each is not None],
    }


def _from_own_place(node: str, peers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Beginning at itself, so that not all begin with the same."""
    own = next(index for index, peer in enumerate(peers) if peer["name"] == node)
    return [*peers[own:], *peers[:own]]


def _meet(parameters: Facts, peer: Mapping[str, Any], deadline: float, last: float) -> dict[str, Any] | None:
    """Connect to a peer's process and exchange bytes, then to the ports that Ray has there. None: no time was left for it."""
    if time.monotonic() > last:
        return None
    limit_s = parameters["connect_s"]
    failed: list[dict[str, Any]] = []
    round_trip_ms = None
    began = time.time()
    try:
        with _connect(peer["address"], peer["port"], limit_s, deadline) as connection:
            round_trip_ms = _exchange(connection, parameters["node"], peer["name"], parameters["round_trips"])
    except (OSError, ValueError) as error:
        failed.append(_failure(peer, "rendezvous", peer["port"], error, limit_s, began))
        if isinstance(error, TimeoutError):
            # The other ports would cost as much time, and say the same.
            return {"peer": peer["name"], "failed": failed, "round_trip_ms": None}
    for purpose, port in peer["ports"].items():
        began = time.time()
        try:
            socket.create_connection((peer["address"], port), timeout=limit_s).close()
        except OSError as error:
            failed.append(_failure(peer, purpose, port, error, limit_s, began))
    return {"peer": peer["name"], "failed": failed, "round_trip_ms": round_trip_ms}


def _failure(
    peer: Mapping[str, Any], purpose: str, port: int, error: Exception, limit_s: float, began: float
) -> dict[str, Any]:
    tried = [began, time.time()]
    return {"peer": peer["name"], "purpose": purpose, "port": port, "error": _said(error, limit_s), "tried": tried}


def _connect(address: str, port: int, limit_s: float, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=limit_s)
        except ConnectionRefusedError:
            # Its process may only be about to start.
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)


def _exchange(connection: socket.socket, node: str, peer: str, round_trips: int) -> float:
    """Median round trip in ms. Raises ValueError when somebody else answers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _send_line(connection, {"from": node, "does": "talk"})
    answered = _read_line(connection).get("node")
    if answered != peer:
        raise ValueError(f"{answered} answers there instead")
    took: list[float] = []
    for _ in range(round_trips):
        began = time.perf_counter()
        connection.sendall(b".")
        if not connection.recv(1):
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        took.append(time.perf_counter() - began)
    return round(statistics.median(took) * 1000, 4)


def _round_trips(node: str, met: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Over the other nodes; None when it reached none."""
    took = {each["peer"]: each["round_trip_ms"] for each in met if each["round_trip_ms"] is not None and each["peer"] != node}
    if not took:
        return None
    worst = max(took, key=lambda peer: took[peer])
    return {"median": statistics.median(took.values()), "worst": took[worst], "peer": worst}


def _stream(parameters: Facts, peer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Send for a while; what the receiver counted. None when it broke off, which the exchange before has told of or will."""
    try:
        with socket.create_connection((peer["address"], peer["port"]), timeout=parameters["connect_s"]) as connection:
            _send_line(connection, {"from": parameters["node"], "does": "stream"})
            _read_line(connection)
            until = time.monotonic() + parameters["stream_s"]
            while time.monotonic() < until:
                connection.sendall(BLOCK)
            connection.shutdown(socket.SHUT_WR)
            return {"peer": peer["name"], **_read_line(connection)}
    except (OSError, ValueError):
        return None


class _Server:
    """Answers everybody, each in a thread of its own."""

    def __init__(self, listener: socket.socket, node: str, limit_s: float) -> None:
        self.heard: set[str] = set()
        self._streams = 0
        self._listener = listener
        self._node = node
        self._limit_s = limit_s
        self._changed = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, names: set[str], streams: int, deadline: float) -> None:
        """Until all of these have talked and that many streams have ended, or the deadline."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.heard >= names and self._streams >= streams, max(0.0, deadline - time.monotonic())
            )

    def _accept(self) -> None:
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
                if asked["does"] == "talk":
                    while byte := connection.recv(1):
                        connection.sendall(byte)
                else:
                    _send_line(connection, _count(connection))
            except (OSError, ValueError):
                # Who connected tells of it; a stranger is none of ours.
                return
            with self._changed:
                if asked["does"] == "talk":
                    self.heard.add(asked["from"])
                else:
                    self._streams += 1
                self._changed.notify_all()


def _count(connection: socket.socket) -> dict[str, Any]:
    """Receive until the other side ends."""
    room = bytearray(1 << 20)
    count, began = 0, time.monotonic()
    while received := connection.recv_into(room):
        count += received
    return {"bytes": count, "seconds": time.monotonic() - began}


def _send_line(connection: socket.socket, line: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(line).encode() + b"\n")


def _read_line(connection: socket.socket) -> dict[str, Any]:
    read = b""
    while not read.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        read += byte
    return json.loads(read)


def _said(error: Exception, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {limit_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return getattr(error, "strerror", None) or str(error)
