"""The verdict on a drill: PASS, FAIL or INCONCLUSIVE, from its files alone.

Owns the rule that turns checks into a verdict and an exit code. Nothing but an explicit pass of every required check makes a
PASS: a skipped, missing, undecided or crashed one does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.journal import Outcome
from chaosrun.records.layout import RunLayout
from chaosrun.records.order import DataResume
from chaosrun.records.run_file import read_object, recorded_leg
from chaosrun.spec.model import JobSpec
from chaosrun.verify.account import AttemptSummary, FaultOutcome, attempt_summaries, fault_outcomes
from chaosrun.verify.advice import warnings
from chaosrun.verify.blame import INEXACT_PROTOCOL, blame
from chaosrun.verify.check import Check, Drill
from chaosrun.verify.checks import PREMISES, required, run_checks
from chaosrun.verify.compare import first_difference
from chaosrun.verify.corruption import CAUSE, HINT, UNSEEN_HINT, explained
from chaosrun.verify.divergence import Divergence, first_divergence
from chaosrun.verify.replicas import DRIFT_HINT, drift
from chaosrun.wording import count

VERDICT_VERSION = 1

VerdictStatus = Literal["PASS", "FAIL", "INCONCLUSIVE"]

EXIT_CODES: Mapping[VerdictStatus, int] = {"PASS": 0, "FAIL": 3, "INCONCLUSIVE": 6}
OUTCOME_EXIT_CODES: Mapping[str, int] = {
    "user_error": 4,
    "recovery_failed": 5,
    "resources": 7,
    "timeout": 124,
    "interrupted": 130,
}
"""Of a leg that did not complete; its drill is INCONCLUSIVE."""
IDS_SHOWN = 8
WITHIN = "within the tolerance of"
RECOVERY_CHECKS = ("completed", "lineage", "resume_points", "data_order", "rng")
"""What fails only where the job came back wrongly, whatever was done to its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    status: VerdictStatus
    exit_code: int
    cause: str
    """One sentence: what the status rests on."""
    hint: str | None
    """What to do about it, where something can be said."""
    outcome: Outcome | None
    """How the chaos leg ended, or the reference leg if that did not complete; None while it runs."""
    checks: tuple[Check, ...]
    divergence: Divergence | None
    faults: tuple[FaultOutcome, ...]
    attempts: tuple[AttemptSummary, ...]
    """Of the chaos leg."""
    steps: int
    """Last step of the chaos leg."""
    lost_steps: int
    warnings: tuple[str, ...] = ()
    """What is no question of exactness; see `verify.advice`."""

    @property
    def exact(self) -> bool:
        """A PASS in which every bit was compared: the job file may ask for less (`verify.losses`, `verify.weights`)."""
        return self.status == "PASS" and not self.cause.startswith(WITHIN)

    def to_json(self) -> dict[str, Any]:
        return {
            "v": VERDICT_VERSION,
            "status": self.status,
            "exit_code": self.exit_code,
            "cause": self.cause,
            "hint": self.hint,
            "blame": blame(self).to_json(),
            "outcome": self.outcome,
            "checks": [check.to_json() for check in self.checks],
            "divergence": self.divergence.to_json() if self.divergence else None,
            "faults": [fault.to_json() for fault in self.faults],
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "steps": self.steps,
            "lost_steps": self.lost_steps,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ruling:
    status: VerdictStatus
    cause: str
    hint: str | None = None
    exit_code: int | None = None
    """None: that of the status."""


def judge(run: RunLayout) -> Verdict:
    """Judge a run from run.json, plan.json and its two legs. Raises UsageError when it is not a run this version can read."""
    facts = read_object(run.run_json)
    plan = FaultPlan.from_json(read_object(run.plan_json))
    try:
        spec = JobSpec.model_validate(facts.get("spec"))
    except ValidationError as error:
        raise UsageError(
            f"{run.run_json}: spec: {error.errors()[0]['msg']}", hint="the run was written by another version of chaosrun"
        ) from error
    irreproducible = facts.get("irreproducible")
    if not isinstance(irreproducible, str | None):
        raise UsageError(f"{run.run_json}: irreproducible is {irreproducible!r}", hint="the run is damaged")
    legs = [read_leg(recorded_leg(run, facts, name)) for name in ("reference", "chaos")]
    return judge_drill(Drill.of(legs[0], legs[1], spec, plan), irreproducible=irreproducible)


def judge_drill(drill: Drill, *, irreproducible: str | None = None) -> Verdict:
    """Pure but for the checkpoints' audit. `irreproducible` says how two undisturbed runs differed, if they did."""
    checks = run_checks(drill)
    attempts = attempt_summaries(drill.plan, drill.chaos)
    faults = fault_outcomes(drill.plan, drill.chaos)
    unfounded = _of_premises(checks, irreproducible)
    divergence = first_divergence(drill)
    drifted = _of_drift(checks)
    blameless = unfounded or drifted
    if divergence and blameless:
        divergence = _without_blame(divergence, drill.chaos, blameless)
    elif divergence and (injection := explained(divergence, drill)):
        divergence = replace(divergence, cause=CAUSE, hint=f"{injection.what}: what the training's own steps make of it")
    corrupted = None if blameless else _of_corruption(checks, drill)
    ruling = (
        corrupted
        or _of_outcomes(drill.reference, drill.chaos)
        or unfounded
        or drifted
        or _of_failures(checks, divergence, drill)
        or _of_doubts(checks, drill)
        or _pass(drill, attempts, landed=sum(fault.landed for fault in faults))
    )
    leg = drill.chaos if drill.reference.outcome == "completed" else drill.reference
    return Verdict(
        status=ruling.status,
        exit_code=EXIT_CODES[ruling.status] if ruling.exit_code is None else ruling.exit_code,
        cause=ruling.cause,
        hint=ruling.hint,
        outcome=leg.outcome,
        checks=checks,
        divergence=divergence,
        faults=faults,
        attempts=attempts,
        steps=drill.chaos_lineage.final_step,
        lost_steps=sum(attempt.lost_steps for attempt in attempts),
        warnings=warnings(drill),
    )


def _of_outcomes(reference: LegHistory, chaos: LegHistory) -> _Ruling | None:
    """A leg that did not complete settles the drill; a restore that chaosrun itself found inexact fails it."""
    for leg in (reference, chaos):
        if leg.outcome == "completed":
            continue
        if leg.finished is None:
            return _Ruling(status="INCONCLUSIVE", cause=f"the {leg.name} leg has not finished")
        message, hint = leg.finished["message"] or leg.outcome or "", leg.finished.get("hint")
        if leg is chaos and leg.outcome == "inexact_restore":
            return _Ruling(status="FAIL", cause=message, hint=hint)
        exit_code = OUTCOME_EXIT_CODES.get(leg.outcome or "")
        if leg.outcome == "user_error" and (found := drift(leg)):
            cause = f"{leg.name} leg: the replicas had drifted apart ({found.what}) when {message}"
            return _Ruling(status="INCONCLUSIVE", cause=cause, hint=DRIFT_HINT, exit_code=exit_code)
        return _Ruling(status="INCONCLUSIVE", cause=f"{leg.name} leg: {message}", hint=hint, exit_code=exit_code)
    return None


def _of_premises(checks: Sequence[Check], irreproducible: str | None) -> _Ruling | None:
    if irreproducible:
        return _Ruling(status="INCONCLUSIVE", cause=irreproducible, hint=_IRREPRODUCIBLE_HINT)
    for check in checks:
        if check.name in PREMISES and check.status not in ("pass", "skip"):
            hint = _IRREPRODUCIBLE_HINT if check.name == "reproducible" else None
            return _Ruling(status="INCONCLUSIVE", cause=check.summary, hint=hint)
    return None


def _without_blame(divergence: Divergence, chaos: LegHistory, unfounded: _Ruling) -> Divergence:
    """Where the legs part is worth knowing in any case; after a restore, the cause seen there would blame what may be sound."""
    restored = {attempt.number for attempt in chaos.attempts if attempt.resume is not None}
    if divergence.attempt not in restored:
        return divergence
    hint = unfounded.hint or "from here nothing can be said about recovery"
    return replace(divergence, cause="not shown to come from the restore", hint=hint)


_IRREPRODUCIBLE_HINT = (
    "first make the script give the same numbers twice without any fault: seeds, deterministic: strict, threads"
)


def _of_drift(checks: Sequence[Check]) -> _Ruling | None:
    """Replicas that part undisturbed fail the drill; a restore, which makes them one again, is not to blame for differing."""
    for check in checks:
        if check.name == "rank_agreement" and check.status == "fail" and check.evidence["leg"] == "reference":
            return _Ruling(status="FAIL", cause=f"replicas drifted apart: {check.summary}", hint=DRIFT_HINT)
    return None


def _of_corruption(checks: Sequence[Check], drill: Drill) -> _Ruling | None:
    """A corruption that was injected and seen fails the drill, also where the training broke down over it."""
    outcome = drill.chaos.outcome
    if drill.reference.outcome != "completed" or outcome not in ("completed", "user_error", "recovery_failed"):
        return None
    failing = {check.name: check for check in checks if check.status == "fail"}
    seen = failing.get("silent_corruption")
    if seen is None:
        return None
    beside = next((failing[name] for name in RECOVERY_CHECKS if name in failing), None)
    if beside is not None and outcome == "completed":
        cause = f"{beside.name}: {beside.summary}, which no corruption explains; besides, {seen.summary}"
        return _Ruling(status="FAIL", cause=cause)
    end = "" if drill.chaos.finished is None or outcome == "completed" else f"; then {drill.chaos.finished['message']}"
    return _Ruling(status="FAIL", cause=f"{CAUSE}: {seen.summary}{end}", hint=HINT)


def _of_failures(checks: Sequence[Check], divergence: Divergence | None, drill: Drill) -> _Ruling | None:
    """A divergence fails the drill even if no check should have reported it."""
    failing = [check for check in checks if check.status == "fail"]
    if not failing and divergence is None:
        return None
    if divergence:
        return _of_divergence(divergence, drill.spec.data.resume)
    hint = _UNRESTORABLE_HINT if failing[0].evidence.get("unrestorable") else None
    return _Ruling(status="FAIL", cause=f"{failing[0].name}: {failing[0].summary}", hint=hint)


_UNRESTORABLE_HINT = (
    "the restore comes with the first batch: parameter groups, layers and objects that the loop adds later have to be there "
    "before it in every attempt (frozen, or at a learning rate of 0)"
)


def _of_divergence(divergence: Divergence, protocol: DataResume) -> _Ruling:
    where = f"step {divergence.step}, rank {divergence.rank}, attempt {divergence.attempt}"
    tensor = f", {divergence.tensor}" if divergence.tensor else ""
    if divergence.kind != "data order":
        return _Ruling(status="FAIL", cause=f"{divergence.cause} (first difference: {where}{tensor})", hint=divergence.hint)
    expected, seen = _around(divergence.expected, divergence.seen), _around(divergence.seen, divergence.expected)
    cause = f"{divergence.cause} (first difference in data order: {where}: samples {expected} expected, {seen} seen)"
    hint = divergence.hint
    if protocol != "seedable":  # what else there is to say of it, the divergence says
        hint = f"set data.resume: seedable (data.resume is {protocol}, and {INEXACT_PROTOCOL})"
    return _Ruling(status="FAIL", cause=cause, hint=hint)


def _around(ids: Any, others: Any) -> str:
    """The sample ids of a batch, of a large one those from the first that is not the other's on."""
    if not isinstance(ids, list | tuple) or not isinstance(others, list | tuple):
        return str(ids)
    start = (first_difference(ids, others) or 0) if len(ids) > IDS_SHOWN else 0
    shown = [*(["…"] if start else []), *ids[start : start + IDS_SHOWN], *(["…"] if len(ids) > start + IDS_SHOWN else [])]
    return f"[{', '.join(map(str, shown))}]"


def _of_doubts(checks: Sequence[Check], drill: Drill) -> _Ruling | None:
    doubtful = [check for check in checks if check.status == "inconclusive"]
    if doubtful:
        first = doubtful[0]
        hint = _faults_hint(drill) if first.name == "faults_landed" else None
        hint = UNSEEN_HINT if first.name == "silent_corruption" else hint
        return _Ruling(status="INCONCLUSIVE", cause=f"{first.name}: {first.summary}", hint=hint)
    passing = {check.name for check in checks if check.status == "pass"}
    lacking = sorted(required(drill) - passing)
    if lacking:
        return _Ruling(status="INCONCLUSIVE", cause=f"not shown: {', '.join(lacking)}")
    return None


def _faults_hint(drill: Drill) -> str | None:
    """How to have the faults of the plan land, where the plan is what kept them from it."""
    end = drill.chaos_lineage.final_step
    if not drill.plan.faults:
        return "plan at least one: faults.schedule or faults.random in the job file"
    late = [fault.id for fault in drill.plan.faults if fault.at_step is not None and fault.at_step > end]
    if late:
        return (
            f"the training ended at step {end}, before {', '.join(late)}: plan them earlier (max_steps has `plan` check that)"
        )
    return None


def _pass(drill: Drill, attempts: Sequence[AttemptSummary], *, landed: int) -> _Ruling:
    verify = drill.spec.verify
    equal = "bit-identical to" if verify.weights.exact and verify.losses.exact else WITHIN
    steps, ranks = count(drill.chaos_lineage.final_step, "step"), count(drill.spec.workers, "rank")
    cause = f"{equal} the undisturbed run: {steps} on {ranks}, {count(landed, 'fault')}"
    if not any(attempt.resumed_from for attempt in attempts):
        return _Ruling(
            status="PASS",
            cause=f"{cause}; no checkpoint was restored, every attempt began at the beginning",
            hint="let a fault strike after the first checkpoint to test a restore",
        )
    return _Ruling(status="PASS", cause=cause)
