"""What a fault of the storage must have led to: a damage was met, and of a commit that failed nothing came.

Pure.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from chaosrun.faults.fault import Fault
from chaosrun.records.events import AttemptStarting, FaultObserved, FaultRequested, StagingCleared
from chaosrun.records.history import Attempt, LegHistory

DAMAGES = frozenset({"truncate", "zero_tail", "flip_file_bit", "missing_file", "missing_manifest", "foreign_manifest"})
"""Kinds that spoil a committed checkpoint."""


class Shortfall(NamedTuple):
    """Why the storage does not bear out that a fault happened."""

    code: Literal["unread", "used", "committed"]
    problem: str
    """A sentence for people."""


def storage_problem(fault: Fault, seen: FaultObserved, chaos: LegHistory) -> str | None:
    found = storage_shortfall(fault, seen, chaos)
    return found and found.problem


def storage_shortfall(fault: Fault, seen: FaultObserved, chaos: LegHistory) -> Shortfall | None:
    """None when the storage bears it out, and for faults of other kinds."""
    found = seen.found or {}
    later = [attempt for attempt in chaos.attempts if attempt.number > seen.attempt]
    if fault.kind in DAMAGES:
        return _unmet_damage(str(found.get("checkpoint")), chaos, later)
    if fault.kind == "stale_staging":
        name = str(found.get("staged"))
        if any(name in record.names for record in _since(chaos, StagingCleared, seen)):
            return None
        why = "it was not there at the next start" if later else "no attempt came after it"
        return Shortfall("unread", f"nobody cleared {name} away: {why}")
    if fault.kind == "failed_rename" and later:
        saved = [record.step or 0 for record in chaos.events(FaultRequested) if record.fault == fault.id][-1]
        if later[0].resume_step >= saved:
            return Shortfall("committed", f"the checkpoint of step {saved} was committed all the same")
    return None


def _unmet_damage(name: str, chaos: LegHistory, later: list[Attempt]) -> Shortfall | None:
    if any(name in attempt.quarantined for attempt in later):
        return None
    if any(attempt.resume == name for attempt in later):
        return Shortfall("used", f"{name} was damaged, and an attempt went on from it")
    if not later:
        return Shortfall("unread", f"{name} was damaged, but no attempt started after that, so nobody read it")
    why = "the attempts after that went on from newer checkpoints, so nobody read it"
    return Shortfall("unread", f"{name} was damaged, but {why}")


def _since(chaos: LegHistory, event: type[StagingCleared], seen: FaultObserved) -> Iterator[StagingCleared]:
    """Records of an event from after the start of the attempt that the fault struck."""
    started = next(record.seq for record in chaos.events(AttemptStarting) if record.attempt == seen.attempt)
    return (record for record in chaos.events(event) if record.seq > started)
