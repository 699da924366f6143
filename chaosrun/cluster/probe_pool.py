"""The pool of probe agents: the Ray that is joined or started, and one agent on each of its nodes that runs probes there.

Owns Ray's life (when it started it) and the agents' handles. A node that does not answer costs the time that it was given, and
no more: it counts as lost from then on. Knows no check and judges nothing.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from chaosrun.cluster.connection import Connection, connect
from chaosrun.cluster.probe_agent import ProbeAgent
from chaosrun.cluster.probing import Call, Node, Outcome
from chaosrun.cluster.ray_cluster import start_actor

START_S = 30.0
"""For an agent to answer for the first time: a Python process and a few imports, from a slow disk."""
ANSWER_S = 15.0
"""More than its limit for a call to be answered: a process is killed, and killed again, within 10 s."""
STOP_S = 8.0
LOOK_EVERY_S = 0.5
"""So soon a signal is noticed while Ray is waited for."""
LEAST_S = 0.5
PROCESS = "chaosrun's process on the node"
"""How people are told of an agent."""
GONE = f"{PROCESS}, or the node itself, is gone"
PORTS = {
    "node manager": "NodeManagerPort",
    "object manager": "ObjectManagerPort",
    "metrics": "MetricsExportPort",
    "runtime env agent": "RuntimeEnvAgentPort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call that has not been answered."""

    node: str
    index: int
    began: float
    late: float
    cut_short: bool
    """Whether the call had less than its limit."""


class ProbePool:
    """Call `start_agents` first, and `close` at the end."""

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self.until: float | None = None
        """When the time for all calls is over, on the monotonic clock."""
        self.everyone: tuple[Node, ...] = ()
        self.lost: dict[str, str] = {}
        """Why, by the name of a node that does not answer any more."""
        self._connection = connection
        self._agents: dict[str, Any] = {}
        self._closed = False

    @classmethod
    def connect(cls, address: str | None, *, cpus: float = 0.0) -> Self:
        """To the Ray that `connection.connect` finds, from the main thread; `cpus` as it says. Raises ResourcesError."""
        return cls(connect(address, cpus=cpus))

    @property
    def nodes(self) -> Sequence[Node]:
        """Those that answer."""
        return [node for node in self.everyone if node.name not in self.lost]

    def start_agents(self) -> None:
        """Put an agent on every node and hear of each; who does not answer is lost."""
        self.everyone = _nodes()
        for node in self.everyone:
            self._agents[node.name] = start_actor(ProbeAgent, node.node_id, f"{self._connection.mark}#{node.node_id}")
        self._hear(START_S, f"{PROCESS} could not start", f"{PROCESS} did not start within {START_S:g} s")

    def check_agents(self) -> None:
        """Hear of every node again; who does not answer is lost."""
        self._hear(ANSWER_S, GONE, f"{PROCESS} has not answered for {ANSWER_S:g} s")

    def _hear(self, limit_s: float, broken: str, silent: str) -> None:
        waiting = {self._agents[node.name].hello.remote(): node.name for node in self.nodes}
        deadline = time.monotonic() + limit_s
        while waiting and time.monotonic() < deadline:
            ready, _ = ray.wait(list(waiting), timeout=LOOK_EVERY_S)
            for reference in ready:
                name = waiting.pop(reference)
                try:
                    ray.get(reference)
                except RayError as error:
                    self._lose(name, f"{broken}: {_cause(error)}")
        for name in waiting.values():
            self._lose(name, silent)

    def probe(self, calls: Mapping[str, Call]) -> dict[str, Outcome]:
        """Run calls, by node name, at the same time; returns when every one has ended. Never raises for what happens there."""
        outcomes: dict[str, Outcome] = {}
        self.relay(
            {name: [call] for name, call in calls.items()}, lambda name, index, outcome: outcomes.update({name: outcome})
        )
        return outcomes

    def relay(self, chains: Mapping[str, Sequence[Call]], on_outcome: Callable[[str, int, Outcome], None]) -> None:
        """Run each node's calls one after the other, nodes beside each other, and tell what becomes of each as it ends: (node,
        index, outcome). A chain ends with a node that is lost."""
        pending: dict[Any, Asked] = {}

        def begin(name: str, index: int) -> None:
            if index == len(chains[name]):
                return
            call, now = chains[name][index], time.monotonic()
            if name in self.lost:
                on_outcome(name, index, Outcome(ended="lost", error=self.lost[name]))
                return
            limit_s = call.limit_s if self.until is None else min(call.limit_s, self.until - now)
            if limit_s < LEAST_S:
                on_outcome(name, index, Outcome(ended="late", error="the time for the whole was over before it could begin"))
                begin(name, index + 1)
                return
            reference = self._agents[name].probe.remote(replace(call, limit_s=limit_s))
            pending[reference] = Asked(
                node=name, index=index, began=now, late=now + limit_s + ANSWER_S, cut_short=limit_s < call.limit_s
            )

        for name in chains:
            begin(name, 0)
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            if not ready:
                ready, _ = ray.wait(list(pending), timeout=LOOK_EVERY_S)
            now = time.monotonic()
            late = [reference for reference, asked in pending.items() if asked.late <= now and reference not in ready]
            for reference in (*ready, *late):
                asked = pending.pop(reference)
                outcome = self._no_answer(asked) if reference in late else self._answer(asked, reference)
                if outcome.ended == "limit" and asked.cut_short:
                    outcome = replace(outcome, ended="late")
                on_outcome(asked.node, asked.index, outcome)
                if outcome.ended != "lost":
                    begin(asked.node, asked.index + 1)

    def _answer(self, asked: Asked, reference: Any) -> Outcome:
        try:
            return ray.get(reference)
        except RayActorError as error:
            self._lose(asked.node, f"{GONE}: {_cause(error)}")
        except RayError as error:
            return Outcome(ended="raised", error=f"{PROCESS} could not run it: {_cause(error)}")
        return Outcome(ended="lost", error=self.lost[asked.node], seconds=time.monotonic() - asked.began)

    def _no_answer(self, asked: Asked) -> Outcome:
        waited_s = time.monotonic() - asked.began
        self._lose(asked.node, f"{PROCESS} has not answered for {waited_s:.0f} s")
        return Outcome(ended="lost", error=self.lost[asked.node], seconds=waited_s)

    def _lose(self, name: str, why: str) -> None:
        self.lost.setdefault(name, why)
        ray.kill(self._agents[name], no_restart=True)

    def close(self) -> None:
        """Leave nothing behind: probes, agents, and of a private Ray its processes and its folder."""
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


def _nodes() -> tuple[Node, ...]:
    """The live ones, by hostname and id. A node is called after its host; where a host has several, with the beginning of
    Ray's id for it."""
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
    """The line that says why: of the traceback, or of the list of facts, that Ray makes the message of, the last."""
    if isinstance(error, ActorUnavailableError):
        return "its connection broke"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
