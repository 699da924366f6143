"""A placement that is kept: one drill after the other on the same agents and fork servers, each for the price of its legs."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.cluster.workers import ClusterWorkers
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import own_leg
from chaosrun.records.storage_owner import is_owner
from chaosrun.spec.source import Job, load_job
from chaosrun.supervise.drill import Drill, create_run, read_run, supervised
from chaosrun.supervise.interrupts import OneOfMany
from chaosrun.supervise.run import reachable
from chaosrun.supervise.supervisor import Supervisor
from chaosrun.verify.verdict import Verdict

Watch = Callable[[Supervisor | None], None]
"""Told which supervisor to interrupt; None: none."""
Listener = Callable[[dict[str, Any]], None]
Calmly = Callable[[], AbstractContextManager[None]]
"""Makes the context within which no signal interrupts."""


@dataclass(slots=True)
class WarmPlace:
    """All drills are of jobs that differ in their faults alone: what a fork server starts with is the same."""

    cluster: RayCluster
    job: Job
    root: Path
    """Whose references are used."""
    workers: ClusterWorkers = field(init=False)

    def __post_init__(self) -> None:
        self.workers = ClusterWorkers(self.cluster, self.job.spec)

    def drill(
        self,
        run: RunLayout,
        *,
        watch: Watch,
        on_record: Listener = lambda record: None,
        survey: bool = False,
        report: Callable[[Verdict], Sequence[str]] = lambda verdict: (),
    ) -> Verdict:
        """Carry a run out, where other processes reach it, and `report` its verdict, whose warnings that returns. Raises as
        `Drill.execute` does."""
        with OneOfMany(watch) as interrupts, supervised(run) as (_, warnings):
            with reachable(run, on_record, interrupts) as (hear, on_supervisor):
                drill = Drill(
                    run=run,
                    root=self.root,
                    workers=lambda: self.workers,
                    devices=self.workers.devices,
                    on_record=hear,
                    on_supervisor=on_supervisor,
                    survey=survey,
                )
                verdict = drill.execute()
            warnings += report(verdict)
            return verdict


def new_run(root: Path, path: Path, overrides: Sequence[str], *, reference: str) -> RunLayout:
    """Plan a drill of the job file at `path`, under `root`/runs. Raises SpecError and UsageError, as `api.plan` does."""
    from chaosrun.plan.planner import make_plan

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


@contextmanager
def warm_places(
    address: str | None, job: Job, root: Path, *, at_most: int | None = None, calmly: Calmly
) -> Iterator[list[WarmPlace]]:
    """As many places for the job's workers as the cluster has room for, one in any case, on one Ray."""
    spec = job.spec
    with ExitStack() as stack:

        def close(cluster: RayCluster) -> None:
            with calmly():
                cluster.close()

        def connect() -> WarmPlace:
            with calmly():
                cluster = RayCluster.connect(address, workers=spec.workers, cpu=spec.per_worker.cpu, gpu=spec.per_worker.gpu)
            stack.callback(close, cluster)
            return WarmPlace(cluster=cluster, job=job, root=root)

        places = [connect()]
        room = max(1, places[0].cluster.room)
        places += [connect() for _ in range(1, min(room, at_most or room))]
        yield places
