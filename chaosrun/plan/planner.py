"""Plans a spec's faults (scheduled, random, replayed, a preset's): each gets its rank and moment; or says why there can be no
plan. Pure, and the same on every machine (`plan.sampling`).

Random faults get their times by `mtbf`, or their steps by `count`, `rate` or `mean_steps`, drawn from the plan's seed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.entries import MAX_FAULTS, RefusedError, at_one_moment
from chaosrun.plan.preset_faults import preset_faults
from chaosrun.plan.replay import replayed
from chaosrun.plan.rules import objections
from chaosrun.plan.sampling import bernoulli, distinct, exponential, nth_free
from chaosrun.plan.timeline import Timeline
from chaosrun.spec.faults import RandomFaults, ScheduledFault
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Objection, SourceText

HINT = "a fault that cannot fire proves nothing: change the entry, or workers (--workers), max_steps or checkpoint"
MAX_DRAWN_STEPS = 10_000_000
"""Most steps that `mean_steps` and `rate` may range over: each takes one draw."""
MEAN_TIMES_WITHIN = 10
"""For how many times `mtbf` faults are drawn, unless `within` sets the time."""


def _refusal(objections: Sequence[Objection], hint: str) -> UsageError:
    reasons = [str(each) for each in objections]
    message = reasons[0] if len(reasons) == 1 else "\n  ".join([f"{len(reasons)} faults cannot be planned:", *reasons])
    return UsageError(message, hint=hint)


def make_plan(
    spec: JobSpec, trace: SourceText | None = None, refuse: Callable[[Sequence[Objection], str], UsageError] = _refusal
) -> FaultPlan:
    """The plan of a job in the order in which it meets the faults, with ids F1, F2, …; `trace` is what `faults.replay` names.
    Raises UsageError, made by `refuse`, which names every entry that cannot be planned, or SpecError when the trace cannot be
    read."""
    chance = random.Random(spec.faults.seed)
    if spec.faults.preset is not None:
        try:
            return FaultPlan(seed=spec.faults.seed, faults=_numbered(preset_faults(spec, spec.faults.preset, chance)))
        except RefusedError as error:
            found = error.objection
            raise refuse([found if found.entry == "faults.preset" else Objection("faults.preset", str(found))], HINT) from error
    faults: list[Fault] = []
    refused: list[Objection] = []
    for index, entry in enumerate(spec.faults.schedule):
        try:
            faults += _scheduled(spec, entry, f"faults.schedule[{index}]", chance)
        except RefusedError as error:
            refused.append(error.objection)
    if spec.faults.random is not None:
        try:
            faults += _random_faults(spec, spec.faults.random, faults, chance)
        except RefusedError as error:
            refused.append(error.objection)
    if spec.faults.replay is not None:
        assert trace is not None, "the trace is read when the job is loaded"
        faults += replayed(spec, spec.faults.replay, trace)
    if not refused and len(faults) > MAX_FAULTS:
        refused.append(Objection("faults", f"{len(faults)} faults are more than a drill can do (at most {MAX_FAULTS})"))
    faults.sort(key=lambda fault: (fault.after_s or 0, fault.at_step or 0))
    if impossible := [*refused, *objections(spec, faults, some_missing=bool(refused))]:
        raise refuse(impossible, HINT)
    return FaultPlan(seed=spec.faults.seed, faults=_numbered(faults))


def _numbered(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """The faults with ids, and with groups renamed to G1/2, G2/3, …, number and size."""
    names: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for fault in faults:
        if fault.group is not None:
            names.setdefault(fault.group, f"G{len(names) + 1}")
            sizes[fault.group] = sizes.get(fault.group, 0) + 1
    groups = {group: f"{name}/{sizes[group]}" for group, name in names.items()}
    return tuple(
        replace(fault, id=f"F{number}", group=groups[fault.group] if fault.group else None)
        for number, fault in enumerate(faults, start=1)
    )


def _scheduled(spec: JobSpec, entry: ScheduledFault, source: str, chance: random.Random) -> list[Fault]:
    return [
        fault
        for step in _scheduled_steps(spec, entry, source)
        for fault in at_one_moment(
            spec,
            entry,
            source,
            chance,
            phase=None if entry.after is not None else entry.moment,
            at_step=step,
            occurrence=entry.occurrence or 1,
            attempt=entry.attempt,
            after_s=entry.after,
        )
    ]


def _scheduled_steps(spec: JobSpec, entry: ScheduledFault, source: str) -> range | list[int | None]:
    if entry.every_steps is None:
        return [entry.at_step]
    last = entry.until_step if entry.until_step is not None else spec.max_steps
    if last is None:
        raise RefusedError(source, "every_steps needs a last step, set until_step or max_steps")
    if spec.max_steps is not None and last > spec.max_steps:
        raise RefusedError(source, f"until_step {last} is never reached, max_steps is {spec.max_steps}")
    if last < entry.every_steps:
        raise RefusedError(source, f"every {entry.every_steps} steps comes to none within {last} steps")
    steps = range(entry.every_steps, last + 1, entry.every_steps)
    if len(steps) > MAX_FAULTS:
        raise RefusedError(source, f"{len(steps)} faults are more than a drill can do (at most {MAX_FAULTS})")
    return steps


def _random_faults(spec: JobSpec, entry: RandomFaults, scheduled: Sequence[Fault], chance: random.Random) -> list[Fault]:
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
