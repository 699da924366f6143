"""Whether the ranks' replicas of the model are one: after every restore, after every step, in both legs (hazard C8). Pure.

Data parallelism keeps replicas equal by averaging gradients. Where DDP does not average them, each rank trains a model of its
own, with or without faults: that is the script's doing, whichever leg shows it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.traces import Block, StartRecord, StepRecord
from chaosrun.verify.check import Check, Drill, failed, inconclusive, passed, skipped
from chaosrun.verify.compare import first_difference, unlike_orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The first place in a leg where one rank's weights are not those of the others."""

    leg: str
    attempt: int
    step: int
    """The weights are those after it: 0 before the first."""
    rank: int
    other: int
    """A rank of those that agree."""
    tensor: str | None
    at_start: bool
    """Not trained apart: begun, or restored, apart."""
    fingerprints: Mapping[str, str]
    """By rank."""

    @property
    def what(self) -> str:
        """Without the leg: "rank 1 has other weights than rank 0 after step 1 of attempt 1, first in net1.weight"."""
        when = f"after step {self.step} of attempt {self.attempt}"
        if self.at_start:
            when = f"at the start of attempt {self.attempt}, from step {self.step}"
        first = f", first in {self.tensor}" if self.tensor else ""
        return f"rank {self.rank} has other weights than rank {self.other} {when}{first}"


def rank_agreement(drill: Drill) -> Check:
    """All ranks hold the same parameters when an attempt begins and after each step, in both legs."""
    if drill.spec.workers == 1:
        return skipped("one worker has nobody to agree with")
    if any(map(is_sharded, (drill.reference, drill.chaos))):
        return skipped("the parameters are sharded: each rank has its own part of them")
    for leg in (drill.reference, drill.chaos):
        if message := unlike_orders(start for attempt in leg.attempts for start in attempt.starts.values()):
            return failed("parameter_order", message=message)
        found = drift(leg)
        if found is None:
            continue
        undisturbed = leg is drill.reference
        because, aside = ("undisturbed", " (undisturbed: recovery is not to blame)") if undisturbed else (None, "")
        about = asdict(found)
        del about["at_start"]
        return failed("replicas_drift", because=because, what=found.what, aside=aside, **about)
    starts = comparisons = 0
    for attempt in (attempt for leg in (drill.reference, drill.chaos) for attempt in leg.attempts):
        began, counted = len(attempt.starts), Counter(block.steps for block in _blocks(attempt))
        comparisons += max(0, began - 1) + sum(len(steps) * times for steps, times in counted.items()) - len(attempt.steps)
        starts += began > 1
    if not comparisons:
        return inconclusive("replicas_not_compared")
    summary = f"{drill.spec.workers} ranks began {starts} attempts with equal weights, and held equal weights after each step"
    return passed(summary, starts=starts, comparisons=comparisons)


def is_sharded(leg: LegHistory) -> bool:
    return any(trace.start is not None and trace.start.sharded for trace in leg.traces)


def drift(leg: LegHistory) -> Drift | None:
    """None where all ranks agree as far as they have recorded anything, and where there is nothing to agree on."""
    if is_sharded(leg):
        return None
    for attempt in leg.attempts:
        for records in _perhaps_apart(attempt):
            values = {rank: record.param for rank, record in records.items()}
            if len(set(values.values())) > 1:
                return _drift(leg, attempt, records, values)
    return None


def _blocks(attempt: Attempt) -> Iterator[Block]:
    return (block for trace in attempt.traces.values() for block in trace.steps.blocks)


def _perhaps_apart(attempt: Attempt) -> Iterator[Mapping[int, StartRecord | StepRecord]]:
    """What ranks recorded at the same moment: first the starts, then step after step, but for the steps that all ranks hold in
    blocks in which the digests of the parameters are the same."""
    yield attempt.starts
    values: dict[int, set[tuple[range, bytes]]] = {}
    for block in {(block.steps, block.param) for block in _blocks(attempt)}:
        for step in block[0]:
            values.setdefault(step, set()).add(block)
    steps = attempt.steps
    yield from (steps[step] for step in steps if len(values[step]) > 1 or (b"" in {param for _, param in values[step]}))


def _drift(
    leg: LegHistory, attempt: Attempt, records: Mapping[int, StartRecord | StepRecord], values: Mapping[int, str]
) -> Drift:
    seen = list(values.values())
    # The weights that most ranks hold, of equally many those of the lowest rank.
    common = max(seen, key=seen.count)
    rank = next(rank for rank, value in values.items() if value != common)
    other = next(rank for rank, value in values.items() if value == common)
    words = [memoryview(records[number].params).cast("I") for number in (other, rank)]
    index = first_difference(*words) if all(words) else None
    record = records[rank]
    return Drift(
        leg=leg.name,
        attempt=attempt.number,
        step=record.step if isinstance(record, StepRecord) else record.position.step,
        rank=rank,
        other=other,
        tensor=None if index is None else attempt.traces[rank].tensor(index),
        at_start=isinstance(record, StartRecord),
        fingerprints={str(number): value for number, value in values.items()},
    )
