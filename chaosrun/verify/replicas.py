"""Whether the ranks' replicas of the model are equal after every restore and every step, in both legs (hazard C8). Pure. In a
sharded model, ranks are replicas if they hold the same part of a tensor, by its name in the trace ("weight[8:16]").
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from operator import attrgetter

from chaosrun.records.grouping import grouped
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.traces import Block, StartRecord, StepRecord
from chaosrun.verify.check import CheckResult, Drill, failed, inconclusive, passed, skipped
from chaosrun.verify.compare import first_difference, unlike_orders

OWN_STEPS = 64
"""The gradients of this many first steps of a leg show which tensors each rank trains on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The first place in a leg where one rank's weights differ from the others'."""

    leg: str
    attempt: int
    step: int
    """The weights are those after it: 0 before the first."""
    rank: int
    other: int
    """One of the ranks that agree."""
    tensor: str | None
    at_start: bool
    """The ranks differed before the first step: they began, or restored, different weights."""
    fingerprints: Mapping[str, str]
    """By rank."""
    unlike_rates: str | None
    """The two ranks' learning rates in that step, if they differ: "0.01 on rank 0, 0.005 on rank 1"."""

    @property
    def what(self) -> str:
        """Without the leg: "rank 1 has other weights than rank 0 after step 1 of attempt 1, first in net1.weight"."""
        when = f"after step {self.step} of attempt {self.attempt}"
        if self.at_start:
            when = f"at the start of attempt {self.attempt}, from step {self.step}"
        first = f", first in {self.tensor}" if self.tensor else ""
        return f"rank {self.rank} has other weights than rank {self.other} {when}{first}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMismatch:
    """A step or start at which ranks that should hold the same weights do not."""

    records: Mapping[int, StartRecord | StepRecord]
    values: Mapping[int, str]
    """Fingerprints by rank, of the ranks that should agree."""
    index: int | None = None
    """The index of the tensor, if only single tensors are compared."""

    @property
    def at_start(self) -> bool:
        return isinstance(self._record, StartRecord)

    @property
    def step(self) -> int:
        return self._record.step if isinstance(self._record, StepRecord) else self._record.position.step

    @property
    def _record(self) -> StartRecord | StepRecord:
        return next(iter(self.records.values()))


class Replicas:
    def __init__(self, leg: LegHistory) -> None:
        self._leg = leg
        self.sharded = is_sharded(leg)

    @property
    def in_part(self) -> bool:
        """Whether some tensors, or parts of them, belong to single ranks."""
        return self.sharded or bool(self.own)

    @cached_property
    def exist(self) -> bool:
        """Whether two ranks hold the same part of a tensor, or all of it."""
        starts = (start for attempt in self._leg.attempts[:1] for start in attempt.starts.values())
        held = [name for start in starts for name in set(self._held(start))]
        return not self.in_part or len(set(held)) < len(held)

    @cached_property
    def own(self) -> Mapping[str, Mapping[int, int]]:
        """Tensors that ranks, or groups of ranks, train on their own, as with experts: they differ when the leg begins, and so
        do their gradients, which are not averaged. By name and rank, the first rank that began with the same."""
        attempt = next(iter(self._leg.attempts), None)
        if attempt is None:
            return {}
        names = attrgetter("tensors")
        began = _words_by_name(attempt, {rank: start.params for rank, start in attempt.starts.items()}, names)
        unlike = {name: by_rank for name, by_rank in began.items() if len({*by_rank.values()}) > 1}
        own: dict[str, Mapping[int, int]] = {}
        for records in islice(attempt.steps.values(), OWN_STEPS) if unlike else ():
            gradients = _words_by_name(attempt, {rank: record.grads for rank, record in records.items()}, names)
            for name in [each for each in unlike if each not in own]:
                if len({*gradients.get(name, {}).values()}) > 1:
                    first = {word: rank for rank, word in sorted(unlike[name].items(), reverse=True)}
                    own[name] = {rank: first[word] for rank, word in unlike[name].items()}
            if len(own) == len(unlike):
                break
        return own

    @cached_property
    def longest_unsynchronized(self) -> int:
        """The largest number of steps for which the script lets the ranks' weights differ before it synchronises them: 1 where
        each rank updates a share of the weights and broadcasts it, more with Local SGD, 0 if they never differ."""
        longest = 0
        for attempt in self._leg.attempts if self.exist else ():
            until = 0
            for mismatch in self._weight_mismatches(attempt):
                joined = _joined_after(attempt, mismatch) if mismatch.step >= until else None
                if joined is not None:
                    longest, until = max(longest, joined - mismatch.step), joined
        return longest

    def drift(self, usual: int | None = None) -> Drift | None:
        """The first drift; None if all ranks agree in everything that they recorded, or if no two hold the same part. `usual`:
        the reference leg's `longest_unsynchronized`; None: this leg's."""
        usual = self.longest_unsynchronized if usual is None else usual
        for attempt in self._leg.attempts if self.exist else ():
            until = 0
            for mismatch in self._weight_mismatches(attempt):
                if mismatch.step < until:
                    continue
                last, ended = _end_of(attempt, mismatch)
                until = _joined_after(attempt, mismatch) or last + (2 if ended else 1)
                if until - mismatch.step > usual or (mismatch.at_start and (usual <= 1 or mismatch.step == 0)):
                    return _drift(self._leg, attempt, mismatch)
        return None

    def comparisons(self, attempt: Attempt) -> int:
        """How many times ranks that hold the same parts can be compared in it."""
        found = 0
        for group in self._groups(attempt):
            counted = Counter(block.steps for block in _blocks(attempt, group))
            steps = {step for alike in counted for step in alike}
            found += max(0, len(group) - 1) + sum(len(alike) * times for alike, times in counted.items()) - len(steps)
        return found

    def _held(self, start: StartRecord) -> tuple[str, ...]:
        """Names of the rank's tensors; none if its record does not say which parts of sharded tensors it has."""
        if start.sharded and not start.parts:
            return ()
        whose = {name: by_rank.get(start.rank) for name, by_rank in self.own.items()}
        return tuple(f"{name}[of rank {whose[name]}]" if name in whose else name for name in start.tensors)

    def _groups(self, attempt: Attempt) -> list[list[int]]:
        """Ranks that hold the same parts of all tensors."""
        return list(grouped(attempt.starts, lambda rank: self._held(attempt.starts[rank])).values())

    def _weight_mismatches(self, attempt: Attempt) -> Iterator[WeightMismatch]:
        groups = self._groups(attempt)
        for records in _perhaps_apart(attempt):
            for group in groups:
                values = {rank: record.param for rank, record in records.items() if rank in group}
                if len(set(values.values())) > 1:
                    yield WeightMismatch(records=records, values=values)
            if len(groups) > 1 and (found := self._apart_in(attempt, records)):
                yield found

    def _apart_in(self, attempt: Attempt, records: Mapping[int, StartRecord | StepRecord]) -> WeightMismatch | None:
        """The first tensor that differs between ranks that share some, if digests of single tensors were recorded."""
        words = _words_by_name(attempt, {rank: record.params for rank, record in records.items()}, self._held)
        for name, by_rank in words.items():
            if len({*by_rank.values()}) > 1:
                index = self._held(attempt.starts[next(iter(by_rank))]).index(name)
                values = {rank: f"{word:08x}" for rank, word in by_rank.items()}
                return WeightMismatch(records=records, values=values, index=index)
        return None


def of_reference(drill: Drill) -> Replicas:
    """The replicas of the reference; in a run without one, those of its first attempt."""
    leg = drill.reference
    return Replicas(leg if leg.attempts else replace(drill.chaos, attempts=drill.chaos.attempts[:1]))


def rank_agreement(drill: Drill) -> CheckResult:
    """All ranks hold the same parameters when an attempt begins and after each step, in both legs; if the script lets them
    differ for some steps in the reference run (Local SGD), whenever it has synchronised them."""
    if drill.spec.workers == 1:
        return skipped("one worker: there is nothing to compare")
    replicas = of_reference(drill)
    if not replicas.exist:
        return skipped("no two ranks hold the same part of any parameter")
    if never_equal_again(drill):
        return passed("the ranks part in the reference run, without DDP: each is compared with itself there")
    usual = replicas.longest_unsynchronized
    for leg in (drill.reference, drill.chaos):
        if message := unlike_orders(start for attempt in leg.attempts for start in attempt.starts.values()):
            return failed("parameter_order", message=message)
        found = Replicas(leg).drift(usual)
        if found is None:
            continue
        fault_free = leg is drill.reference
        because, aside = ("fault_free", " (in a fault-free run: recovery is not to blame)") if fault_free else (None, "")
        because = "begun" if fault_free and found.at_start and found.step == 0 else because
        about = asdict(found)
        del about["at_start"]
        if found.unlike_rates is None:
            del about["unlike_rates"]
        return failed("replicas_drift", because=because, what=found.what, aside=aside, **about)
    attempts = [attempt for leg in (drill.reference, drill.chaos) for attempt in leg.attempts]
    starts, comparisons = sum(len(attempt.starts) > 1 for attempt in attempts), sum(map(replicas.comparisons, attempts))
    if not comparisons and not (starts and replicas.in_part):
        return inconclusive("replicas_not_compared")
    summary = f"{drill.spec.workers} ranks began {starts} attempts with equal weights, and held equal weights after each step"
    if replicas.in_part:
        each = " and after each step" if comparisons else ", and in the steps after a checkpoint"
        summary = f"ranks that hold the same part of a tensor held it alike at the beginning of {starts} attempts{each}"
    if usual > 1:
        summary = f"the script let the ranks' weights differ, and synchronised them after {usual} steps at most"
    return passed(summary, starts=starts, comparisons=comparisons)


def never_equal_again(drill: Drill) -> Drift | None:
    """Where the ranks of a script that resumes by itself part and never hold equal weights again, without a fault and without
    DDP (gossip, a model of each rank's own): every rank's state is its own, and right if it is what it was."""
    leg = drill.reference
    by_itself = any(attempt.by == "script" for attempt in leg.attempts)
    if not by_itself or any(each.layout for trace in leg.traces for each in trace.buckets):
        return None
    found = Replicas(leg).drift()
    return found if found and found.step else None


def chaos_drift(drill: Drill) -> Drift | None:
    """The drift of the chaos leg, in which ranks may differ for as many steps as in the reference leg."""
    return Replicas(drill.chaos).drift(of_reference(drill).longest_unsynchronized)


def is_sharded(leg: LegHistory) -> bool:
    return any(trace.start is not None and trace.start.sharded for trace in leg.traces)


def _words_by_name(
    attempt: Attempt, words: Mapping[int, bytes], names: Callable[[StartRecord], Sequence[str]]
) -> dict[str, dict[int, int]]:
    """Digests of each tensor, by rank, as far as they were recorded. `names`: of a rank's tensors."""
    found: dict[str, dict[int, int]] = {}
    for rank, packed in words.items():
        start = attempt.starts.get(rank)
        for name, word in zip(names(start) if start else (), memoryview(packed).cast("I") if packed else (), strict=False):
            found.setdefault(name, {})[rank] = word
    return found


def _joined_after(attempt: Attempt, mismatch: WeightMismatch) -> int | None:
    """The first later step at whose beginning the ranks are equal, because the script has synchronised them; the last step plus
    one if they are equal at the end only. None: no record shows it."""
    held = mismatch.values
    for step in (each for each in attempt.steps if each > mismatch.step):
        records = attempt.steps[step]
        began = {records[rank].began or held.get(rank, "") for rank in mismatch.values if rank in records}
        changed = any(record.began for record in records.values())
        if changed and len(began) == 1 and mismatch.values.keys() <= records.keys():
            return step
        held = {rank: record.param for rank, record in records.items()}
    if len({held.get(rank) for rank in mismatch.values}) == 1:
        return None
    last, ended = _end_of(attempt, mismatch)
    ends = [trace.end.digests.get("model") for rank in mismatch.values if (trace := attempt.traces[rank]).end]
    return last + 1 if ended and ends[0] and all(each == ends[0] for each in ends) else None


def _end_of(attempt: Attempt, mismatch: WeightMismatch) -> tuple[int, bool]:
    """The last step that all of these ranks recorded, and whether they came to the end of the training: a rank that outlives
    another records some steps alone, at which the ranks cannot have been synchronised."""
    traces = [attempt.traces[rank] for rank in mismatch.values]
    last, ended = [trace.steps.last for trace in traces], all(trace.end for trace in traces)
    return max(mismatch.step, max(last) if ended else min(last)), ended


def _blocks(attempt: Attempt, ranks: Iterable[int]) -> Iterator[Block]:
    return (block for rank in ranks for block in attempt.traces[rank].blocks)


def _perhaps_apart(attempt: Attempt) -> Iterator[Mapping[int, StartRecord | StepRecord]]:
    """Records of the ranks at the same moment: the starts, then each step except those in blocks with equal parameter
    digests."""
    yield attempt.starts
    values: dict[int, set[tuple[range, bytes]]] = {}
    for block in {(block.steps, block.param) for block in _blocks(attempt, attempt.traces)}:
        for step in block[0]:
            values.setdefault(step, set()).add(block)
    steps = attempt.steps
    yield from (steps[step] for step in steps if len(values[step]) > 1 or (b"" in {param for _, param in values[step]}))


def _drift(leg: LegHistory, attempt: Attempt, mismatch: WeightMismatch) -> Drift:
    records, values, index = mismatch.records, mismatch.values, mismatch.index
    seen = list(values.values())
    # The weights of the majority; on a tie, those of the lowest rank.
    common = max(seen, key=seen.count)
    rank = next(rank for rank, value in values.items() if value != common)
    other = next(rank for rank, value in values.items() if value == common)
    words = [memoryview(records[number].params).cast("I") for number in (other, rank)]
    if index is None and all(words):
        index = first_difference(*words)
    rates = {number: record.lr for number in (other, rank) if isinstance(record := records[number], StepRecord)}
    told = [f"{', '.join(repr(float.fromhex(each)) for each in seen)} on rank {number}" for number, seen in rates.items()]
    return Drift(
        leg=leg.name,
        attempt=attempt.number,
        step=mismatch.step,
        rank=rank,
        other=other,
        tensor=None if index is None else attempt.traces[rank].tensor(index),
        at_start=mismatch.at_start,
        fingerprints={str(number): value for number, value in values.items()},
        unlike_rates=", ".join(told) if len({*rates.values()}) > 1 else None,
    )
