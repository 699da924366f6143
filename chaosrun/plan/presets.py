"""From a fault preset to faults of one job: shares of the training become steps, drawn so that every fault can happen. Pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, ONCE_AN_ATTEMPT
from chaosrun.plan.chance import bernoulli, distinct
from chaosrun.plan.entries import RefusedError, at_one_moment
from chaosrun.plan.rules import objections, only_rank
from chaosrun.plan.timeline import Timeline
from chaosrun.spec.faults import PresetFault, PresetSpec
from chaosrun.spec.model import JobSpec

TRIES = 30
"""Draws of one entry, until its faults can happen together with those that are there already."""
ROUNDS = 30
"""Draws of the whole preset, until at least one fault comes."""


def drawn(spec: JobSpec, preset: PresetSpec, chance: random.Random) -> list[Fault]:
    """The preset's faults in the order of the plan, without ids: at least one, and all of them can happen. An entry for which a
    short job has no room beside the others is left out.

    Raises RefusedError when the job has no known length, or is too short for any of it.
    """
    if spec.max_steps is None:
        raise RefusedError("faults.preset", f"preset {preset.name}: the job's length is not known, set max_steps")
    # What comes in a recovery needs what leads to one.
    entries = sorted(enumerate(preset.faults), key=lambda entry: entry[1].moment in ONCE_AN_ATTEMPT)
    reason = "no fault was drawn"
    for _ in range(ROUNDS):
        faults: list[Fault] = []
        one = int(chance.random() * spec.workers) if preset.one_rank else None
        for index, entry in entries:
            if chance.random() >= entry.chance:
                continue
            source = f"preset {preset.name}, faults[{index}]"
            for _ in range(TRIES):
                more = [*faults, *_of_entry(spec, _aimed(entry, one), source, chance)]
                more.sort(key=lambda fault: fault.at_step or 0)
                against = objections(spec, more)
                if not against:
                    faults = more
                    break
                reason = str(against[0])
        if faults:
            return faults
    raise RefusedError("faults.preset", f"preset {preset.name} does not fit {spec.max_steps} steps: {reason}")


def _aimed(entry: PresetFault, one: int | None) -> PresetFault:
    """At the rank that all faults of the preset strike, where they strike one, and this can be done to any."""
    if one is None or entry.rank != "random" or only_rank(entry.kind, entry.moment, entry.target) is not None:
        return entry
    return entry.model_copy(update={"rank": one, "at_once": None})


def _of_entry(spec: JobSpec, entry: PresetFault, source: str, chance: random.Random) -> Iterator[Fault]:
    if entry.moment in ONCE_AN_ATTEMPT:
        yield from at_one_moment(spec, entry, source, chance, phase=entry.moment, occurrence=entry.occurrence or 1)
        return
    for step in _steps(spec, entry, source, chance):
        first = list(at_one_moment(spec, entry, source, chance, phase=entry.moment, at_step=step))
        yield from first
        if entry.then is not None:
            following = at_one_moment(spec, entry.then, f"{source}.then", chance, phase=entry.then.moment, at_step=step)
            yield from (replace(fault, rank=first[0].rank) if entry.then.rank == "random" else fault for fault in following)


def _steps(spec: JobSpec, entry: PresetFault, source: str, chance: random.Random) -> Sequence[int]:
    """Steps of the entry's part of the training; of a phase of checkpoints those at which one is saved. A part that holds none
    is widened to the nearest."""
    last = spec.max_steps or 1
    begin, end = entry.within[0] * last, entry.within[1] * last
    timeline = Timeline.of(spec)
    possible = [step for step in range(1, last + 1) if entry.moment not in CHECKPOINT_PHASES or timeline.saves(step)]
    inside = [step for step in possible if begin <= step <= end]
    if not inside:
        inside = [min(possible, key=lambda step: max(begin - step, step - end))]
    if entry.mean is not None:
        chosen = list(bernoulli(min(1.0, 1 / (entry.mean * last)), 0, len(inside) - 1, chance))
        return [inside[place] for place in chosen or [int(chance.random() * len(inside))]]
    count = entry.count or 1
    if count > len(inside):
        raise RefusedError(source, f"{count} faults do not fit, there are {len(inside)} steps for them")
    return [inside[place] for place in distinct(count, len(inside), chance)]
