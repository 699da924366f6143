"""The default plan, for a drill that names no faults, made from the observed reference run. Pure.

One kill in the middle of an epoch, two within the next, one at an epoch's boundary, one inside a save; each of a rank drawn at
random.
"""

import random
from collections.abc import Mapping
from dataclasses import replace

from chaosrun.faults.fault import BY_DEFAULT, Fault, FaultPlan
from chaosrun.faults.kind import Phase
from chaosrun.plan.sampling import distinct
from chaosrun.records.grouping import grouped
from chaosrun.spec.model import JobSpec

_WITHIN = ((1, 2), (1, 3), (2, 3))
"""The kills' places as fractions: one within an epoch, two within the next."""


def default_plan(
    spec: JobSpec, epoch_of_step: Mapping[int, int], savers: Mapping[int, frozenset[int]], *, strikes_saves: bool = True
) -> FaultPlan:
    """`epoch_of_step`: in the reference run; `savers`: for each step, the ranks that saved after it. `strikes_saves`: strace is
    installed."""
    chance = random.Random(spec.faults.seed)
    epochs = grouped(sorted(epoch_of_step), lambda step: epoch_of_step[step])
    found: list[Fault] = []
    last = max(epoch_of_step, default=0)
    saved = [step for step in sorted(savers) if 0 < step < last] or [step for step in savers if step > 0]
    if saved and strikes_saves:
        step = saved[len(saved) // 2]
        ranks = sorted(savers[step])
        found.append(_kill(ranks[distinct(1, len(ranks), chance)[0]], step, "save"))
    taken = {fault.at_step for fault in found}
    for step in _steps(list(epochs.values()), saved):
        free = [near for near in sorted(epoch_of_step, key=lambda each: (abs(each - step), each)) if near not in taken | {last}]
        if free:
            taken.add(free[0])
            found.append(_kill(distinct(1, spec.workers, chance)[0], free[0], "step"))
    found.sort(key=lambda fault: fault.at_step or 0)
    faults = tuple(replace(fault, id=f"F{number}") for number, fault in enumerate(found, start=1))
    return FaultPlan(seed=spec.faults.seed, faults=faults)


def _steps(epochs: list[list[int]], saved: list[int]) -> list[int]:
    """The steps of the kills: within two epochs, if possible after the first save, and at the end of another epoch."""
    if len(epochs) < 2:
        # Epochs are unknown, or there is only one: spread all four kills over the run.
        steps = epochs[0] if epochs else []
        return [steps[len(steps) * part // 5] for part in (1, 2, 3, 4)] if steps else []
    first = next((number for number, steps in enumerate(epochs) if saved and steps[0] > saved[0]), 0)
    first = min(first, len(epochs) - 2)
    chosen = (epochs[first], epochs[first + 1], epochs[first + 1])
    found = [steps[len(steps) * part // whole] for steps, (part, whole) in zip(chosen, _WITHIN, strict=True)]
    boundary = first + 1 if first + 2 < len(epochs) else max(0, first - 1)
    return [*found, epochs[boundary][-1]]


def _kill(rank: int, step: int, phase: Phase) -> Fault:
    return Fault(id="", rank=rank, phase=phase, at_step=step, source=BY_DEFAULT)
