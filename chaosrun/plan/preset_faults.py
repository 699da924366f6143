"""The faults of a preset: its shares of the training become steps, drawn from the plan's seed until every fault can happen.
Pure, and the same on every machine (`plan.sampling`)."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, ONCE_AN_ATTEMPT
from chaosrun.plan.entries import RefusedError, at_one_moment
from chaosrun.plan.rules import objections, only_rank
from chaosrun.plan.sampling import bernoulli, distinct
from chaosrun.plan.timeline import Timeline
from chaosrun.spec.faults import PresetFault, PresetSpec
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Objection

TRIES = 30
"""How often to draw one entry, until its faults can happen together with those already in the plan."""
ROUNDS = 30
"""How often to draw the whole preset, until it has at least one fault."""


def preset_faults(spec: JobSpec, preset: PresetSpec, chance: random.Random) -> list[Fault]:
    """The preset's faults in the order of the plan, without ids: at least one, all of which can happen; entries for which a
    short job has no room are left out. Raises RefusedError if there is room for none, or the length is not known."""
    if spec.max_steps is None:
        raise RefusedError("faults.preset", f"preset {preset.name}: the job's length is not known, set max_steps")
    # Last, the faults during a recovery: they need others that cause one.
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
                against = objections(spec, more) or _successive_notices(more)
                if not against:
                    faults = more
                    break
                reason = str(against[0])
        if faults:
            return faults
    raise RefusedError("faults.preset", f"preset {preset.name} does not fit {spec.max_steps} steps: {reason}")


def _successive_notices(faults: Sequence[Fault]) -> list[Objection]:
    """Objections to notices in successive steps: ranks leave after the second step, and receive its notice only by chance."""
    steps = {fault.at_step: fault for fault in faults if fault.facts.notice and fault.at_step is not None}
    late = (fault for step, fault in steps.items() if step - 1 in steps)
    return [Objection(fault.source, f"{fault.describe()}: ranks leave after this step, on another notice") for fault in late]


def _aimed(entry: PresetFault, one: int | None) -> PresetFault:
    """The entry with the preset's common rank, if there is one and this fault can strike any rank."""
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
    """Steps in the entry's part of the training, or the nearest; for checkpoint phases only steps with a checkpoint."""
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
