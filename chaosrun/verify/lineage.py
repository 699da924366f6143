"""The chain of attempt segments that leads to a leg's final state, and the tails that restarts cut off.

Pure. Judges nothing: gaps and repetitions are left visible for the checks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from chaosrun.records.history import LegHistory
from chaosrun.records.traces import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    steps: Mapping[int, Mapping[int, StepRecord]]
    """By rank, then by step."""
    tails: tuple[StepRecord, ...]
    """Steps that were done, rolled back, and (where the job went on) done again."""
    repeated: tuple[StepRecord, ...]
    """Records of a step that the same attempt, or the state it went on from, already holds: never legitimate."""

    @property
    def final_step(self) -> int:
        return max((max(by_step, default=0) for by_step in self.steps.values()), default=0)

    def at(self, rank: int, step: int) -> StepRecord | None:
        return self.steps.get(rank, {}).get(step)


def lineage(history: LegHistory, before: Lineage | None = None, began: int = 0) -> Lineage:
    """Follow each rank through the attempts: an attempt that went on from step r cuts off everything after r. A leg that was
    given the state of step `began` of another one has the steps up to there from `before`."""
    ranks = sorted({rank for attempt in history.attempts for rank in attempt.traces})
    steps: dict[int, dict[int, StepRecord]] = {}
    for rank in ranks:
        given = before.steps.get(rank, {}) if before else {}
        steps[rank] = {step: record for step, record in given.items() if step <= began}
    tails: list[StepRecord] = []
    repeated: list[StepRecord] = []
    for attempt in history.attempts:
        for rank in ranks:
            kept, trace = steps[rank], attempt.traces.get(rank)
            if attempt.by == "script" and not (trace and trace.start):
                continue  # it never began, and where it would have begun nobody knows
            base = attempt.start_of(rank)
            tails.extend(kept.pop(step) for step in sorted(kept) if step > base)
            for record in trace.steps if trace else ():
                if record.step in kept or record.step <= base:
                    repeated.append(record)
                else:
                    kept[record.step] = record
    return Lineage(steps=steps, tails=tuple(tails), repeated=tuple(repeated))
