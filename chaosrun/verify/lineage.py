"""The chain of attempt segments that leads to a leg's final state, and the tails that restarts cut off.

Pure. Judges nothing: gaps and repetitions are left visible for the checks. Steps stay in their files until somebody looks at
them: where two chains hold blocks of the same digest, nobody has to.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from chaosrun.records.history import LegHistory
from chaosrun.records.traces import Block, RankTrace, StepRecord


@dataclass(frozen=True, slots=True)
class Span:
    """Successive steps of one block."""

    first: int
    last: int
    block: Block
    trace: RankTrace

    def at(self, step: int) -> StepRecord:
        return self.trace.steps.of(self.block)[step - self.block.first]

    def part(self, first: int, last: int) -> "Span":
        return Span(max(first, self.first), min(last, self.last), self.block, self.trace)

    @property
    def steps(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def is_whole(self) -> bool:
        return (self.first, self.last) == (self.block.first, self.block.last)

    @property
    def knows_ids(self) -> bool:
        """Of every micro-batch of its steps."""
        return self.block.knows_ids or (not self.is_whole and all(self.at(step).knows_ids for step in self.steps))

    def equals(self, other: "Span") -> bool:
        """Both hold the same steps, whose records are alike in all that is compared, by their digests."""
        same = self.is_whole and other.is_whole and self.block.steps == other.block.steps
        return same and self.block.digest == other.block.digest != b""


class Chain(Mapping[int, StepRecord]):
    """One rank's records by step, each step once."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span_of(self, step: int) -> Span | None:
        place = bisect_right(self.spans, step, key=lambda span: span.first) - 1
        return self.spans[place] if place >= 0 and step <= self.spans[place].last else None

    def over(self, steps: range) -> Iterator[Span]:
        """The parts of it that hold any of these steps."""
        place = max(0, bisect_right(self.spans, steps.start, key=lambda span: span.first) - 1)
        for span in self.spans[place:]:
            if span.first >= steps.stop:
                return
            if span.last >= steps.start:
                yield span

    def __getitem__(self, step: int) -> StepRecord:
        span = self.span_of(step)
        if span is None:
            raise KeyError(step)
        return span.at(step)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.span_of(step) is not None

    def __iter__(self) -> Iterator[int]:
        return (step for span in self.spans for step in span.steps)

    def __len__(self) -> int:
        return sum(len(span.steps) for span in self.spans)

    @property
    def last(self) -> int:
        """0 where there is no step."""
        return self.spans[-1].last if self.spans else 0

    def missing(self, final: int) -> list[int]:
        """Of steps 1 to `final`."""
        if self.last == len(self) == final:
            return []
        return [step for step in range(1, final + 1) if step not in self]

    def common(self, steps: range) -> int:
        """How many of these steps it has."""
        return sum(len(span.part(steps.start, steps.stop - 1).steps) for span in self.over(steps))

    def cut(self, base: int) -> list[Span]:
        """Take off what comes after a step."""
        off = [span.part(base + 1, span.last) for span in self.spans if span.last > base]
        self.spans = [span.part(span.first, base) for span in self.spans if span.first <= base]
        return off

    def add(self, span: Span) -> list[int]:
        """Take on what is not there yet; the steps that are."""
        held = [step for step in span.steps if step in self] if span.first <= self.last else []
        for new in [span] if not held else [span.part(step, step) for step in span.steps if step not in held]:
            self.spans.insert(bisect_right(self.spans, new.first, key=lambda span: span.first), new)
        return held


@dataclass(frozen=True, kw_only=True)
class Lineage:
    steps: Mapping[int, Mapping[int, StepRecord]]
    """By rank, then by step."""
    cut_off: Sequence[Span] = ()
    """Steps that were done, rolled back, and (where the job went on) done again."""
    repeated: tuple[StepRecord, ...] = ()
    """Records of a step that the same attempt, or the state it went on from, already holds: never legitimate."""

    @cached_property
    def final_step(self) -> int:
        return max((self.chain(rank).last for rank in self.steps), default=0)

    @property
    def tails(self) -> Iterator[StepRecord]:
        """Of each step in `cut_off`, its record."""
        return (span.at(step) for span in self.cut_off for step in span.steps)

    def at(self, rank: int, step: int) -> StepRecord | None:
        return self.steps.get(rank, {}).get(step)

    def chain(self, rank: int) -> Chain:
        """Empty for a rank that left no trace."""
        found = self.steps.get(rank, Chain())
        assert isinstance(found, Chain), "of a leg, as it was read"
        return found


def lineage(history: LegHistory, before: Lineage | None = None, began: int = 0) -> Lineage:
    """Follow each rank through the attempts: an attempt that went on from step r cuts off everything after r. A leg that was
    given the state of step `began` of another one has the steps up to there from `before`."""
    ranks = sorted({rank for attempt in history.attempts for rank in attempt.traces})
    chains = {rank: Chain() for rank in ranks}
    if before:
        for rank in ranks:
            chains[rank].spans = [span.part(span.first, began) for span in before.chain(rank).over(range(1, began + 1))]
    tails: list[Span] = []
    repeated: list[StepRecord] = []
    for attempt in history.attempts:
        for rank in ranks:
            kept, trace = chains[rank], attempt.traces.get(rank)
            if attempt.by == "script" and not (trace and trace.start):
                continue  # it never began, and where it would have begun nobody knows
            base = attempt.start_of(rank)
            tails += kept.cut(base)
            for span in spans_of(trace):
                early = range(span.first, min(span.last, base) + 1)
                late = span.part(base + 1, span.last)
                held = kept.add(late) if late.steps else []
                repeated += [span.at(step) for step in (*early, *held)]
    return Lineage(steps=chains, cut_off=tails, repeated=tuple(repeated))


def spans_of(trace: RankTrace | None) -> list[Span]:
    """All of a trace, in the order in which it was written."""
    return [Span(block.first, block.last, block, trace) for block in trace.steps.blocks] if trace else []
