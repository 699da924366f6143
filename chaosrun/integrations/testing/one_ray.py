"""One Ray for all drills of a test session: started by the first that needs one, closed when the session ends."""

import math
import os
from typing import TYPE_CHECKING

from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import expected_ray

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster
    from chaosrun.faults.fault import FaultPlan
    from chaosrun.spec.model import JobSpec


class OneRay:
    """Belongs to one process: under pytest-xdist each worker has its own."""

    def __init__(self, address: str | None) -> None:
        """`address`: a cluster to join instead of starting a private Ray."""
        self._address = address
        self._cluster: RayCluster | None = None
        self._cpus = 0.0

    def make_ready(self, spec: "JobSpec", plan: "FaultPlan") -> None:
        """Have this process connected to a Ray that is large enough, as the drill will find it; or to none, where the plan
        strikes Ray itself and the drill must have one to itself. Raises as `api.submit`."""
        # Read when Ray is imported; see `supervise.run.placed`.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        from chaosrun.campaign.planned_drill import TAKES_AGENTS

        if any(fault.facts.family in TAKES_AGENTS for fault in plan.faults):
            self.close()
            return
        cpus = spec.workers * spec.per_worker.cpu
        if self._cluster is not None and not self._serves(self._cluster, cpus):
            self.close()
        if self._cluster is None:
            self._connect(spec)
            self._cpus = max(os.cpu_count() or 1, math.ceil(cpus))

    def _connect(self, spec: "JobSpec") -> None:
        from chaosrun.cluster.ray_cluster import RayCluster

        with Interrupts() as interrupts:
            with interrupts.postponed():
                cpu = spec.per_worker.cpu
                self._cluster = RayCluster.connect(self._address, workers=spec.workers, cpu=cpu, gpu=0)
            interrupts.check()

    def _serves(self, cluster: "RayCluster", cpus: float) -> bool:
        """A test may have shut Ray down, and a private Ray has as many CPUs as it was started with."""
        return expected_ray(self._address) is None and (cluster.kind != "private" or cpus <= self._cpus)

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            with Interrupts() as interrupts, interrupts.postponed():
                cluster.close()
