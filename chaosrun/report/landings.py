"""Where faults have landed, as the files of a running drill show it: for who has just asked for one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.observed import Observation
from chaosrun.records.codec import DamagedRecordError, read_records
from chaosrun.records.events import EVENTS, FaultObserved, LegFinished
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import read_object
from chaosrun.records.trace import TornRecordError
from chaosrun.report.progress import last_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    fault: str
    landed: bool = False
    attempt: int | None = None
    rank: int | None = None
    step: int | None = None
    """The last that its rank recorded in that attempt; None when there is none."""
    pid: int | None = None
    evidence: str | None = None
    problem: str | None = None
    """Why it cannot be shown to have happened, once that is certain."""

    @property
    def settled(self) -> bool:
        return self.landed or self.problem is not None

    @property
    def sentence(self) -> str:
        if not self.landed:
            return f"has not landed: {self.problem}" if self.problem else "has not been seen to land yet"
        step = "before its first step" if self.step is None else f"after step {self.step}"
        return f"landed in attempt {self.attempt}: rank {self.rank} {step}, {self.evidence}"

    def to_json(self) -> dict[str, Any]:
        """But for its id, under which it is known."""
        return {key: value for key, value in asdict(self).items() if key != "fault"}


def read_landings(run: RunLayout, faults: Sequence[str]) -> tuple[Landed, ...]:
    """Of each of these faults what the chaos leg's journal says so far. Raises UsageError when the run's files are damaged."""
    planned = {fault.id: fault for fault in FaultPlan.from_json(read_object(run.plan_json)).faults}
    leg = run.leg("chaos")
    try:
        events = list(read_records(leg.journal, EVENTS)) if leg.journal.exists() else []
    except DamagedRecordError as error:
        raise UsageError(f"the journal is damaged: {error}", hint=f"see `chaosrun status {run_argument(run)}`") from error
    found = {fault: Landed(fault=fault) for fault in faults}
    for event in events:
        if isinstance(event, FaultObserved) and event.fault in found:
            found[event.fault] = _landed(run, planned[event.fault], event)
    if events and isinstance(over := events[-1], LegFinished):
        why = f"the leg ended before it came ({over.outcome.replace('_', ' ')})"
        found = {name: each if each.settled else replace(each, problem=why) for name, each in found.items()}
    return tuple(found.values())


def _landed(run: RunLayout, fault: Fault, record: FaultObserved) -> Landed:
    problem = (record.found or {}).get("problem")
    if problem is not None:
        return Landed(fault=fault.id, problem=str(problem))
    attempt, rank = record.attempt, record.rank
    try:
        seen = last_step(run.leg("chaos").attempt(attempt).trace(rank))
    except TornRecordError:
        seen = None  # the verdict will tell
    return Landed(
        fault=fault.id,
        landed=True,
        attempt=attempt,
        rank=rank,
        step=None if seen is None else seen.step,
        pid=record.pid,
        evidence=Observation.of(fault, record).words,
    )
