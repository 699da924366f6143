"""One drill: reference leg, chaos leg, verdict; and, before any verdict other than PASS, a second reference.

Every step leaves files behind; a drill whose supervisor was killed is continued from them.
"""

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.checkpoint.storage_errors import before_again, place_of
from chaosrun.errors import DISK_FAILS, InterruptedRunError, ResourcesError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.faults.strace import expect_strace
from chaosrun.plan.default import default_plan
from chaosrun.plan.permission import ask_permission
from chaosrun.records.codec import changed
from chaosrun.records.events import RESUMABLE, EventRecord, LegFinished, can_go_on
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RUN, LegLayout, RunLayout
from chaosrun.records.left import note_left, read_left
from chaosrun.records.locks import locked
from chaosrun.records.naming import run_argument
from chaosrun.records.opened import TrainingTime, earlier_legs, of_a_training, opened_files, training_time
from chaosrun.records.order import WorkerOrder
from chaosrun.records.run_file import RunInfo, own_leg, read_object, read_run, recorded_leg, write_run
from chaosrun.records.supervision import supervision
from chaosrun.records.trace_reader import read_trace
from chaosrun.spec.model import JobSpec
from chaosrun.supervise import beginning, early_end
from chaosrun.supervise.judging import RecoveryJudge
from chaosrun.supervise.objects import remove_objects
from chaosrun.supervise.reference import ReferenceCache, copy_leg, expect_resumable, final_step, leg_end, reference_key
from chaosrun.supervise.supervisor import Supervisor
from chaosrun.supervise.workers import order_template
from chaosrun.supervise.working_folder import check_paths_above, lay_out
from chaosrun.verify.confirm import NO_FAULTS, agreed_at_first, fault_free_difference, worth_confirming
from chaosrun.verify.verdict import Verdict, judge
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.cluster.workers import ClusterWorkers


def lock_run(run: RunLayout) -> AbstractContextManager[int]:
    """Hold a run for this process; raises UsageError when another one supervises it. The kernel frees the lock when the
    process, and every process that inherited the yielded descriptor, has ended."""
    return locked(run.lock, f"run {run.run_id} is being supervised", hint=f"chaosrun status {run_argument(run)}")


@contextmanager
def supervised(run: RunLayout) -> Iterator[tuple[int, list[str]]]:
    """Hold a run as `lock_run` does, and record its outcome in supervisor.json with the warnings appended to the list."""
    with lock_run(run) as lock, ExitStack() as stack:
        with run_files(run, "resume"):
            warnings = stack.enter_context(supervision(run))
        yield lock, warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRunner:
    """Runs legs, one after the other, on the same workers."""

    workers: "ClusterWorkers"
    on_record: Callable[[EventRecord], None]
    on_supervisor: Callable[[Supervisor | None], None] = lambda supervisor: None
    """Called with the supervisor that a signal must interrupt while a leg runs."""
    has_successor: bool = False
    """Another process continues the run when this one is killed (`chaosrun.supervise.process`)."""
    deadline_s: float | None = None
    """When the run's timeout expires, CLOCK_MONOTONIC; None: it has none."""

    def ask_permission(self, plan: FaultPlan, spec: JobSpec) -> None:
        """Raises UsageError for a fault that this Ray, or this process, does not allow."""
        ask_permission(plan.faults, spec, ray=self.workers.ray, has_successor=self.has_successor)

    def run(self, name: str, leg: LegLayout, template: WorkerOrder, plan: FaultPlan, spec: JobSpec) -> LegFinished:
        """Run one leg, called `name` in its records. Raises as `ask_permission`; UsageError and OSError when the leg's working
        folder cannot be laid out."""
        self.ask_permission(plan, spec)
        if template.by == "script":
            lay_out(leg, Path(template.directory), spec.outputs)
            check_paths_above((*template.args, *template.command, *template.resume_args), Path(template.directory), leg.work)
        supervisor = Supervisor(
            name=name,
            leg=leg,
            template=template,
            plan=plan,
            workers=self.workers,
            recovery=spec.recovery,
            deadline_s=self.deadline_s,
            on_record=self.on_record,
            judge=RecoveryJudge(leg, spec) if name == RUN else None,
        )
        try:
            self.on_supervisor(supervisor)
            return supervisor.run()
        finally:
            self.on_supervisor(None)


@dataclass(slots=True)
class DrillExecution:
    """A run and what it needs to be executed; `execute` continues from what the run's files show as done."""

    run: RunLayout
    root: Path
    legs: LegRunner
    survey: bool = False
    """Make every rank record which fault points it reaches."""
    _removed: list[TrainingTime] = field(default_factory=list, init=False)
    """Training times of legs whose records were removed: their files may still exist."""

    def execute(self) -> Verdict:
        """Run the remaining legs and judge them. The verdict is in verdict.json when this returns.

        Raises InterruptedRunError when a leg was interrupted, ResourcesError when the run's own files cannot be written.
        """
        with run_files(self.run, "resume"):
            return self._execute()

    def _execute(self) -> Verdict:
        info = read_run(self.run)
        spec = JobSpec.model_validate(info.spec)
        plan = FaultPlan.read(self.run.plan_json)
        self.legs.ask_permission(plan, spec)
        if self._reference(spec, info, plan):
            if outcome_of(self._leg("chaos")) in RESUMABLE:
                if spec.by == "script" and not plan.faults:
                    plan = self._default_plan(spec)
                _expect_reached(plan, final_step(self._leg("reference")), read_run(self.run).reference.source)
                self._run_chaos(spec, plan)
            self._note_left("chaos", spec)
        verdict = judge(self.run)
        if spec.verify.confirm and worth_confirming(verdict) and info.irreproducible is None:
            verdict = self._confirm(spec, verdict)
        if verdict.exact and verdict.outcome == "completed" and not beginning.has_begun_there(self._leg("chaos")):
            self._note_repeated()
        write_durably(self.run.verdict_json, json.dumps(verdict.to_json(), indent=1).encode())
        return verdict

    def _run_chaos(self, spec: JobSpec, plan: FaultPlan) -> None:
        info, leg, reference = read_run(self.run), self._leg("chaos"), self._leg("reference")
        if not leg.journal.exists() and beginning.wanted(spec, info.early, reference):
            began = beginning.begin(info, spec, plan, reference, leg)
            if began.why:
                self._tell("chaos.begins", leg="chaos", why=began.why)
        self._run_leg("chaos", spec, info, plan)

    def _note_repeated(self) -> None:
        """Record that two whole runs were equal: later drills with this reference may end early."""
        early_end.has_repeated(leg := self._leg("reference"), self.run.run_id)
        ReferenceCache(self.root).note_repeated(read_run(self.run).reference.key or "", leg)

    def _reference(self, spec: JobSpec, info: RunInfo, plan: FaultPlan) -> bool:
        """Make sure that there is a reference leg. False when it was run and did not complete."""
        leg = self._leg("reference")
        notices = any(fault.facts.notice for fault in plan.faults)
        if (outcome := outcome_of(leg)) not in RESUMABLE:
            if outcome == "completed" and spec.by == "script" and info.reference.source is None:
                expect_resumable(leg, spec.workers, final_step(leg), on_notice=notices)
            if info.reference.source is None:
                self._note_left("reference", spec)
            return outcome == "completed"
        self._remove(leg)
        mode = info.reference.mode
        cache = ReferenceCache(self.root)
        keys = early_end.reference_keys(reference_key(spec, Path(info.script), self.legs.workers.devices()), info.early)
        key = (mode == "auto" and next(filter(cache.find, keys), None)) or keys[0]
        info = _referring(info, key=key, source=None)
        with cache.locked():
            source = cache.find(key) if mode == "auto" else None
            if mode not in ("auto", "fresh"):
                source = leg_of(RunLayout(Path(mode)), "reference")
            if source is not None:
                step = final_step(source)
                write_run(self.run, _copied(info, source=str(source.path)))
                copy_leg(source, self.run.reference, step)
                self._tell("reference.cached", source=str(source.path), whose=info.reference.run)
                return True
        write_run(self.run, info)
        result = self._run_without_faults("reference", spec, info)
        if result.outcome == "completed" and spec.by == "script":
            expect_resumable(leg, spec.workers, result.final_step, on_notice=notices)
        if result.outcome == "completed" and len(leg.attempts()) == 1 and not of_a_training(opened_files(leg, [])):
            self._cache(key, leg, result.final_step)
        return result.outcome == "completed"

    def _default_plan(self, spec: JobSpec) -> FaultPlan:
        """The plan for a script that names no faults, from what its reference did. Raises UsageError for a script that saves
        nothing."""
        traces = [read_trace(self._leg("reference").attempt(1).trace(rank), 1, rank, []) for rank in range(spec.workers)]
        savers: dict[int, frozenset[int]] = defaultdict(frozenset)
        for trace in traces:
            for save in trace.saves:
                savers[save.step] |= frozenset() if save.how == "remove" else {trace.rank}
        epochs = {step: record.epoch for step, record in traces[0].steps.items()}
        missing = ""
        try:
            expect_strace()
        except ResourcesError as error:
            missing = f", none inside a save: {error.message.partition('needs ')[2]} ({error.hint})"
        plan = default_plan(spec, epochs, savers, strikes_saves=not missing)
        write_durably(self.run.plan_json, json.dumps(plan.to_json(), indent=1).encode())
        self._tell("plan.made", plan=f"{count(len(plan.faults), 'kill')}{missing}")
        return plan

    def _cache(self, key: str, leg: LegLayout, step: int) -> None:
        """Keep a reference for other drills; this drill does not need the cached copy."""
        try:
            ReferenceCache(self.root).put(key, leg, step)
        except OSError as error:
            self._tell("reference.uncached", message=f"{error.filename or self.root}: {error.strerror or error}")

    def _tell(self, event: str, leg: str = "reference", **about: str | None) -> None:
        self.legs.on_record({"leg": leg, "event": event, **about, "time_s": time.time()})

    def _run_without_faults(self, name: str, spec: JobSpec, info: RunInfo) -> LegFinished:
        """Run a leg without faults; when something killed it anyway, run it once more from the beginning."""
        result = self._run_leg(name, spec, info, NO_FAULTS)
        if result.outcome == "completed" and len(self._leg(name).attempts()) > 1:
            self._remove(self._leg(name))
            result = self._run_leg(name, spec, info, NO_FAULTS)
        return result

    def _confirm(self, spec: JobSpec, verdict: Verdict) -> Verdict:
        """Run the job again without faults, `verify.confirm` times, before blaming recovery (or the job) for a difference."""
        info = read_run(self.run)
        confirmed = info.confirmed
        if confirmed >= spec.verify.confirm:
            return verdict
        if outcome_of(self._leg("confirm")) in RESUMABLE:
            self._remove(self._leg("confirm"))
            if self._run_without_faults("confirm", spec, info).outcome != "completed":
                return judge(self.run)
        if of_a_training(opened_files(self._leg("confirm"), [])):
            return judge(self.run)
        found = fault_free_difference(self._leg("reference"), self._leg("confirm"), spec)
        if found is None:
            self._note_repeated()
            write_run(self.run, changed(info, confirmed=confirmed + 1))
            if confirmed + 1 < spec.verify.confirm:
                self._remove(self._leg("confirm"))
            return self._confirm(spec, judge(self.run))
        difference, wanders = found
        if confirmed:
            difference += f" (fault-free run {confirmed + 2}; the first {confirmed + 1} were equal)"
        if info.reference.source is None or info.reference.mode != "auto":
            write_run(self.run, changed(info, irreproducible=difference, wanders=wanders))
            return judge(self.run)
        # The cached reference is stale (data or machine have changed): judge against the one just made.
        chaos = self._leg("chaos")
        if by_it := beginning.has_begun_there(chaos) or outcome_of(chaos) == "differed":
            self._remove(chaos)  # first: a supervisor that goes on from here finds no leg by another reference
        self._replace_reference(info, difference)
        if by_it:
            self._run_chaos(spec, FaultPlan.read(self.run.plan_json))
        agreed, verdict = agreed_at_first(verdict), judge(self.run)
        # If the chaos leg agreed with the stale one at first, another run made now shows whether the job is reproducible.
        return self._confirm(spec, verdict) if agreed or worth_confirming(verdict) else verdict

    def _replace_reference(self, info: RunInfo, difference: str) -> None:
        confirmed = self._leg("confirm")
        step = final_step(confirmed)
        self._remove(self._leg("reference"))
        write_run(self.run, _copied(info, source=None, replaced=difference))
        self._tell("reference.replaced", difference=difference)
        copy_leg(confirmed, self.run.reference, step)
        self._cache(info.reference.key or "", confirmed, step)
        self._remove(confirmed)

    def _run_leg(self, name: str, spec: JobSpec, info: RunInfo, plan: FaultPlan) -> LegFinished:
        leg = self._leg(name)
        earlier = (*earlier_legs(self.root, self.run.path, info.script, leg.path), *self._removed)
        reference = self.run.reference.path if name == "chaos" else None
        template = order_template(name, leg, spec, info, reference=reference)
        template = early_end.with_early_end(template, spec, info.early, plan, self._leg("reference"))
        template = beginning.keeping(template, spec, info.early)
        template = replace(template, survey=self.survey, earlier=earlier)
        self.run.verdict_json.unlink(missing_ok=True)  # of the end that is continued now
        result = self.legs.run(name, leg, template, plan, spec)
        self._note_left(name, spec)
        if result.outcome == "interrupted":
            hint = f"`chaosrun resume {run_argument(self.run)}` continues the run"
            raise InterruptedRunError(f"interrupted in the {name} leg", hint=hint)
        return result

    def _note_left(self, name: str, spec: JobSpec) -> None:
        """Note what a completed leg left, unless that is done: of large files it takes long, and an interruption may have ended
        it."""
        leg = self._leg(name)
        if outcome_of(leg) == "completed" and not leg.left.exists():
            known = read_left(self._leg("reference"), []).files if name == "chaos" else ()
            note_left(leg, 0 if spec.by == "script" else spec.workers, known)

    def _leg(self, name: str) -> LegLayout:
        return own_leg(self.run, read_run(self.run), name)

    def _remove(self, leg: LegLayout) -> None:
        """Remove a leg that will be run again from its beginning: resumed from a checkpoint, it would not be uninterrupted."""
        if time := training_time(leg, f"{leg.path.name} leg"):
            self._removed.append(time)
        remove_leg(leg)


def _expect_reached(plan: FaultPlan, last: int, earlier: str | None) -> None:
    """Refuse faults beyond the end of the training, where only the reference run could show where that is. `earlier`: the leg
    that the reference was copied from; the job may have been shorter then."""
    late = [f"{fault.source}: step {fault.at_step} is never reached" for fault in plan.faults if (fault.at_step or 0) > last]
    if late:
        message = "; ".join(dict.fromkeys(late))
        raise UsageError(
            f"{message}: the reference run ended at step {last}",
            hint="plan it earlier; with max_steps `chaosrun plan` sees it"
            + ("; if the job trains longer than in that earlier drill: --reference fresh" if earlier else ""),
        )


def has_ended(run: RunLayout) -> bool:
    """Whether the run has a verdict that continuing it would not change."""
    if not run.verdict_json.is_file():
        return False
    confirming = run.leg("confirm")
    if confirming.journal.exists() and outcome_of(confirming) in RESUMABLE:
        return False
    return not can_go_on(read_object(run.verdict_json).get("outcome"), in_production=run.main == RUN)


def leg_of(run: RunLayout, name: str) -> LegLayout:
    """One of the run's own legs, with its checkpoints at the place given in run.json."""
    return recorded_leg(run, read_run(run), name)


def _referring(info: RunInfo, **about: str | None) -> RunInfo:
    return changed(info, reference=changed(info.reference, **about))


def _copied(info: RunInfo, **about: str | None) -> RunInfo:
    """Copy a reference into the run's own directory and use that."""
    return changed(_referring(info, **about), storage={**info.storage, "reference": None})


@contextmanager
def run_files(run: RunLayout, command: str) -> Iterator[None]:
    """End the run with a ResourcesError when its files were removed, or when the disk takes no more of the supervisor's
    records; in the latter case `chaosrun <command>` can be tried again."""
    try:
        yield
    except (OSError, UsageError) as error:
        if _is_gone(run.path.parent):
            raise ResourcesError(
                f"the folder of runs is gone, unmounted or removed: {run.path.parent}",
                hint=f"if unmounted, mount it and `chaosrun {command} {run_argument(run)}`; if removed, start again",
            ) from error
        if _is_gone(run.run_json):
            raise ResourcesError(
                f"the run's files were removed while it ran: {run.path}",
                hint="start again, and leave a run's folder alone until it has ended: `chaosrun cancel RUN` ends it",
            ) from error
        if isinstance(error, UsageError) or error.errno not in DISK_FAILS:
            raise
        again = f"`chaosrun {command} {run_argument(run)}`, or start again with --root elsewhere"
        raise ResourcesError(
            f"the run's own files cannot be written: {place_of(error, run.path)}: {error.strerror}",
            hint=f"{before_again(error, run.path)} and {again}",
        ) from error


def _is_gone(path: Path) -> bool:
    """Also where it cannot be asked for: a storage that is away answers with errors of many kinds."""
    try:
        path.stat()
    except OSError:
        return True
    return False


def remove_leg(leg: LegLayout) -> None:
    remove_objects(leg)
    for path in {leg.path, leg.storage or leg.path}:
        if path.exists():
            shutil.rmtree(path)


def outcome_of(leg: LegLayout) -> str | None:
    end = leg_end(leg)
    return None if end is None else end.outcome
