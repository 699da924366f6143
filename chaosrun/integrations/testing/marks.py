"""The cases that the marks `chaos` and `chaos_plans` make of a test."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from chaosrun.integrations.testing.drills import Faults, Plan


def cases(plans: pytest.Mark | None, seeds: pytest.Mark | None, *, where: str) -> list[tuple[str, Plan]]:
    """(id, plan) of each drill: every plan with every seed. Raises pytest.UsageError for a mark that says something else."""
    faults = [("", None)] if plans is None else _plans(plans, where)
    drawn = [("", None)] if seeds is None else _seeds(seeds, where)
    return [
        ("-".join(filter(None, (name, number))), Plan(faults=section, seed=seed))
        for name, section in faults
        for number, seed in drawn
    ]


def _plans(mark: pytest.Mark, where: str) -> list[tuple[str, Faults]]:
    plans = mark.args
    wrong = [plan for plan in plans if not isinstance(plan, str | Mapping | Sequence)]
    if not plans or wrong or mark.kwargs.keys() - {"ids"}:
        raise pytest.UsageError(
            f"{where}: write @pytest.mark.chaos_plans(plan, …, ids=[…]), each plan as in a job file's faults"
        )
    ids = mark.kwargs.get("ids")
    if ids is None:
        ids = [plan if isinstance(plan, str) else f"plan{number}" for number, plan in enumerate(plans)]
    if len(ids) != len(plans):
        raise pytest.UsageError(f"{where}: @pytest.mark.chaos_plans has {len(plans)} plans and {len(ids)} ids")
    return list(zip(map(str, ids), plans, strict=True))


def _seeds(mark: pytest.Mark, where: str) -> list[tuple[str, int]]:
    seeds: Any = mark.kwargs.get("seeds")
    numbers = list(seeds) if isinstance(seeds, Iterable) else []
    wrong = [seed for seed in numbers if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0]
    if mark.args or mark.kwargs.keys() != {"seeds"} or not numbers or wrong:
        raise pytest.UsageError(f"{where}: write @pytest.mark.chaos(seeds=[…]) with numbers, 0 or more, such as range(3)")
    return [(f"seed{seed}", seed) for seed in numbers]
