"""The records of all ranks at one step of an attempt of the chaos leg, in which a difference may be. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from chaosrun.records.history import Attempt
from chaosrun.records.traces import StepRecord
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
        drill, attempt = self.drill, self.attempt
        starts = [start for start in attempt.starts.values() if start.digests]
        for start in starts:
            own = saved_before(drill, attempt, start.rank, start.position.step)
            if not reference_state(drill, start.rank, start.position.step) and (own is None or own.digests != start.digests):
                return False
        return bool(starts) and restored_difference(drill, attempt) is None
