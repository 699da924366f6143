"""The plan of a script that names no faults, from what its undisturbed run was seen to do."""

import pytest

from chaosrun.plan.default import default_plan
from chaosrun.spec.model import JobSpec

SPEC = JobSpec.model_validate({"name": "probe", "script": "train.py", "workers": 3, "resume": {"by": "script"}})


def epochs(number: int, steps: int) -> dict[int, int]:
    return {step: (step - 1) // steps for step in range(1, number * steps + 1)}


def test_five_kills() -> None:
    savers = {step: frozenset({0}) for step in (20, 40, 60, 80)}
    plan = default_plan(SPEC, epochs(4, 20), savers)
    assert [(fault.at_step, fault.phase) for fault in plan.faults] == [
        (31, "step"),  # the middle of the epoch after the first save
        (40, "save"),
        (47, "step"),  # twice within the next
        (54, "step"),
        (60, "step"),  # an epoch's end
    ]
    assert [fault.id for fault in plan.faults] == ["F1", "F2", "F3", "F4", "F5"]
    assert {fault.kind for fault in plan.faults} == {"kill"} and plan.faults[1].rank == 0
    assert plan == default_plan(SPEC, epochs(4, 20), savers)
    drawn = {
        tuple(fault.rank for fault in default_plan(spec, epochs(4, 20), savers).faults)
        for seed in range(9)
        for spec in [SPEC.model_copy(update={"faults": SPEC.faults.model_copy(update={"seed": seed})})]
    }
    assert len(drawn) > 3


@pytest.mark.parametrize(("number", "steps", "expected"), [(1, 50, 5), (2, 20, 5), (3, 4, 5), (1, 3, 2), (1, 1, 1)])
def test_a_short_training_has_those_that_fit(number: int, steps: int, expected: int) -> None:
    last = number * steps
    plan = default_plan(SPEC, epochs(number, steps), {max(1, last // 2): frozenset({0, 1, 2})})
    moments = [fault.at_step or 0 for fault in plan.faults]
    assert len(moments) == len(set(moments)) == expected
    # Nothing follows the last step that a restart could do again, but for a save there.
    assert all(1 <= fault.at_step < last or fault.phase == "save" for fault in plan.faults if fault.at_step)


def test_without_saves_or_what_strikes_there() -> None:
    assert all(fault.phase == "step" for fault in default_plan(SPEC, epochs(3, 9), {}).faults)
    savers = {9: frozenset({0})}
    assert all(fault.phase == "step" for fault in default_plan(SPEC, epochs(3, 9), savers, strikes_saves=False).faults)
