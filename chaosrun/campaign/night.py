"""One run of a suite: what is asked for becomes an agenda, the agenda is carried out, and every result is kept as it comes.

Can be taken up again after every drill. Must not know how anything is shown.
"""

import codecs
import hashlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaosrun.campaign.choice import Shard, chosen, sharded
from chaosrun.campaign.comparison import comparison_of
from chaosrun.campaign.crew import Listener, carry_out_all
from chaosrun.campaign.folder import Agenda, SuiteFolder, find_suite, go_on, new_suite
from chaosrun.campaign.history import Entry, History, Night, append, expect_writable, label, nights, read_history, trend
from chaosrun.campaign.kept import PASSES, KeptPlans, reruns
from chaosrun.campaign.place import WarmPlace, new_run
from chaosrun.campaign.places import Place, Places
from chaosrun.campaign.planned import PlannedDrill, plan_drills
from chaosrun.campaign.results import DrillResult, SuiteResult, compare_losses, comparison_result, drill_result
from chaosrun.campaign.seeds import night_of
from chaosrun.campaign.sources import changed, digests
from chaosrun.campaign.sweep import Interruptible
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.records.journal import Journal
from chaosrun.records.layout import RunLayout
from chaosrun.spec.source import Job, load_job
from chaosrun.spec.suite import Comparison, load_suite
from chaosrun.supervise.drill import has_ended, lock_run, read_run
from chaosrun.supervise.interrupts import OneOfMany
from chaosrun.supervise.run import carry_out
from chaosrun.verify.verdict import Verdict, judge

Finish = Callable[[RunLayout, Verdict], Sequence[str]]
"""What is done with each drill that came to a verdict; returns what is to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asks for."""

    path: Path
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    shard: Shard | None = None
    seed: int | None = None
    fail_fast: bool = False
    history: Path | None = None
    """None: under the root."""
    asked_s: float | None = field(default=None, compare=False)
    """When, for what is named by the date; None: when the suite is opened."""

    @property
    def plain(self) -> bool:
        """Nothing but the suite itself."""
        return self == Wish(path=self.path, history=self.history)


def agree(wish: Wish, root: Path, now_s: float) -> Agenda:
    """Plan what is asked for. Starts and writes nothing.

    Raises SpecError for whatever is wrong in any file, and UsageError when nothing of what was asked for exists.
    """
    suite = load_suite(wish.path)
    drills = chosen(suite.drills, wish.only, wish.without)
    if wish.shard is not None:
        # What is compared must be in one place.
        drills = sharded(drills, wish.shard, together=None if suite.spec.comparison is None else suite.spec.name)
    planned = plan_drills(drills, wish.seed)
    comparison, not_all = comparison_of(suite, drills)
    if wish.shard is not None and suite.spec.comparison is not None:
        not_all.append(f"all drills belong to one of the {wish.shard.of} shards: their losses are compared with each other")
    name, night = suite.spec.name, night_of(now_s)
    history = (wish.history or root / "suites" / "history" / f"{name}.jsonl").absolute()
    kept_plans = KeptPlans.beside(history)
    plans, notes = kept_plans.read()
    again, more = reruns(plans, suite.drills, planned)
    if more:
        more.append(f"kept plans are in {kept_plans.folder}: without its file one is given up")
    more += [f"{drill.name}: no fault is planned, so nothing about recovery is tested" for drill in planned if not drill.faults]
    kept = {each.plan for each in plans}
    return Agenda(
        suite_id="",
        name=name,
        path=str(wish.path.resolve()),
        created_s=now_s,
        night=night,
        seed=wish.seed,
        shard=None if wish.shard is None else str(wish.shard),
        fail_fast=wish.fail_fast,
        by_hand=bool(wish.only),
        history=str(history),
        # What failed before comes first: if it fails again, that is known soonest.
        drills=(*again, *sorted(planned, key=lambda drill: drill.plan not in kept)),
        notes=(*notes, *more, *not_all),
        comparison=None if comparison is None else comparison.model_dump(mode="json"),
        files=digests(suite, drills),
    )


@contextmanager
def opened(root: Path, wish: Wish, resume: str | None) -> "Iterator[tuple[SuiteFolder, Agenda, Journal]]":
    """The folder of a new run of the suite, with all of it planned, or that of the one called `resume`; held for this process.

    Raises as `agree`, and UsageError when what was planned cannot be gone on with.
    """
    if resume is None:
        agenda = agree(wish, root, time.time() if wish.asked_s is None else wish.asked_s)
        expect_writable(Path(agenda.history))
        folder = new_suite(root, agenda.name)
        agenda = replace(agenda, suite_id=folder.path.name)
        folder.save(agenda)
    else:
        if not wish.plain:
            raise UsageError(
                f"the suite is gone on with as it began ({resume})",
                hint="leave out --only, --except, --shard, --seed and --fail-fast, or begin anew without --resume",
            )
        folder = find_suite(root, resume, wish.path)
        agenda = folder.load()
        if wish.history is not None and wish.history.absolute() != Path(agenda.history):
            hint = f"leave out --history: it goes on with {agenda.history}"
            raise UsageError(f"the suite is gone on with as it began ({resume}), with another history", hint=hint)
        _expect_unchanged(agenda)
        expect_writable(Path(agenda.history))
    with folder.locked() as journal:
        yield folder, agenda, journal


def _expect_unchanged(agenda: Agenda) -> None:
    for job, digest in dict.fromkeys((drill.job, drill.text) for drill in agenda.drills):
        path = Path(job)
        if not path.is_file() or hashlib.sha256(path.read_bytes().removeprefix(codecs.BOM_UTF8)).hexdigest() != digest:
            raise UsageError(f"{job} has changed since the suite began", hint="begin the suite anew, without --resume")
    if others := changed(agenda.files):
        raise UsageError(f"{others[0]} has changed since the suite began", hint="begin the suite anew, without --resume")


def _as_planned(drill: PlannedDrill) -> Job:
    """Its job. Raises UsageError when the file has been edited under a suite that is being carried out."""
    job = load_job(Path(drill.job), drill.overrides)
    if hashlib.sha256(job.text.encode()).hexdigest() != drill.text:
        raise UsageError(f"{drill.job} has changed since the suite began", hint="begin the suite anew")
    return job


@dataclass(slots=True)
class SuiteRun:
    """A run of a suite that is being carried out."""

    folder: SuiteFolder
    agenda: Agenda
    journal: Journal
    root: Path
    address: str | None
    on_record: Callable[[dict[str, Any]], None]
    finish: Finish
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _began_s: float = field(default_factory=time.monotonic)
    _took_s: float = 0.0
    """Of the processes before this one."""
    _told: list[str] = field(default_factory=list)

    def carry_out(self, places: Places, *, at_once: int | None) -> SuiteResult:
        """Do what is left to do.

        Raises InterruptedRunError on a KeyboardInterrupt, and whatever is no drill's fault: what is done then is in the folder.
        """
        done = self.folder.done()
        self._took_s = done.took_s
        self.journal.append("suite.began")
        left = [drill for drill in self.agenda.drills if drill.name not in done.results]
        results = dict(done.results)

        def on_start(drill: PlannedDrill) -> None:
            self._tell("suite.drill", name=drill.name, number=len(results) + 1)

        def on_result(drill: PlannedDrill, result: DrillResult) -> bool:
            results[drill.name] = result
            self._keep(drill, result)
            about = {"status": result.status, "cancelled": result.cancelled, "ok": result.ok, "took_s": result.took_s}
            self._tell("suite.ended", name=drill.name, number=len(results), cause="; ".join(result.surprises), **about)
            return result.ok or not self.agenda.fail_fast

        def carry(
            drill: PlannedDrill, place: Place | None, working: Interruptible, listen: Listener
        ) -> tuple[DrillResult, bool]:
            return self._carry(drill, place, working, listen, done.started.get(drill.name))

        try:
            if not (self.agenda.fail_fast and any(not result.ok for result in results.values())):
                carry_out_all(left, carry, places, at_once=at_once or len(left) or 1, on_start=on_start, on_result=on_result)
        except (KeyboardInterrupt, InterruptedRunError) as error:
            so_far = f"{len(results)} of {len(self.agenda.drills)} drills done"
            raise InterruptedRunError(f"interrupted, {so_far}", hint=f"`{go_on(self.agenda, self.root)}` goes on") from error
        finally:
            self.journal.append("suite.ended")
        return self._result(results)

    def so_far(self, why: str) -> SuiteResult:
        """What had ended when it was cut short. Of the losses nothing is said: they are compared where all are there."""
        whole = self._whole(self.folder.done().results)
        left = f"`{go_on(self.agenda, self.root)}` carries out what is left"
        return replace(whole, cut_short=why, notes=(*whole.notes, left))

    def nothing(self) -> SuiteResult:
        """The result where no drill is to be carried out."""
        return self._result({})

    def _carry(
        self, drill: PlannedDrill, place: Place | None, working: Interruptible, listen: Listener, former: str | None
    ) -> tuple[DrillResult, bool]:
        began_s = time.monotonic()
        run: RunLayout | None = None
        told: list[str] = []

        def report(verdict: Verdict) -> Sequence[str]:
            assert run is not None, "nothing else comes to a verdict"
            told.extend(self.finish(run, verdict))
            return told

        def failed(message: str, error: ChaosrunError | None = None) -> tuple[DrillResult, bool]:
            took_s = round(time.monotonic() - began_s, 3)
            return (
                DrillResult(
                    name=drill.name,
                    run=run,
                    status=None,
                    expected=drill.expectation.verdict,
                    exit_code=None if error is None else error.exit_code,
                    cancelled=isinstance(error, InterruptedRunError),
                    error=message,
                    surprises=(message,),
                    faults=drill.faults,
                    took_s=took_s,
                    rerun=drill.rerun,
                ),
                False,
            )

        try:
            run = self._run_of(drill, former)
            verdict = self._verdict(drill, run, place, working, listen, report)
            took_s = time.monotonic() - began_s
            result = drill_result(drill.name, drill.expectation, run, verdict, took_s=took_s, rerun=drill.rerun)
        except InterruptedRunError as error:
            if working.interrupted:
                raise
            # By a wish that was for this drill alone.
            return failed(f"it was cancelled ({error.message})", error)
        except ChaosrunError as error:
            return failed(error.message, error)
        except Exception as error:
            log = self.folder.path / f"bug-{threading.get_native_id()}-{int(time.time())}.txt"
            log.write_text("".join(traceback.format_exception(error)))
            return failed(f"this is a bug in chaosrun: {type(error).__name__}: {error} (see {log})")
        with self._lock:
            self._told += told
        return result, verdict.outcome == "completed" and not drill.needs_fresh

    def _run_of(self, drill: PlannedDrill, former: str | None) -> RunLayout:
        """The run that was begun before, if it can be gone on with, else a new one; written down before it starts."""
        if former is not None:
            run = RunLayout(Path(former))
            try:
                read_run(run)
                return run
            except UsageError:
                self._tell("suite.anew", name=drill.name)  # killed before it was whole
        _as_planned(drill)
        run = new_run(self.root, Path(drill.job), drill.overrides, reference="auto")
        with self._lock:
            self.journal.append("drill.started", name=drill.name, run=str(run.path))
        return run

    def _verdict(
        self,
        drill: PlannedDrill,
        run: RunLayout,
        place: Place | None,
        working: Interruptible,
        listen: Listener,
        report: Callable[[Verdict], Sequence[str]],
    ) -> Verdict:
        if has_ended(run):
            with lock_run(run):
                verdict = judge(run)
                report(verdict)
                return verdict
        watch = working.watch()
        if place is None:
            with OneOfMany(watch) as interrupts:
                return carry_out(run, self.root, self.address, lambda record: listen(record), interrupts, report)
        job = _as_planned(drill)
        warm = WarmPlace(cluster=place.cluster, job=job, root=self.root)
        return warm.drill(run, watch=watch, on_record=listen, report=report)

    def _keep(self, drill: PlannedDrill, result: DrillResult) -> None:
        """Everywhere that it matters tomorrow, and last where it says that it is done: all of this may be done twice."""
        if not result.cancelled:  # of which nothing is known
            self._keep_for_later(drill, result)
        with self._lock:
            self.journal.append("drill.ended", name=drill.name, result=result.recorded())

    def _keep_for_later(self, drill: PlannedDrill, result: DrillResult) -> None:
        agenda = self.agenda
        if told := self._remember(result):
            self._told.append(told)
        try:
            KeptPlans.beside(Path(agenda.history)).take(result, drill, suite=agenda.path, night=agenda.night)
        except Exception as error:  # whatever lies among the kept plans: no reason to lose the night
            told = error if isinstance(error, OSError | ChaosrunError) else f"{type(error).__name__}: {error}"
            self._told.append(f"{drill.name}: what it means for the kept plans could not be written down: {told}")

    def _result(self, results: Mapping[str, DrillResult]) -> SuiteResult:
        return self._compared(self._whole(results))

    def _whole(self, results: Mapping[str, DrillResult]) -> SuiteResult:
        agenda = self.agenda
        try:
            history = read_history(Path(agenda.history))
        except UsageError as error:
            history = History()
            self._told.append(f"nothing is known of earlier nights: {error}")
        earlier = [each for each in history.entries if each.suite != agenda.suite_id and each.time_s < agenda.created_s]
        before = nights(earlier, by_hand=True)
        drills = tuple(
            result if result.cancelled else replace(result, label=label(_before(result, before), result.ok))
            for planned in agenda.drills
            if (result := results.get(planned.name)) is not None
        )
        notes = [*agenda.notes, *dict.fromkeys(self._told)]
        notes += [f"{path} has changed while the suite ran: not all drills had the same" for path in self._edited()]
        if history.damaged:
            lines = ", ".join(map(str, history.damaged[:5]))
            notes.append(
                f"{agenda.history}: lines that cannot be read were left out: {lines}{'…' * (len(history.damaged) > 5)}"
            )
        if any(result.cancelled for result in drills):
            notes.append(f"`{go_on(agenda, self.root)}` carries out what was cancelled")
        if any(result.rerun and not result.ok and not result.cancelled for result in drills):
            folder = KeptPlans.beside(Path(agenda.history)).folder
            notes.append(
                f"what failed runs again until it has passed {PASSES} nights; remove its file in {folder} to give it up"
            )
        left = tuple(drill.name for drill in agenda.drills if drill.name not in results)
        assert len(drills) == len(results) == len(agenda.drills) - len(left), "a drill's result was lost"
        return SuiteResult(
            name=agenda.name,
            drills=drills,
            path=self.folder.path,
            suite_id=agenda.suite_id,
            night=agenda.night,
            seed=agenda.seed,
            shard=agenda.shard,
            left=left,
            took_s=self._took_s + time.monotonic() - self._began_s,
            notes=tuple(notes),
        )

    def _edited(self) -> list[str]:
        return [path for path in changed(self.agenda.files) if path != self.agenda.path]

    def _compared(self, whole: SuiteResult) -> SuiteResult:
        comparison = self.agenda.comparison
        if comparison is None or not whole.drills:
            return whole
        compared = compare_losses(whole, Comparison(**comparison))
        if told := self._remember(comparison_result(compared)):
            return replace(compared, notes=(*compared.notes, told))
        return compared

    def _remember(self, result: DrillResult) -> str | None:
        """Put a line into the history; what is to be told when that cannot be done."""
        agenda = self.agenda
        about = {"suite": agenda.suite_id, "night": agenda.night, "time_s": agenda.created_s, "seed": agenda.seed}
        try:
            append(Path(agenda.history), Entry.of(result, by_hand=agenda.by_hand, **about))
        except (UsageError, OSError) as error:
            return f"{result.name} is not in the history: {error}"
        return None

    def _tell(self, event: str, **about: Any) -> None:
        self.on_record({"leg": None, "event": event, "of": len(self.agenda.drills), **about})


def _before(result: DrillResult, known: Sequence[Night]) -> list[bool]:
    """What the drill was in the nights before; one that repeats a failure began with that."""
    return [*([False] if result.rerun is not None else []), *(entry.ok for entry in trend(result.name, known))]
