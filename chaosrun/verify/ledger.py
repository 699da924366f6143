"""The cause of other data: finds the batches that a resumed rank saw in the reference, ahead, behind, in another epoch, on
another rank. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chaosrun.records.traces import RankTrace, SourceRecord, StepRecord
from chaosrun.verify.alignment import attempt_start
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause, Params
from chaosrun.verify.compare import Field, Mismatch, differing_keys, left_out
from chaosrun.verify.moment import Moment
from chaosrun.verify.warnings import sample_finding, unrepeatable

WINDOW = 16
"""Number of micro-batches followed to distinguish occurrences of a batch."""
NEAR = 8
"""A shift across an epoch's end by at most this many batches is reported as a shift, a longer one as another epoch's order."""

_BY_ALL = ", or the global step count was skipped within the epoch instead of the epoch's own"
_OF_THE_STEP = ("accumulation_window", "batch_contents", "data_order_not_restored", "forward_pass", "gradient", "more_batches")
_AFTER_RESTORE = ("restored_right", "drew_before", "first_after_restore", "restored")
"""Variants of rows for a loss or gradient that differs although everything was restored."""
_ORDER_OF_A_PASS = ("sampler_epoch_not_set", "sampler_epoch_ahead", "data_order_not_restored")
"""Causes for a sampler or stream that keeps its own position, when a pass starts anew."""
SHIFTED = ("batches_skipped", "batches_repeated")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    step: int
    epoch: int
    index: int
    """Batch number within the epoch, from 0; a batch that goes through several modules in turn keeps its number."""
    key: tuple[object, ...]
    number: int = 0
    """Batch number within all of these records."""


def of_data(field: Field, moment: Moment, first: Mismatch) -> Cause:
    """The cause of other samples, or of other inputs of the model."""
    record = moment.records[first.rank]
    expected = moment.drill.reference_lineage.at(first.rank, moment.step)
    if expected and (counted := other_count(expected, record, restored=moment.first_after_restore)):
        return counted
    if field == "batch" and record.knows_ids and (expected is None or expected.knows_ids):
        return _contents(moment, record, first.micro_batch or 0)
    fetched = expected and field == "batch" and fetched_alike(expected, record, first.micro_batch or 0)
    if (fetched or (field == "batch" and fetched_alike_later(moment.drill, record))) and not _streams_lost(moment):
        return Cause.of("batch_contents", because="changed" if moment.restored else None)
    place = other_size(moment.drill, record) or displacement(moment.drill, record, first.micro_batch or 0)
    if moment.restored and moment.drill.hash_seeds and (place.code, place.because) == ("data_order_not_restored", None):
        place = place.explained("hashes", where=moment.drill.hash_order)
    by_script = moment.first_after_restore and moment.drill.by_script
    if expected and by_script and (window := _within_window(place, expected, record)):
        place = place.explained("within_window", **window)
    return _of_source(moment, record, place) or place if moment.restored else place


def _within_window(place: Cause, expected: StepRecord, seen: StepRecord) -> Params | None:
    """The place in the accumulation window of the batch that a step began with, if it took as many as the whole window has."""
    begins = place.params.get("batches")
    if (place.code, place.because) != ("batches_skipped", None) or not isinstance(begins, int) or begins >= len(expected.batch):
        return None
    alike = len(seen.batch) == len(expected.batch) and seen.batch[:-begins] == expected.batch[begins:]
    return {"begins": begins + 1, "window": len(expected.batch)} if alike else None


def _of_source(moment: Moment, record: StepRecord, place: Cause) -> Cause | None:
    """The cause if a sampler or stream keeps its own position: its state was not the reference's, or it has no set_epoch."""
    seen = _source_at(moment.attempt.traces[record.rank], record.epoch)
    if apart := _source_apart(moment, record):
        counts = str(apart["expected"]).isdecimal()
        return Cause.of("source_keeps_its_place", because=None if counts else "state", **apart)
    if seen is None or seen.own is None or place.code not in _ORDER_OF_A_PASS:
        return None
    return Cause.of(
        "source_keeps_its_place", because="unseen", name=seen.own, where=place.explained(place.because or "place").hint
    )


def _source_apart(moment: Moment, record: StepRecord) -> Params | None:
    """The state of the script's samplers and dataset that differed from the reference's when the epoch was opened."""
    expected = moment.drill.reference_lineage.at(record.rank, record.step)
    other = moment.drill.reference.trace(expected.attempt, record.rank) if expected else None
    sides = [_source_at(trace, record.epoch) for trace in (other, moment.attempt.traces[record.rank])]
    if sides[0] is None or sides[1] is None:
        return None
    # If the source has set_epoch, chaosrun is responsible for its epoch.
    told = () if sides[1].own else ("epoch", "_epoch")
    apart = [name for name in differing_keys(sides[0].held, sides[1].held) if name.split("/")[-1] not in told]
    if not apart:
        return None
    values = [side.held.get(apart[0], "absent") for side in sides if side]
    return {"name": apart[0], "expected": values[0], "seen": values[1], "epoch": record.epoch}


def _source_at(trace: RankTrace | None, epoch: int) -> SourceRecord | None:
    return next((source for source in reversed(trace.sources) if source.epoch == epoch), None) if trace else None


def _contents(moment: Moment, record: StepRecord, micro_batch: int) -> Cause:
    """Why a sample with the same id has different contents: as the probe saw it, else the likely reason."""
    finding = sample_finding(moment.drill)
    if seen := unrepeatable(finding):
        return Cause.of("batch_contents", because="unrepeatable", probe=seen)
    if moment.restored and (apart := _source_apart(moment, record)):
        return Cause.of("batch_contents", because="held", **apart)
    if then := step_of_contents(moment.drill, record, micro_batch):
        return Cause.of("batch_contents", because="of_step", step=then.step, epoch=then.epoch)
    if moment.restored and moment.drill.hash_seeds:
        return Cause.of("batch_contents", because="hashes", where=moment.drill.hash_order)
    independent = finding is not None and finding.items in ("independent", "draws")
    return Cause.of("batch_contents", because="independent" if independent else None)


def _streams_lost(moment: Moment) -> bool:
    """Whether this is the first step after a restart and the random streams were not the reference's."""
    found = attempt_start(moment.drill, moment.attempt) if moment.first_after_restore else None
    return found is not None and "rng" in found.wrong


def other_count(expected: StepRecord, seen: StepRecord, *, restored: bool = False) -> Cause | None:
    """The cause if a step took more or fewer micro-batches than expected, some of them equal, or split the same samples
    differently. If the number of losses (one per backward pass) also changed, so did the accumulation window; else additional
    batches went through the model."""
    counts: Params = {"seen": len(seen.batch), "expected": len(expected.batch)}
    both = min(len(seen.batch), len(expected.batch))
    if len(seen.batch) == len(expected.batch):
        return None
    if len(seen.loss) == len(expected.loss) > 0:
        alike = seen.batch[0] == expected.batch[0] or seen.batch[-1] == expected.batch[-1]
        return Cause.of("forward_pass", because="passes", **counts) if alike else None
    samples = [[each for ids in record.ids or () for each in ids or ()] for record in (expected, seen)]
    ends = expected.batch[-both:] == seen.batch[-both:]
    alike = ends or expected.batch[:both] == seen.batch[:both] or (any(samples[0]) and samples[0] == samples[1])
    within = restored and ends and counts["seen"] == both
    return Cause.of("accumulation_window", because="within" if within else None, **counts) if alike else None


def of_turns(found: Cause, expected: StepRecord | None, seen: StepRecord) -> Cause:
    """The cause as another optimizer's turn, if it only said which part of a step differs."""
    if found.code not in _OF_THE_STEP or not (expected and expected.stepped and seen.stepped):
        return found
    if sorted(seen.stepped) != sorted(expected.stepped):  # Pyro's step in any order
        return Cause.of("other_optimizer_stepped", seen=seen.stepped, expected=expected.stepped)
    return found


def of_updates(found: Cause, expected: StepRecord | None, seen: StepRecord) -> Cause:
    """The cause as a step that only one of the legs skipped, if everything had been restored."""
    if found.because not in _AFTER_RESTORE or not expected or bool(expected.lr) == bool(seen.lr):
        return found
    made = "was made here, but skipped in the reference run" if seen.lr else "was skipped here, but made in the reference run"
    return Cause.of(found.code, because="left_out", made=made)


def displacement(drill: Drill, first: StepRecord, micro_batch: int) -> Cause:
    """Explain micro-batch `micro_batch` of the chaos leg's record `first`, which differs from the reference's."""
    trace = drill.chaos.trace(first.attempt, first.rank)
    following = [record for record in trace.steps.values() if record.step >= first.step] if trace else [first]
    expected = _reference_steps(drill, first.rank)
    by_ids = all(record.knows_ids for record in (*following, *expected)) and not _renumbered(following, expected)
    entries = _entries(following, by_ids)[micro_batch : micro_batch + WINDOW]
    seen = [entry.key for entry in entries]
    ledger = _entries(expected, by_ids)
    given = drill.reference_lineage.at(first.rank, first.step)
    there = micro_batch + (left_out(given, first) if given else 0)
    here = _before(expected, first.step) + there
    if not seen or here >= len(ledger):
        return Cause.of("more_batches")
    place = _best(ledger, seen, here)
    if place is not None:
        name = _name(ledger[here], ledger[place], place - here)
        start = _before(expected, min(trace.steps)) if trace else here
        if name.code in SHIFTED and _skips_again(ledger, start, here, place, entries):
            return replace(name, because="each_pass")
        broken = name.code in SHIFTED and not _goes_on(ledger, place, entries)
        return Cause.of("data_order_not_restored", because="broken", step=ledger[place].step) if broken else name
    for rank in drill.ranks:
        other = _entries(_reference_steps(drill, rank), by_ids)
        place = _best(other, seen, here) if rank != first.rank else None
        if place is not None:
            return Cause.of("data_of_another_rank", other=rank, step=other[place].step)
    if given and given.tensors[there:] == first.tensors[micro_batch:] and all(first.tensors):
        return Cause.of("batch_contents", because="beside_tensors")
    return Cause.of("data_order_not_restored")


def step_of_contents(drill: Drill, first: StepRecord, micro_batch: int) -> StepRecord | None:
    """Another step of the reference in which the same samples had the contents that this micro-batch has."""
    digest, ids = first.batch[micro_batch], first.ids[micro_batch] if first.ids else None
    others = (each for each in _reference_steps(drill, first.rank) if each.step != first.step)
    return next((each for each in others if (digest, ids) in _with_ids(each)), None)


def fetched_alike(expected: StepRecord, seen: StepRecord, micro_batch: int) -> bool:
    """Whether the loader returned the same samples for this micro-batch, and the script made other inputs from them."""
    known = [_fetched(expected, micro_batch + left_out(expected, seen)), _fetched(seen, micro_batch)]
    return known[0] is not None and known[0] == known[1]


def fetched_alike_later(drill: Drill, seen: StepRecord) -> bool:
    """Whether the loader's samples for this step are unknown in one leg (around the end of a pass), and equal in all later
    steps in which both are known."""
    trace, expected = drill.chaos.trace(seen.attempt, seen.rank), drill.reference_lineage.at(seen.rank, seen.step)
    if trace is None or expected is None or (expected.fetched and seen.fetched):
        return False
    later = ((drill.reference_lineage.at(seen.rank, step), each) for step, each in trace.steps.items() if step > seen.step)
    known = [(other.fetched, each.fetched) for other, each in later if other and other.fetched and each.fetched]
    return len(known) > 1 and all(fault_free == here for fault_free, here in known)


def other_size(drill: Drill, first: StepRecord) -> Cause | None:
    """The cause if the batches of the rest of the pass have another size, not counting the last one, which may be short."""
    trace, expected = drill.chaos.trace(first.attempt, first.rank), drill.reference_lineage.at(first.rank, first.step)
    if trace is None or expected is None:
        return None
    seen = _sizes(record for record in trace.steps.values() if record.step >= first.step and record.epoch == first.epoch)
    fault_free = _sizes(record for record in _reference_steps(drill, first.rank) if record.epoch == expected.epoch)
    if len(seen) == len(fault_free) == 1 and seen != fault_free and None not in seen | fault_free:
        return Cause.of("batch_size_not_restored", samples=seen.pop(), expected=fault_free.pop())
    return None


def _sizes(records: Iterable[StepRecord]) -> set[int | None]:
    """The sizes of these records' batches; includes None if some sizes are unknown."""
    known = [ids for record in records for ids in record.ids or record.fetched or (None,)]
    return {None if ids is None else len(ids) for ids in known[:-1]}


def _fetched(record: StepRecord, micro_batch: int) -> Sequence[object] | None:
    return record.fetched[micro_batch] if record.fetched and micro_batch < len(record.fetched) else None


def _name(expected: _Entry, found: _Entry, shift: int) -> Cause:
    same_epoch = expected.epoch == found.epoch
    # In the first epoch the total count of steps equals the epoch's.
    about = {"by_all": _BY_ALL if shift > 0 and expected.epoch else "", "shift": shift}
    if not same_epoch and (expected.index == found.index or abs(shift) > NEAR):
        where = "at the same place" if expected.index == found.index else f"from its batch {found.index} on"
        code = "sampler_epoch_ahead" if found.epoch > expected.epoch else "sampler_epoch_not_set"
        return Cause.of(code, epoch=found.epoch, where=where, expected=expected.epoch, **about)
    batches = abs(found.index - expected.index if same_epoch else found.number - expected.number)
    batches = batches or abs(shift)  # of one batch that several steps train on
    code = "batches_skipped" if shift > 0 else "batches_repeated"
    # At an epoch's first batch, no batch count can be wrong.
    because = None if found.index else "at_first" if shift < 0 else "rest_of_epoch"
    return Cause.of(code, because=because, batches=batches, step=found.step, index=found.index, epoch=found.epoch, **about)


def _before(steps: Sequence[StepRecord], step: int) -> int:
    return sum(len(record.batch) for record in steps if record.step < step)


def _skips_again(ledger: Sequence[_Entry], start: int, here: int, place: int, seen: Sequence[_Entry]) -> bool:
    """Whether an attempt that resumed correctly at `start` began a later pass after its first batch; or, for a stream that
    counts its passes itself, resumed with the right state."""
    if ledger[start].epoch < ledger[here].epoch and ledger[here].index == 0 < ledger[place].index:
        return _goes_on(ledger, place, seen)
    again = [entry.key for entry in seen[: here - start]]
    return place == start < here and _in_common(ledger, place, again) == len(again)


def _goes_on(ledger: Sequence[_Entry], place: int, seen: Sequence[_Entry]) -> bool:
    """Whether `seen` equals the batches from this index on, up to the end of either epoch or of the records."""
    length = _in_common(ledger, place, [entry.key for entry in seen])
    rests = ledger[place + length - 1 :], seen[length - 1 :]
    return any(len(rest) < 2 or rest[0].epoch != rest[1].epoch for rest in rests)


def _in_common(ledger: Sequence[_Entry], place: int, seen: Sequence[tuple[object, ...]]) -> int:
    length = 0
    while length < len(seen) and place + length < len(ledger) and ledger[place + length].key == seen[length]:
        length += 1
    return length


def _best(ledger: Sequence[_Entry], seen: Sequence[tuple[object, ...]], here: int) -> int | None:
    """Index in the ledger where the longest prefix of `seen` matches; of equal ones, the same epoch's, then the nearest."""
    epoch = ledger[here].epoch if here < len(ledger) else -1

    def rating(place: int) -> tuple[int, bool, int]:
        return _in_common(ledger, place, seen), ledger[place].epoch == epoch, -abs(place - here)

    return max((place for place, entry in enumerate(ledger) if entry.key == seen[0]), key=rating, default=None)


def _reference_steps(drill: Drill, rank: int) -> list[StepRecord]:
    return [*drill.reference_lineage.of(rank).values()]


def _renumbered(seen: Sequence[StepRecord], expected: Sequence[StepRecord]) -> bool:
    """Whether a batch has other sample ids than the only equal one of the reference, at another step: the script cut its
    dataset to what is left."""
    known: dict[str, list[tuple[int, Any]]] = {}
    for each in expected:
        for digest, ids in _with_ids(each):
            known.setdefault(digest, []).append((each.step, ids))
    for each in seen:
        for digest, ids in _with_ids(each):
            match known.get(digest):
                case [(step, others)] if step != each.step and others != ids:
                    return True
    return False


def _with_ids(record: StepRecord) -> Iterator[tuple[str, tuple[Any, ...] | None]]:
    return zip(record.batch, record.ids or (), strict=False)


def _entries(records: Sequence[StepRecord], by_ids: bool) -> list[_Entry]:
    entries: list[_Entry] = []
    epoch = again = 0
    for record in records:
        first = record.batches - len(record.batch)
        if record.epoch != epoch:
            epoch, again = record.epoch, 0
        for place, digest in enumerate(record.batch):
            ids = record.ids[place] if by_ids and record.ids else None
            key = tuple(ids) if ids is not None else (digest,)
            once_more = bool(entries) and (entries[-1].epoch, entries[-1].key) == (epoch, key)
            again += once_more
            number = entries[-1].number + (not once_more) if entries else 0
            entries.append(_Entry(step=record.step, epoch=epoch, index=first + place - again, number=number, key=key))
    return entries
