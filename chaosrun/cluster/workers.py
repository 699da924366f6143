"""The supervisor's interface to a leg's workers: places, starts, stops and events, through the agents of a RayCluster."""

import os
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
from chaosrun.cluster.messages import AgentDied, RankStack
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.errors import RecoveryError, ResourcesError
from chaosrun.faults.outside import StrikeOrder
from chaosrun.processes import ProcessIdentity, child_called
from chaosrun.records.events import NodePlace, PlacementAcquired
from chaosrun.records.grouping import grouped
from chaosrun.records.heartbeat import Activity
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import HASH_ORDER, WorkerOrder
from chaosrun.spec.hash_order import hash_order
from chaosrun.spec.model import JobSpec

ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request to agents for the activity of their ranks, not answered yet."""

    about: tuple[Path, int]
    """Leg and attempt."""
    calls: Sequence[tuple[AgentClient, Any]]
    limit_s: float
    """Deadline for all answers, on the monotonic clock."""


class ClusterWorkers:
    """The supervisor's interface to a cluster. The legs use the same agents and fork servers, one after the other."""

    def __init__(self, cluster: RayCluster, spec: JobSpec, directory: Path | None = None) -> None:
        """`directory`: where the job's relative paths start; None for this process's."""
        self._cluster = cluster
        self._acquire_timeout_s = spec.recovery.acquire_timeout
        self._standby: int | Literal["all"] = spec.recovery.standby
        # Read by the interpreter when it starts, so it must be in the fork server's environment.
        self._hash_seed = None if spec.by == "script" and "PYTHONHASHSEED" in spec.env else spec.seed
        """None: the job sets its own."""
        self._env = {**spec.env, **self._hashing()}
        prepares = WHERE_INSTALLED if spec.by == "chaosrun" else ()
        self._runs: dict[str, Any] = {"preload": (*PRELOAD, *prepares, *spec.recovery.preload)}
        if spec.command:
            # The module that runs a command imports what it needs by itself.
            self._runs = {"preload": (), "target": command.TARGET}
        elif directory and (path := spec.env.get("PYTHONPATH")):
            # A fork server starts in the cluster's directory, and imports the preloads before a rank changes to the script's.
            self._env["PYTHONPATH"] = os.pathsep.join(str(directory / entry) for entry in path.split(os.pathsep) if entry)
        self._asked: _Asked | None = None
        self._lost: set[str] = set()
        self._leaving: set[str] = set()
        """Nodes that a fault is ending."""
        self._avoid: dict[str, str] = {}
        """Nodes that must not be used again, and why."""

    def devices(self) -> str:
        """The GPU models that the job may run on, or "cpu"."""
        if not self._cluster.gpu:
            return "cpu"
        models = sorted(name for name in ray.cluster_resources() if name.startswith("accelerator_type:"))
        return ", ".join(models) or "gpu"

    def acquire(self) -> PlacementAcquired:
        """Get places for all ranks, new ones if a node was lost. Raises ResourcesError, RecoveryError if further nodes die."""
        if self._lost:
            healthy = self._cluster.agents.keys() - self._lost - self._leaving - self._avoid.keys()
            self._cluster.release(lost=self._lost, keep=healthy)
            self._lost.clear()
            self._leaving.clear()
        try:
            return self._acquire()
        except RecoveryError:
            # A node of the new placement has died meanwhile.
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
            gpus_too_few=self._cluster.gpus_too_few,
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
        """Fork all ranks of an attempt; returns their pids by rank (empty if a command starts them, as events report them),
        and the rendezvous address. Raises ResourcesError, RecoveryError if an agent has died."""
        if place := _hash_order_at_restart(orders[0]):
            hashing = {**self._hashing(orders[0].attempt), HASH_ORDER: place}
            self._cluster.start_servers({**self._env, **hashing}, **self._runs)
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
        """The next event and its node; None if none came in time. RanksStopped comes once from each node."""
        try:
            node, event = self._cluster.events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, AgentDied):
            if node in self._lost | self._leaving:
                return None  # `lose` reports it
            self._lost.add(node)
        return node, event

    def wake(self, event: object) -> None:
        """Have `next_event` return this event; safe from signal handlers and other threads."""
        self._cluster.events.put(("", event))

    @property
    def ray(self) -> str:
        """ "private", "joined" or "borrowed"."""
        return self._cluster.kind

    def node_of(self, rank: int) -> str:
        placement = self._cluster.placement
        assert placement is not None, "acquire comes first"
        return placement.node_of[rank][1]

    def identify_rank(self, attempt: int, rank: int, *, listening: bool = False) -> tuple[int, int] | None:
        """(pid, start ticks) of a rank that runs in this attempt; None if it does not, or is not `listening` for notices."""
        try:
            return self._cluster.agents[self.node_of(rank)].call("identify_rank", attempt, rank, listening)
        except RecoveryError:
            return None  # its agent is gone, which an event reports

    def strike(self, orders: Sequence[StrikeOrder]) -> Sequence[bool | None]:
        """Carry out strikes at once. False for one whose rank was gone, so that nothing was done; None if that is unknown
        because its agent's answer was lost."""
        done: dict[str, bool | None] = {}
        calls: list[tuple[AgentClient, list[str], Any]] = []
        for node, own in grouped(orders, lambda order: self.node_of(order.fault.rank)).items():
            if node in self._lost | self._leaving:
                continue
            if any(order.fault.facts.evidence == "node" for order in own):
                # From here on, whatever Ray reports about this agent was planned.
                self._leaving.add(node)
            agent = self._cluster.agents[node]
            calls.append((agent, [order.fault.id for order in own], agent.submit("strike", own)))
        for agent, faults, reference in calls:
            try:
                struck: list[bool | None] = agent.collect(reference, timeout_s=60.0)
            except RecoveryError:
                # The agent was gone or cut off before it answered. A death, a note or a witness will show its effect.
                struck = [None] * len(faults)
            done.update(zip(faults, struck, strict=True))
            if all(each is False for each in struck):
                self._leaving.discard(agent.node_id)
        return [done.get(order.fault.id, False) for order in orders]

    def lose(self, node: str) -> None:
        """Note that the agent of this node is gone; it is not reported again."""
        self._leaving.discard(node)
        self._lost.add(node)

    def avoid(self, node: str, why: str) -> None:
        """Do not use this node any more."""
        self._avoid[node] = f"node {node[:8]} ({why})"

    def is_on_own_node(self, rank: int) -> bool:
        """Whether this rank is on the node that this process itself depends on."""
        return self._cluster.placement is not None and self.node_of(rank) == self._cluster.own_node

    def head(self) -> ProcessIdentity | None:
        """The head process of a private Ray, which is a child of this process."""
        return child_called("gcs_server", os.getpid()) if self._cluster.kind == "private" else None

    def activities(self, leg: LegLayout, attempt: int) -> Mapping[int, Activity] | None:
        """The activity of every rank as of the last request; also sends the next request. None if there is no answer yet: at
        the first call, while a node has not answered, or if an agent has just died.

        Does not wait: one slow node must not delay the handling of deaths elsewhere. Raises ResourcesError if a node does not
        answer within ANSWER_LIMIT_S.
        """
        asked, now_s = self._asked, time.monotonic()
        if asked is not None and asked.about == (leg.path, attempt):
            if now_s < asked.limit_s and not all(agent.has_answered(reference) for agent, reference in asked.calls):
                return None
            self._asked = None
            found = self._collect(asked.calls, timeout_s=1.0)
        else:
            found = None
        calls = self._ask(lambda place: ("activities", str(leg.path), attempt, place.ranks))
        self._asked = _Asked(about=(leg.path, attempt), calls=calls, limit_s=now_s + ANSWER_LIMIT_S)
        return found

    def stacks(self, leg: LegLayout, attempt: int, *, wait_s: float) -> Mapping[int, RankStack] | None:
        """Make all live ranks write their stacks to their logs; returns them by rank. None if an agent has just died."""
        calls = self._ask(lambda place: ("stacks", str(leg.path), attempt, wait_s))
        return self._collect(calls, timeout_s=ANSWER_LIMIT_S)

    def _ask(self, call: Callable[[NodePlace], tuple[Any, ...]]) -> list[tuple[AgentClient, Any]]:
        """Call every agent of the placement in parallel."""
        placement, agents = self._cluster.placement, self._cluster.agents
        assert placement is not None, "acquire comes first"
        return [(agents[node], agents[node].submit(*call(place))) for node, place in placement.nodes.items()]

    @staticmethod
    def _collect(calls: Sequence[tuple[AgentClient, Any]], *, timeout_s: float) -> dict[int, Any] | None:
        """The answers of all agents, by rank; None if an agent has died, which an event reports."""
        try:
            answers = [agent.collect(reference, timeout_s=timeout_s) for agent, reference in calls]
        except RecoveryError:
            return None
        return {rank: answer for answers_of_node in answers for rank, answer in answers_of_node.items()}


def _hash_order_at_restart(order: WorkerOrder) -> str:
    """Where the script depends on hashes, if this is a restart of it. A new process hashes strings differently, and a drill
    must show the effect."""
    in_drill = order.by == "script" and order.reference_path is not None
    return hash_order(Path(order.script)) if in_drill and order.attempt > 1 else ""
