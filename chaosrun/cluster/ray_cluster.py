"""The cluster: a Ray that is joined or started, one placement for the whole world size, one agent per node of it.

Owns Ray's life (if it started it), the placement group and the agents' handles. Ray only places and connects: its retries and
restarts are off, and the processes that train are the agents' children, not Ray's workers. Decides nothing about attempts.
"""

import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from chaosrun.checkpoint.storage_errors import refusal
from chaosrun.cluster.agent import NodeAgent
from chaosrun.cluster.agent_client import AgentClient, look_after
from chaosrun.cluster.connection import connect, cpu_count, no_room_for_ray
from chaosrun.cluster.forkserver import PRELOAD, TARGET
from chaosrun.cluster.messages import AgentDied, NodeEvent, RanksStarted, Ready
from chaosrun.cluster.placement import Placement, places_for, rooms_for
from chaosrun.errors import RecoveryError, ResourcesError
from chaosrun.records.events import NodePlace, NotPreloaded
from chaosrun.records.grouping import grouped
from chaosrun.records.order import WorkerOrder
from chaosrun.spec.bounds import crowded

START_LIMIT_S = 300.0
"""For fork servers to import everything, and for the ranks of an attempt to be forked."""
PREFERRED_S = 5.0
"""How long placement is tried on preferred or warm nodes before any others."""


class RayCluster(AbstractContextManager["RayCluster"]):
    """Use as a context manager. `events` receives (node id, event) of all agents, as they come; others may add events."""

    def __init__(
        self,
        address: str | None,
        *,
        workers: int,
        cpu: float = 1.0,
        gpu: int | Literal["auto"] = "auto",
        only_on: Collection[str] = (),
        spread: bool = False,
    ) -> None:
        """Use the Ray that `connection.connect` finds, from the main thread; a private one has room for all workers.

        `only_on`: ids of the nodes that may be used, if not all; `spread`: no two workers on one node. Raises
        ResourcesError when the address does not answer, and for more workers than a private one is to have.
        """
        self._connection = connection = connect(address, cpus=workers * cpu)
        if connection.kind == "private" and (found := crowded(workers, cpu, cpu_count())):
            connection.close()
            raise ResourcesError(found[0], hint=found[1])
        self.events: queue.SimpleQueue[tuple[str, NodeEvent | object]] = queue.SimpleQueue()
        self.placement: Placement | None = None
        self.agents: dict[str, AgentClient] = {}
        self.standbys: dict[str, AgentClient] = {}
        """Agents that have no ranks, and reserve nothing on their nodes."""
        self._rooms: Mapping[str, int] = {}
        """How many workers fitted on each node when last looked at."""
        self.kind = connection.kind
        self.mark = connection.mark
        gpus = int(ray.cluster_resources().get("GPU", 0))
        self.gpu: int = (1 if gpus >= workers else 0) if gpu == "auto" else gpu
        self.gpus_too_few = gpus if gpu == "auto" and not self.gpu else 0
        """GPUs that the cluster has and no worker gets, as there is not one for each."""
        self._workers = workers
        self._cpu = cpu
        self._only_on = frozenset(only_on)
        self._preferred: frozenset[str] = frozenset()
        self.places: Mapping[str, int] = {}
        """How many workers each node has or, before there is a placement, is to have."""
        self._spread = spread
        self._group: PlacementGroup | None = None
        self._closed = False
        self._over = threading.Event()
        self._watchers: list[threading.Thread] = []

    @property
    def oversubscribed(self) -> bool:
        """Whether the workers ask for more CPUs than this machine has (only a private Ray allows that)."""
        return self.kind == "private" and self._workers * self._cpu > cpu_count()

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker."""
        return {"CPU": self._cpu, **({"GPU": self.gpu} if self.gpu else {})}

    def places_within(self, free: Mapping[str, Mapping[str, float]]) -> dict[str, int] | None:
        """How many workers each node would get with these free resources by node; None: they do not fit."""
        return places_for(self._workers, self.bundle, free, spread=self._spread)

    def prefer(self, places: Mapping[str, int]) -> None:
        """Prefer these places; others are used if they have been taken meanwhile, and after a loss."""
        self.places, self._preferred = places, frozenset(places)

    @staticmethod
    def free() -> dict[str, dict[str, float]]:
        """By live node, the resources that are not reserved, as far as Ray knows."""
        return {node: dict(amounts) for node, amounts in available_resources_per_node().items()}

    def __exit__(self, *_: object) -> None:
        self.close()

    def acquire(self, timeout_s: float, *, avoid: Collection[str] = ()) -> Placement:
        """Reserve the whole world size and put an agent on each of its nodes, none of which is in `avoid`.

        Raises ResourcesError if that fails within `timeout_s`, RecoveryError if agents still die then. Has no effect if there
        is a placement already.
        """
        if self.placement is not None:
            return self.placement
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._acquire(deadline, avoid, timeout_s)
            except RecoveryError:
                # A node that had died before Ray knew of it.
                self.release(lost=self.agents.keys())
                if time.monotonic() >= deadline:
                    raise

    def _acquire(self, deadline: float, avoid: Collection[str], timeout_s: float) -> Placement:
        bundle = self.bundle
        if self.kind == "private" and self._workers * self.gpu > ray.cluster_resources().get("GPU", 0):
            # This machine will not get another GPU during a wait.
            raise self._no_placement(bundle, avoid, waited_s=0)
        if self._only_on and self._only_on <= set(avoid):
            raise self._no_placement(bundle, avoid, waited_s=0)
        preferred, self._preferred = self._preferred.difference(avoid), frozenset()
        node_of_bundle = {} if preferred else self._reserve_at_once(avoid)
        if not node_of_bundle:
            preferred = preferred or self._warm(avoid)
            reserved = bool(preferred) and self._reserve(_in(preferred), min(PREFERRED_S, timeout_s / 2))
            if not reserved and not self._reserve(self._selector(avoid), max(0.0, deadline - time.monotonic())):
                raise self._no_placement(bundle, avoid, waited_s=timeout_s)
            assert self._group is not None, "reserved"
            node_of_bundle = placement_group_table(self._group)["bundles_to_node_id"]
        gpus = self._gpus_of_bundles(deadline) if self.gpu else {}
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        bundles_of_node = grouped(range(self._workers), lambda index: node_of_bundle[index])
        nodes: dict[str, NodePlace] = {}
        stood_by = tuple(node for node in bundles_of_node if node in self.standbys)
        rank = 0
        for node_id, bundles in bundles_of_node.items():
            ranks = tuple(range(rank, rank + len(bundles)))
            own_gpus = tuple(gpu for bundle in bundles for gpu in gpus.get(bundle, ()))
            nodes[node_id] = NodePlace(address=addresses[node_id], ranks=ranks, gpus=own_gpus)
            if node_id not in self.agents:
                self.agents[node_id] = self.standbys.pop(node_id, None) or self._new_agent(node_id)
            rank += len(bundles)
        self._end({node_id: self.agents.pop(node_id) for node_id in self.agents.keys() - nodes.keys()}, lost=())
        self.placement = Placement(nodes=nodes, stood_by=stood_by)
        self.places = {node: len(place.ranks) for node, place in nodes.items()}
        asked = [(agent, agent.submit("hello")) for agent in self.agents.values()]
        for agent, reference in asked:
            agent.collect(reference, timeout_s=max(30.0, deadline - time.monotonic()))
        return self.placement

    def _reserve(self, allowed: str | None, wait_s: float) -> bool:
        where: dict[str, Any] = {"bundle_label_selector": [{"ray.io/node-id": allowed}] * self._workers} if allowed else {}
        strategy = "STRICT_SPREAD" if self._spread else "PACK"
        self._group = placement_group([self.bundle] * self._workers, strategy=strategy, **where)
        if not (reserved := self._group.wait(wait_s)):
            self.release()
        return reserved

    def _reserve_at_once(self, avoid: Collection[str]) -> dict[int, str]:
        """If nodes stand by, reserve places on nodes with agents without waiting, as Ray takes a second to free what a lost
        placement held. Returns nodes by bundle; empty if not all workers are known to fit, and for GPUs, which Ray has to
        assign."""
        if self.gpu or not self.standbys:
            return {}
        free = rooms_for(self._workers, self.bundle, self.free(), spread=self._spread)
        if not (places := self._warm_places(free, avoid)[: self._workers]):
            return {}
        where: dict[str, Any] = {"bundle_label_selector": [{"ray.io/node-id": _in([node])} for node in places]}
        self._group = placement_group([self.bundle] * self._workers, strategy="PACK", **where)
        return dict(enumerate(places))

    def _selector(self, avoid: Collection[str]) -> str | None:
        """Which nodes may be used, as a label selector of Ray; None: any."""
        if self._only_on:
            return _in(self._only_on.difference(avoid))
        return f"!in({','.join(sorted(avoid))})" if avoid else None

    def _new_agent(self, node_id: str) -> AgentClient:
        return AgentClient(start_actor(NodeAgent, node_id, f"{self.mark}#{node_id}", node_id), node_id, self._take_event)

    def _take_event(self, node_id: str, event: NodeEvent) -> None:
        if node_id not in self.standbys:
            self.events.put((node_id, event))
        elif isinstance(event, AgentDied):
            self.standbys.pop(node_id, None)

    def _gpus_of_bundles(self, deadline: float) -> dict[int, tuple[int, ...]]:
        task = ray.remote(num_cpus=0, num_gpus=self.gpu, max_retries=0)(_assigned_gpus)
        assert self._group is not None
        references = [
            task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index)).remote()
            for index in range(self._workers)
        ]
        found = ray.get(references, timeout=max(30.0, deadline - time.monotonic()))
        return {index: tuple(int(gpu) for gpu in ids) for index, ids in enumerate(found)}

    def _no_placement(self, bundle: Mapping[str, float], avoid: Collection[str], *, waited_s: float) -> ResourcesError:
        files = Path(self.mark.rpartition("#")[0]).parent
        if self.kind == "private" and waited_s and (refused := refusal(files)):
            # Its workers die of it at their start, and say nothing: the agents seem to wait for a place.
            return no_room_for_ray(files, refused)
        usable = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoid]
        usable = [node for node in usable if not self._only_on or node["NodeID"] in self._only_on]
        total = {name: sum(node["Resources"].get(name, 0.0) for node in usable) for name in bundle}
        free = {name: min(amount, ray.available_resources().get(name, 0.0)) for name, amount in total.items()}
        asked = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
        has = ", ".join(f"{name} {total.get(name, 0):g} ({free.get(name, 0):g} free)" for name in bundle)
        nodes = len(usable)
        waited = f" within {waited_s:g} s" if waited_s else ""
        possible = all(self._workers * amount <= total.get(name, 0) for name, amount in bundle.items())
        return ResourcesError(
            f"no place for {self._workers} workers with {asked} each{waited}: the cluster has {has} on {nodes} node(s)",
            hint="wait for other jobs to end, or raise recovery.acquire_timeout"
            if possible
            else "lower workers, per_worker.cpu or per_worker.gpu, or join a larger cluster with --address",
        )

    def release(self, *, lost: Collection[str] = (), keep: Collection[str] = ()) -> None:
        """End the agents and everything below them, and release the reserved resources. Agents on `lost` nodes are gone. Those
        to `keep`, whose fork servers are warm, serve the next placement if it has ranks on their nodes."""
        agents, self.agents, self.placement = self.agents, {}, None
        self.agents = {node_id: agents.pop(node_id) for node_id in [*agents] if node_id in keep}
        self._end(agents, lost)
        self._forget_old_events()
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    @staticmethod
    def _end(agents: Mapping[str, AgentClient], lost: Collection[str]) -> None:
        ending = {node_id: agent.submit_shutdown() for node_id, agent in agents.items() if node_id not in lost}
        for node_id, agent in agents.items():
            if node_id in lost:
                agent.abandon()
            else:
                agent.close(ending[node_id])

    def _forget_old_events(self) -> None:
        """Drop events of ended agents, which would be mistaken for events of their successors. Other events stay."""
        kept: list[tuple[str, object]] = []
        with suppress(queue.Empty):
            while True:
                node, event = self.events.get_nowait()
                if not node or node in self.agents:
                    kept.append((node, event))
        for each in kept:
            self.events.put(each)

    def stand_by(
        self, wanted: int | Literal["all"], env: Mapping[str, str], *, avoid: Collection[str] = (), **runs: Any
    ) -> None:
        """Keep this many agents, with fork servers as in `start_servers`, waiting on free nodes for the next placement.

        Does not wait for them and reserves nothing: if another user takes such a node, the placement does without it.
        """
        assert self.placement is not None, "acquire comes first"
        missing = None if wanted == "all" else wanted - len(self.standbys)
        if missing is not None and missing <= 0:
            return
        most = max(len(place.ranks) for place in self.placement.nodes.values())
        for node in self._spare_nodes(avoid)[:missing]:
            agent = self.standbys[node] = self._new_agent(node)
            agent.submit("hello")
            agent.submit("start_server", dict(env), runs.get("preload", PRELOAD), runs.get("target", TARGET), most)

    def _spare_nodes(self, avoid: Collection[str]) -> list[str]:
        """Nodes with room for a worker and without an agent, the roomiest first."""
        self._rooms = {**self._rooms, **(rooms := rooms_for(self._workers, self.bundle, self.free(), spread=self._spread))}
        taken = {*avoid, *self.agents, *self.standbys}
        usable = [node for node in rooms if node not in taken and (not self._only_on or node in self._only_on)]
        return sorted(usable, key=lambda node: -rooms[node])

    def _warm(self, avoid: Collection[str]) -> frozenset[str]:
        """Nodes with agents, if all workers fit there as far as is known."""
        return frozenset(self._warm_places(self._rooms, avoid))

    def _warm_places(self, rooms: Mapping[str, int], avoid: Collection[str]) -> list[str]:
        """If nodes stand by, the nodes with agents, each as often as workers fit there; empty if not all workers fit. `rooms`:
        by node that stands by."""
        known = {node: self.places.get(node, 0) for node in self.agents} | {node: rooms.get(node, 0) for node in self.standbys}
        places = [node for node, room in known.items() if node not in avoid for _ in range(room)]
        return places if self.standbys and len(places) >= self._workers else []

    def start_servers(
        self, env: Mapping[str, str], *, preload: Sequence[str] = PRELOAD, target: str = TARGET
    ) -> tuple[NotPreloaded, ...]:
        """Ensure that a fork server with this environment runs on every node; at once where one runs. Returns the modules of
        `preload` that some node must leave out."""
        assert self.placement is not None, "acquire comes first"
        calls = [
            (agent := self.agents[node], agent.submit("start_server", dict(env), preload, target, len(place.ranks)))
            for node, place in self.placement.nodes.items()
        ]
        ready: list[Ready] = [agent.collect(reference, timeout_s=START_LIMIT_S) for agent, reference in calls]
        return tuple({left.module: left for server in ready for left in server.left_out}.values())

    def start_attempt(self, attempt: int, orders: Sequence[WorkerOrder]) -> RanksStarted:
        """Fork all ranks; rank 0's node chooses the port, the others get it. Raises ResourcesError when a node cannot."""
        assert self.placement is not None, "acquire comes first"
        by_rank = {order.rank: order for order in orders}
        pids: dict[int, int] = {}
        port: int | None = None
        calls: list[tuple[AgentClient, Any]] = []
        for node, place in self.placement.nodes.items():
            told = [by_rank[rank] if port is None else replace(by_rank[rank], master_port=port) for rank in place.ranks]
            agent = self.agents[node]
            reference = agent.submit("start", attempt, told, port is None)
            if port is None:
                first: RanksStarted = agent.collect(reference, timeout_s=START_LIMIT_S)
                port = first.port
                pids.update(first.pids)
            else:
                calls.append((agent, reference))
        for agent, reference in calls:
            pids.update(agent.collect(reference, timeout_s=START_LIMIT_S).pids)
        return RanksStarted(pids=pids, port=port)

    def stop(self, attempt: int, nodes: Collection[str]) -> None:
        """Begin to kill an attempt on these nodes; each reports when it has stopped, or is reported lost."""
        calls = [(self.agents[node], self.agents[node].submit("stop", attempt)) for node in nodes]
        watcher = threading.Thread(target=look_after, args=(calls, self._over), name="stopping", daemon=True)
        self._watchers = [*(each for each in self._watchers if each.is_alive()), watcher]
        watcher.start()

    @property
    def own_node(self) -> str:
        """The node that this process is connected to."""
        return ray.get_runtime_context().get_node_id()

    def close(self) -> None:
        """End agents and all below them, the placement, and a private Ray with its folder."""
        if self._closed:
            return
        self._closed = True
        standbys, self.standbys = self.standbys, {}
        self.agents = {**standbys, **self.agents}
        try:
            self.release()
        finally:
            self._over.set()
            for watcher in self._watchers:
                watcher.join()
            self._connection.close()


def _in(nodes: Collection[str]) -> str:
    return f"in({','.join(sorted(nodes))})"


def _assigned_gpus() -> list[Any]:
    return ray.get_gpu_ids()


def start_actor(kind: type, node_id: str, *arguments: object) -> Any:
    """Start an actor on this node, without resources and without Ray's restarts and retries."""
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    alone = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 16}
    return ray.remote(kind).options(scheduling_strategy=strategy, **alone).remote(*arguments)
