"""One run of a suite: executes its plan on one Ray, saves each result as it comes, writes its pages. Can be resumed."""

import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.campaign.drill import drill_on, new_run, takes_agents
from chaosrun.campaign.files import DrillEnded, DrillStarted, SuiteBegan, SuiteEnded, SuiteFolder, SuitePlan, plain
from chaosrun.campaign.history import History, NightResult, append, expect_writable, label, nights, read_history, trend
from chaosrun.campaign.kept_plans import PASSES, KeptPlans
from chaosrun.campaign.planned_drill import PlannedDrill
from chaosrun.campaign.report.pages import write_pages
from chaosrun.campaign.results import DrillResult, SuiteResult, compare_losses, comparison_result, drill_result
from chaosrun.campaign.scheduler import PlacementPool, RunningSupervisors, Scheduler, one_ray
from chaosrun.campaign.suite_plan import SuiteRequest, changed_files, plan_suite
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.records.events import TRAINED
from chaosrun.records.journal import Journal
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import default_root
from chaosrun.records.run_file import Early, read_run
from chaosrun.report.write import write_reports
from chaosrun.spec.suite import Comparison
from chaosrun.supervise.drill import has_ended, lock_run
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import Listener
from chaosrun.verify.verdict import Verdict, judge
from chaosrun.wording import listed

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster

ANEW = "start the suite again, without --resume"


def suite_plan(request: SuiteRequest, *, root: Path | None = None) -> SuitePlan:
    """What `suite` would do. Starts nothing."""
    base = default_root() if root is None else root
    return plan_suite(request, base.absolute(), time.time() if request.asked_s is None else request.asked_s)


def suite(
    request: SuiteRequest,
    *,
    resume: str | None = None,
    at_once: int | None = None,
    early: Early = "always",
    overrides: Sequence[str] = (),
    root: Path | None = None,
    address: str | None = None,
    on_event: Listener | None = None,
    on_cut_short: Callable[[SuiteResult], None] | None = None,
) -> SuiteResult:
    """Run the drills of a suite, as many at once as there is room for, or `at_once`, and compare; its pages are in its folder.

    Raises SpecError and UsageError before anything starts, else as `api.submit`; a drill that cannot be run appears as such in
    the result. `resume` continues a suite (id, unique prefix, "latest"); `overrides`: added to those of every drill. When the
    suite is cut short, `on_cut_short` is called with the result so far before the error is raised.
    """
    base = (default_root() if root is None else root).absolute()
    listener = on_event or (lambda record: None)
    with Interrupts() as interrupts, opened(base, request, resume) as (folder, plan, journal):
        run = SuiteRun(folder, plan, journal, base, address, early, listener, tuple(overrides))
        run.tell("suite.started", suite=plan.suite_id, seed=plan.seed)
        if not plan.drills:  # an empty shard
            return write_pages(folder, run.result({}), Path(plan.history))
        with one_ray(address, [drill.shape for drill in plan.drills], interrupts) as pool:
            try:
                result = run.carry_out(pool, at_once=at_once)
            except Exception as error:
                bug = f"a bug in chaosrun ({type(error).__name__}: {error})"
                why = error.message if isinstance(error, ChaosrunError) else bug
                # Before Ray is stopped, as a user who interrupts may not wait long. An unreadable folder must not hide the
                # cause; a second interrupt skips the pages.
                with suppress(ChaosrunError, OSError, KeyboardInterrupt):
                    so_far = write_pages(folder, run.so_far(why), Path(plan.history))
                    if on_cut_short is not None:
                        on_cut_short(so_far)
                raise
        return write_pages(folder, result, Path(plan.history))


@contextmanager
def opened(root: Path, request: SuiteRequest, resume: str | None) -> Iterator[tuple[SuiteFolder, SuitePlan, Journal]]:
    """The folder of a new, completely planned run of the suite, or of the run `resume`; locked for this process. Raises as
    `plan_suite`, and UsageError when the plan cannot be resumed."""
    if resume is None:
        plan = suite_plan(request, root=root)
        expect_writable(Path(plan.history))
        folder = SuiteFolder.new(root, plan.name)
        plan = replace(plan, suite_id=folder.path.name)
        folder.save(plan)
    else:
        if request != SuiteRequest(path=request.path, history=request.history):
            raise UsageError(
                f"the suite continues as it began ({resume})",
                hint="leave out --only, --except, --shard, --seed and --fail-fast, or start again without --resume",
            )
        folder = SuiteFolder.find(root, resume, request.path)
        plan = folder.load()
        if request.history is not None and request.history.absolute() != Path(plan.history):
            hint = f"leave out --history: the suite continues with {plan.history}"
            raise UsageError(f"the suite continues as it began ({resume}), with another history", hint=hint)
        if others := changed_files(plan.files):
            raise UsageError(f"{others[0]} has changed since the suite began", hint=ANEW)
        expect_writable(Path(plan.history))
    with folder.locked(), closing(Journal(folder.journal)) as journal:
        yield folder, plan, journal


@dataclass(slots=True)
class SuiteRun:
    folder: SuiteFolder
    plan: SuitePlan
    journal: Journal
    root: Path
    address: str | None
    early: Early
    on_record: Listener
    overrides: tuple[str, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _began_s: float = field(default_factory=time.monotonic)
    _took_s: float = 0.0
    """Seconds that earlier processes of this suite ran."""
    _started: Mapping[str, str] = field(default_factory=dict)
    """Run directories of drills that earlier processes began."""
    _notes: list[str] = field(default_factory=list)

    def carry_out(self, pool: PlacementPool, *, at_once: int | None) -> SuiteResult:
        """Run the remaining drills. Raises InterruptedRunError on a KeyboardInterrupt, and errors outside single drills."""
        progress = self.folder.progress()
        self._took_s, self._started = progress.took_s, progress.started
        self.journal.append(SuiteBegan())
        left = [drill for drill in self.plan.drills if drill.name not in progress.results]
        results = dict(progress.results)

        def on_result(drill: PlannedDrill, result: DrillResult) -> bool:
            results[drill.name] = result
            self.keep(drill, result)
            about = {"status": result.status, "cancelled": result.cancelled, "ok": result.ok, "took_s": result.took_s}
            self.tell("suite.ended", name=drill.name, number=len(results), cause="; ".join(result.surprises), **about)
            return result.ok or not self.plan.fail_fast

        scheduler = Scheduler(carry=self._carry, pool=pool, at_once=at_once, on_result=on_result, tell=self.on_record)
        try:
            if not (self.plan.fail_fast and any(not result.ok for result in results.values())):
                scheduler.run([drill.task for drill in left])
        except (KeyboardInterrupt, InterruptedRunError) as error:
            so_far = f"{len(results)} of {len(self.plan.drills)} drills done"
            hint = f"`{self._resume_command}` continues the suite"
            raise InterruptedRunError(f"interrupted, {so_far}", hint=hint) from error
        finally:
            self.journal.append(SuiteEnded())
        return self.result(results)

    def so_far(self, why: str) -> SuiteResult:
        """The result of the drills that had ended when the suite was cut short. Losses are not compared, as that needs all
        drills."""
        whole = self._whole(self.folder.progress().results, None)
        left = f"`{self._resume_command}` carries out what is left"
        return replace(whole, cut_short=why, notes=(*whole.notes, left))

    def result(self, results: Mapping[str, DrillResult]) -> SuiteResult:
        return self._whole(results, self.plan.comparison)

    def keep(self, drill: PlannedDrill, result: DrillResult) -> None:
        """Keep a result: kept plans and history first, the journal (which marks the drill as done) last. Repeating this after a
        crash does no harm."""
        plan = self.plan
        if not result.cancelled:  # it has no verdict
            self._remember(result)
            try:
                KeptPlans.next_to(Path(plan.history)).take(result, drill, suite=plan.path, night=plan.night)
            except Exception as error:  # an error in the kept plans must not lose the night's results
                why = error if isinstance(error, OSError | ChaosrunError) else f"{type(error).__name__}: {error}"
                self._notes.append(f"{drill.name}: the kept plans could not be updated: {why}")
        with self._lock:
            self.journal.append(DrillEnded(name=drill.name, result=plain(result)))

    def _remember(self, result: DrillResult) -> None:
        try:
            append(Path(self.plan.history), NightResult.of(result, self.plan))
        except (UsageError, OSError) as error:
            self._notes.append(f"{result.name} is not in the history: {error}")

    def _carry(
        self, drill: PlannedDrill, cluster: "RayCluster | None", supervisors: RunningSupervisors, listen: Listener
    ) -> tuple[DrillResult, bool]:
        """The result of a drill, which may have been begun earlier; and whether its agents may serve another one."""
        began_s = time.monotonic()
        run: RunLayout | None = None

        def failed(message: str, error: ChaosrunError | None = None) -> tuple[DrillResult, bool]:
            result = DrillResult(
                name=drill.name,
                run=run,
                status=None,
                expected=drill.expect.verdict,
                exit_code=None if error is None else error.exit_code,
                cancelled=isinstance(error, InterruptedRunError),
                error=message,
                surprises=(message,),
                faults=drill.faults,
                took_s=round(time.monotonic() - began_s, 3),
                rerun=drill.rerun,
            )
            return result, False

        try:
            run = self._run_of(drill)
            verdict = self._verdict(run, cluster, supervisors, listen)
            result = drill_result(drill, run, verdict, took_s=time.monotonic() - began_s)
        except InterruptedRunError as error:
            if supervisors.interrupted:
                raise
            return failed(f"it was cancelled ({error.message})", error)  # `chaosrun cancel`, of this drill alone
        except ChaosrunError as error:
            return failed(error.message, error)
        except Exception as error:
            log = self.folder.path / f"bug-{threading.get_native_id()}-{int(time.time())}.txt"
            log.write_text("".join(traceback.format_exception(error)))
            return failed(f"this is a bug in chaosrun: {type(error).__name__}: {error} (see {log})")
        return result, verdict.outcome in TRAINED and not takes_agents(drill.kinds)

    def _run_of(self, drill: PlannedDrill) -> RunLayout:
        """The run begun earlier, if it can be resumed, else a new one; recorded before it starts."""
        if drill.name in self._started:
            run = RunLayout(Path(self._started[drill.name]))
            try:
                read_run(run)
                return run
            except UsageError:
                self.tell("suite.anew", name=drill.name)  # killed before it was complete
        if changed_files({drill.job: self.plan.files.get(drill.job)}):
            raise UsageError(f"{drill.job} has changed since the suite began", hint="start the suite again")
        overrides = (*drill.overrides, *self.overrides)
        run = new_run(self.root, Path(drill.job), overrides, reference="auto", early=self._early(drill))
        with self._lock:
            self.journal.append(DrillStarted(name=drill.name, run=str(run.path)))
        return run

    def _early(self, drill: PlannedDrill) -> Early:
        """Whether a drill may end early. One drill of every night runs to its end, as a control: another one each night."""
        names = sorted(each.name for each in self.plan.drills)
        control = names[zlib.crc32(self.plan.suite_id.encode()) % len(names)]
        return "watch" if drill.name == control and self.early != "never" else self.early

    def _verdict(
        self, run: RunLayout, cluster: "RayCluster | None", supervisors: RunningSupervisors, listen: Listener
    ) -> Verdict:
        def report(verdict: Verdict) -> Sequence[str]:
            unwritten = write_reports(run, verdict)
            self._notes += unwritten
            return unwritten

        if has_ended(run):
            with lock_run(run):
                report(verdict := judge(run))
                return verdict
        watch = supervisors.watch()
        return drill_on(cluster, run, self.root, watch=watch, address=self.address, on_record=listen, report=report)

    @property
    def _resume_command(self) -> str:
        return self.folder.resume_command(self.plan.path)

    def _whole(self, results: Mapping[str, DrillResult], comparison: Comparison | None) -> SuiteResult:
        plan = self.plan
        try:
            history = read_history(Path(plan.history))
        except UsageError as error:
            self._notes.append(f"nothing is known of earlier nights: {error}")
            history = History()
        earlier = [each for each in history.entries if each.suite != plan.suite_id and each.time_s < plan.created_s]
        before = nights(earlier, by_hand=True)

        def labelled(result: DrillResult) -> DrillResult:
            # For a drill that repeats a failure, the failure comes first.
            oks = [*([False] if result.rerun is not None else []), *(entry.ok for entry in trend(result.name, before))]
            return result if result.cancelled else replace(result, label=label(oks, result.ok))

        drills = tuple(labelled(results[planned.name]) for planned in plan.drills if planned.name in results)
        left = tuple(drill.name for drill in plan.drills if drill.name not in results)
        assert len(drills) == len(results) == len(plan.drills) - len(left), "a drill's result was lost"
        whole = SuiteResult(
            **{name: getattr(plan, name) for name in ("name", "suite_id", "night", "seed", "shard")},
            drills=drills,
            path=self.folder.path,
            left=left,
            took_s=self._took_s + time.monotonic() - self._began_s,
        )
        if comparison is not None and drills:
            whole = compare_losses(whole, comparison)
            self._remember(comparison_result(whole))
        return replace(whole, notes=(*plan.notes, *dict.fromkeys(self._notes), *self._notes_on(drills, history)))

    def _notes_on(self, drills: Sequence[DrillResult], history: History) -> Iterator[str]:
        plan = self.plan
        for path in changed_files(plan.files):
            if path != plan.path:
                yield f"{path} has changed while the suite ran: not all drills had the same"
        if history.damaged:
            yield f"{plan.history}: lines that cannot be read were left out: {listed(list(map(str, history.damaged)))}"
        if any(result.cancelled for result in drills):
            yield f"`{self._resume_command}` carries out what was cancelled"
        if any(result.rerun and not result.ok and not result.cancelled for result in drills):
            folder = KeptPlans.next_to(Path(plan.history)).folder
            yield f"what failed runs again until it has passed {PASSES} nights; remove its file in {folder} to give it up"

    def tell(self, event: str, **about: object) -> None:
        self.on_record({"leg": None, "event": event, "of": len(self.plan.drills), **about})
