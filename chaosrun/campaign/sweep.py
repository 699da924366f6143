"""A sweep: one kill at every point that a job comes by, each a drill against one reference, several at a time where they fit.

A run before it, the survey, finds out what there is to try: the job undisturbed, then killed once, every rank writing down
which points it comes by; its undisturbed leg is the reference of the whole sweep. Can be taken up again after every drill. Must
not know how points are chosen (`plan.points`) nor what a verdict rests on.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chaosrun.campaign.placements import PlacementPool, Shape, drill_on, new_run, one_ray, remove_run
from chaosrun.campaign.scheduler import Listener as Listens
from chaosrun.campaign.scheduler import RunningSupervisors, Scheduler
from chaosrun.campaign.sweep_file import PointResult, Sweep, SweepFolder, find_sweep, new_sweep
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.cluster.workers import ClusterWorkers
from chaosrun.errors import (
    ChaosrunError,
    InterruptedRunError,
    RecoveryError,
    ResourcesError,
    RunTimeoutError,
    UsageError,
    UserScriptError,
)
from chaosrun.plan.points import Passage, Point, chosen_steps, enumerate_points, first_kill, matching, saved_steps
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.runs import default_root
from chaosrun.records.trace import read_lines
from chaosrun.spec.fragment import cleared, scheduled
from chaosrun.spec.source import Job, load_job
from chaosrun.supervise.drill import leg_of, read_run
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.reference import leg_end, reference_key
from chaosrun.supervise.run import Listener

UNDISTURBED_ERRORS: dict[str, type[ChaosrunError]] = {
    "user_error": UserScriptError,
    "resources": ResourcesError,
    "timeout": RunTimeoutError,
}
"""Outcome of the undisturbed job → what a sweep ends with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What the user asks to be tried."""

    overrides: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    """Of the training's phases; empty: chosen (`plan.points.chosen_steps`)."""
    only: tuple[str, ...] = ()
    """Patterns of phases or ids of points; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    run: RunLayout
    reference_key: str
    undisturbed: tuple[Passage, ...]
    recovering: tuple[Passage, ...]
    """Of the attempt after the first kill; empty when it came to none."""
    epoch_of_step: dict[int, int]

    @property
    def passages(self) -> int:
        """How many different points were come by in all."""
        return len({*((False, passage) for passage in self.undisturbed), *((True, passage) for passage in self.recovering)})


@dataclass(frozen=True, slots=True)
class PointDrill:
    """A `scheduler.Task`: the reference of all is there."""

    point: Point
    shape: Shape
    reference: None = None
    needs_all: bool = False
    needs_fresh: bool = False

    @property
    def name(self) -> str:
        return self.point.id


def sweep(
    job: Path,
    *,
    overrides: Sequence[str] = (),
    steps: Sequence[int] = (),
    only: Sequence[str] = (),
    at_once: int | None = None,
    keep: bool = False,
    resume: str | None = None,
    root: Path | None = None,
    address: str | None = None,
    on_event: Listener | None = None,
) -> Sweep:
    """Kill the job once at each of its points, one drill each, against one reference; its own faults are left out.

    `steps`: those at which the training's phases are tried, instead of a few that are chosen; `only`: patterns of phases or
    points; `at_once`: most drills at the same time; `keep` the runs that pass, too. `resume` goes on with a sweep (id, unique
    prefix, "latest"). Raises as `api.submit`; InterruptedRunError leaves it to be gone on with, once its points are known.
    """
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    base = (default_root() if root is None else root).absolute()
    request = SweepRequest(overrides=tuple(overrides), steps=tuple(steps), only=tuple(only))
    with Interrupts() as interrupts, opened(base, job, request, resume) as (folder, known):
        run = SweepRun(
            folder=folder,
            job=load_job(job, request.overrides if known is None else known.overrides),
            root=base,
            interrupts=interrupts,
            on_event=on_event or (lambda record: None),
        )
        with one_ray(address, [run.shape], interrupts), PlacementPool(address, interrupts.postponed) as pool:
            known = run.begin(pool, request) if known is None else run.take_up(pool, known)
            return run.try_points(known, pool, at_once=at_once, keep=keep)


@contextmanager
def opened(root: Path, job: Path, request: SweepRequest, resume: str | None) -> Iterator[tuple[SweepFolder, Sweep | None]]:
    """The folder of a new sweep, or of the one called `resume` with what is known of it; held for this process.

    A new one is gone afterwards if it did not come to know its points. Raises UsageError.
    """
    if resume is None:
        folder = new_sweep(root, load_job(job, request.overrides).spec.name)
        try:
            with folder.locked():
                yield folder, None
        finally:
            if not folder.file.exists():
                shutil.rmtree(folder.path)
        return
    folder = find_sweep(root, resume, job)
    with folder.locked():
        known = folder.load()
        if request.steps or request.only or request.overrides not in ((), known.overrides):
            raise UsageError(
                f"sweep {known.sweep_id} goes on as it began, with {' '.join(known.overrides) or 'no overrides'}",
                hint="leave out --steps, --only and overrides, or begin a new one without --resume",
            )
        yield folder, known


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """A sweep that is being carried out."""

    folder: SweepFolder
    job: Job
    root: Path
    interrupts: Interrupts
    on_event: Listener

    @property
    def shape(self) -> Shape:
        return Shape.of(self.job.spec)

    def begin(self, pool: PlacementPool, request: SweepRequest) -> Sweep:
        """Find out what there is to try, and write it down. Raises UsageError when nothing of what was asked for exists."""
        self.on_event({"leg": None, "event": "sweep.survey", "sweep": self.folder.path.name})
        with self._placement(pool) as cluster:
            try:
                found = self._survey(cluster, request.overrides)
            except InterruptedRunError as error:
                raise InterruptedRunError("interrupted before the points of the job were known", hint="begin again") from error
        steps = request.steps or chosen_steps(found.epoch_of_step, saved_steps(found.undisturbed))
        last = max(found.epoch_of_step, default=0)
        if missing := [step for step in steps if step not in found.epoch_of_step]:
            raise UsageError(f"step {missing[0]} is never reached, the job has {last} steps", hint="change --steps")
        points = enumerate_points(self.job.spec, found.undisturbed, found.recovering, steps=steps)
        chosen = matching(points, request.only)
        if not chosen:
            phases = ", ".join(dict.fromkeys(point.phase for point in points))
            message = f"no point matches {' or '.join(request.only)}"
            raise UsageError(message, hint=f"phases that the job comes by: {phases}")
        known = Sweep(
            sweep_id=self.folder.path.name,
            created_s=time.time(),
            job=str(self.job.path.resolve()),
            text=self.job.text,
            overrides=request.overrides,
            cleared=tuple(cleared(self.job.spec)),
            reference_key=found.reference_key,
            survey=found.run.run_id,
            workers=self.job.spec.workers,
            final_step=last,
            passages=found.passages,
            steps=tuple(sorted(steps)),
            points=tuple(chosen),
        )
        self.folder.save(known)
        return known

    def take_up(self, pool: PlacementPool, known: Sweep) -> Sweep:
        """Raises UsageError when what the reference was made with has changed: the verdicts would speak of two jobs."""
        with self._placement(pool) as cluster:
            key = reference_key(self.job.spec, self.job.script_path, ClusterWorkers(cluster, self.job.spec).devices())
        if known.text != self.job.text or known.reference_key != key:
            raise UsageError(
                f"the job, its script, the machine or chaosrun has changed since sweep {known.sweep_id} began",
                hint="begin a new one, without --resume",
            )
        return known

    def try_points(self, known: Sweep, pool: PlacementPool, *, at_once: int | None, keep: bool) -> Sweep:
        """Try every point that is left. `keep` the runs that pass. A point whose drill is cancelled stays left.

        Raises InterruptedRunError on a KeyboardInterrupt, and whatever a drill raises: what is done then is in the folder.
        """

        def carry(
            task: PointDrill, cluster: RayCluster | None, supervisors: RunningSupervisors, listen: Listens
        ) -> tuple[PointResult | None, bool]:
            assert cluster is not None, "no point takes a node along"
            try:
                return self._try(task.point, known, cluster, supervisors, keep=keep), True
            except InterruptedRunError:
                if supervisors.interrupted:
                    raise
                return None, True  # `chaosrun cancel`, of this drill alone

        def on_result(task: PointDrill, result: PointResult | None) -> bool:
            nonlocal known
            if result is None:
                self.on_event({"leg": None, "event": "sweep.cancelled", "point": task.point.id})
                return True
            known = replace(known, tried={**known.tried, task.point.id: result})
            self.folder.save(known)
            self.on_event(_record(known, task.point))
            return True

        tasks = [PointDrill(point, self.shape) for point in known.left]
        try:
            Scheduler(carry=carry, pool=pool, at_once=at_once or len(tasks) or 1, on_result=on_result).run(tasks)
        except (KeyboardInterrupt, InterruptedRunError) as error:
            tried = f"{len(known.tried)} of {len(known.points)} points tried"
            hint = f"`{self.folder.resume_command(known)}` goes on with the sweep"
            raise InterruptedRunError(f"interrupted, {tried}", hint=hint) from error
        return known

    @contextmanager
    def _placement(self, pool: PlacementPool) -> Iterator[RayCluster]:
        cluster = pool.take(self.shape)
        assert cluster is not None, "nothing else is in use"
        try:
            self.interrupts.check()
            yield cluster
        finally:
            pool.give_back(self.shape, cluster, sound=True)

    def _survey(self, cluster: RayCluster, overrides: Sequence[str]) -> Survey:
        """Raises what the undisturbed job failed with; whether it comes back from the kill is for the sweep to tell."""
        spec = self.job.spec
        kill = [*cleared(spec), scheduled([first_kill(spec)])]
        run = new_run(self.folder.path, self.job.path, [*overrides, *kill], reference="fresh")
        drill_on(cluster, run, self.job, self.root, watch=self.interrupts.watch, survey=True)
        reference = leg_of(run, "reference")
        end = leg_end(reference)
        assert end is not None, "a drill ends with its legs"
        if end["outcome"] != "completed":
            error = UNDISTURBED_ERRORS.get(end["outcome"], RecoveryError)
            raise error(f"the undisturbed job did not end well: {end['message']}", hint=end["hint"])
        attempt = reference.attempts()[-1]
        return Survey(
            run=run,
            reference_key=read_run(run)["reference"]["key"],
            undisturbed=tuple(_passages(reference, attempt, spec.workers)),
            recovering=tuple(_passages(leg_of(run, "chaos"), 2, spec.workers)),
            epoch_of_step=_epochs(reference, attempt),
        )

    def _try(
        self, point: Point, known: Sweep, cluster: RayCluster, supervisors: RunningSupervisors, *, keep: bool
    ) -> PointResult:
        began_s = time.monotonic()
        reference = str(self.folder.path / "runs" / known.survey)
        try:
            run = new_run(self.folder.path, self.job.path, known.overrides_of(point), reference=reference)
        except UsageError as error:
            return PointResult(
                status="INCONCLUSIVE", exit_code=error.exit_code, cause=error.message, reached=False, run=None, took_s=0.0
            )
        try:
            verdict = drill_on(cluster, run, self.job, self.root, watch=supervisors.watch())
        except InterruptedRunError:
            remove_run(run)
            raise
        passed = verdict.status == "PASS" and not keep
        result = PointResult.of(verdict, run=None if passed else run.run_id, took_s=time.monotonic() - began_s)
        if passed:
            remove_run(run)
        return result


def _record(known: Sweep, point: Point) -> dict[str, Any]:
    counts = Counter(tried.status for tried in known.tried.values())
    about = {"point": point.id, "number": len(known.tried), "of": len(known.points)}
    return {"leg": None, "event": "sweep.tried", **about, "counts": dict(counts), **asdict(known.tried[point.id])}


def _passages(leg: LegLayout, attempt: int, workers: int) -> Iterator[Passage]:
    for rank in range(workers):
        path = leg.attempt(attempt).points(rank)
        for line in read_lines(path) if path.exists() else ():
            yield Passage(rank=rank, **line)


def _epochs(leg: LegLayout, attempt: int) -> dict[int, int]:
    lines = read_lines(leg.attempt(attempt).trace(0))
    return {line["step"]: line["epoch"] for line in lines if line["kind"] == "step"}
