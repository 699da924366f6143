"""Optimizers that make no more steps: if a restart loses their state, the training is not affected. Pure.

A script may create an optimizer for each phase of its training up front, and restore only the one in use. The lost state
shows in every digest of all optimizers to the end, and may be ignored only if all else is known to be right: the others end
as in the reference run, and no checkpoint held the lost state.
"""

from collections.abc import Iterable, Mapping

import xxhash

from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.traces import SaveRecord, StartRecord, StepRecord
from chaosrun.verify.compare import differing_keys
from chaosrun.verify.lineage import Lineage

Retired = Mapping[tuple[int, int], tuple[str, ...]]
"""By attempt of the chaos leg and rank, the names of the optimizers whose lost state does not count there."""


def retired(reference: LegHistory, chaos: LegHistory, known: Lineage) -> Retired:
    """`known`: the reference's."""
    if {reference.outcome, chaos.outcome} != {"completed"} or not reference.attempts:
        return {}
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    for attempt in chaos.attempts[1:]:
        others = [rank for rank, start in attempt.starts.items() if start.optimizers and _began_otherwise(start, known)]
        lost = {rank: names for rank in others if (names := _lost_for_good(reference, chaos, rank))}
        is_last = attempt is chaos.attempts[-1]
        if len(lost) == len(others) and all(
            _make_no_difference(names, reference, known, attempt, rank, is_last=is_last) for rank, names in lost.items()
        ):
            found |= {(attempt.number, rank): names for rank, names in lost.items()}
    return found


def _began_otherwise(start: StartRecord, known: Lineage) -> bool:
    base = known.at(start.rank, start.position.step)
    return base is not None and base.state != start.state


def _lost_for_good(reference: LegHistory, chaos: LegHistory, rank: int) -> tuple[str, ...]:
    """Of several optimizers, those whose state differs from the reference's at the end, has not changed since the last attempt
    began, and was in no checkpoint that an attempt resumed from. Empty if that is unknown."""
    expected, seen, last = reference.ends.get(rank), chaos.ends.get(rank), chaos.attempts[-1].starts.get(rank)
    if expected is None or seen is None or last is None or not expected.optimizers:
        return ()
    if not expected.optimizers.keys() == seen.optimizers.keys() == last.optimizers.keys():
        return ()
    names = differing_keys(expected.optimizers, seen.optimizers)
    steps = {each.resume_step for each in chaos.attempts[1:]}
    saves = (save for leg in (reference, chaos) for save in _saves(leg) if save.step in steps)
    held = {value for save in saves for value in save.held.values()}
    ends = [end.digests.get("optimizer", {}) for end in (expected, seen)]
    if any(_as_held(ends[0][key]) in held for key in differing_keys(*ends) if key in ends[0]):
        return ()
    return tuple(names) if all(last.optimizers[name] == seen.optimizers[name] for name in names) else ()


def _make_no_difference(
    lost: tuple[str, ...], reference: LegHistory, known: Lineage, attempt: Attempt, rank: int, *, is_last: bool
) -> bool:
    """Whether the attempt began with all other optimizers as in the reference, and no lost one makes a step in either leg."""
    start = attempt.starts[rank]
    step = start.position.step
    saved = [save.optimizers for save in _saves(reference) if save.step == step and save.optimizers]
    others = {name for each in saved for name in differing_keys(each, start.optimizers)} - {*lost}
    if others or not (saved or is_last):
        return False
    later = (record for record in known.of(rank).values() if record.step > step)
    return _stand_still(lost, later) and _stand_still(lost, attempt.traces[rank].steps.values())


def _stand_still(names: tuple[str, ...], steps: Iterable[StepRecord]) -> bool:
    """Whether all of these steps record which optimizers made them, and none of these did. A skipped step has none."""
    return all(bool(each.stepped or not each.grad) and not {*names} & {*each.stepped} for each in steps)


def _saves(leg: LegHistory) -> Iterable[SaveRecord]:
    return (save for trace in leg.traces for save in trace.saves)


def _as_held(digest: str) -> str:
    """The form in which `SaveRecord.held` records a tensor that has this digest in an end record."""
    try:
        return xxhash.xxh3_64_hexdigest(bytes.fromhex(digest)[::-1])
    except ValueError:  # a number
        return ""
