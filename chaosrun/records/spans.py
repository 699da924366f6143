"""The steps of a trace, read from their file on access."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaosrun.records.traces import Block, RankTrace, StepRecord


@dataclass(frozen=True, slots=True)
class Span:
    """Successive steps of one block of a trace."""

    first: int
    last: int
    block: "Block"
    trace: "RankTrace"

    def at(self, step: int) -> "StepRecord":
        """The record of a step. Raises DamagedRecordError if the file has changed."""
        count = 1 if step == self.block.first else self.last - self.block.first + 1
        return self.trace.read(self.block, count)[step - self.block.first]

    def part(self, first: int, last: int) -> "Span":
        return Span(max(first, self.first), min(last, self.last), self.block, self.trace)

    @property
    def steps(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def digest(self) -> bytes:
        """The block's digest; empty for a part of a block."""
        return self.block.digest if self.steps == self.block.steps else b""

    @property
    def knows_ids(self) -> bool:
        """Whether the sample ids of every micro-batch are known."""
        return self.block.knows_ids or (not self.digest and all(self.at(step).knows_ids for step in self.steps))

    def equals(self, other: "Span") -> bool:
        """Whether both hold the same steps, with equal digests of everything that is compared."""
        return self.steps == other.steps and self.digest == other.digest != b""


class StepsByNumber(Mapping[int, "StepRecord"]):
    """Records by step, each step once, read from their files on access."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans: list[Span] = []
        for span in spans:
            self.add(span)

    def span_of(self, step: int) -> Span | None:
        place = bisect_right(self.spans, step, key=lambda span: span.first) - 1
        return self.spans[place] if place >= 0 and step <= self.spans[place].last else None

    def over(self, steps: range) -> Iterator[Span]:
        """The spans, cut to these steps."""
        place = max(0, bisect_right(self.spans, steps.start, key=lambda span: span.first) - 1)
        found = takewhile(lambda span: span.first < steps.stop, self.spans[place:])
        return (span.part(steps.start, steps.stop - 1) for span in found if span.last >= steps.start)

    def __getitem__(self, step: int) -> "StepRecord":
        if span := self.span_of(step):
            return span.at(step)
        raise KeyError(step)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.span_of(step) is not None

    def __iter__(self) -> Iterator[int]:
        return (step for span in self.spans for step in span.steps)

    def __len__(self) -> int:
        return sum(len(span.steps) for span in self.spans)

    @property
    def last(self) -> int:
        """The last step; 0 if there is none."""
        return self.spans[-1].last if self.spans else 0

    def add(self, span: Span) -> list[int]:
        """Add those steps of a span that are missing; returns the steps that were there already."""
        held = [step for step in span.steps if step in self] if span.first <= self.last else []
        for new in [span] if not held else [span.part(step, step) for step in span.steps if step not in held]:
            self.spans.insert(bisect_right(self.spans, new.first, key=lambda span: span.first), new)
        return held
