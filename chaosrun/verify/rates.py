"""The position of an attempt's learning rate schedule, from the rates that it then used, or from its saves. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from chaosrun.records.history import Attempt
from chaosrun.records.tensor_files import unnumbered
from chaosrun.records.traces import RankTrace
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause

_Rates = Mapping[int, tuple[str, ...]]
"""Learning rates of all parameter groups, by step."""
_ROUNDED = 1e-9
"""Tolerance for schedules that multiply the current rate: rounding depends on the steps on the way."""
_OFTEN = 3
"""If this many changes are missing, the schedule is not merely late."""


def of_schedule(drill: Drill, attempt: Attempt, rank: int, first: int) -> Cause | None:
    """Why learning rates differ from step `first` on; None if no schedule explains them.

    "The schedule of another step" is reported only if exactly one shift fits all rates since the attempt began: rates that stay
    the same for many steps fit several shifts, a single change always fits some shift, and a new scheduler continues from the
    rate that the optimizer kept.
    """
    expected, seen = _rates(drill, attempt, rank)
    if first not in seen:
        return None
    start = attempt.start_of(rank)
    later = {step: rates for step, rates in seen.items() if step >= first}
    kept = seen.get(start + 1) if first > start + 1 else None
    if seen[first] != kept and _fits(-start, expected, later):
        return Cause.of("lr_scheduler_not_restored", because="of_the_beginning")
    shifts = [step - first for step in expected if step != first and _fits(step - first, expected, seen)]
    # A new scheduler continues from the right rate: for an exponential one, only a wrong first rate shows a wrong step.
    if _starts_over(expected, seen, start) and (kept or len(shifts) != 1):
        return Cause.of("lr_scheduler_not_restored", because="begun_anew")
    if len(shifts) == 1 and (kept is None or _changes(seen) > 1):
        return Cause.of("lr_scheduler_of_another_step", step=first + shifts[0], base=first)
    if kept and not shifts and _counted_twice(start, expected, later):
        return Cause.of("lr_scheduler_not_restored", because="counted_twice")
    if kept and not shifts and _stands_still(expected, seen):
        return Cause.of("lr_scheduler_not_restored", because="still")
    if shifts or kept:
        return Cause.of("lr_scheduler_not_restored", because="late" if kept else "of_several")
    return None


def stays(drill: Drill, attempt: Attempt, rank: int) -> str | None:
    """The variant of a row for an attempt restored by chaosrun whose rates never change from the first ones."""
    expected, seen = _rates(drill, attempt, rank)
    return "still" if attempt.by == "chaosrun" and attempt.went_on and _stands_still(expected, seen) else None


def _rates(drill: Drill, attempt: Attempt, rank: int) -> tuple[_Rates, _Rates]:
    """Rates of the reference run and of this attempt, by step, without skipped steps, which have none."""
    expected = {step: record.lr for step, record in drill.reference_lineage.of(rank).items() if record.lr}
    seen = {step: record.lr for step, record in attempt.traces[rank].steps.items() if record.lr}
    return expected, seen


def where_used(drill: Drill, rank: int, step: int, rates: tuple[str, ...]) -> str:
    """The steps of the reference with these rates: those up to `step`, if the rates did not change, or else the first."""
    having = {each for each, record in drill.reference_lineage.of(rank).items() if record.lr == rates}
    if not having:
        return "no recorded step has this learning rate"
    stayed = step - 1 in having
    first = last = step - 1 if stayed else min(having)
    while stayed and first - 1 in having:
        first -= 1
    while last + 1 in having:
        last += 1
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"the optimizer used the learning rate of {steps}{', after which it changes in the reference run' if stayed else ''}"


def _fits(shift: int, expected: _Rates, seen: _Rates) -> bool:
    """Whether all of these rates are the reference's `shift` steps later, as far as the reference has these steps."""
    return min(seen) + shift in expected and all(expected.get(step + shift, rates) == rates for step, rates in seen.items())


def _changes(rates: _Rates) -> int:
    in_order = [rates[step] for step in sorted(rates)]
    return sum(one != other for one, other in pairwise(in_order))


def _counted_twice(start: int, expected: _Rates, later: _Rates) -> bool:
    """Whether these rates are those of `start` steps later, and of no others."""
    known = {step: rates for step, rates in later.items() if step + start in expected}
    shifts = [step - min(later) for step in expected if _fits(step - min(later), expected, known)] if known else []
    return shifts == [start] and _changes(known) > 1


def _stands_still(expected: _Rates, seen: _Rates) -> bool:
    """Whether the rates never change while the reference run's change repeatedly."""
    meanwhile = {step: expected[step] for step in seen if step in expected}
    return _changes(seen) == 0 and _changes(meanwhile) >= _OFTEN


def _starts_over(expected: _Rates, seen: _Rates, start: int) -> bool:
    """Whether the rates, after the first one that the optimizer kept, change by the same factors as the reference run's after
    its first."""
    if 1 not in expected or start + 1 not in seen or all(rates == seen[start + 1] for rates in seen.values()):
        return False
    kept, origin = seen[start + 1], expected[1]
    pairs = [(rates, kept, expected[step - start], origin) for step, rates in seen.items() if step - start in expected]
    return all(
        math.isclose(now * first, before * then, rel_tol=_ROUNDED)
        for rates in pairs
        for now, before, then, first in (map(float.fromhex, each) for each in zip(*rates, strict=False))
    )


def schedule_behind(drill: Drill) -> Iterator[str]:
    """A warning if a scheduler's count was lost in a run without a reference: the optimizer keeps the rate itself, so that a
    lost count shows only at the next change."""
    for attempt in [] if drill.reference.attempts else drill.chaos.attempts:
        found = _count_behind(drill, attempt)
        if found is None:
            continue
        name, saved, step, counted = found
        yield (
            f"a learning rate scheduler counted {saved} in the checkpoint of step {attempt.resume_step}, from which attempt "
            f"{attempt.number} resumed, but only {counted} ({name}) in what that attempt saved after step {step}: its count "
            "was perhaps not restored, so that rates change later than they should. No step that was done twice shows it "
            "(save and load the scheduler's state, too; nothing is wrong if a new schedule is meant to start)"
        )
        return


def _count_behind(drill: Drill, attempt: Attempt) -> tuple[str, int, int, int] | None:
    """A torch scheduler whose count in this attempt's saves is lower than in the save that the attempt resumed from: its name,
    that count, the later step and the count there. None, too, if rates never change."""
    base = attempt.resume_step
    for rank, trace in attempt.traces.items() if base else ():
        saved = [[*_counts(each)] for each in (*drill.before(attempt.number, rank), trace)]
        before = {place: counted for each in saved[:-1] for step, place, counted in each if step == base}
        for step, place, counted in saved[-1]:
            # A scheduler that counts each step continues to do so; any other never counts backwards.
            if place in before and counted < before[place] + (step - base) * _by_step(place, saved, before[place] // base):
                rates = {record.lr for record in drill.chaos_lineage.of(rank).values() if record.lr}
                return (place[1], before[place], step, counted) if len(rates) > 1 else None
    return None


def _by_step(place: tuple[str, str], saved: Sequence[Sequence[tuple[int, tuple[str, str], int]]], otherwise: int) -> int:
    """How far a scheduler counts with each step: from two saves of one attempt, as the run may have begun with a count.
    `otherwise`: where no attempt has two."""
    for each in saved:
        counts = {step: counted for step, name, counted in each if name == place}
        if len(counts) > 1:
            first, *_, last = sorted(counts)
            return (counts[last] - counts[first]) // (last - first)
    return otherwise


def _counts(trace: RankTrace) -> Iterator[tuple[int, tuple[str, str], int]]:
    """Counts of schedulers in saved files, by step, and by file and name; without the parts of a combined one, which may
    pause."""
    for saved in trace.saves:
        for name, value in saved.held.items():
            *folder, last = name.split("/")
            whole = "/".join((*folder, "_last_lr")) in saved.held and "_schedulers" not in folder
            if last == "last_epoch" and whole and value.isdecimal():
                yield saved.step, (unnumbered(saved.path), name), int(value)
