"""Whether and where faults have landed, while their drill still runs: judged as the verdict will judge, from the same files."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.landed import fault_problem, may_be_taken_back
from chaosrun.faults.observed import Observation
from chaosrun.records.codec import DamagedRecordError, read_records
from chaosrun.records.events import EVENTS, FaultObserved
from chaosrun.records.history import LegHistory, history_of
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.supervision import looks
from chaosrun.records.trace_reader import read_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    fault: str
    landed: bool = False
    attempt: int | None = None
    rank: int | None = None
    step: int | None = None
    """The last step that its rank recorded in that attempt; None without one."""
    pid: int | None = None
    evidence: str | None = None
    problem: str | None = None
    """Why it cannot be shown to have happened, once that is certain."""

    @property
    def is_certain(self) -> bool:
        return self.landed or self.problem is not None

    @property
    def sentence(self) -> str:
        if not self.landed:
            return f"has not landed: {self.problem}" if self.problem else "has not been seen to land yet"
        step = "before its first step" if self.step is None else f"after step {self.step}"
        return f"landed in attempt {self.attempt}: rank {self.rank} {step}, {self.evidence}"

    def to_json(self) -> dict[str, object]:
        """Without its id, which is the key."""
        return {key: value for key, value in asdict(self).items() if key != "fault"}


def landings(run: RunLayout, faults: Sequence[str], *, timeout_s: float) -> tuple[Landed, ...]:
    """`read_landings` as soon as all of it is certain, the run is no longer supervised, or `timeout_s` has passed."""
    found: tuple[Landed, ...] = ()
    for _ in looks(run, timeout_s):
        found = read_landings(run, faults)
        if all(each.is_certain for each in found):
            break
    return found


def read_landings(run: RunLayout, faults: Sequence[str]) -> tuple[Landed, ...]:
    """The state of each of these faults according to the chaos leg's files so far. Raises UsageError when they are damaged."""
    planned = {fault.id: fault for fault in FaultPlan.read(run.plan_json).faults}
    leg = run.leg(run.main)
    try:
        journal = list(read_records(leg.journal, EVENTS)) if leg.journal.exists() else []
    except DamagedRecordError as error:
        raise UsageError(
            f"the journal is damaged: {error.message}", hint=f"see `chaosrun status {run_argument(run)}`"
        ) from error
    history = history_of(leg, journal, read_ends, [])
    return tuple(landing(planned[fault], history) for fault in faults)


def landing(fault: Fault, history: LegHistory) -> Landed:
    """What the verdict would say about it if the leg ended now. The ends of the history's traces are enough."""
    seen = next((event for event in history.events(FaultObserved) if event.fault == fault.id), None)
    over = history.finished
    if seen is None:
        why = over and f"the leg ended before it came ({over.outcome.replace('_', ' ')})"
        return Landed(fault=fault.id, problem=why)
    problem = fault_problem(fault, history)
    if problem is not None:
        certain = over or (seen.found or {}).get("problem")
        return Landed(fault=fault.id, problem=problem.words if certain else None)
    if may_be_taken_back(fault, seen, history):
        return Landed(fault=fault.id)
    trace = history.trace(seen.attempt, seen.rank)
    return Landed(
        fault=fault.id,
        landed=True,
        attempt=seen.attempt,
        rank=seen.rank,
        step=(trace.steps.last or None) if trace else None,
        pid=seen.pid,
        evidence=Observation.of(fault, seen).words,
    )
