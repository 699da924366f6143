"""A leg's worker processes, as the supervisor sees them: places, starts, stops and events, on the agents of a RayCluster."""

import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from chaosrun.cluster.forkserver import PRELOAD
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.errors import RecoveryError
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.spec.model import JobSpec

__all__ = ["ClusterWorkers"]


class ClusterWorkers:
    """Implements `supervise.supervisor.Workers`. The same agents and fork servers serve one leg after the other."""

    def __init__(self, cluster: RayCluster, spec: JobSpec) -> None:
        self._cluster = cluster
        self._acquire_timeout_s = spec.recovery.acquire_timeout
        # Read by the interpreter when it starts, so it has to be in the fork server's environment.
        self._env = {**spec.env, "PYTHONHASHSEED": str(spec.seed)}
        self._preload = (*PRELOAD, *spec.recovery.preload)
        self._lost: set[str] = set()

    def devices(self) -> str:
        """The GPU models that the job may run on, or "cpu"."""
        if not self._cluster.gpu:
            return "cpu"
        models = sorted(name for name in ray.cluster_resources() if name.startswith("accelerator_type:"))
        return ", ".join(models) or "gpu"

    def acquire(self) -> dict[str, Any]:
        if self._lost:
            self._cluster.release()
            self._lost.clear()
        placement = self._cluster.acquire(self._acquire_timeout_s)
        self._cluster.start_servers(self._env, preload=self._preload)
        return {
            "nodes": {
                node.node_id: {"address": node.address, "ranks": node.ranks, "gpus": node.gpus} for node in placement.nodes
            },
            "ray": self._cluster.kind,
            "oversubscribed": self._cluster.oversubscribed,
        }

    @property
    def nodes(self) -> Sequence[str]:
        placement = self._cluster.placement
        return [] if placement is None else [node.node_id for node in placement.nodes]

    def place(self, order: WorkerOrder) -> WorkerOrder:
        placement = self._cluster.placement
        assert placement is not None, "acquire comes first"
        number, node = next((n, node) for n, node in enumerate(placement.nodes) if order.rank in node.ranks)
        return replace(
            order,
            node_rank=number,
            local_rank=node.ranks.index(order.rank),
            local_world_size=len(node.ranks),
            gpus=node.gpus,
            master_addr=placement.master_addr,
        )

    def start(self, orders: Sequence[WorkerOrder]) -> tuple[dict[int, int], str]:
        started = self._cluster.start_attempt(orders[0].attempt, orders)
        return started.pids, f"{started.master_addr}:{started.master_port}"

    def stop(self, attempt: int) -> None:
        for node, agent in self._cluster.agents.items():
            if node not in self._lost:
                agent.submit("stop", attempt)

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            node, event = self._cluster.events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event["event"] == "agent_lost":
            self._lost.add(node)
        return {**event, "node": node}

    def wake(self, event: dict[str, Any]) -> None:
        self._cluster.events.put(("", event))

    def last_progress_s(self, leg: LegLayout, attempt: int) -> float:
        try:
            progress = self._cluster.progress(str(leg.path), attempt)
        except RecoveryError:
            # An agent died. An event tells that; until it comes, nobody can say that the ranks are silent.
            return time.time()
        return max((rank["mtime_s"] for rank in progress.values() if rank is not None), default=0.0)
