"""What a script's files of tensors held when it had come to its end, against the reference's: state that it keeps and saves in
whatever way, and that a restart has not brought back. Pure.

A second undisturbed leg decides: what differs there, too, tells nothing.
"""

from collections.abc import Set
from itertools import pairwise
from math import gcd
from pathlib import PurePath
from typing import NamedTuple

from chaosrun.records.history import Attempt, LegHistory
from chaosrun.verify.alignment import REMOVED
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.kept import KeptDifference


def left_difference(drill: Drill) -> KeptDifference | None:
    """The first entry that was otherwise in a file which a restarted attempt wrote; None: there is none, or nobody can tell."""
    restarted = len(drill.chaos.attempts) > 1 and drill.ended_early is None and not drill.given
    if not drill.spec.verify.confirm or not drill.exact_weights or not restarted:
        return None
    for path, held in sorted(drill.chaos.left.files.items()):
        expected = drill.reference.left.files.get(path, {})
        again = drill.confirmed.left.files.get(path, {}) if drill.confirmed else expected
        # Of another size is what is gathered while a script runs: losses, samples.
        differing = [
            name
            for name, seen in held.items()
            if seen != expected.get(name, seen) and again.get(name) == expected[name] and seen[0] == expected[name][0]
        ]
        if differing and (rank := _comparable(drill, path)) is not None:
            name = f"{path}: {differing[0]}" if differing[0] else path
            where = f"at the end, {name} is not what every undisturbed run leaves there"
            step = drill.chaos_lineage.final_step
            about = {"name": name, "path": path, "step": step, "rank": rank, "where": where, "differing": differing}
            values = {"expected": expected[differing[0]][1], "seen": held[differing[0]][1]}
            if drill.by_script:
                return KeptDifference(rank=rank, name=name, **values, cause=Cause("kept_state_not_restored", about))
            cause = Cause("result_differs", {**about, "what": drill.outside}, "outside" if drill.outside else None)
            return KeptDifference(rank=rank, name=name, **values, cause=cause)
    return None


class _Save(NamedTuple):
    step: int
    attempt: int
    rank: int
    time_s: float


def _comparable(drill: Drill, path: str) -> int | None:
    """The rank that saved a file of which both legs must leave the same; None: what it holds depends on when it is saved.

    They must where it is written when a training is complete; where the last attempt saved it after the same steps as the
    reference, or last after the same step; where it is saved as what a script forgets would have it (`_follows_what_was_best`);
    and where no rhythm explains that one leg saves it and the other does not. Else it may be saved by the clock, on a notice,
    or so many steps after a start."""
    left = drill.chaos.left
    if path in left.ranks and path not in left.saves:
        return left.ranks[path]
    expected, last = _saves(drill.reference, path), drill.chaos.attempts[-1]
    seen = [save for save in _saves(drill.chaos, path) if save.attempt == last.number]
    if not expected:
        return None
    step, _, rank, _ = max(seen or expected)
    begun, final = last.start_of(rank), drill.reference_lineage.final_step
    after, at = ({save.step for save in saves} for saves in (expected, seen))
    if seen and (at == {each for each in after if each > begun} or step == max(after)):
        return rank
    if _follows_what_was_best(after, at, begun, final):
        return rank
    if at == {begun + each for each in after if begun + each <= final} or _is_regular(after, at, begun, final):
        return None
    if not seen:
        return rank if _is_missed(drill, last, expected) else None
    steps = {save.step for trace in drill.reference.traces for save in trace.saves if save.how != REMOVED}
    # What is saved at once is of the start.
    return rank if step in steps or (step - begun > 1 and _has_ceased(drill, expected)) else None


def _follows_what_was_best(expected: Set[int], seen: Set[int], begun: int, final: int) -> bool:
    """A file is saved at some of the steps at which a model is evaluated, all of them multiples of one; a restart that has
    forgotten the best value saves it at the first of these, and one with a wrong value at none."""
    every = gcd(*expected, *seen)
    if every == 1 or final // every == len(expected):
        return False
    return min(seen) == begun - begun % every + every if seen else len(expected) > 1 and max(expected) > begun


def _is_regular(expected: Set[int], seen: Set[int], begun: int, final: int) -> bool:
    """In each leg the file is saved every so many steps, the same number, wherever it began to count."""
    every = min(expected)
    legs = ((0, expected), (begun, seen))
    places = [sorted({start, *steps}) for start, steps in legs]
    even = all(b - a == every for own in (places[0], places[1][1:]) for a, b in pairwise(own))
    return even and all(final - own[-1] < every for own in places) and (len(places[1]) < 2 or places[1][1] - begun <= every)


def _has_ceased(drill: Drill, saves: list[_Save]) -> bool:
    """The reference went on for longer than it ever had between two of these saves: they follow something that the script has
    learnt."""
    newest, pause = max(saves), _longest_pause(drill, saves)
    ends = [trace.steps[trace.steps.last].time_s for trace in drill.reference.traces if trace.steps]
    if not pause or not ends:
        return False
    return drill.reference_lineage.final_step - newest.step > pause[0] and max(ends) - newest.time_s > pause[1]


def _is_missed(drill: Drill, last: Attempt, saves: list[_Save]) -> bool:
    """The reference saved a file after the step that the last attempt began with, which did not, for all that it went on for
    longer than there ever was between two of these saves."""
    newest, pause = max(saves), _longest_pause(drill, saves)
    trace = last.traces.get(newest.rank)
    if not pause or not trace or not trace.start or not trace.steps:
        return False
    begun, done = last.start_of(newest.rank), trace.steps.last
    seconds = trace.steps[done].time_s - trace.start.time_s
    return newest.step > begun and done - begun > pause[0] and seconds > pause[1]


def _longest_pause(drill: Drill, saves: list[_Save]) -> tuple[int, float] | None:
    """Of the reference, between two saves or the first step and the first save: steps, seconds. None where it was restarted."""
    starts = [next(iter(trace.steps.values())).time_s for trace in drill.reference.traces if trace.steps]
    if len(drill.reference.attempts) != 1 or not starts:
        return None
    steps, times = ([0, *(save.step for save in saves)], [min(starts), *(save.time_s for save in saves)])
    return max(b - a for a, b in pairwise(sorted(steps))), max(b - a for a, b in pairwise(sorted(times)))


def _saves(leg: LegHistory, path: str) -> list[_Save]:
    """A folder may have been renamed as a whole."""
    if path in leg.left.saves:
        return [_Save(step, leg.attempts[-1].number, leg.left.ranks[path], when) for step, when in leg.left.saves[path]]
    return [
        _Save(save.step, trace.attempt, trace.rank, save.time_s)
        for trace in leg.traces
        for save in trace.saves
        if save.how != REMOVED and PurePath(path).is_relative_to(save.path)
    ]
