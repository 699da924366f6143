"""Agents and fork servers that are kept from drill to drill: each drill then costs no more than its legs.

A `RayCluster` stands for one placement: workers, and what each of them takes. `PlacementPool` has as many at once as one Ray
has room for; it reckons with what it has handed out itself, since Ray learns of a reservation only when it is made.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from chaosrun.plan.planner import make_plan
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import own_leg
from chaosrun.records.storage_owner import is_owner
from chaosrun.spec.model import JobSpec
from chaosrun.spec.source import Job, load_job
from chaosrun.supervise.drill import Drill, LegRunner, create_run, read_run, supervised
from chaosrun.supervise.interrupts import Interrupts, OneOfMany
from chaosrun.supervise.run import Listener, reachable
from chaosrun.supervise.supervisor import Supervisor
from chaosrun.verify.verdict import Verdict

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster

Watch = Callable[[Supervisor | None], None]
"""Told which supervisor to interrupt; None: none."""
Postponed = Callable[[], AbstractContextManager[None]]
"""Makes the context within which no signal interrupts."""
Report = Callable[[RunLayout, Verdict], Sequence[str]]
"""What is done with a run that came to a verdict; returns what is to be told."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a job wants of a cluster."""

    workers: int
    cpu: float
    gpu: int | Literal["auto"]

    @classmethod
    def of(cls, spec: JobSpec) -> "Shape":
        return cls(spec.workers, spec.per_worker.cpu, spec.per_worker.gpu)

    def connect(self, address: str | None, postponed: Postponed) -> "RayCluster":
        from chaosrun.cluster.ray_cluster import RayCluster

        with postponed():
            return RayCluster.connect(address, workers=self.workers, cpu=self.cpu, gpu=self.gpu)


@contextmanager
def one_ray(address: str | None, shapes: Sequence[Shape], interrupts: Interrupts) -> Iterator[None]:
    """Connect once for many drills: each of them finds this process connected, and leaves it so. A private Ray has room for the
    largest of the shapes."""
    workers, cpu = max((shape.workers for shape in shapes), default=1), max((shape.cpu for shape in shapes), default=1.0)
    cluster = Shape(workers, cpu, 0).connect(address, interrupts.postponed)
    try:
        interrupts.check()
        yield
    finally:
        with interrupts.postponed():
            cluster.close()


def drill_on(
    cluster: "RayCluster",
    run: RunLayout,
    job: Job,
    root: Path,
    *,
    watch: Watch,
    on_record: Listener = lambda record: None,
    survey: bool = False,
    report: Report = lambda run, verdict: (),
) -> Verdict:
    """Carry a run of the job out on these agents, where other processes reach it, and `report` its verdict. `root`: whose
    references are used. Raises as `Drill.execute` does."""
    from chaosrun.cluster.workers import ClusterWorkers

    with OneOfMany(watch) as interrupts, supervised(run) as (_, warnings):
        with reachable(run, on_record, interrupts) as (hear, on_supervisor):
            legs = LegRunner(workers=ClusterWorkers(cluster, job.spec), on_record=hear, on_supervisor=on_supervisor)
            verdict = Drill(run=run, root=root, legs=legs, survey=survey).execute()
        warnings += report(run, verdict)
        return verdict


def new_run(root: Path, path: Path, overrides: Sequence[str], *, reference: str) -> RunLayout:
    """Plan a drill of the job file at `path`, under `root`/runs. Raises SpecError and UsageError, as `api.plan` does."""
    job = load_job(path, overrides)
    return create_run(
        root,
        job.spec,
        job_path=job.path.resolve(),
        script=job.script_path,
        text=job.text,
        plan=make_plan(job.spec, job.trace),
        overrides=list(overrides),
        reference=reference,
    )


def remove_run(run: RunLayout) -> None:
    """The run, and its checkpoints where `checkpoint.storage` puts them."""
    info = read_run(run)
    storage = own_leg(run, info, "chaos").storage
    if storage is not None and is_owner(storage.parent, run.path, info):
        shutil.rmtree(storage.parent)
    run.run_json.unlink()  # first: nobody takes for a run what is half gone
    shutil.rmtree(run.path)


@dataclass(slots=True)
class PlacementPool(AbstractContextManager["PlacementPool"]):
    """Use as a context manager, while this process is connected to a Ray; by one thread."""

    address: str | None
    postponed: Postponed
    _free: dict[str, float] = field(init=False, default_factory=dict)
    _idle: "list[tuple[Shape, RayCluster]]" = field(default_factory=list)
    _used: int = 0

    def __enter__(self) -> Self:
        probe = Shape(1, 1.0, 0).connect(self.address, self.postponed)
        self._free = probe.free
        probe.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def take(self, shape: Shape, *, fresh: bool = False) -> "RayCluster | None":
        """A placement for a drill; None while there is no room for it. Where nothing is in use it gets one in any case: whoever
        then wants the resources is told that the cluster is too small. `fresh`: whose agents served no other drill."""
        for entry in self._idle:
            if entry[0] == shape and not fresh:
                self._idle.remove(entry)
                self._used += 1
                return entry[1]
        cluster = shape.connect(self.address, self.postponed)
        while self._idle and not self._has_room(cluster):
            self._close(*self._idle[0])
        if not self._has_room(cluster) and self._used:
            cluster.close()
            return None
        self._reserve(cluster, 1)
        self._used += 1
        return cluster

    def give_back(self, shape: Shape, cluster: "RayCluster", *, sound: bool) -> None:
        """`sound`: its agents may serve the next drill."""
        self._used -= 1
        self._idle.append((shape, cluster))
        if not sound:
            self._close(shape, cluster)

    def clear(self) -> None:
        """Let go of all that is not in use."""
        while self._idle:
            self._close(*self._idle[0])

    def _has_room(self, cluster: "RayCluster") -> bool:
        return all(self._free.get(name, 0.0) + 1e-6 >= amount for name, amount in cluster.needs.items() if amount)

    def _reserve(self, cluster: "RayCluster", times: int) -> None:
        for name, amount in cluster.needs.items():
            self._free[name] = self._free.get(name, 0.0) - times * amount

    def _close(self, shape: Shape, cluster: "RayCluster") -> None:
        self._idle.remove((shape, cluster))
        self._reserve(cluster, -1)
        with self.postponed():
            cluster.close()
