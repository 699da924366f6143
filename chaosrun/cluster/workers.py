"""A leg's worker processes, as the supervisor sees them: places, starts, stops and events, on the agents of a RayCluster."""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray

from chaosrun.cluster import command
from chaosrun.cluster.agent_client import AgentClient
from chaosrun.cluster.forkserver import PRELOAD, WHERE_INSTALLED
from chaosrun.cluster.messages import AgentLost, RankStack
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.errors import RecoveryError, ResourcesError
from chaosrun.faults.kinds import KINDS
from chaosrun.faults.outside import StrikeOrder
from chaosrun.processes import ProcessIdentity
from chaosrun.records.events import NodePlace, PlacementAcquired
from chaosrun.records.heartbeat import Activity
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.spec.hash_order import goes_by_hashes
from chaosrun.spec.model import JobSpec

ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Agents that have been asked what their ranks do."""

    about: tuple[Path, int]
    """Leg and attempt."""
    calls: Sequence[tuple[AgentClient, Any]]
    limit_s: float
    """When all should have answered, monotonic."""


class ClusterWorkers:
    """What a supervisor needs from a cluster. The same agents and fork servers serve one leg after the other."""

    def __init__(self, cluster: RayCluster, spec: JobSpec) -> None:
        self._cluster = cluster
        self._acquire_timeout_s = spec.recovery.acquire_timeout
        self._standby: int | Literal["all"] = spec.recovery.standby
        # Read by the interpreter when it starts, so it has to be in the fork server's environment.
        self._hash_seed = None if spec.by == "script" and "PYTHONHASHSEED" in spec.env else spec.seed
        """None: the job's own."""
        self._env = {**spec.env, **self._hashing()}
        prepares = WHERE_INSTALLED if spec.by == "chaosrun" else ()
        self._runs: dict[str, Any] = {"preload": (*PRELOAD, *prepares, *spec.recovery.preload)}
        if spec.command:
            # It imports for itself what it needs.
            self._runs = {"preload": (), "target": command.TARGET}
        self._asked: _Asked | None = None
        self._lost: set[str] = set()
        self._leaving: set[str] = set()
        """Nodes that a fault is ending."""
        self._avoid: dict[str, str] = {}
        """Nodes that are not to be used again, and why."""

    def devices(self) -> str:
        """The GPU models that the job may run on, or "cpu"."""
        if not self._cluster.gpu:
            return "cpu"
        models = sorted(name for name in ray.cluster_resources() if name.startswith("accelerator_type:"))
        return ", ".join(models) or "gpu"

    def acquire(self) -> PlacementAcquired:
        """Get places for all ranks, anew when a node was lost. Raises ResourcesError."""
        if self._lost:
            healthy = self._cluster.agents.keys() - self._lost - self._leaving - self._avoid.keys()
            self._cluster.release(lost=self._lost, keep=healthy)
            self._lost.clear()
            self._leaving.clear()
        try:
            return self._acquire()
        except RecoveryError:
            # What had just been had has died meanwhile.
            self._cluster.release(lost=self._cluster.agents.keys())
            return self._acquire()

    def _acquire(self) -> PlacementAcquired:
        try:
            placement = self._cluster.acquire(self._acquire_timeout_s, avoid=self._avoid)
        except ResourcesError as error:
            if not self._avoid:
                raise
            lost = "; ".join(self._avoid.values())
            hint = "bring a node back, or raise recovery.acquire_timeout, and `chaosrun resume`"
            raise ResourcesError(f"{error.message}; lost: {lost}", hint=hint) from error
        return PlacementAcquired(
            nodes=placement.nodes,
            ray=self._cluster.kind,
            oversubscribed=self._cluster.oversubscribed,
            stood_by=placement.stood_by,
            not_preloaded=self._cluster.start_servers(self._env, **self._runs),
        )

    @property
    def nodes(self) -> Sequence[str]:
        placement = self._cluster.placement
        return [] if placement is None else list(placement.nodes)

    def place(self, order: WorkerOrder) -> WorkerOrder:
        """Fill in node, local rank and devices."""
        placement = self._cluster.placement
        assert placement is not None, "acquire comes first"
        number, name = placement.node_of[order.rank]
        node = placement.nodes[name]
        return replace(
            order,
            node_rank=number,
            nodes=len(placement.nodes),
            local_rank=node.ranks.index(order.rank),
            local_world_size=len(node.ranks),
            gpus=node.gpus,
            master_addr=placement.master_addr,
        )

    def start(self, orders: Sequence[WorkerOrder]) -> tuple[dict[int, int], str]:
        """Fork all ranks of an attempt; returns their pids by rank (none where a command starts them, which is told by events),
        and the rendezvous address. Raises ResourcesError."""
        if _hashes_anew(orders[0]):
            self._cluster.start_servers({**self._env, **self._hashing(orders[0].attempt)}, **self._runs)
        started = self._cluster.start_attempt(orders[0].attempt, orders)
        if self._standby:
            self._cluster.stand_by(self._standby, self._env, avoid={*self._avoid, *self._lost, *self._leaving}, **self._runs)
        return started.pids, f"{orders[0].master_addr}:{started.port}"

    def _hashing(self, attempt: int = 1) -> dict[str, str]:
        return {} if self._hash_seed is None else {"PYTHONHASHSEED": str(self._hash_seed + attempt - 1)}

    def stop(self, attempt: int) -> None:
        """Begin to kill an attempt; each node reports when it has stopped."""
        self._cluster.stop(attempt, self._cluster.agents.keys() - self._lost - self._leaving)

    def next_event(self, timeout_s: float) -> tuple[str, Any] | None:
        """The next event, and its node, None when none came in time; Stopped comes once from each node."""
        try:
            node, event = self._cluster.events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, AgentLost):
            if node in self._lost | self._leaving:
                return None  # `lose` has told, or will
            self._lost.add(node)
        return node, event

    def wake(self, event: object) -> None:
        """Have `next_event` return this; safe from signal handlers and other threads."""
        self._cluster.events.put(("", event))

    # Faults

    @property
    def ray(self) -> str:
        """ "private", "joined" or "borrowed"."""
        return self._cluster.kind

    def node_of(self, rank: int) -> str:
        placement = self._cluster.placement
        assert placement is not None, "acquire comes first"
        return placement.node_of[rank][1]

    def identify_rank(self, attempt: int, rank: int, *, listening: bool = False) -> tuple[int, int] | None:
        """(pid, start time) of a rank that runs in this attempt; None when it does not, or is not `listening` for notices."""
        try:
            return self._cluster.agents[self.node_of(rank)].call("identify_rank", attempt, rank, listening)
        except RecoveryError:
            return None  # its agent is gone, an event tells that

    def strike(self, orders: Sequence[StrikeOrder]) -> Sequence[bool | None]:
        """Carry these out at once; False for one whose rank was gone, and nothing was done; None where nobody knows, for the
        answer of its agent was lost."""
        done: dict[str, bool | None] = {}
        calls: list[tuple[AgentClient, list[str], Any]] = []
        by_node: dict[str, list[StrikeOrder]] = {}
        for order in orders:
            by_node.setdefault(self.node_of(order.rank), []).append(order)
        for node, own in by_node.items():
            if node in self._lost | self._leaving:
                continue
            if any(KINDS[order.kind].evidence == "node" for order in own):
                # From here on whatever Ray says of this agent is what was planned.
                self._leaving.add(node)
            agent = self._cluster.agents[node]
            calls.append((agent, [order.fault for order in own], agent.submit("strike", own)))
        for agent, faults, reference in calls:
            try:
                struck: list[bool | None] = agent.collect(reference, timeout_s=60.0)
            except RecoveryError:
                # Gone, or cut off, before it could answer. What it did, a death, a note or a witness shows.
                struck = [None] * len(faults)
            done.update(zip(faults, struck, strict=True))
            if all(each is False for each in struck):
                self._leaving.discard(agent.node_id)
        return [done.get(order.fault, False) for order in orders]

    def lose(self, node: str) -> None:
        """The agent of this node is gone; it will not be told again."""
        self._leaving.discard(node)
        self._lost.add(node)

    def avoid(self, node: str, why: str) -> None:
        """Place nothing on this node any more."""
        self._avoid[node] = f"node {node[:8]} ({why})"

    def lives_beside(self, rank: int) -> bool:
        """Whether this rank is on the node that this process itself depends on."""
        return self._cluster.placement is not None and self.node_of(rank) == self._cluster.own_node

    def head(self) -> ProcessIdentity | None:
        """Ray's head process, where it is this process's own."""
        return self._cluster.head()

    # What hangs

    def activities(self, leg: LegLayout, attempt: int) -> Mapping[int, Activity] | None:
        """What there was to see of every rank when it was last asked for; and ask again. None when that cannot be said now: for
        the first time, while a node has not answered, because an agent has just died.

        Waits for nobody: deaths elsewhere are not to wait for one node that is slow. Raises ResourcesError for one that does
        not answer within ANSWER_LIMIT_S.
        """
        asked, now_s = self._asked, time.monotonic()
        if asked is not None and asked.about == (leg.path, attempt):
            if now_s < asked.limit_s and not all(agent.has_answered(reference) for agent, reference in asked.calls):
                return None
            self._asked = None
            found = self._collect(asked.calls, timeout_s=1.0)
        else:
            found = None
        if (calls := self._ask(lambda place: ("activities", str(leg.path), attempt, place.ranks))) is not None:
            self._asked = _Asked(about=(leg.path, attempt), calls=calls, limit_s=now_s + ANSWER_LIMIT_S)
        return found

    def stacks(self, leg: LegLayout, attempt: int, *, wait_s: float) -> Mapping[int, RankStack] | None:
        """Have all live ranks write their stacks to their logs, and say where each is; None likewise."""
        calls = self._ask(lambda place: ("stacks", str(leg.path), attempt, wait_s))
        return None if calls is None else self._collect(calls, timeout_s=ANSWER_LIMIT_S)

    def _ask(self, call: Callable[[NodePlace], tuple[Any, ...]]) -> list[tuple[AgentClient, Any]] | None:
        """Every agent of the placement, all at once; None when one has died: an event tells that."""
        placement, agents = self._cluster.placement, self._cluster.agents
        assert placement is not None, "acquire comes first"
        try:
            return [(agents[node], agents[node].submit(*call(place))) for node, place in placement.nodes.items()]
        except RecoveryError:
            return None

    @staticmethod
    def _collect(calls: Sequence[tuple[AgentClient, Any]], *, timeout_s: float) -> dict[int, Any] | None:
        """What all agents say, by rank; None likewise."""
        try:
            answers = [agent.collect(reference, timeout_s=timeout_s) for agent, reference in calls]
        except RecoveryError:
            return None
        return {rank: answer for answers_of_node in answers for rank, answer in answers_of_node.items()}


def _hashes_anew(order: WorkerOrder) -> bool:
    """A new process hashes strings differently: a drill has to show what that does to a script that depends on hashes."""
    in_drill = order.by == "script" and order.reference_path is not None
    return in_drill and order.attempt > 1 and goes_by_hashes(Path(order.script))
