"""What a script's files of tensors held when it had come to its end, against the reference's: state that it keeps and saves in
whatever way, and that a restart has not brought back. Pure.

A second undisturbed leg decides: what differs there, too, tells nothing.
"""

from itertools import pairwise
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

    They must where it is written when a training is complete; where the last attempt saved it after the step after which the
    reference did last, or one after which that saved something else (of the best weights another attempt may think otherwise);
    and where no rhythm explains that one leg saves it and the other does not. Else it may be saved by the clock, on a notice,
    or every so many steps after a start."""
    left = drill.chaos.left
    if path in left.ranks and path not in left.saves:
        return left.ranks[path]
    expected, last = _saves(drill.reference, path), drill.chaos.attempts[-1]
    seen = [save for save in _saves(drill.chaos, path) if save.attempt == last.number]
    if not expected:
        return None
    if not seen:
        return max(expected).rank if _is_missed(drill, last, expected) else None
    step, _, rank, _ = max(seen)
    steps = {save.step for trace in drill.reference.traces for save in trace.saves if save.how != REMOVED}
    # What is saved at once is of the start.
    anew = step - last.start_of(rank) > 1 and _has_ceased(drill, expected)
    return rank if step == max(expected).step or step in steps or anew else None


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
