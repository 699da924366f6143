"""Finds, while the job runs, a planned fault that can no longer happen, in cases that `plan.rules` must leave to chance.
Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chaosrun.faults.fault import INJECTED, Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, RESTORE_PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    fault: Fault
    why: str
    taken: bool = False
    """The script's own handler received the notice."""

    def message(self) -> str:
        return f"{self.fault.id} ({self.fault.describe()}) can no longer happen: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The state of a leg when its next attempt is about to begin."""

    attempt: int
    resume: int
    """The step of the checkpoint at which the next attempt resumes; 0: it starts from the beginning."""
    restores: int
    """How many earlier attempts resumed from a checkpoint."""
    every: int
    last: int | None
    """The job's last step, where it is known."""
    struck: Mapping[str, int | None]
    """The faults that have struck, by id, with their attempt; None if the attempt is not known."""
    observed: Collection[str]
    ended_by: str
    """What ended the previous attempt, in words."""


def first_missed(faults: Sequence[Fault], outlook: Outlook) -> Missed | None:
    """The first fault of the plan that can no longer happen after an attempt is over."""
    planned = [fault for fault in faults if fault.required and fault.source != INJECTED]
    for fault in planned:
        if fault.id in outlook.struck and fault.id not in outlook.observed:
            struck = outlook.struck[fault.id]
            during = "an earlier attempt" if struck is None else f"attempt {struck}"
            return Missed(fault=fault, why=f"it struck in {during}, and {outlook.ended_by} before it could be seen")
    pending = [fault for fault in faults if fault.id not in outlook.struck]
    due = _Due(outlook, pending)
    for fault in planned:
        if fault.id not in outlook.struck and (why := due.problem(fault)):
            return Missed(fault=fault, why=why)
    return None


class _Due:
    """Which points the next attempt, and those to which the remaining faults lead, can still reach."""

    def __init__(self, outlook: Outlook, pending: Sequence[Fault]) -> None:
        self._at = outlook
        self._may_fall_back = any(fault.facts.damages for fault in pending)
        self._noticed = any(fault.facts.notice for fault in pending)
        self._ending = [fault for fault in pending if fault.facts.ends_attempt]
        self._ending_now = [fault for fault in self._ending if not self._waits_for_restart(fault)]

    def problem(self, fault: Fault) -> str | None:
        if fault.phase is None:
            return None
        found = next(self._passed(fault), None)
        if found is not None:
            return f"{self._at.ended_by}, and {found}"
        needed = self._waits_for_restart(fault)
        if needed and not any(_key(each) != _key(fault) for each in self._ending_now):
            return f"{self._at.ended_by}, and no fault is left that ends attempt {self._at.attempt}"
        if needed > len({_key(each) for each in self._ending} - {_key(fault)}):
            return f"{self._at.ended_by}, and too few faults are left that end an attempt"
        return None

    def _passed(self, fault: Fault) -> Iterator[str]:
        """Why the fault's trigger point has been passed for good."""
        at, step = self._at, fault.at_step
        if fault.attempt is not None and fault.attempt < at.attempt:
            yield f"attempt {fault.attempt} is over"
        if self._may_fall_back:
            return
        on = f"the job resumes from the checkpoint of step {at.resume}" if at.resume else "the job resumes from the beginning"
        if step is not None and (step < at.resume or (step == at.resume and fault.phase not in RESTORE_PHASES)):
            yield on
        saves = step is not None and (step % at.every == 0 or step == at.last or self._noticed)
        if step is not None and fault.phase in CHECKPOINT_PHASES and not saves:
            yield f"no checkpoint will be saved at step {step}"
        if step is None and at.last is not None and fault.occurrence > self._left(fault, at.last):
            yield on

    def _left(self, fault: Fault, last: int) -> int:
        """How often the job reaches the fault's phase after the checkpoint; if unknown, often enough for the fault."""
        assert fault.phase is not None
        if fault.phase in RESTORE_PHASES or fault.phase == "rendezvous" or fault.phase.startswith("checkpoint.fsync"):
            return fault.occurrence
        if fault.phase in CHECKPOINT_PHASES:
            return last // self._at.every - self._at.resume // self._at.every + bool(last % self._at.every) + self._noticed
        return last - self._at.resume

    def _waits_for_restart(self, fault: Fault) -> int:
        """The least number of attempts that must end before the fault can strike."""
        at = self._at
        needed = max(0, (fault.attempt or 0) - at.attempt)
        if fault.phase == "rendezvous":
            needed = max(needed, fault.occurrence - at.attempt)
        elif fault.phase in RESTORE_PHASES:
            if fault.at_step is not None:
                needed = max(needed, int(fault.at_step != at.resume))
            else:
                needed = max(needed, fault.occurrence - at.restores - (at.resume > 0))
        return needed


def _key(fault: Fault) -> str:
    return fault.group or fault.id
