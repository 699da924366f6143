"""Whether a file is saved at steps that depend on training results, or only on when its process started. Pure. After a restart
a file may be saved at other steps than in the reference run. That is right for a script that saves by the clock, or a number of
steps or evaluations after a start; it is a mistake if a best value, a patience or a list of the best was not restored.
"""

from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

SHORTEST_PERIOD_S = 0.2
"""Saves by the clock are at least this far apart."""
ENOUGH = 4
"""With at least this many saves, equal pauses between them are no coincidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSaves:
    """The saves of one file by one process."""

    times: dict[int, float]
    """Times in seconds, by step."""
    begun: int
    """The step that it resumed at."""
    final: int
    began_s: float
    ended_s: float
    longest_step_s: float

    @property
    def steps(self) -> Set[int]:
        return self.times.keys()


def is_of_its_start(fault_free: FileSaves, restarted: FileSaves, *, holds_weights: bool) -> bool:
    """Whether the start times of the processes explain the difference. In doubt, a file of weights is assumed to depend on the
    best value."""
    due = {step + restarted.begun for step in fault_free.steps}
    counted = restarted.steps == {step for step in due if step <= restarted.final} or _same_evaluations(fault_free, restarted)
    rhythmic = _is_regular(fault_free, restarted) or _is_by_the_clock(fault_free, restarted)
    if _follows_what_was_best(fault_free, restarted):
        return (counted and not holds_weights) or (rhythmic and _is_long_enough(fault_free, restarted))
    once = len(fault_free.steps) == len(restarted.steps) == 1 and not holds_weights
    # Weights that are saved again later may be the best, evaluated at every step: without a best value the first are.
    at_first = max(fault_free.steps) <= 2 if holds_weights else min(fault_free.steps) <= 1
    at_once = at_first and bool(restarted.steps) and max(restarted.steps) - restarted.begun <= 1
    return counted or once or at_once or rhythmic


def _follows_what_was_best(fault_free: FileSaves, restarted: FileSaves) -> bool:
    """A model may be evaluated at the final step under any rhythm."""
    begun, final = restarted.begun, fault_free.final
    return any(
        _is_best_of_some(fault_free.steps - left_out, restarted.steps - left_out, begun, final)
        for left_out in (set[int](), {final})
    )


def _is_best_of_some(expected: Set[int], seen: Set[int], begun: int, final: int) -> bool:
    """A file is saved at some of the steps at which a model is evaluated; a restart that has forgotten the best value saves it
    at the first of these, and one with a wrong value at none."""
    points = expected | seen
    every = gcd(*points)
    if every == 1 and len(points) > 2:  # 1, 11, 21, …
        every = gcd(*(step - min(points) for step in points))
    if every < 2 or not expected:
        return False
    phase = min(points) % every
    if len(range(phase or every, final + 1, every)) <= len(expected):
        return False  # at all of them
    return min(seen) == begun + 1 + (phase - begun - 1) % every if seen else len(expected) > 1 and max(expected) > begun


def _is_long_enough(fault_free: FileSaves, restarted: FileSaves) -> bool:
    """Whether there are enough saves to show a rhythm, with none due after the last."""
    own = sorted(fault_free.steps)
    shortest = min((b - a for a, b in pairwise(own)), default=0)
    return len(own) + len(restarted.steps) >= ENOUGH and fault_free.final - own[-1] < shortest


def _same_evaluations(fault_free: FileSaves, restarted: FileSaves) -> bool:
    """Both save at the same evaluations, counted from their start: the first, say, or every third."""
    every = gcd(*fault_free.steps, *restarted.steps)
    before = restarted.begun // every
    expected = {step // every for step in fault_free.steps}
    return {step // every - before for step in restarted.steps} == {
        n for n in expected if n <= restarted.final // every - before
    }


def _is_regular(fault_free: FileSaves, restarted: FileSaves) -> bool:
    """Both save at a fixed interval of steps, counted from any step."""
    own = sorted(fault_free.steps)
    every = own[1] - own[0] if len(own) > 1 else own[0]
    for saves in (fault_free, restarted):
        first, *others = sorted(saves.steps) or [saves.begun]
        even = all(b - a == every for a, b in pairwise((first, *others)))
        if not even or first - saves.begun > every or saves.final - max([first, *others]) >= every:
            return False
    return True


def _is_by_the_clock(fault_free: FileSaves, restarted: FileSaves) -> bool:
    """One period in seconds explains all pauses between saves, and the absence of further saves; a save may be a step late."""
    pauses = [b - a for saves in (fault_free, restarted) for a, b in pairwise(saves.times.values())]
    waits = [saves.ended_s - max(saves.times.values(), default=saves.began_s) for saves in (fault_free, restarted)]
    waits += [min(saves.times.values()) - saves.began_s for saves in (fault_free, restarted) if saves.times]
    period_s = min(pauses, default=min(fault_free.times.values()) - fault_free.began_s)
    steps = max(b - a for a, b in pairwise([0, *sorted(fault_free.steps)]))
    if not restarted.steps and restarted.final - restarted.begun >= steps:
        return False  # another save would have been due
    late_s = max(fault_free.longest_step_s, restarted.longest_step_s)
    return period_s >= SHORTEST_PERIOD_S and max([*pauses, *waits]) <= period_s + late_s
