"""What happened, for the report: each planned fault, each attempt, lost steps, recovery times. Pure; judges nothing."""

from dataclasses import dataclass

from chaosrun.faults.fault import INJECTED, Fault, FaultPlan
from chaosrun.faults.landed import fault_problem, requests_of
from chaosrun.faults.observed import Observation
from chaosrun.records.events import FaultObserved, SupervisorResumed
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.traces import Source
from chaosrun.verify.alignment import passed_over
from chaosrun.verify.check import Drill
from chaosrun.verify.recovery_times import lost_steps, recoveries_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOutcome:
    """A fault of the plan; `verify.schema` says what the fields are."""

    id: str
    description: str
    rank: int
    phase: str | None
    step: int | None
    attempt: int | None
    landed: bool
    problem: str | None
    kind: str
    evidence: str | None = None

    @property
    def where(self) -> str | None:
        """ "attempt 1, step 6"; None of one that never fired."""
        at = "" if self.step is None else f", step {self.step}"
        return None if self.attempt is None else f"attempt {self.attempt}{at}"

    @property
    def shown(self) -> str:
        """The observation of it; or why it cannot be shown to have happened."""
        return self.problem or self.evidence or "landed"

    @property
    def seen(self) -> str:
        return self.shown if self.landed else f"NOT SHOWN: {self.shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    """An attempt of the chaos leg; `verify.schema` says what the fields are."""

    attempt: int
    resumed_from: str | None
    resumed_step: int
    first_step: int | None
    last_step: int | None
    ended_by: str
    lost_steps: int
    recovery_s: float | None
    ranks: int
    faults: tuple[str, ...] = ()
    source: Source | None = None
    passed_over: int | None = None


def fault_outcomes(plan: FaultPlan, chaos: LegHistory) -> tuple[FaultOutcome, ...]:
    return tuple(_fault_outcome(fault, chaos) for fault in plan.faults)


def _fault_outcome(fault: Fault, chaos: LegHistory) -> FaultOutcome:
    requested = next(iter(requests_of(fault, chaos)), None)
    found = fault_problem(fault, chaos)
    problem = found.words if found else None
    if requested is None and not fault.required and fault.source != INJECTED:
        problem = "its time had not come when the training ended"
    seen = next((record for record in chaos.events(FaultObserved) if record.fault == fault.id), None)
    return FaultOutcome(
        id=fault.id,
        description=fault.describe(),
        rank=fault.rank,
        phase=fault.phase,
        step=requested.step if requested else fault.at_step,
        attempt=requested.attempt if requested else None,
        landed=problem is None,
        problem=problem,
        kind=fault.kind,
        evidence=None if problem is not None or seen is None else Observation.of(fault, seen).words,
    )


def attempt_summaries(drill: Drill) -> tuple[AttemptSummary, ...]:
    plan, chaos = drill.plan, drill.chaos
    recovery_s = {recovery.attempt: recovery.total_s for recovery in recoveries_of(chaos)}
    lost = lost_steps(chaos.attempts)
    summaries: list[AttemptSummary] = []
    for attempt in chaos.attempts:
        faults = _faults_that_ended(attempt, plan, chaos)
        steps, own = attempt.steps, attempt.by == "script" and attempt.went_on
        newer = passed_over(drill, attempt) if drill.by_script and attempt.number > 1 and attempt.starts else None
        summaries.append(
            AttemptSummary(
                attempt=attempt.number,
                resumed_from=f"step {attempt.resume_step} (its own checkpoint)" if own else attempt.resume,
                resumed_step=attempt.resume_step,
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
                ended_by=", ".join(faults.values()) or _ended_by(attempt, chaos),
                lost_steps=lost.get(attempt.number, 0),
                recovery_s=recovery_s.get(attempt.number),
                ranks=len(attempt.starts),
                faults=tuple(faults),
                source=attempt.source,
                passed_over=newer and newer.step,
            )
        )
    return tuple(summaries)


def _faults_that_ended(attempt: Attempt, plan: FaultPlan, chaos: LegHistory) -> dict[str, str]:
    """Descriptions, by id, of the faults that ended a process. A fault that left a note ended none: its process lived on."""
    known = {fault.id: fault.describe() for fault in plan.faults}
    observed = (record for record in chaos.events(FaultObserved) if record.attempt == attempt.number)
    ended = (record.fault for record in observed if record.how != "note")
    return {fault: f"{fault} ({known.get(fault, 'not in the plan')})" for fault in ended}


def _ended_by(attempt: Attempt, chaos: LegHistory) -> str:
    if attempt.unplanned:
        death = attempt.unplanned[0]
        whose = "" if death.rank is None else f" of rank {death.rank}"
        return f"unplanned death{whose}: {death.reason}"
    if attempt is chaos.attempts[-1] and chaos.outcome is not None:
        return chaos.outcome
    if attempt.stopped is None and chaos.events(SupervisorResumed):
        return "the death of its supervisor"
    return attempt.stopped or "unknown"
