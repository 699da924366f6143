"""From the faults a spec asks for to the plan: every fault with its rank and step, or the reason why there can be none.

Pure: the same spec gives the same plan on every machine. Chance comes only from `random.Random(seed).random()`, whose
sequence Python keeps the same between versions, and is only compared, multiplied and truncated, which IEEE 754 fixes.
"""

import dataclasses
import random
from collections.abc import Iterator

from chaosrun.errors import UsageError
from chaosrun.plan.faults import Fault, FaultPlan
from chaosrun.plan.feasible import first_checkpoint, objections
from chaosrun.spec.faults import RandomFaults, ScheduledFault
from chaosrun.spec.model import JobSpec

__all__ = ["MAX_DRAWN_STEPS", "MAX_FAULTS", "make_plan"]

MAX_FAULTS = 10_000
MAX_DRAWN_STEPS = 10_000_000
"""Steps that `mean_steps` may range over: each is one draw."""


def make_plan(spec: JobSpec) -> FaultPlan:
    """The plan of a job, sorted by step, with ids F1, F2, … in that order.

    Raises UsageError, naming every entry at fault, when one could never fire, or has no last step to stop at.
    """
    chance = random.Random(spec.faults.seed)
    faults: list[Fault] = []
    refused: list[str] = []
    for index, entry in enumerate(spec.faults.schedule):
        source = f"faults.schedule[{index}]"
        steps = _scheduled_steps(spec, entry, source)
        if isinstance(steps, str):
            refused.append(steps)
            continue
        ranks = [_rank(entry.rank, spec.workers, chance) for _ in steps]
        faults += (_scheduled(entry, rank, step, source) for rank, step in zip(ranks, steps, strict=True))
    if spec.faults.random is not None:
        taken = {fault.at_step or first_checkpoint(spec) for fault in faults}
        drawn = _random_faults(spec, spec.faults.random, taken, chance)
        if isinstance(drawn, str):
            refused.append(drawn)
        else:
            faults += drawn
    if not refused and len(faults) > MAX_FAULTS:
        refused.append(f"faults: {len(faults)} faults are more than a drill can do (at most {MAX_FAULTS})")
    if refused:
        raise _refusal(refused)
    faults.sort(key=lambda fault: fault.at_step or 0)
    if impossible := objections(spec, faults):
        raise _refusal(impossible)
    numbered = (dataclasses.replace(fault, id=f"F{number}") for number, fault in enumerate(faults, start=1))
    return FaultPlan(seed=spec.faults.seed, faults=tuple(numbered))


def _scheduled(entry: ScheduledFault, rank: int, step: int | None, source: str) -> Fault:
    return Fault(
        id="",
        kind=entry.kind,
        rank=rank,
        phase=None if entry.after is not None else entry.moment,
        at_step=step,
        occurrence=entry.occurrence or 1,
        attempt=entry.attempt,
        target=entry.target,
        after_s=entry.after,
        options=entry.options,
        source=source,
    )


def _refusal(reasons: list[str]) -> UsageError:
    message = reasons[0] if len(reasons) == 1 else "\n  ".join([f"{len(reasons)} faults cannot be planned:", *reasons])
    return UsageError(message, hint="a fault that cannot fire proves nothing: change the entry, or max_steps and checkpoint")


def _scheduled_steps(spec: JobSpec, entry: ScheduledFault, source: str) -> range | list[int | None] | str:
    """The steps of one schedule entry, or why it has none."""
    if entry.every_steps is None:
        return [entry.at_step]
    last = entry.until_step if entry.until_step is not None else spec.max_steps
    if last is None:
        return f"{source}: every_steps needs a last step, set until_step or max_steps"
    if spec.max_steps is not None and last > spec.max_steps:
        return f"{source}: until_step {last} is never reached, max_steps is {spec.max_steps}"
    if last < entry.every_steps:
        return f"{source}: every {entry.every_steps} steps comes to none within {last} steps"
    steps = range(entry.every_steps, last + 1, entry.every_steps)
    if len(steps) > MAX_FAULTS:
        return f"{source}: {len(steps)} faults are more than a drill can do (at most {MAX_FAULTS})"
    return steps


def _random_faults(spec: JobSpec, entry: RandomFaults, taken: set[int], chance: random.Random) -> list[Fault] | str:
    """Faults at drawn steps, none of them one that the schedule has already taken; or why they cannot be drawn."""
    source = "faults.random"
    if entry.between is None and spec.max_steps is None:
        return f"{source}: needs to know the last step, set between or max_steps"
    first, last = entry.between or (1, spec.max_steps or 1)
    if spec.max_steps is not None and last > spec.max_steps:
        return f"{source}: step {last} of between is never reached, max_steps is {spec.max_steps}"
    occupied = sorted(step for step in taken if first <= step <= last)
    if entry.count is not None:
        free = last - first + 1 - len(occupied)
        if entry.count > min(free, MAX_FAULTS):
            return (
                f"{source}: {entry.count} faults do not fit, {min(free, MAX_FAULTS)} can be placed from step {first} to {last}"
            )
        steps = [_nth_free(first, occupied, index) for index in _distinct(entry.count, free, chance)]
    else:
        if last - first >= MAX_DRAWN_STEPS:
            return (
                f"{source}: mean_steps over {last - first + 1} steps is too far, set between (at most {MAX_DRAWN_STEPS} steps)"
            )
        steps = [step for step in _bernoulli(entry, first, last, chance) if step not in taken]
    return [
        Fault(
            id="",
            kind=entry.kind,
            rank=_rank(entry.rank, spec.workers, chance),
            phase=entry.moment,
            at_step=step,
            options=entry.options,
            source=source,
        )
        for step in steps
    ]


def _rank(rank: int | str, workers: int, chance: random.Random) -> int:
    return rank if isinstance(rank, int) else int(chance.random() * workers)


def _distinct(count: int, among: int, chance: random.Random) -> list[int]:
    """`count` different numbers of range(among), ascending, each set equally likely (R. W. Floyd's sampling: `count` draws)."""
    chosen: set[int] = set()
    for limit in range(among - count, among):
        candidate = int(chance.random() * (limit + 1))
        chosen.add(limit if candidate in chosen else candidate)
    return sorted(chosen)


def _nth_free(first: int, occupied: list[int], index: int) -> int:
    """The step number `index` (from 0) of those from `first` on that are not in `occupied` (ascending)."""
    step = first + index
    for busy in occupied:
        if busy > step:
            break
        step += 1
    return step


def _bernoulli(entry: RandomFaults, first: int, last: int, chance: random.Random) -> Iterator[int]:
    # One draw a step: gaps by a logarithm would differ between C libraries in the last bit, and so between machines.
    probability = 1 / (entry.mean_steps or 1)
    return (step for step in range(first, last + 1) if chance.random() < probability)
