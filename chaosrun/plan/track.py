"""Where a job's checkpoints lie, in which order a rank comes by its points, and between which collectives. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, RESTORE_PHASES
from chaosrun.spec.model import SHORTEST_HANG_S, JobSpec

Place = tuple[int, int]
"""A moment of an attempt: a step, and a slot within it. Of two places of one attempt the smaller comes first."""

_SLOTS: Mapping[str, int] = {
    "rendezvous": 0,
    "restore.begin": 1,
    "restore.end": 2,
    "fetch": 3,
    "forward": 4,
    "reduce": 5,
    "optimizer": 6,
    "record": 7,
    "checkpoint.begin": 8,
    "checkpoint.file": 9,
    "checkpoint.fsync.before": 10,
    "checkpoint.fsync.after": 11,
    # 12, 13: fsyncs of the manifest and of the checkpoint's directory
    "checkpoint.precommit": 14,
    "checkpoint.rename.before": 15,
    "checkpoint.rename.after": 16,
    # 17, 18: fsyncs of the directories around, after the rename
    "checkpoint.postcommit": 19,
    "checkpoint.retention": 20,
    "step": 21,
}
RENDEZVOUS, RESTORED, _REDUCE, AFTER_THE_STEP = (_SLOTS[phase] for phase in ("rendezvous", "restore.end", "reduce", "step"))
_MANIFEST, _PRECOMMIT, _RENAMED, _POSTCOMMIT = 12, 14, 16, 19
_LATE = 20
"""Added to the slots of a checkpoint that is not due by its step: it is saved after the step's faults, not before them."""
LEAVING = 50
"""Of ranks that leave on notice."""
_MANIFEST_TARGETS = frozenset({"MANIFEST.json", "."})
_LATER_TARGETS = frozenset({"checkpoints", "staging"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    workers: int
    every: int
    last: int | None
    """The job's last step; None: only the script knows."""
    keep: int
    patience_s: float = SHORTEST_HANG_S
    """How long a stopped rank is certain not to be taken for hung."""

    @classmethod
    def of(cls, spec: JobSpec) -> "Track":
        every, keep = spec.checkpoint.every_steps, spec.checkpoint.keep
        patience_s = spec.recovery.hang_timeout or SHORTEST_HANG_S
        return cls(workers=spec.workers, every=every, last=spec.max_steps, keep=max(2, keep), patience_s=patience_s)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is saved at this step, undisturbed."""
        return step % self.every == 0 or step == self.last

    @property
    def first_save(self) -> int:
        return self.every if self.last is None else min(self.every, self.last)

    def reaches(self, step: int) -> bool:
        return self.last is None or step <= self.last

    def newest_save(self, at_most: int) -> int:
        """The newest step with a checkpoint, up to this one; 0 for none."""
        return at_most if at_most == self.last else at_most - at_most % self.every

    def nth_save(self, resume: int, number: int, extra: int | None) -> int | None:
        """The step of the n-th checkpoint of an attempt that goes on from step `resume`; None when it does not come to that.

        `extra`: a step with a checkpoint that is not due by its step.
        """
        step = resume - resume % self.every + number * self.every
        unusual = [late for late in (extra, self.last) if late is not None and late % self.every and late > resume]
        # Each of them makes what comes after it one more.
        for late in sorted(set(unusual)):
            if late < step:
                step = max(late, step - self.every)
        return step if self.reaches(step) else None

    def newest(self, place: Place, resume: int, extra: int | None) -> int:
        """The newest checkpoint's step when an attempt that went on from `resume` has come to `place`; 0 for none."""
        step, _ = place
        saved = step > resume and (self.saves(step) or step == extra) and self.commits(place)
        return max(resume, step if saved else self.newest_save(step - 1))

    def due(self, fault: Fault, *, attempt: int, resume: int, restores: int, extra: int | None) -> Place | None:
        """Where an attempt comes to the fault's moment; None when it does not. `restores`: how many so far."""
        if fault.attempt not in (None, attempt):
            return None
        if fault.phase == "rendezvous":
            return (0, RENDEZVOUS) if attempt >= fault.occurrence else None
        if fault.phase in RESTORE_PHASES:
            agrees = restores >= fault.occurrence if fault.at_step is None else fault.at_step == resume
            return self.place(fault, resume) if resume and agrees else None
        step = fault.at_step
        if fault.phase in CHECKPOINT_PHASES:
            if step is None:
                # Of its many fsyncs nobody knows the number: any may belong to the first checkpoint.
                often = fault.phase.startswith("checkpoint.fsync")
                step = self.nth_save(resume, 1 if often else fault.occurrence, extra)
            elif not self.saves(step) and step != extra:
                return None
        elif step is None:
            step = resume + fault.occurrence
        return self.place(fault, step) if step is not None and step > resume and self.reaches(step) else None

    def place(self, fault: Fault, step: int) -> Place:
        phase = fault.phase or "step"
        slot = _SLOTS[phase]
        if phase.startswith("checkpoint.fsync"):
            late = int(phase.endswith("after"))
            if fault.target in _MANIFEST_TARGETS:
                slot = _MANIFEST + late
            elif fault.target in _LATER_TARGETS:
                slot = _RENAMED + 1 + late
        if phase in CHECKPOINT_PHASES and step % self.every:
            slot += _LATE
        return step, slot

    def commits(self, place: Place) -> bool:
        """Whether the checkpoint of this step, if one is saved, has been committed here."""
        step, slot = place
        return slot >= (_RENAMED + _LATE if step % self.every else _RENAMED)

    def epoch(self, place: Place, resume: int) -> tuple[int, int]:
        """Between which collectives a rank is: the number of the one before, and of the last that others may get past.

        Of each step four: its all-reduce; of a checkpoint the gathering of hashes and the barriers around the rename.
        """
        step, slot = place
        if slot == RENDEZVOUS:
            return -1, -1
        if slot <= _REDUCE:
            before = resume if slot <= RESTORED else step - 1
            tail = 4 * before + (3 if before == resume or self.saves(before) else 0)
            # Who is inside the all-reduce has launched its share: the others may come out of it.
            return tail, 4 * step if slot == _REDUCE else tail
        number = 4 * step + self._stage(step, slot)
        return number, number

    def _stage(self, step: int, slot: int) -> int:
        if step % self.every:
            if slot == AFTER_THE_STEP:
                return 0
            slot -= _LATE
        return 3 if slot >= _POSTCOMMIT else 2 if slot > _PRECOMMIT else 1 if slot >= _MANIFEST else 0
