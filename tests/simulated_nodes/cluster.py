"""A cluster of simulated nodes, as `ClusterWorkers` takes it: what is Ray's in a `RayCluster` is replaced, and nothing else."""

import json
import pickle
import queue
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from chaosrun.cluster.agent_client import Sink
from chaosrun.cluster.messages import AgentDied
from chaosrun.cluster.ray_cluster import Placement, RayCluster
from chaosrun.errors import RecoveryError, ResourcesError
from chaosrun.records.events import NodePlace
from tests.simulated_nodes.farm import HEADER_BYTES
from tests.simulated_nodes.fork_server import Pace


class SimulatedClient:
    """One agent behind its socket, with the calls of an `AgentClient`; events are fetched by calls that wait, as there."""

    def __init__(self, path: Path, node_id: str, sink: Sink) -> None:
        self.node_id = node_id
        self._sink = sink
        self._closing = False
        self._heard = 0
        self._asked: dict[int, Future[Any]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._unread = b""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            self._number += 1
            self._asked[self._number] = answer
            body = pickle.dumps((self._number, method, arguments))
            try:
                self.socket.sendall(len(body).to_bytes(HEADER_BYTES) + body)
            except OSError:
                answer.set_exception(self._gone())
        return answer

    def collect(self, reference: Future[Any], *, timeout_s: float) -> Any:
        try:
            return reference.result(timeout=timeout_s)
        except FutureTimeoutError as error:
            raise ResourcesError(f"the agent on node {self.node_id} did not answer within {timeout_s:.0f} s") from error

    def has_answered(self, reference: Future[Any]) -> bool:
        return reference.done()

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        return self.collect(self.submit(method, *arguments), timeout_s=timeout_s)

    def submit_shutdown(self) -> Future[Any]:
        self._closing = True
        return self.submit("shutdown")

    def close(self, shutdown: Future[Any]) -> None:
        with suppress(RecoveryError, ResourcesError):  # it is gone
            self.collect(shutdown, timeout_s=10.0)

    def abandon(self) -> None:
        self._closing = True

    def fetch_events(self) -> None:
        """Have one call waiting for events, as `AgentClient` has."""
        self.submit("events", self._heard).add_done_callback(self._take)

    def _take(self, answer: Future[Any]) -> None:
        if answer.exception() is not None:
            return
        self._heard += len(answer.result())
        for event in answer.result():
            self._sink(self.node_id, event)
        self.fetch_events()

    def hear(self) -> bool:
        """What has come; False when the agent is gone."""
        try:
            received = self.socket.recv(1 << 20)
        except OSError:
            received = b""
        if not received:
            asked, self._asked = self._asked, {}
            for answer in asked.values():
                if not answer.done():
                    answer.set_exception(self._gone())
            if not self._closing:
                self._sink(self.node_id, AgentDied(message="its node is gone"))
            return False
        self._unread += received
        while len(self._unread) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._unread[:HEADER_BYTES])
            if len(self._unread) < end:
                break
            number, well, found = pickle.loads(self._unread[HEADER_BYTES:end])
            self._unread = self._unread[end:]
            answer = self._asked.pop(number)
            if well:
                answer.set_result(found)
            else:
                answer.set_exception(found)
        return True

    def _gone(self) -> RecoveryError:
        return RecoveryError(f"the agent on node {self.node_id} is gone")


class SimulatedCluster(RayCluster):
    """`nodes` nodes with `ranks_per_node` ranks each, and some to spare. Use as a context manager."""

    def __init__(self, *, nodes: int, ranks_per_node: int, pace: Pace, spare: int = 2) -> None:
        self.kind = "joined"
        self.mark = "simulated"
        self.gpu = self.gpus_too_few = 0
        self.placement = None
        self.agents = {}
        self.standbys = {}
        self._over, self._watchers = threading.Event(), []
        self.events = queue.SimpleQueue()
        self._workers = nodes * ranks_per_node
        self._cpu = 1.0
        self._ranks_per_node = ranks_per_node
        self._group = None
        self._closed = False
        self._names = [f"node-{number:03d}" for number in range(nodes + spare)]
        self._gone: set[str] = set()
        self._temporary = tempfile.TemporaryDirectory(prefix="simulated-nodes-")
        self.folder = Path(self._temporary.name)
        self._sockets = selectors.DefaultSelector()
        command = [sys.executable, "-m", "tests.simulated_nodes.farm", str(self.folder), ",".join(self._names)]
        self._farm = subprocess.Popen([*command, json.dumps(asdict(pace))], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._farm.stdout is not None and self._farm.stdout.readline() == b"ready\n"
        self._listener = threading.Thread(target=self._listen, name="simulated-nodes", daemon=True)
        self._listener.start()

    def stop(self, attempt: int, nodes: Collection[str]) -> None:
        for node in nodes:
            self.agents[node].submit("stop", attempt)

    def _acquire(self, deadline: float, avoid: Collection[str], timeout_s: float) -> Placement:
        usable = [name for name in self._names if name not in self._gone and name not in avoid]
        wanted = self._workers // self._ranks_per_node
        if len(usable) < wanted:
            raise ResourcesError(f"no place for {self._workers} workers: {len(usable)} nodes are left")
        nodes: dict[str, NodePlace] = {}
        for number, name in enumerate(usable[:wanted]):
            ranks = tuple(range(number * self._ranks_per_node, (number + 1) * self._ranks_per_node))
            nodes[name] = NodePlace(address="127.0.0.1", ranks=ranks, gpus=())
            if name not in self.agents:
                client = SimulatedClient(self.folder / f"{name}.sock", name, self._take_event)
                self._sockets.register(client.socket, selectors.EVENT_READ, client)
                self.agents[name] = client  # type: ignore[assignment]
                client.fetch_events()
        self.placement = Placement(nodes=nodes)
        asked = [(agent, agent.submit("hello")) for agent in self.agents.values()]
        for agent, reference in asked:
            agent.collect(reference, timeout_s=timeout_s)
        return self.placement

    def _listen(self) -> None:
        while not self._closed:
            for key, _ in self._sockets.select(0.05):
                client: SimulatedClient = key.data
                if not client.hear():
                    self._gone.add(client.node_id)
                    self._sockets.unregister(client.socket)
                    client.socket.close()

    def __enter__(self) -> Self:
        return self

    @property
    def own_node(self) -> str:
        return "head"

    def happened(self, what: str) -> Sequence[dict[str, Any]]:
        """What the nodes noted of this, in the order of time."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["what"] == what]

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.release()
        finally:
            self._closed = True
            self._listener.join()
            assert self._farm.stdin is not None
            self._farm.stdin.close()
            self._farm.wait()
            self._temporary.cleanup()
