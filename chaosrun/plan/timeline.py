"""At which steps a job saves checkpoints, and in which order a rank reaches its points. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, RESTORE_PHASES
from chaosrun.spec.model import SHORTEST_HANG_S, JobSpec

Moment = tuple[int, int]
"""A step, and a slot within it. Within an attempt, the smaller of two moments comes first."""

_SLOTS: Mapping[str, int] = {
    "fetch": 0,
    "forward": 1,
    "reduce": 2,
    "optimizer": 3,
    "record": 4,
    "checkpoint.begin": 5,
    "checkpoint.file": 6,
    "checkpoint.fsync.before": 7,
    "checkpoint.fsync.after": 8,
    # 9, 10: fsyncs of the manifest and of the checkpoint's directory
    "checkpoint.precommit": 11,
    "checkpoint.rename.before": 12,
    "checkpoint.rename.after": 13,
    # 14, 15: fsyncs of the directories around, after the rename
    "checkpoint.postcommit": 16,
    "checkpoint.retention": 17,
    "step": 18,
    "save": 19,
}
_REDUCE, _MANIFEST, _PRECOMMIT, _RENAMED, _POSTCOMMIT, END_OF_STEP = 2, 9, 11, 13, 16, 18
_LATE = 20
"""Added to the slots of a checkpoint that is not due by its step: it is saved after the step's faults, not before them."""
_LEAVING = 50
"""The slot in which ranks leave on a notice, with a checkpoint of that step."""
_MANIFEST_FILES = frozenset({"MANIFEST.json", "."})
_FOLDERS_AROUND = frozenset({"checkpoints", "staging"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    workers: int
    every: int
    last: int | None
    """The job's last step; None: only the script knows."""
    patience_s: float = SHORTEST_HANG_S
    """A rank stopped for less than this is certainly not judged to hang."""

    @classmethod
    def of(cls, spec: JobSpec) -> "Timeline":
        patience_s = spec.recovery.hang_timeout or SHORTEST_HANG_S
        return cls(workers=spec.workers, every=spec.checkpoint.every_steps, last=spec.max_steps, patience_s=patience_s)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is saved at this step when no fault strikes."""
        return step % self.every == 0 or step == self.last

    @property
    def first_save(self) -> int:
        return self.every if self.last is None else min(self.every, self.last)

    def reaches(self, step: int) -> bool:
        return self.last is None or step <= self.last

    def newest_save(self, at_most: int) -> int:
        """The newest step with a checkpoint, up to this one; 0 for none."""
        return at_most if at_most == self.last else at_most - at_most % self.every

    def newest(self, moment: Moment) -> int:
        """The step of the newest checkpoint when a job has reached this moment; 0 for none."""
        step, slot = moment
        if slot >= _LEAVING:
            return step
        committed = slot >= (_RENAMED + _LATE if step % self.every else _RENAMED)
        return step if self.saves(step) and committed else self.newest_save(step - 1)

    def moment(self, fault: Fault) -> Moment | None:
        """When the job first reaches the fault's point; None if that depends on other faults, or on the clock."""
        step, phase = fault.at_step, fault.phase
        if phase is None or phase == "rendezvous" or phase in RESTORE_PHASES or (phase == "save" and step is None):
            return None
        synced = phase.startswith("checkpoint.fsync")
        if fault.occurrence > 1 and (step is None or synced):
            return None
        if step is None and fault.attempt not in (None, 1):
            return None
        if step is None:
            step = self.first_save if phase in CHECKPOINT_PHASES else 1
        slot = _SLOTS[phase]
        if synced and fault.target in _MANIFEST_FILES:
            slot += _MANIFEST - _SLOTS["checkpoint.fsync.before"]
        elif synced and fault.target in _FOLDERS_AROUND:
            slot += _RENAMED + 1 - _SLOTS["checkpoint.fsync.before"]
        return step, slot + (_LATE if phase in CHECKPOINT_PHASES and step % self.every else 0)

    def leaving(self, moment: Moment) -> Moment:
        """When the ranks leave on a notice: after the following step; a single worker leaves at once."""
        return moment[0] + (self.workers > 1), _LEAVING

    def race(self, one: Moment, other: Moment) -> bool:
        """Whether either of two ranks may reach its moment first, because no collective lies between the moments."""
        (first, last), (other_first, other_last) = self._between(one), self._between(other)
        return first <= other_last and other_first <= last

    def _between(self, moment: Moment) -> tuple[int, int]:
        """The collectives between which a rank is: the number of the one before it, and of the last one that other ranks may
        pass. A step has four: its all-reduce and, for a checkpoint, the gathering of hashes and the barriers around the
        rename."""
        step, slot = moment
        if slot <= _REDUCE:
            before = 4 * (step - 1) + (3 if self.saves(step - 1) else 0)
            # A rank inside the all-reduce has sent its part, so the others may complete it.
            return before, 4 * step if slot == _REDUCE else before
        if step % self.every:
            slot = 0 if slot == END_OF_STEP else slot - _LATE
        stage = 3 if slot >= _POSTCOMMIT else 2 if slot > _PRECOMMIT else 1 if slot >= _MANIFEST else 0
        return 4 * step + stage, 4 * step + stage
