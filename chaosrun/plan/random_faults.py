"""The faults of `faults.random`: their times by `mtbf`, or their steps by `count`, `rate` or `mean_steps`, drawn from
the plan's seed. Pure, and the same on every machine (`plan.sampling`)."""

import random
from collections.abc import Sequence

from chaosrun.faults.fault import Fault
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.entries import MAX_FAULTS, RefusedError, at_one_moment
from chaosrun.plan.sampling import bernoulli, distinct, exponential, nth_free
from chaosrun.plan.timeline import Timeline
from chaosrun.spec.faults import RandomFaults
from chaosrun.spec.model import JobSpec

MAX_DRAWN_STEPS = 10_000_000
"""Most steps that `mean_steps` and `rate` may range over: each takes one draw."""
MEAN_TIMES_WITHIN = 10
"""For how many times `mtbf` faults are drawn, unless `within` sets the time."""


def random_faults(spec: JobSpec, entry: RandomFaults, scheduled: Sequence[Fault], chance: random.Random) -> list[Fault]:
    """Faults at drawn times, or at drawn steps, none of which `scheduled` has taken. Raises RefusedError."""
    source = "faults.random"
    if entry.mtbf is not None:
        return [
            fault
            for after_s in _times(entry.mtbf, entry.within or MEAN_TIMES_WITHIN * entry.mtbf, chance)
            for fault in at_one_moment(spec, entry, source, chance, phase=None, after_s=after_s, required=False)
        ]
    return [
        fault
        for step in _random_steps(spec, entry, source, _taken(spec, scheduled, entry), chance)
        for fault in at_one_moment(spec, entry, source, chance, phase=entry.moment, at_step=step)
    ]


def _taken(spec: JobSpec, faults: Sequence[Fault], entry: RandomFaults) -> set[int]:
    """Steps at which a drawn fault would collide with one of these faults: its own step, and the one that ranks finish on a
    notice."""
    drawn = Fault(id="", kind=entry.kind, rank=0, source="")
    taken: set[int] = set()
    for fault in faults:
        if fault.phase is None:
            continue
        step = fault.at_step or Timeline.of(spec).first_save
        taken.add(step)
        if fault.facts.ends_attempt and drawn.facts.ends_attempt:
            taken |= {step + 1} if fault.facts.notice else set()
            taken |= {step - 1} if drawn.facts.notice else set()
    return taken


def _times(mean_s: float, within_s: float, chance: random.Random) -> list[float]:
    """Times of independent faults that are `mean_s` apart on average: in seconds, rounded to milliseconds."""
    times: list[float] = []
    now_s = mean_s * exponential(chance)
    while now_s <= within_s:
        times.append(max(0.001, round(now_s, 3)))
        if len(times) > MAX_FAULTS:
            raise RefusedError(
                "faults.random", f"more than {MAX_FAULTS} faults within {within_s:g} s, lower within or raise mtbf"
            )
        now_s += mean_s * exponential(chance)
    return times


def _random_steps(spec: JobSpec, entry: RandomFaults, source: str, taken: set[int], chance: random.Random) -> list[int]:
    if entry.between is None and spec.max_steps is None:
        raise RefusedError(source, "needs to know the last step, set between or max_steps")
    first, last = entry.between or (1, spec.max_steps or 1)
    if spec.max_steps is not None and last > spec.max_steps:
        raise RefusedError(source, f"step {last} of between is never reached, max_steps is {spec.max_steps}")
    occupied = sorted(step for step in taken if first <= step <= last)
    # After a notice the job makes one more step and resumes there: no other notice may come at that step or at the last.
    apart = 2 if KINDS[entry.kind].notice else 1
    last -= apart - 1 if last == spec.max_steps else 0
    if entry.count is not None:
        free = last - first + 1 - len(occupied)
        room = min(free + apart - 1, MAX_FAULTS * apart) // apart
        if entry.count > room:
            raise RefusedError(source, f"{entry.count} faults do not fit, {room} can be placed from step {first} to {last}")
        drawn = distinct(entry.count, free - (entry.count - 1) * (apart - 1), chance)
        return [nth_free(first, occupied, index + place * (apart - 1)) for place, index in enumerate(drawn)]
    probability, key = (entry.rate, "rate") if entry.rate is not None else (1 / (entry.mean_steps or 1), "mean_steps")
    if last - first >= MAX_DRAWN_STEPS:
        raise RefusedError(
            source, f"{key} over {last - first + 1} steps is too far, set between (at most {MAX_DRAWN_STEPS} steps)"
        )
    steps: list[int] = []
    for step in bernoulli(probability, first, last, chance):
        if step not in taken and (not steps or step - steps[-1] >= apart):
            steps.append(step)
    return steps
