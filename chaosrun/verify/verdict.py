"""The verdict on a drill: PASS, FAIL or INCONCLUSIVE, from its files alone.

Owns the rule that turns checks into a verdict and an exit code. Nothing but an explicit pass of every required check makes a
PASS: a skipped, missing, undecided or crashed one does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.events import Outcome
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.opened import opened_files
from chaosrun.records.order import DataResume
from chaosrun.records.run_file import RunInfo, read_run, recorded_leg
from chaosrun.spec.model import JobSpec
from chaosrun.verify.account import AttemptSummary, FaultOutcome, attempt_summaries, fault_outcomes
from chaosrun.verify.advice import warnings
from chaosrun.verify.blame import Blame
from chaosrun.verify.check import Check, Drill
from chaosrun.verify.checks import PREMISES, required, run_checks
from chaosrun.verify.codes import Cause
from chaosrun.verify.compare import first_difference
from chaosrun.verify.corruption import explained
from chaosrun.verify.divergence import Divergence, first_divergence
from chaosrun.verify.premises import file_that_differs
from chaosrun.verify.replicas import drift

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
END_CODES: Mapping[str, str] = {
    "user_error": "script_failed",
    "recovery_failed": "recovery_failed",
    "inexact_restore": "state_changed_on_load",
    "resources": "resources",
    "timeout": "timeout",
    "interrupted": "interrupted",
    "fault_missed": "fault_missed",
}
"""Of a leg of which no more is known than its outcome."""
IDS_SHOWN = 8
REPLACED = (
    "the reference in the cache was replaced by a run made now, from which it differed ({difference}): data, files or the "
    "machine have changed since it was made"
)
RECOVERY_CHECKS = ("completed", "lineage", "resume_points", "data_order", "rng")
"""What fails only where the job came back wrongly, whatever was done to its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    status: VerdictStatus
    exit_code: int
    reason: Cause
    """What the status rests on."""
    headline: str
    """The same in one sentence."""
    place: str | None = None
    """Where the first difference is, in words."""
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
    confirmed: int = 0
    """Undisturbed runs that agreed with the reference after the legs had differed."""

    @property
    def code(self) -> str:
        return self.reason.code

    @property
    def cause(self) -> str:
        """One sentence: what the status rests on, and where."""
        return self.headline if self.place is None else f"{self.headline} ({self.place})"

    @property
    def blame(self) -> Blame:
        blame, runs = self.reason.blame, self.confirmed + 1
        if runs == 1 or self.status != "FAIL":
            return blame
        return replace(blame, reason=f"{blame.reason}; undisturbed, the job repeats itself: {runs} of {runs}")

    @property
    def exact(self) -> bool:
        """A PASS in which every bit was compared: the job file may ask for less (`verify.losses`, `verify.weights`)."""
        return self.code == "exact"

    def says(self, cause: str) -> bool:
        """Whether this is its cause: the code, or words of the sentence."""
        return cause == self.code or cause in self.cause

    def to_json(self) -> dict[str, Any]:
        return {
            "v": VERDICT_VERSION,
            "status": self.status,
            "exit_code": self.exit_code,
            "code": self.code,
            "cause": self.cause,
            "hint": self.hint,
            "blame": self.blame.to_json(),
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
    reason: Cause
    headline: str | None = None
    """None: the sentence of the reason."""
    place: str | None = None
    hint: str | None = None
    """None: that of the reason."""
    exit_code: int | None = None
    """None: that of the status."""


def judge(run: RunLayout) -> Verdict:
    """Judge a run from run.json, plan.json and its two legs. Raises UsageError when it is not a run this version can read."""
    info = read_run(run)
    plan = FaultPlan.read(run.plan_json)
    try:
        spec = JobSpec.model_validate(info.spec)
    except ValidationError as error:
        raise UsageError(
            f"{run.run_json}: spec: {error.errors()[0]['msg']}", hint="the run was written by another version of chaosrun"
        ) from error
    legs = [read_leg(recorded_leg(run, info, name)) for name in ("reference", "chaos")]
    confirming = opened_files(recorded_leg(run, info, "confirm"), [])
    drill = Drill.of(legs[0], legs[1], spec, plan, confirming)
    verdict = judge_drill(drill, irreproducible=_irreproducible(info), confirmed=info.confirmed)
    # A reference that was taken from the cache and is no longer the one that is judged by.
    replaced = [] if info.reference.replaced is None else [REPLACED.format(difference=info.reference.replaced)]
    return replace(verdict, warnings=(*replaced, *verdict.warnings))


def _irreproducible(info: RunInfo) -> Cause | None:
    """How two undisturbed runs differed, if a second one was made and they did."""
    difference, reference = info.irreproducible, info.reference
    if not difference:
        return None
    if reference.source is not None and reference.mode == "auto":
        return Cause.of("undisturbed_runs_differ", because="agreed_at_first", difference=difference)
    if reference.source is not None:
        return Cause.of("reference_of_another_job", run=Path(reference.mode).name, difference=difference)
    return Cause.of("undisturbed_runs_differ", difference=difference)


def judge_drill(drill: Drill, *, irreproducible: Cause | None = None, confirmed: int = 0) -> Verdict:
    """Pure but for the checkpoints' audit. `irreproducible` says how two undisturbed runs differed, if they did; `confirmed`,
    how many more agreed with the reference."""
    checks = run_checks(drill)
    attempts = attempt_summaries(drill.plan, drill.chaos)
    faults = fault_outcomes(drill.plan, drill.chaos)
    unfounded = _of_premises(checks, irreproducible, drill)
    divergence = first_divergence(drill)
    drifted = _of_drift(checks)
    blameless = unfounded or drifted
    if divergence and blameless:
        divergence = _without_blame(divergence, drill.chaos, blameless.reason)
    elif divergence and (injection := explained(divergence, drill)):
        divergence = replace(divergence, reason=Cause.of("corruption_injected", because="where", what=injection.what))
    corrupted = None if blameless else _of_corruption(checks, drill)
    unproven = unfounded if drill.chaos.outcome == "inexact_restore" and drill.reference.outcome == "completed" else None
    ruling = (
        corrupted
        or unproven
        or _of_outcomes(drill.reference, drill.chaos, checks)
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
        reason=ruling.reason,
        headline=ruling.reason.sentence if ruling.headline is None else ruling.headline,
        place=ruling.place,
        hint=ruling.reason.hint if ruling.hint is None else ruling.hint,
        outcome=leg.outcome,
        checks=checks,
        divergence=divergence,
        faults=faults,
        attempts=attempts,
        steps=drill.chaos_lineage.final_step,
        lost_steps=sum(attempt.lost_steps for attempt in attempts),
        warnings=warnings(drill),
        confirmed=confirmed,
    )


def _of_outcomes(reference: LegHistory, chaos: LegHistory, checks: Sequence[Check]) -> _Ruling | None:
    """A leg that did not complete settles the drill; a restore that chaosrun itself found inexact fails it."""
    for leg in (reference, chaos):
        if leg.outcome == "completed":
            continue
        if leg.finished is None:
            damaged = any(check.code == "records_damaged" and not _only_missing(reference, chaos) for check in checks)
            reason = Cause.of("not_finished", because="records_damaged" if damaged else None, leg=leg.name)
            return _Ruling(status="INCONCLUSIVE", reason=reason)
        message, hint = leg.finished.message or leg.outcome or "", leg.finished.hint
        if leg is chaos and leg.outcome == "inexact_restore":
            reason = _end_of(leg, message)
            return _Ruling(status="FAIL", reason=reason, hint=reason.hint or hint)
        exit_code = OUTCOME_EXIT_CODES.get(leg.outcome or "")
        if leg.outcome == "user_error" and (found := drift(leg)):
            headline = f"{leg.name} leg: the replicas had drifted apart ({found.what}) when {message}"
            reason = Cause.of("replicas_drift", because="undisturbed", leg=leg.name, what=found.what, aside="")
            return _Ruling(status="INCONCLUSIVE", reason=reason, headline=headline, exit_code=exit_code)
        return _Ruling(status="INCONCLUSIVE", reason=_end_of(leg, message), hint=hint, exit_code=exit_code)
    return None


def _only_missing(*legs: LegHistory) -> bool:
    """Nothing is wrong with the records of a run that has not come that far but that there are none yet."""
    return all(len(leg.problems) <= (not leg.layout.journal.exists()) for leg in legs)


def _end_of(leg: LegHistory, message: str) -> Cause:
    assert leg.finished is not None
    code = leg.finished.code or END_CODES[leg.outcome or "recovery_failed"]
    return Cause(code, {"leg": leg.name, "message": message})


def _of_premises(checks: Sequence[Check], irreproducible: Cause | None, drill: Drill) -> _Ruling | None:
    doubts = [check.cause for check in checks if check.name in PREMISES and check.cause is not None]
    # A mistake that was seen says more than that two runs differ.
    known = [cause for cause in doubts if cause.code in ("parameter_order", "file_of_another_leg")]
    found = next(iter([*known, *([irreproducible] if irreproducible else []), *doubts]), None)
    if found and found.code in ("job_not_repeatable", "undisturbed_runs_differ"):
        found = file_that_differs(drill) or found
    return found and _Ruling(status="INCONCLUSIVE", reason=found)


def _without_blame(divergence: Divergence, chaos: LegHistory, unfounded: Cause) -> Divergence:
    """Where the legs part is worth knowing in any case; after a restore, the cause seen there would blame what may be sound."""
    restored = {attempt.number for attempt in chaos.attempts if attempt.resume is not None}
    if divergence.attempt not in restored:
        return divergence
    return replace(divergence, reason=Cause("not_of_the_restore", unfounded.params, because=unfounded.code))


def _of_drift(checks: Sequence[Check]) -> _Ruling | None:
    """Replicas that part undisturbed fail the drill; a restore, which makes them one again, is not to blame for differing."""
    for check in checks:
        if check.cause and check.status == "fail" and check.code == "replicas_drift" and check.evidence["leg"] == "reference":
            return _Ruling(status="FAIL", reason=check.cause)
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
        headline = f"{_about(beside)}, which no corruption explains; besides, {seen.summary}"
        return _Ruling(status="FAIL", reason=_cause_of(beside), headline=headline)
    end = "" if drill.chaos.finished is None or outcome == "completed" else f"; then {drill.chaos.finished.message}"
    reason = Cause.of("corruption_injected")
    return _Ruling(status="FAIL", reason=reason, headline=f"{reason.sentence}: {seen.summary}{end}")


def _of_failures(checks: Sequence[Check], divergence: Divergence | None, drill: Drill) -> _Ruling | None:
    """A divergence fails the drill even if no check should have reported it."""
    if divergence:
        return _of_divergence(divergence, drill.spec.data.resume)
    failing = next((check for check in checks if check.status == "fail"), None)
    return failing and _Ruling(status="FAIL", reason=_cause_of(failing), headline=_about(failing))


def _about(check: Check) -> str:
    return f"{check.name}: {check.summary}"


def _cause_of(check: Check) -> Cause:
    assert check.cause is not None, f"{check.name} did not pass and says nothing"
    return check.cause


def _of_divergence(divergence: Divergence, protocol: DataResume) -> _Ruling:
    where = f"step {divergence.step}, rank {divergence.rank}, attempt {divergence.attempt}"
    tensor = f", {divergence.tensor}" if divergence.tensor else ""
    reason, seen = divergence.reason, f": {where}{tensor}"
    if divergence.kind == "data order":
        ids = [_around(*pair) for pair in permutations((divergence.expected, divergence.seen))]
        seen = f" in data order: {where}: samples {ids[0]} expected, {ids[1]} seen"
        if protocol != "seedable":  # what else there is to say of it, the divergence says
            reason = reason.explained("data_resume_inexact", protocol=protocol)
    return _Ruling(status="FAIL", reason=reason, headline=divergence.cause, place=f"first difference{seen}")


def _around(ids: Any, others: Any) -> str:
    """The sample ids of a batch, of a large one those from the first that is not the other's on."""
    if not isinstance(ids, list | tuple) or not isinstance(others, list | tuple):
        return str(ids)
    start = (first_difference(ids, others) or 0) if len(ids) > IDS_SHOWN else 0
    shown = [*(["…"] if start else []), *ids[start : start + IDS_SHOWN], *(["…"] if len(ids) > start + IDS_SHOWN else [])]
    return f"[{', '.join(map(str, shown))}]"


def _of_doubts(checks: Sequence[Check], drill: Drill) -> _Ruling | None:
    doubtful = next((check for check in checks if check.status == "inconclusive"), None)
    if doubtful:
        return _Ruling(status="INCONCLUSIVE", reason=_cause_of(doubtful), headline=_about(doubtful))
    lacking = sorted(required(drill) - {check.name for check in checks if check.status == "pass"})
    return _Ruling(status="INCONCLUSIVE", reason=Cause.of("checks_missing", checks=lacking)) if lacking else None


def _pass(drill: Drill, attempts: Sequence[AttemptSummary], *, landed: int) -> _Ruling:
    verify = drill.spec.verify
    restored = any(attempt.resumed_from for attempt in attempts)
    reason = Cause.of(
        "exact" if verify.weights.exact and verify.losses.exact else "within_tolerance",
        because=None if restored else "never_restored",
        steps=drill.chaos_lineage.final_step,
        ranks=drill.spec.workers,
        faults=landed,
        more="" if restored else "; no checkpoint was restored, every attempt began at the beginning",
    )
    return _Ruling(status="PASS", reason=reason)
