"""A sweep: one kill at every point that a job comes by, each a drill against one reference, several at a time where they fit.

Can be taken up again after every drill. Must not know how points are chosen (`plan.points`) nor what a verdict rests on.
"""

import shlex
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from chaosrun.campaign.place import Listener, WarmPlace, Watch, new_run, remove_run
from chaosrun.campaign.survey import survey
from chaosrun.campaign.sweeps import Sweep, SweepFolder, Tried, find_sweep, new_sweep
from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.plan.fragment import cleared
from chaosrun.plan.points import Point, chosen_steps, enumerate_points, matching, saved_steps
from chaosrun.records.naming import root_arguments, shortest
from chaosrun.spec.source import load_job
from chaosrun.supervise.reference import reference_key
from chaosrun.supervise.supervisor import Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user asks to be tried."""

    overrides: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    """Of the training's phases; empty: chosen (`plan.points.chosen_steps`)."""
    only: tuple[str, ...] = ()
    """Patterns of phases or ids of points; empty: all."""


@contextmanager
def opened(root: Path, job: Path, choice: Choice, resume: str | None) -> Iterator[tuple[SweepFolder, Sweep | None]]:
    """The folder of a new sweep, or of the one called `resume` with what is known of it; held for this process.

    A new one is gone afterwards if it did not come to know its points. Raises UsageError.
    """
    if resume is None:
        folder = new_sweep(root, load_job(job, choice.overrides).spec.name)
        try:
            with folder.locked():
                yield folder, None
        finally:
            if not folder.file.exists():
                shutil.rmtree(folder.path)
        return
    folder = find_sweep(root, resume, job)
    with folder.locked():
        sweep = folder.load()
        if choice.steps or choice.only or choice.overrides not in ((), sweep.overrides):
            raise UsageError(
                f"sweep {sweep.sweep_id} goes on as it began, with {' '.join(sweep.overrides) or 'no overrides'}",
                hint="leave out --steps, --only and overrides, or begin a new one without --resume",
            )
        yield folder, sweep


def begin_sweep(place: WarmPlace, folder: SweepFolder, choice: Choice, *, watch: Watch, on_record: Listener) -> Sweep:
    """Find out what there is to try, and write it down. Raises UsageError when nothing of what was asked for exists."""
    on_record({"leg": None, "event": "sweep.survey", "sweep": folder.path.name})
    try:
        found = survey(place, folder.path, choice.overrides, watch=watch, on_record=lambda record: None)
    except InterruptedRunError as error:
        raise InterruptedRunError("interrupted before the points of the job were known", hint="begin again") from error
    steps = choice.steps or chosen_steps(found.epoch_of_step, saved_steps(found.undisturbed))
    last = max(found.epoch_of_step, default=0)
    if missing := [step for step in steps if step not in found.epoch_of_step]:
        raise UsageError(f"step {missing[0]} is never reached, the job has {last} steps", hint="change --steps")
    points = enumerate_points(place.job.spec, found.undisturbed, found.recovering, steps=steps)
    chosen = matching(points, choice.only)
    if not chosen:
        phases = ", ".join(dict.fromkeys(point.phase for point in points))
        raise UsageError(f"no point matches {' or '.join(choice.only)}", hint=f"phases that the job comes by: {phases}")
    sweep = Sweep(
        sweep_id=folder.path.name,
        created_s=time.time(),
        job=str(place.job.path.resolve()),
        text=place.job.text,
        overrides=choice.overrides,
        cleared=tuple(cleared(place.job.spec)),
        reference_key=found.reference_key,
        survey=found.run.run_id,
        workers=place.job.spec.workers,
        final_step=last,
        passages=found.passages,
        steps=tuple(sorted(steps)),
        points=tuple(chosen),
    )
    folder.save(sweep)
    return sweep


def take_up(sweep: Sweep, place: WarmPlace) -> None:
    """Raises UsageError when what the reference was made with has changed: the verdicts would speak of two jobs."""
    job = place.job
    if sweep.text != job.text or sweep.reference_key != reference_key(job.spec, job.script_path, place.workers.devices()):
        raise UsageError(
            f"the job, its script, the machine or chaosrun has changed since sweep {sweep.sweep_id} began",
            hint="begin a new one, without --resume",
        )


@dataclass(slots=True)
class Interruptible:
    """The supervisors that work now, in whichever threads: all of them are interrupted, or none."""

    _working: set[Supervisor] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    interrupted: bool = False

    def watch(self) -> Watch:
        """For the drills of one thread, that follow each other."""
        mine: list[Supervisor] = []

        def supervised(supervisor: Supervisor | None) -> None:
            with self._lock:
                self._working.difference_update(mine)
                mine[:] = [] if supervisor is None else [supervisor]
                self._working.update(mine)
                if supervisor is not None and self.interrupted:
                    supervisor.interrupt()

        return supervised

    def interrupt(self) -> None:
        with self._lock:
            self.interrupted = True
            for supervisor in self._working:
                supervisor.interrupt()


def try_points(
    sweep: Sweep,
    folder: SweepFolder,
    places: Sequence[WarmPlace],
    *,
    keep: bool,
    on_record: Listener,
) -> Sweep:
    """Try every point that is left, as many at a time as there are places. `keep` the runs that pass. A point whose drill is
    cancelled stays left.

    Raises InterruptedRunError on a KeyboardInterrupt, and whatever a drill raises: what is done then is in the folder.
    """
    working = Interruptible()
    free: SimpleQueue[tuple[WarmPlace, Watch]] = SimpleQueue()
    for place in places:
        free.put((place, working.watch()))

    def try_at_a_free_place(point: Point) -> Tried | None:
        place, watch = free.get()
        try:
            return _try(point, sweep, folder, place, watch=watch, keep=keep)
        except InterruptedRunError:
            if working.interrupted:
                raise
            return None  # by a wish that was for this drill alone
        finally:
            free.put((place, watch))

    with ThreadPoolExecutor(len(places), thread_name_prefix="chaosrun-sweep") as pool:
        drills = {pool.submit(try_at_a_free_place, point): point for point in sweep.left}
        try:
            for done in as_completed(drills):
                point, tried = drills[done], done.result()
                if tried is None:
                    on_record({"leg": None, "event": "sweep.cancelled", "point": point.id})
                    continue
                sweep = _with(sweep, point, tried)
                folder.save(sweep)
                on_record(_record(sweep, point))
        except BaseException as error:
            working.interrupt()
            pool.shutdown(cancel_futures=True)
            for done, point in drills.items():
                if _ended_well(done) and (tried := done.result()) is not None:
                    sweep = _with(sweep, point, tried)
            folder.save(sweep)
            if isinstance(error, KeyboardInterrupt):
                tried = f"{len(sweep.tried)} of {len(sweep.points)} points tried"
                raise InterruptedRunError(f"interrupted, {tried}", hint=_go_on(sweep, folder)) from error
            raise
    return sweep


def _record(sweep: Sweep, point: Point) -> dict[str, Any]:
    counts = Counter(tried.status for tried in sweep.tried.values())
    about = {"point": point.id, "number": len(sweep.tried), "of": len(sweep.points)}
    return {"leg": None, "event": "sweep.tried", **about, "counts": dict(counts), **asdict(sweep.tried[point.id])}


def _go_on(sweep: Sweep, folder: SweepFolder) -> str:
    where = root_arguments(folder.path.parent.parent)
    command = ["chaosrun", "sweep", shortest(Path(sweep.job)), "--resume", sweep.sweep_id, *where]
    return f"`{shlex.join(command)}` goes on with the sweep"


def _with(sweep: Sweep, point: Point, tried: Tried) -> Sweep:
    return replace(sweep, tried={**sweep.tried, point.id: tried})


def _ended_well(drill: Future[Tried | None]) -> bool:
    return drill.done() and not drill.cancelled() and drill.exception() is None


def _try(
    point: Point,
    sweep: Sweep,
    folder: SweepFolder,
    place: WarmPlace,
    *,
    watch: Watch,
    keep: bool,
) -> Tried:
    began_s = time.monotonic()
    reference = folder.path / "runs" / sweep.survey
    try:
        run = new_run(folder.path, place.job.path, sweep.overrides_of(point), reference=str(reference))
    except UsageError as error:
        return Tried(status="INCONCLUSIVE", exit_code=error.exit_code, cause=error.message, reached=False, run=None, took_s=0.0)
    try:
        verdict = place.drill(run, watch=watch)
    except InterruptedRunError:
        remove_run(run)
        raise
    passed = verdict.status == "PASS" and not keep
    tried = Tried.of(verdict, run=None if passed else run.run_id, took_s=time.monotonic() - began_s)
    if passed:
        remove_run(run)
    return tried
