"""Whether the ranks' replicas of the model are one: after every restore and every step, in both legs (hazard C8). Pure.

Of a sharded model, ranks are replicas in what they hold the same part of, by its name in the trace ("weight[8:16]").
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
    if not has_replicas(drill.reference):
        return skipped("the parameters are sharded: no two ranks hold the same part of any")
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
        for group in _groups(attempt):
            began, counted = len(group), Counter(block.steps for block in _blocks(attempt, group))
            steps = {step for alike in counted for step in alike}
            comparisons += max(0, began - 1) + sum(len(alike) * times for alike, times in counted.items()) - len(steps)
        starts += len(attempt.starts) > 1
    if not comparisons and not (starts and is_sharded(drill.reference)):
        return inconclusive("replicas_not_compared")
    summary = f"{drill.spec.workers} ranks began {starts} attempts with equal weights, and held equal weights after each step"
    if is_sharded(drill.reference):
        each = " and after each step" if comparisons else ", and in the steps after a checkpoint"
        summary = f"ranks that hold the same part of a tensor held it alike at the beginning of {starts} attempts{each}"
    return passed(summary, starts=starts, comparisons=comparisons)


def is_sharded(leg: LegHistory) -> bool:
    return any(trace.start is not None and trace.start.sharded for trace in leg.traces)


def has_replicas(leg: LegHistory) -> bool:
    """Two ranks hold the same part of a tensor, or the whole of it."""
    held = [name for attempt in leg.attempts[:1] for start in attempt.starts.values() for name in set(_held(start))]
    return not is_sharded(leg) or len(set(held)) < len(held)


def drift(leg: LegHistory) -> Drift | None:
    """None where all ranks agree as far as they have recorded anything, and where there is nothing to agree on."""
    if not has_replicas(leg):
        return None
    joins = False
    for attempt in leg.attempts:
        groups = _groups(attempt)
        for records in _perhaps_apart(attempt):
            for group in groups:
                values = {rank: record.param for rank, record in records.items() if rank in group}
                if len(set(values.values())) > 1:
                    joined = _joined(attempt, records, values)
                    if joins := joined or (joins and joined is None):
                        continue
                    return _drift(leg, attempt, records, values)
            if len(groups) > 1 and (found := _apart_in(attempt, records)):
                return _drift(leg, attempt, records, found[1], found[0])
    return None


def _joined(attempt: Attempt, records: Mapping[int, StartRecord | StepRecord], ranks: Iterable[int]) -> bool | None:
    """Whether the script itself hands out the weights after the optimizers' step, each of which steps a share of them: the
    next step, or the end, finds them alike. None where there is neither."""
    traces = [(attempt.traces[rank], records[rank]) for rank in ranks]
    following = [trace.steps.get(record.step + 1) for trace, record in traces if isinstance(record, StepRecord)]
    if following and all(following):
        words = {each.began for each in following if each}
        return len(words) == 1 and "" not in words
    ends = [trace.end.digests.get("model") for trace, _ in traces if trace.end]
    if following and len(ends) == len(traces):
        return bool(ends[0]) and all(each == ends[0] for each in ends)
    return False if len(following) < len(traces) else None


def _held(start: StartRecord) -> tuple[str, ...]:
    """Names of what it has; none where it does not say which parts of what is sharded."""
    return start.tensors if start.parts or not start.sharded else ()


def _groups(attempt: Attempt) -> list[list[int]]:
    """Ranks that hold the same parts of all tensors."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, start in attempt.starts.items():
        groups.setdefault(_held(start), []).append(rank)
    return list(groups.values())


def _apart_in(attempt: Attempt, records: Mapping[int, StartRecord | StepRecord]) -> tuple[int, dict[int, str]] | None:
    """Of ranks that hold some tensors alike: the index of the first that is not, and its words by rank, where recorded."""
    words: dict[str, dict[int, tuple[int, int]]] = {}
    for rank, record in records.items():
        start = attempt.starts.get(rank)
        values = memoryview(record.params).cast("I") if record.params else ()
        for index, (name, word) in enumerate(zip(_held(start) if start else (), values, strict=False)):
            words.setdefault(name, {})[rank] = (index, word)
    for by_rank in words.values():
        if len({word for _, word in by_rank.values()}) > 1:
            index = next(iter(by_rank.values()))[0]
            return index, {rank: f"{word:08x}" for rank, (_, word) in by_rank.items()}
    return None


def _blocks(attempt: Attempt, ranks: Iterable[int] | None = None) -> Iterator[Block]:
    chosen = attempt.traces if ranks is None else ranks
    return (block for rank in chosen for block in attempt.traces[rank].blocks)


def _perhaps_apart(attempt: Attempt) -> Iterator[Mapping[int, StartRecord | StepRecord]]:
    """What ranks recorded at the same moment: the starts, then each step but those in blocks of equal parameter digests."""
    yield attempt.starts
    values: dict[int, set[tuple[range, bytes]]] = {}
    for block in {(block.steps, block.param) for block in _blocks(attempt)}:
        for step in block[0]:
            values.setdefault(step, set()).add(block)
    steps = attempt.steps
    yield from (steps[step] for step in steps if len(values[step]) > 1 or (b"" in {param for _, param in values[step]}))


def _drift(
    leg: LegHistory,
    attempt: Attempt,
    records: Mapping[int, StartRecord | StepRecord],
    values: Mapping[int, str],
    index: int | None = None,
) -> Drift:
    """`values`: of the ranks that should agree; `index`: of the tensor, where only its words are."""
    seen = list(values.values())
    # The weights that most ranks hold, of equally many those of the lowest rank.
    common = max(seen, key=seen.count)
    rank = next(rank for rank, value in values.items() if value != common)
    other = next(rank for rank, value in values.items() if value == common)
    words = [memoryview(records[number].params).cast("I") for number in (other, rank)]
    if index is None and all(words):
        index = first_difference(*words)
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
