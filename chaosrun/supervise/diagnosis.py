"""Replays a run around its first difference, recording every tensor, and reports what differs first: `chaosrun diagnose`.

Runs two more legs under `<run>/diagnosis` with the ordinary supervisor. The run's own legs, checkpoints and verdict are only
read; the cache of references is not touched.
"""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import InterruptedRunError, InvalidCheckpointError, UsageError, error_of
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.events import CONCLUSIVE, DeathUnplanned, LegFinished
from chaosrun.records.history import read_leg
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LegLayout, RunLayout, checkpoint_step
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import RunInfo, read_run
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.drill import LegRunner, leg_of, remove_leg, run_files
from chaosrun.supervise.reference import changed_inputs
from chaosrun.supervise.workers import order_template
from chaosrun.verify.check import Divergence, Drill
from chaosrun.verify.confirm import NO_FAULTS
from chaosrun.verify.diagnosis import Diagnosis, Replay, Target, hint_of, repeats, target_of
from chaosrun.verify.divergence import first_divergence
from chaosrun.verify.hazards import hazard_of
from chaosrun.verify.inspection import InspectionComparison, compare_inspections
from chaosrun.verify.verdict import judge

NOT_SHOWN_HINT = (
    "a difference that comes and goes follows no state of the job: timing, a kernel that is not deterministic (deterministic: "
    "strict), files or a machine that have changed"
)


NOTHING_COMPARED = InspectionComparison(moments=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingRun:
    """A run and the difference to replay."""

    run: RunLayout
    info: RunInfo
    drill: Drill
    target: Target


def open_case(run: RunLayout) -> DifferingRun:
    """Raises UsageError when there is no difference to look into."""
    info = read_run(run)
    if info.kind == "run":
        hint = "`chaosrun submit` drills its job, and what fails there can be diagnosed"
        raise UsageError(f"run {run.run_id} is in production and has no reference leg to run again", hint=hint)
    spec = JobSpec.model_validate(info.spec)
    plan = FaultPlan.read(run.plan_json)
    drill = Drill.of(read_leg(leg_of(run, "reference")), read_leg(leg_of(run, "chaos")), spec, plan)
    return DifferingRun(run=run, info=info, drill=drill, target=target_of(drill, judge(run), run))


def diagnose(case: DifferingRun, legs: LegRunner) -> Diagnosis:
    """Replay and compare; when this returns, diagnosis.json holds the diagnosis, replacing an older one.

    Raises the error of a replay that does not get to the difference, and InterruptedRunError.
    """
    run = case.run
    with run_files(run, "diagnose"):
        run.diagnosis_json.unlink(missing_ok=True)
        diagnosis = _Replays(run, case.info, case.drill, case.target, legs).execute()
        write_durably(run.diagnosis_json, json.dumps(diagnosis.to_json(), indent=1).encode())
        return diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What a pair of replays showed."""

    start: str | None
    plan: FaultPlan
    irreproducible: str | None
    """How the fault-free replay differs from the run's reference."""
    replayed: Drill | None = None
    """None when the fault-free replay already ended the diagnosis."""
    divergence: Divergence | None = None
    comparison: InspectionComparison = NOTHING_COMPARED
    stopped: str | None = None
    """Why the replay with faults did not complete."""

    @property
    def differs(self) -> bool:
        return self.divergence is not None or self.comparison.finding is not None or self.stopped is not None or self.ends_apart

    @property
    def ends_apart(self) -> bool:
        """The replays ended by themselves, at different steps."""
        legs = (self.replayed.reference, self.replayed.chaos) if self.replayed else ()
        return len({end.step for leg in legs for end in leg.ends.values()}) > 1


@dataclass(slots=True)
class _Replays:
    run: RunLayout
    info: RunInfo
    drill: Drill
    target: Target
    legs: LegRunner

    def execute(self) -> Diagnosis:
        source, why = self._common_checkpoint()
        shown = self._replay(source) if source else None
        if shown is not None and not self._reproduced(shown):
            exact = f"is not exact by itself ({shown.irreproducible})" if shown.irreproducible else None
            why = f"going on from {shown.start} {exact or 'did not show the difference again'}"
            shown = None
        if shown is None:
            shown = self._replay(None)
        diagnosis = self._diagnosis(shown, why)
        self._forget_checkpoints()
        return diagnosis

    def _common_checkpoint(self) -> tuple[Path | None, str]:
        """The newest checkpoint that both legs have in common and whose restore is not itself suspect."""
        target = self.target
        if not target.resume_step:
            return None, "the attempt that differs began there, too"
        found: dict[int, Path] = {}
        for name in ("reference", "chaos"):
            leg = leg_of(self.run, name)
            store = CheckpointStore(leg, self.drill.spec.checkpoint.keep)
            for path in sorted(leg.checkpoints.iterdir()) if leg.checkpoints.is_dir() else ():
                step = checkpoint_step(path.name)
                if step is None or step >= target.resume_step or step in found:
                    continue
                try:
                    manifest = store.audit(path.name)
                except InvalidCheckpointError:
                    continue  # use an older one; the run's own files are not modified
                if name == "reference" or manifest.attempt < target.attempt or step < self.drill.began:
                    found[step] = path
        if not found:
            return None, f"no checkpoint older than step {target.resume_step} was kept (checkpoint.keep)"
        return found[max(found)], f"the newest common checkpoint older than step {target.resume_step}"

    def _replay(self, source: Path | None) -> _Shown:
        """Run both replays from a copy of the checkpoint `source`, or from the beginning."""
        start = source.name if source else None
        plan = self.target.faults_from(checkpoint_step(start) or 0 if start else 0)
        for path in (self.run.diagnosis, *filter(None, [self._storage()])):
            if path.exists():
                shutil.rmtree(path)
        result = self._run_as_planned("reference", source, NO_FAULTS)
        irreproducible = self._irreproducible(result)
        if irreproducible and source:
            return _Shown(start=start, plan=plan, irreproducible=irreproducible)
        if result.outcome != "completed":
            raise _failure("replay without faults", result)
        result = self._run_as_planned("chaos", source, plan)
        legs = [read_leg(self._leg(name)) for name in ("reference", "chaos")]
        replayed = Drill.of(legs[0], legs[1], self.drill.spec, plan)
        comparison = compare_inspections(legs[0].layout, legs[1].layout, self.drill.ranks)
        if result.outcome not in CONCLUSIVE and comparison.finding is None:
            raise _failure("replay with faults", result)
        return _Shown(
            start=start,
            plan=plan,
            irreproducible=irreproducible,
            replayed=replayed,
            divergence=first_divergence(replayed),
            comparison=comparison,
            stopped=None if result.outcome == "completed" else result.message,
        )

    def _irreproducible(self, result: LegFinished) -> str | None:
        if result.outcome != "completed":
            return result.message
        found = first_divergence(Drill.of(self.drill.reference, read_leg(self._leg("reference")), self.drill.spec, NO_FAULTS))
        return f"{found.kind} at step {found.step}, rank {found.rank}" if found else None

    def _run_as_planned(self, name: str, source: Path | None, plan: FaultPlan) -> LegFinished:
        """Run a leg; when something unplanned killed it, run it once more from its beginning."""
        result = self._run_leg(name, source, plan)
        if result.outcome == "completed" and _unplanned(self._leg(name)):
            remove_leg(self._leg(name))
            result = self._run_leg(name, source, plan)
        return result

    def _run_leg(self, name: str, source: Path | None, plan: FaultPlan) -> LegFinished:
        leg, spec = self._leg(name), self.drill.spec
        if source is not None:
            shutil.copytree(source, leg.checkpoints / source.name)
        template = dataclasses.replace(
            order_template(name, leg, spec, self.info), max_steps=self.target.last_step(plan), inspect=self.target.inspected
        )
        name = leg.path.relative_to(self.run.path).as_posix()
        result = self.legs.run(name, leg, template, plan, spec)
        if result.outcome == "interrupted":
            hint = f"`chaosrun diagnose {run_argument(self.run)}` begins again; the run is as it was"
            raise InterruptedRunError("interrupted in a replay", hint=hint)
        return result

    def _leg(self, name: str) -> LegLayout:
        storage = self._storage()
        return self.run.replay(name, storage and storage / name)

    def _storage(self) -> Path | None:
        """Next to the run's own checkpoints where `checkpoint.storage` puts those elsewhere, as that is where there is room."""
        own = leg_of(self.run, "chaos").storage
        return own.with_name(self.run.diagnosis.name) if own else None

    def _forget_checkpoints(self) -> None:
        """Remove the replays' checkpoints: nothing will resume from them. Traces and tensors stay, as evidence."""
        legs = [self._leg(name) for name in ("reference", "chaos")]
        storage = self._storage()
        for path in [storage] if storage else [path for leg in legs for path in (leg.checkpoints, leg.staging, leg.quarantine)]:
            if path.exists():
                shutil.rmtree(path)

    def _reproduced(self, shown: _Shown) -> bool:
        if shown.irreproducible:
            return False
        same = repeats(self.target, shown.divergence)
        return shown.differs if same is None else same

    def _diagnosis(self, shown: _Shown, why: str) -> Diagnosis:
        finding, reproduced = shown.comparison.finding, self._reproduced(shown)
        attempts = shown.replayed.chaos.attempts if shown.replayed else ()
        restored = {attempt.number: attempt.resume_step for attempt in attempts if attempt.resume is not None}
        after_restore = finding is not None and restored.get(finding.attempt, -1) + 1 == finding.step
        inputs = self.run.reference.inputs
        changed = changed_inputs(inputs) if inputs.is_file() else ()
        return Diagnosis(
            run_id=self.run.run_id,
            divergence=self.target.divergence,
            replay=Replay(
                start=shown.start,
                why=why,
                steps=self.target.last_step(NO_FAULTS),
                attempts=len(attempts),
                faults=tuple(fault.describe() for fault in shown.plan.faults),
                changed=changed,
            ),
            reproduced=reproduced,
            account=self._account(shown, reproduced=reproduced, changed=changed),
            comparison=shown.comparison,
            hazard=hazard_of(
                finding, self.target.divergence, after_restore=after_restore, repeats=shown.irreproducible is None
            ),
            hint=hint_of(self.target, shown.comparison) if reproduced else NOT_SHOWN_HINT,
        )

    def _account(self, shown: _Shown, *, reproduced: bool, changed: tuple[str, ...]) -> str:
        expected, seen = self.target.divergence, shown.divergence
        if shown.irreproducible:
            why = "its files have changed since" if changed else "the job does not give the same numbers twice"
            return f"the fault-free replay is not the run's reference ({shown.irreproducible}): {why}"
        if not reproduced and seen is None and shown.stopped:
            return f"the replay ended before it came to the difference: {shown.stopped}"
        if not reproduced and seen is None:
            last = self.target.last_step(shown.plan)
            return (
                f"under the same faults the replay agrees with the fault-free one up to step {last}: it does not repeat itself"
            )
        if not reproduced and seen is not None:
            deaths = "".join(f"; unplanned: {reason}" for reason in _unplanned(self._leg("chaos")))
            return f"the replay differs elsewhere: {seen.kind} at step {seen.step}, rank {seen.rank}{deaths}"
        if shown.stopped and not shown.comparison.finding:
            return f"the replay stopped where the run did: {shown.stopped}"
        if shown.ends_apart and seen is None:
            return "the replay ended at another step than the fault-free one, too"
        if expected is None or seen is None:
            return "the replay differs from the fault-free one, too"
        if expected.seen == seen.seen:
            return "the replay differs where the run did, in the same bits"
        return "the replay differs where the run did, in other bits: what it computes there changes from run to run"


def _unplanned(leg: LegLayout) -> list[str]:
    """Why attempts of a leg died of something other than a planned fault."""
    return [record.reason for record in read_leg(leg).events(DeathUnplanned)]


def _failure(which: str, result: LegFinished) -> Exception:
    return error_of(result.outcome)(f"the {which} did not get to the difference: {result.message}", hint=result.hint)
