"""The records of all ranks at one step of an attempt of the chaos leg, in which a difference may be. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from chaosrun.records.history import Attempt
from chaosrun.records.traces import StartRecord, StepRecord
from chaosrun.verify.alignment import attempt_start
from chaosrun.verify.check import Drill
from chaosrun.verify.restored import reference_state, restored_difference, saved_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    drill: Drill
    attempt: Attempt
    step: int
    records: Mapping[int, StepRecord]

    @property
    def restored(self) -> bool:
        return self.attempt.went_on

    @property
    def first_after_restore(self) -> bool:
        return self.restored and all(self.step == self.attempt.start_of(rank) + 1 for rank in self.records)

    @property
    def restored_right(self) -> bool:
        """It restored the reference's state of that step, or the chaos leg's own save if the reference saved none."""
        if self.attempt.by == "script":
            found = attempt_start(self.drill, self.attempt)
            return found is not None and found.wrong in ((), ("rng",))  # random streams that matter have their own cause
        starts = [start for start in self.attempt.starts.values() if start.digests]
        known = starts and all(
            reference_state(self.drill, start.rank, start.position.step) or self._restored_own(start) for start in starts
        )
        return bool(known) and restored_difference(self.drill, self.attempt) is None

    def _restored_own(self, start: StartRecord) -> bool:
        saved = saved_before(self.drill, self.attempt, start.rank, start.position.step)
        return saved is not None and saved.digests == start.digests
