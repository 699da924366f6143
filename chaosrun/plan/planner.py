"""Plans a spec's faults (scheduled, random, replayed, a preset's): each gets its rank and moment; or says why there can be no
plan. Pure, and the same on every machine (`plan.sampling`)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.plan.entries import MAX_FAULTS, RefusedError, at_one_moment
from chaosrun.plan.preset_faults import preset_faults
from chaosrun.plan.random_faults import random_faults
from chaosrun.plan.replay import replayed
from chaosrun.plan.rules import objections
from chaosrun.spec.faults import ScheduledFault
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Objection, Source

HINT = "a fault that cannot fire proves nothing: change the entry, or workers (--workers), max_steps or checkpoint"


def _refusal(objections: Sequence[Objection], hint: str) -> UsageError:
    reasons = [str(each) for each in objections]
    message = reasons[0] if len(reasons) == 1 else "\n  ".join([f"{len(reasons)} faults cannot be planned:", *reasons])
    return UsageError(message, hint=hint)


def make_plan(
    spec: JobSpec, trace: Source | None = None, refuse: Callable[[Sequence[Objection], str], UsageError] = _refusal
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
            faults += random_faults(spec, spec.faults.random, faults, chance)
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
