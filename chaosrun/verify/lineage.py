"""The chain of attempt segments that leads to a leg's final state, and the tails that restarts cut off. Pure.

Gaps and repetitions are reported by the checks. Steps are read from their files only when they are needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from chaosrun.records.history import LegHistory
from chaosrun.records.spans import Span, StepsByNumber
from chaosrun.records.traces import StepRecord


@dataclass(frozen=True, kw_only=True)
class Lineage:
    steps: Mapping[int, StepsByNumber]
    """By rank."""
    cut_off: Sequence[Span] = ()
    """Steps that were done, rolled back and (if the job resumed) done again."""
    repeated: tuple[StepRecord, ...] = ()
    """Records of a step that the same attempt, or the state that it resumed from, already includes: always an error."""

    @cached_property
    def final_step(self) -> int:
        return max((steps.last for steps in self.steps.values()), default=0)

    @property
    def records(self) -> Iterator[StepRecord]:
        return (record for steps in self.steps.values() for record in steps.values())

    @property
    def tails(self) -> Iterator[StepRecord]:
        """The records of the steps in `cut_off`."""
        return (span.at(step) for span in self.cut_off for step in span.steps)

    def at(self, rank: int, step: int) -> StepRecord | None:
        return self.of(rank).get(step)

    def of(self, rank: int) -> StepsByNumber:
        """The steps of a rank; empty if it left no trace."""
        return self.steps.get(rank, StepsByNumber())

    def missing(self, rank: int, final: int) -> list[int]:
        """The missing ones of steps 1 to `final`."""
        held = self.of(rank)
        return [] if held.last == len(held) == final else [step for step in range(1, final + 1) if step not in held]

    def unlike(self, span: Span) -> Iterator[tuple[StepRecord, StepRecord]]:
        """Pairs of records (the rank's own, the span's) of the steps that both have, without blocks whose digests are equal."""
        for held in self.of(span.trace.rank).over(span.steps):
            if not held.equals(span):
                yield from ((held.at(step), span.at(step)) for step in held.steps)

    def common(self, span: Span) -> int:
        """How many of these steps its rank has."""
        return sum(len(held.steps) for held in self.of(span.trace.rank).over(span.steps))


def lineage(history: LegHistory, before: Lineage | None = None, began: int = 0) -> Lineage:
    """Follow each rank through the attempts: an attempt that resumed at step r cuts off everything after r. A leg that started
    from the state of step `began` of another leg takes the steps up to there from `before`."""
    ranks = sorted({rank for attempt in history.attempts for rank in attempt.traces})
    chains = {rank: StepsByNumber(before.of(rank).over(range(1, began + 1)) if before else ()) for rank in ranks}
    tails: list[Span] = []
    repeated: list[StepRecord] = []
    for attempt in history.attempts:
        for rank in ranks:
            kept, trace = chains[rank], attempt.traces.get(rank)
            if attempt.by == "script" and not (trace and trace.start):
                continue  # it never began to train, so its first step is unknown
            base = attempt.start_of(rank)
            tails += kept.over(range(base + 1, kept.last + 1))
            kept.spans = [*kept.over(range(1, base + 1))]
            for span in trace.spans if trace else ():
                early = range(span.first, min(span.last, base) + 1)
                late = span.part(base + 1, span.last)
                held = kept.add(late) if late.steps else []
                repeated += [span.at(step) for step in (*early, *held)]
    return Lineage(steps=chains, cut_off=tails, repeated=tuple(repeated))
