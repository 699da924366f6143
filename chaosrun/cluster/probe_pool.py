"""The pool of probe agents: the Ray that is joined or started, and one agent on each of its nodes, which runs probes there.

Owns Ray's life (if it started it) and the agents' handles. A node that does not answer within its time counts as lost from then
on. Knows no check and judges nothing.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from chaosrun.cluster.connection import Connection, connect
from chaosrun.cluster.probe_agent import ProbeAgent
from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from chaosrun.cluster.ray_cluster import start_actor

START_S = 30.0
"""Limit for an agent's first answer: a Python process and a few imports from a slow disk."""
ANSWER_S = 20.0
"""How long after its limit a call may be answered: its guard has 10 s to kill its processes, and its agent then 5 s."""
STOP_S = 8.0
LOOK_EVERY_S = 0.5
"""Within this time a signal is noticed during a wait for Ray."""
LEAST_S = 0.5
PROCESS = "chaosrun's process on the node"
"""What messages call an agent."""
GONE = f"{PROCESS}, or the node itself, is gone"
PORTS = {"node manager": "NodeManagerPort", "object manager": "ObjectManagerPort"}
"""Ports that other nodes connect to, without the head's own."""


class ProbePool:
    """Call `start_agents` first, and `close` at the end."""

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self.until: float | None = None
        """Deadline for all calls, on the monotonic clock."""
        self.everyone: tuple[Node, ...] = ()
        self.lost: dict[str, str] = {}
        """By name, nodes that no longer answer, and why."""
        self._connection = connection
        self._agents: dict[str, Any] = {}
        self._closed = False

    @classmethod
    def connect(cls, address: str | None, *, cpus: float = 0.0) -> Self:
        """Connect to the Ray that `connection.connect` finds, from the main thread; `cpus` as there. Raises ResourcesError."""
        return cls(connect(address, cpus=cpus))

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that answer."""
        return [node for node in self.everyone if node.name not in self.lost]

    def start_agents(self) -> None:
        """Start an agent on every node and wait for its answer; a node that does not answer is lost."""
        self.everyone = _nodes()
        for node in self.everyone:
            self._agents[node.name] = start_actor(ProbeAgent, node.node_id, f"{self._connection.mark}#{node.node_id}")
        self._hear(START_S, f"{PROCESS} could not start", f"{PROCESS} did not start within {START_S:g} s")

    def check_agents(self) -> None:
        """Ask every node again; one that does not answer is lost."""
        self._hear(ANSWER_S, GONE, f"{PROCESS} has not answered for {ANSWER_S:g} s")

    def _hear(self, limit_s: float, broken: str, silent: str) -> None:
        waiting = {self._agents[node.name].hello.remote(): node.name for node in self.nodes}
        for name, answer in _answers(waiting, dict.fromkeys(waiting.values(), limit_s)):
            if answer is None:
                self._lose(name, silent)
            elif isinstance(answer, RayError):
                self._lose(name, f"{broken}: {_cause(answer)}")

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        """Run calls, by node name, at the same time; returns when every one has ended. Failures there do not raise."""
        outcomes: dict[str, ProbeOutcome] = {}
        waiting: dict[Any, str] = {}
        limits, left_s = dict[str, float](), math.inf if self.until is None else self.until - time.monotonic()
        for name, call in calls.items():
            limits[name] = min(call.limit_s, left_s)
            if name in self.lost:
                outcomes[name] = ProbeOutcome(ended="lost", error=self.lost[name])
            elif left_s < LEAST_S:
                outcomes[name] = ProbeOutcome(ended="late", error="the time for all probes was over before it could begin")
            else:
                waiting[self._agents[name].probe.remote(replace(call, limit_s=limits[name]))] = name
        for name, answer in _answers(waiting, {name: limit_s + ANSWER_S for name, limit_s in limits.items()}):
            outcome = answer if isinstance(answer, ProbeOutcome) else self._no_answer(name, answer, limits[name] + ANSWER_S)
            if outcome.ended == "limit" and left_s < calls[name].limit_s:
                outcome = replace(outcome, ended="late")
            outcomes[name] = outcome
        return outcomes

    def _no_answer(self, name: str, error: RayError | None, waited_s: float) -> ProbeOutcome:
        if error is not None and not isinstance(error, RayActorError):
            return ProbeOutcome(ended="raised", error=f"{PROCESS} could not run it: {_cause(error)}")
        silent = f"{PROCESS} has not answered for {waited_s:.0f} s"
        self._lose(name, silent if error is None else f"{GONE}: {_cause(error)}")
        return ProbeOutcome(ended="lost", error=self.lost[name])

    def _lose(self, name: str, why: str) -> None:
        self.lost.setdefault(name, why)
        ray.kill(self._agents[name], no_restart=True)

    def close(self) -> None:
        """End probes and agents, and remove a private Ray's processes and folder."""
        if self._closed:
            return
        self._closed = True
        try:
            stopping = [agent.stop.remote() for name, agent in self._agents.items() if name not in self.lost]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S)
            for agent in self._agents.values():
                ray.kill(agent, no_restart=True)
        finally:
            self._connection.close()


def _answers(waiting: Mapping[Any, str], limits_s: Mapping[str, float]) -> Iterator[tuple[str, Any]]:
    """(node, its agent's answer), as they come. The answer may be a RayError, or None if the time is over. `waiting`: nodes by
    Ray's references."""
    began, left = time.monotonic(), dict(waiting)
    while left:
        ready, _ = ray.wait(list(left), num_returns=len(left), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(left), timeout=LOOK_EVERY_S)
        waited_s = time.monotonic() - began
        late = [reference for reference, name in left.items() if limits_s[name] <= waited_s and reference not in ready]
        for reference in (*ready, *late):
            answer = None
            if reference not in late:
                try:
                    answer = ray.get(reference)
                except RayError as error:
                    answer = error
            yield left.pop(reference), answer


def _nodes() -> tuple[Node, ...]:
    """The live nodes, sorted by hostname and id. A node has its host's name; if the host has several, followed by the beginning
    of Ray's id."""
    context = ray.get_runtime_context()
    gcs_port = int(context.gcs_address.rpartition(":")[2])
    alive = [node for node in ray.nodes() if node["Alive"]]
    on_host = Counter(node["NodeManagerHostname"] for node in alive)
    found: list[Node] = []
    for node in alive:
        hostname, head = node["NodeManagerHostname"], "node:__internal_head__" in node["Resources"]
        ports = {purpose: int(node[key]) for purpose, key in PORTS.items() if node.get(key)}
        found.append(
            Node(
                name=hostname if on_host[hostname] == 1 else f"{hostname}#{node['NodeID'][:6]}",
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                hostname=hostname,
                cpus=float(node["Resources"].get("CPU", 0.0)),
                gpus=int(node["Resources"].get("GPU", 0)),
                ports={**ports, **({"gcs": gcs_port} if head else {})},
                head=head,
            )
        )
    return tuple(sorted(found, key=lambda node: (node.hostname, node.node_id)))


def _cause(error: Exception) -> str:
    """The line that says why: the last of Ray's message, which is a traceback or a list of facts."""
    if isinstance(error, ActorUnavailableError):
        return "its connection broke"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
