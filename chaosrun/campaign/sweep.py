"""A sweep: one kill at every point that a job passes, each a drill against one reference. Can be resumed after every drill.

A first run, the survey, finds the points: the job without faults, which is the reference of the whole sweep, then killed once.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chaosrun.campaign.drill import drill_on, new_run
from chaosrun.campaign.files import Sweep, SweepFolder
from chaosrun.campaign.results import PointResult
from chaosrun.campaign.scheduler import RunningSupervisors, Scheduler, Shape, Task, one_ray
from chaosrun.errors import InterruptedRunError, UsageError, error_of
from chaosrun.faults.points import SurveyedPoint
from chaosrun.faults.strace import expect_strace
from chaosrun.plan.points import Passage, Point, chosen_steps, enumerate_points, first_kill, matching, save_points, saved_steps
from chaosrun.records.codec import read_records
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.naming import default_root
from chaosrun.records.operations import read_operations
from chaosrun.records.run_file import Early, read_run
from chaosrun.records.trace_reader import read_trace
from chaosrun.spec.command_line import TypedJob
from chaosrun.spec.fragment import cleared, scheduled
from chaosrun.spec.job_file import Job, load_job
from chaosrun.supervise.drill import leg_of
from chaosrun.supervise.early_end import reference_keys
from chaosrun.supervise.find_runs import remove_run
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.reference import leg_end, reference_key
from chaosrun.supervise.run import Listener, expect_startable

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster

TYPED = "job.yaml"


def sweep(
    job: Path | TypedJob,
    *,
    overrides: Sequence[str] = (),
    steps: Sequence[int] = (),
    only: Sequence[str] = (),
    at_once: int | None = None,
    keep: bool = False,
    saves: bool = False,
    resume: str | None = None,
    early: Early = "always",
    root: Path | None = None,
    address: str | None = None,
    on_event: Listener | None = None,
) -> Sweep:
    """Kill the job once at each of its points, one drill each, against one reference; its own faults are left out.

    `saves`: only points inside one save of a script that saves by itself, after the first of `steps`, else the middle one.
    `steps`: at which to try the training's phases; `only`: patterns of phases or points; `at_once`: most drills at the same
    time; `keep`: keep passing runs as well. `resume` continues a sweep (id, unique prefix, "latest"). Raises as `api.submit`;
    after an InterruptedRunError the sweep can be resumed, once its points are known.
    """
    base = (default_root() if root is None else root).absolute()
    with Interrupts() as interrupts, _opened(base, job, resume, tuple(overrides), steps or only or saves) as (folder, known):
        run = _SweepRun(
            folder=folder,
            job=load_job(_as_file(job, folder), overrides if known is None else known.overrides),
            root=base,
            keep=keep,
            saves=saves,
            early=early,
            interrupts=interrupts,
            on_event=on_event or (lambda record: None),
        )
        expect_startable(run.job, address)
        with one_ray(address, [run.shape], interrupts) as pool:
            cluster = pool.take(run.shape)
            assert cluster is not None, "nothing else is in use"
            try:
                interrupts.check()
                run.known = run.begin(cluster, overrides, steps, only) if known is None else run.take_up(cluster, known)
            finally:
                pool.give_back(run.shape, cluster, sound=True)
            tasks = [Task(point, point.id, run.shape) for point in run.known.left]
            try:
                Scheduler(carry=run.carry, pool=pool, at_once=at_once, on_result=run.on_result, tell=run.on_event).run(tasks)
            except (KeyboardInterrupt, InterruptedRunError) as error:
                tried = f"{len(run.known.tried)} of {len(run.known.points)} points tried"
                hint = f"`{folder.resume_command(run.known.job)}` continues the sweep"
                raise InterruptedRunError(f"interrupted, {tried}", hint=hint) from error
            return run.known


def is_of_job(sweep: Sweep, text: str, key: str) -> bool:
    """Whether a sweep is of the job with this text and `reference_key`, with or without early ends."""
    return sweep.text == text and sweep.reference_key in reference_keys(key, "never")


@contextmanager
def _opened(
    root: Path, job: Path | TypedJob, resume: str | None, overrides: tuple[str, ...], chosen: object
) -> Iterator[tuple[SweepFolder, Sweep | None]]:
    """The folder of a new sweep, removed afterwards unless its points became known, or of the sweep `resume` with its state;
    locked for this process. `chosen`: the requested points. Raises UsageError."""
    if resume is None:
        folder = SweepFolder.new(root, load_job(job, overrides).spec.name)
        try:
            with folder.locked():
                yield folder, None
        finally:
            if not folder.file.exists():
                shutil.rmtree(folder.path)
        return
    if isinstance(job, TypedJob):
        hint = f"chaosrun sweep {root / 'sweeps' / resume / TYPED} --resume {resume}"
        raise UsageError("a sweep of a typed command is resumed by the job file in its folder", hint=hint)
    folder = SweepFolder.find(root, resume, job)
    with folder.locked():
        known = folder.load()
        if chosen or overrides not in ((), known.overrides):
            raise UsageError(
                f"sweep {known.sweep_id} is resumed as it began, with {' '.join(known.overrides) or 'no overrides'}",
                hint="leave out --steps, --only and overrides, or begin a new one without --resume",
            )
        yield folder, known


def _as_file(job: Path | TypedJob, folder: SweepFolder) -> Path:
    """Save a job given on the command line in the sweep's folder, from which its drills and a resume start."""
    if not isinstance(job, TypedJob):
        return job
    write_durably(folder.path / TYPED, job.text(anywhere=True).encode())
    return folder.path / TYPED


@dataclass(slots=True, kw_only=True)
class _SweepRun:
    folder: SweepFolder
    job: Job
    root: Path
    keep: bool
    saves: bool
    early: Early
    interrupts: Interrupts
    on_event: Listener
    known: Sweep = field(init=False)

    @property
    def shape(self) -> Shape:
        return Shape.of(self.job.spec)

    def begin(self, cluster: "RayCluster", overrides: Sequence[str], steps: Sequence[int], only: Sequence[str]) -> Sweep:
        """Find the points to try, and record them. Raises UsageError when none of the requested points exists."""
        spec = self.job.spec
        if self.saves:
            if spec.by != "script":
                hint = "chaosrun saves this job: sweep it without --saves"
                raise UsageError("--saves is for a script that saves by itself (resume.by: script)", hint=hint)
            expect_strace()
        self.on_event({"leg": None, "event": "sweep.survey", "sweep": self.folder.path.name})
        try:
            run = self._survey(cluster, overrides)
        except InterruptedRunError as error:
            raise InterruptedRunError("interrupted before the points of the job were known", hint="begin again") from error
        reference = leg_of(run, "reference")
        attempt = reference.attempts()[-1]
        fault_free = list(_passages(reference, attempt, spec.workers))
        recovering = list(_passages(leg_of(run, "chaos"), 2, spec.workers))  # of the attempt after the kill, if there was one
        trace = read_trace(reference.attempt(attempt).trace(0), attempt, 0, [])
        epochs = {step: record.epoch for step, record in trace.steps.items()}
        last = max(epochs, default=0)
        if self.saves:
            steps = [_save_to_try(fault_free, steps)]
        steps = steps or chosen_steps(epochs, saved_steps(fault_free))
        if missing := [step for step in steps if step not in epochs]:
            raise UsageError(f"step {missing[0]} is never reached, the job has {last} steps", hint="change --steps")
        if self.saves:
            points = save_points(fault_free, steps[0])
        else:
            points = enumerate_points(spec, fault_free, recovering, steps=steps)
        chosen = matching(points, only)
        if not chosen:
            phases = ", ".join(dict.fromkeys(point.phase for point in points))
            raise UsageError(f"no point matches {' or '.join(only)}", hint=f"phases that the job reaches: {phases}")
        known = Sweep(
            sweep_id=self.folder.path.name,
            created_s=time.time(),
            job=str(self.job.path.resolve()),
            text=self.job.text,
            overrides=tuple(overrides),
            cleared=tuple(cleared(spec)),
            reference_key=read_run(run).reference.key or "",
            survey=run.run_id,
            workers=spec.workers,
            final_step=last,
            passages=len(set(fault_free)) + len(set(recovering)),
            steps=tuple(sorted(steps)),
            points=tuple(chosen),
        )
        self.folder.save(known)
        return known

    def take_up(self, cluster: "RayCluster", known: Sweep) -> Sweep:
        """Continue a sweep. Raises UsageError when job, script, machine or chaosrun have changed since its reference, as the
        verdicts would be about two jobs."""
        from chaosrun.cluster.workers import ClusterWorkers

        key = reference_key(self.job.spec, self.job.script_path, ClusterWorkers(cluster, self.job.spec).devices())
        if not is_of_job(known, self.job.text, key):
            raise UsageError(
                f"the job, its script, the machine or chaosrun has changed since sweep {known.sweep_id} began",
                hint="begin a new one, without --resume",
            )
        return known

    def _survey(self, cluster: "RayCluster", overrides: Sequence[str]) -> RunLayout:
        """Run the survey. Raises the error of the job if it fails without faults; the sweep shows whether it recovers from the
        kill."""
        kill = [*cleared(self.job.spec), scheduled([first_kill(self.job.spec)])]
        run = new_run(self.folder.path, self.job.path, [*overrides, *kill], reference="fresh")
        drill_on(cluster, run, self.root, watch=self.interrupts.watch, survey=True)
        end = leg_end(leg_of(run, "reference"))
        assert end is not None, "a drill ends with its legs"
        if end.outcome != "completed":
            raise error_of(end.outcome)(f"the job did not end well without faults: {end.message}", hint=end.hint)
        return run

    def carry(
        self, point: Point, cluster: "RayCluster | None", supervisors: RunningSupervisors, listen: Listener
    ) -> tuple[PointResult | None, bool]:
        assert cluster is not None, "no point takes a node along"
        began_s = time.monotonic()
        reference = str(self.folder.path / "runs" / self.known.survey)
        try:
            run = new_run(
                self.folder.path, self.job.path, self.known.overrides_of(point), reference=reference, early=self.early
            )
        except UsageError as error:
            code, cause = error.exit_code, error.message
            return PointResult(status="INCONCLUSIVE", exit_code=code, cause=cause, reached=False, run=None, took_s=0.0), True
        try:
            verdict = drill_on(cluster, run, self.root, watch=supervisors.watch(), on_record=listen)
        except InterruptedRunError:
            remove_run(run)
            if supervisors.interrupted:
                raise
            return None, True  # `chaosrun cancel` of this drill alone: the point remains to be tried
        passed = verdict.status == "PASS" and not self.keep
        result = PointResult(
            status=verdict.status,
            exit_code=verdict.exit_code,
            cause=verdict.cause,
            reached=bool(verdict.faults) and all(fault.landed for fault in verdict.faults),
            run=None if passed else run.run_id,
            took_s=round(time.monotonic() - began_s, 3),
        )
        if passed:
            remove_run(run)
        return result, True

    def on_result(self, point: Point, result: PointResult | None) -> bool:
        if result is None:
            self.on_event({"leg": None, "event": "sweep.cancelled", "point": point.id})
            return True
        self.known = replace(self.known, tried={**self.known.tried, point.id: result})
        self.folder.save(self.known)
        counts = Counter(tried.status for tried in self.known.tried.values())
        about = {"point": point.id, "number": len(self.known.tried), "of": len(self.known.points)}
        self.on_event({"leg": None, "event": "sweep.tried", **about, "counts": dict(counts), **asdict(result)})
        return True


_POINTS = msgspec.json.Decoder(SurveyedPoint)


def _save_to_try(passed: Sequence[Passage], asked: Sequence[int]) -> int:
    """The step after which the script saves. Raises UsageError when it does not save."""
    saved = sorted({passage.step for passage in passed if passage.phase == "save" and passage.target is not None})
    if not saved:
        hint = "what it saves has to lie below {output}, its working folder or `outputs`"
        raise UsageError("the script was not seen to save anything", hint=hint)
    if asked and asked[0] not in saved:
        raise UsageError(f"the script saves nothing after step {asked[0]}", hint=f"it does after {', '.join(map(str, saved))}")
    return asked[0] if asked else saved[len(saved) // 2]


def _passages(leg: LegLayout, attempt: int, workers: int) -> Iterator[Passage]:
    for rank in range(workers):
        for done in read_operations(leg.attempt(attempt).operations(rank)):
            what = f"{done.kind} {os.path.basename(done.path)}"
            yield Passage(rank=rank, phase="save", step=done.save, target=what)
        path = leg.attempt(attempt).points(rank)
        for point in read_records(path, _POINTS) if path.exists() else ():
            yield Passage(rank=rank, phase=point.phase, step=point.step, target=point.target)
