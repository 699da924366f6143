"""From the faults a spec asks for to the plan: every fault with its rank and moment, or why there can be none. Pure, and the
same on every machine (`plan.sampling`)."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kind import CHECKPOINT_PHASES, ONCE_AN_ATTEMPT
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.entries import RefusedError, at_one_moment
from chaosrun.plan.replay import replayed
from chaosrun.plan.rules import objections, only_rank
from chaosrun.plan.sampling import bernoulli, distinct, exponential, nth_free
from chaosrun.plan.timeline import Timeline
from chaosrun.spec.faults import PresetFault, PresetSpec, RandomFaults, ScheduledFault
from chaosrun.spec.model import JobSpec
from chaosrun.spec.problems import Objection, Source

MAX_FAULTS = 10_000
MAX_DRAWN_STEPS = 10_000_000
"""Steps that `mean_steps` and `rate` may range over: each is one draw."""
MEAN_TIMES_WITHIN = 10
"""How many times their mean apart faults are drawn for by `mtbf`, unless `within` says so."""
TRIES = 30
"""Draws of one entry, until its faults can happen together with those that are there already."""
ROUNDS = 30
"""Draws of the whole preset, until at least one fault comes."""

HINT = "a fault that cannot fire proves nothing: change the entry, or max_steps and checkpoint"


def _refusal(objections: Sequence[Objection], hint: str) -> UsageError:
    reasons = [str(each) for each in objections]
    message = reasons[0] if len(reasons) == 1 else "\n  ".join([f"{len(reasons)} faults cannot be planned:", *reasons])
    return UsageError(message, hint=hint)


def make_plan(
    spec: JobSpec, trace: Source | None = None, refuse: Callable[[Sequence[Objection], str], UsageError] = _refusal
) -> FaultPlan:
    """The plan of a job in the order in which it meets the faults, with ids F1, F2, …; `trace` is what `faults.replay` names.
    Raises UsageError, naming every entry at fault (`refuse` makes it, of the reasons and a hint), or SpecError when the trace
    cannot be read."""
    chance = random.Random(spec.faults.seed)
    if spec.faults.preset is not None:
        try:
            return FaultPlan(seed=spec.faults.seed, faults=_numbered(_of_preset(spec, spec.faults.preset, chance)))
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
        taken = _taken(spec, faults, spec.faults.random)
        try:
            faults += _random_faults(spec, spec.faults.random, taken, chance)
        except RefusedError as error:
            refused.append(error.objection)
    if spec.faults.replay is not None:
        assert trace is not None, "whoever loads the job reads its trace"
        faults += replayed(spec, spec.faults.replay, trace)
    if not refused and len(faults) > MAX_FAULTS:
        refused.append(Objection("faults", f"{len(faults)} faults are more than a drill can do (at most {MAX_FAULTS})"))
    faults.sort(key=lambda fault: (fault.after_s or 0, fault.at_step or 0))
    if impossible := [*refused, *objections(spec, faults, some_missing=bool(refused))]:
        raise refuse(impossible, HINT)
    return FaultPlan(seed=spec.faults.seed, faults=_numbered(faults))


def _numbered(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """With ids, and groups called G1/2, G2/3, … by their size."""
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


def _random_faults(spec: JobSpec, entry: RandomFaults, taken: set[int], chance: random.Random) -> list[Fault]:
    """Faults at drawn times, or at drawn steps, none of them one that the schedule has already taken."""
    source = "faults.random"
    if entry.mtbf is not None:
        return [
            fault
            for after_s in _times(entry.mtbf, entry.within or MEAN_TIMES_WITHIN * entry.mtbf, chance)
            for fault in at_one_moment(spec, entry, source, chance, phase=None, after_s=after_s, required=False)
        ]
    return [
        fault
        for step in _random_steps(spec, entry, source, taken, chance)
        for fault in at_one_moment(spec, entry, source, chance, phase=entry.moment, at_step=step)
    ]


def _taken(spec: JobSpec, faults: Sequence[Fault], entry: RandomFaults) -> set[int]:
    """Steps at which a drawn fault would meet one of these: each one's own, and the one that the ranks make on a notice."""
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
    """Seconds, in steps of one millisecond, at which faults come that are independent of each other and this far apart."""
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
    # After a notice the job makes one step more and goes on from there: no other notice comes at that step, none at the last.
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


# A fault preset: shares of the training become steps, drawn so that every fault can happen


def _of_preset(spec: JobSpec, preset: PresetSpec, chance: random.Random) -> list[Fault]:
    """The preset's faults in the order of the plan, without ids: at least one, all of which can happen; entries for which a
    short job has no room are left out. Raises RefusedError where none has, or the length is not known."""
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
                against = objections(spec, more) or _successive_notices(more)
                if not against:
                    faults = more
                    break
                reason = str(against[0])
        if faults:
            return faults
    raise RefusedError("faults.preset", f"preset {preset.name} does not fit {spec.max_steps} steps: {reason}")


def _successive_notices(faults: Sequence[Fault]) -> list[Objection]:
    """Ranks leave after the step that follows a notice: whether another one's notice of that step is still seen is chance."""
    steps = {fault.at_step: fault for fault in faults if fault.facts.notice and fault.at_step is not None}
    late = (fault for step, fault in steps.items() if step - 1 in steps)
    return [Objection(fault.source, f"{fault.describe()}: ranks leave after this step, on another notice") for fault in late]


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
    """Steps of the entry's part of the training, or the nearest; of a phase of checkpoints those at which one is saved."""
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
