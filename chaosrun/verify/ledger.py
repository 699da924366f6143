"""Where in the reference the batches that a resumed rank saw lie: ahead, behind, in another epoch, on another rank. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from chaosrun.records.traces import StepRecord
from chaosrun.verify.check import Drill

WINDOW = 16
"""Micro-batches followed to tell one occurrence of a batch from another."""
NEAR = 8
"""A shift across an epoch's end by at most this many batches is called a shift, a longer one another epoch's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Displacement:
    """What the data's displacement is called, and what it suggests."""

    cause: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    step: int
    epoch: int
    index: int
    """Batch number within the epoch, from 0."""
    key: tuple[object, ...]


def displacement(drill: Drill, first: StepRecord, micro_batch: int) -> Displacement:
    """Explain micro-batch `micro_batch` of the chaos leg's record `first`, which is not the reference's."""
    trace = drill.chaos.trace(first.attempt, first.rank)
    following = [record for record in trace.steps if record.step >= first.step] if trace else [first]
    by_ids = _knows_ids(following) and _knows_ids(_reference_steps(drill, first.rank))
    seen = [entry.key for entry in _entries(following, by_ids)][micro_batch : micro_batch + WINDOW]
    ledger = _entries(_reference_steps(drill, first.rank), by_ids)
    here = sum(len(record.batch) for record in _reference_steps(drill, first.rank) if record.step < first.step) + micro_batch
    if not seen or here >= len(ledger):
        return Displacement(cause="data order", hint="the resumed leg saw more batches in this step than the reference")
    place = _best(ledger, seen, here)
    if place is not None:
        return _name(ledger[here], ledger[place], place - here)
    for rank in drill.ranks:
        other = _entries(_reference_steps(drill, rank), by_ids)
        place = _best(other, seen, here) if rank != first.rank else None
        if place is not None:
            return Displacement(
                cause="data of another rank",
                hint=f"the batch seen is rank {rank}'s of step {other[place].step}: the ranks' shares of the data changed",
            )
    return Displacement(
        cause="data order not restored",
        hint="the reference never saw this batch: the shuffle follows a seed or a state that was not restored "
        "(use a seedable sampler with an explicit data_seed)",
    )


def _name(expected: _Entry, found: _Entry, shift: int) -> Displacement:
    same_epoch = expected.epoch == found.epoch
    if not same_epoch and (expected.index == found.index or abs(shift) > NEAR):
        where = "at the same place" if expected.index == found.index else f"from its batch {found.index} on"
        ahead = found.epoch > expected.epoch
        return Displacement(
            cause="sampler epoch ahead" if ahead else "sampler epoch not set",
            hint=f"the samples are those of epoch {found.epoch} {where}, expected was epoch {expected.epoch}: "
            + ("epochs were counted twice" if ahead else "the sampler's epoch was not set (call set_epoch in every epoch)"),
        )
    count = abs(found.index - expected.index) if same_epoch else abs(shift)
    batches = f"{count} batch{'es' if count != 1 else ''}"
    word = "skipped" if shift > 0 else "repeated"
    return Displacement(
        cause=f"{batches} {word}",
        hint=f"the samples seen are those expected at step {found.step}, batch {found.index} of epoch {found.epoch}: "
        f"{batches} {word}, the count of batches to skip on resume is off by {count if shift > 0 else -count}",
    )


def _best(ledger: Sequence[_Entry], seen: Sequence[tuple[object, ...]], here: int) -> int | None:
    """Index in the ledger where the longest beginning of `seen` lies; of equals, the same epoch's, then the nearest."""
    epoch = ledger[here].epoch if here < len(ledger) else -1
    found: tuple[tuple[int, bool, int], int] | None = None
    for place, entry in enumerate(ledger):
        if entry.key != seen[0]:
            continue
        length = 0
        while length < len(seen) and place + length < len(ledger) and ledger[place + length].key == seen[length]:
            length += 1
        rating = (length, entry.epoch == epoch, -abs(place - here))
        if found is None or rating > found[0]:
            found = (rating, place)
    return found[1] if found else None


def _reference_steps(drill: Drill, rank: int) -> list[StepRecord]:
    by_step = drill.reference_lineage.steps.get(rank, {})
    return [by_step[step] for step in sorted(by_step)]


def _knows_ids(records: Sequence[StepRecord]) -> bool:
    return all(record.knows_ids for record in records)


def _entries(records: Sequence[StepRecord], by_ids: bool) -> list[_Entry]:
    entries: list[_Entry] = []
    for record in records:
        first = record.batches - len(record.batch)
        for number, digest in enumerate(record.batch):
            ids = record.ids[number] if by_ids and record.ids else None
            key = tuple(ids) if ids is not None else (digest,)
            entries.append(_Entry(step=record.step, epoch=record.epoch, index=first + number, key=key))
    return entries
