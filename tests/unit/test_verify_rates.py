"""A schedule is of another step only where one shift fits all the rates since the attempt began."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from legs import edit_ranks, only, put
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.verify.verdict import Verdict, judge

BEGAN = 4
"""The second attempt goes on from here."""
Schedule = Callable[[int], float]


def told(root: Path, expected: Schedule, seen: Schedule, *, scheduled: bool = True) -> Verdict:
    """Of a run whose rates follow `expected`, and `seen` in its second attempt."""
    run = write_script_run(root, kills=SCRIPT_KILLS[:1])
    for leg, attempt, schedule in (("reference", 1, expected), ("chaos", 1, expected), ("chaos", 2, seen)):

        def rate(line: dict[str, Any], schedule: Schedule = schedule) -> dict[str, Any]:
            return {**line, "lr": [schedule(line["step"]).hex()]}

        edit_ranks(run, leg, attempt, only("step", rate), only("start", put(scheduled=scheduled)))
    return judge(run)


def stairs(step: int) -> float:
    """Lower every third step."""
    return 0.9 ** ((step - 1) // 3)


def falls(step: int) -> float:
    """Even until step 8, then lower every step."""
    return 1.0 - max(0, step - 8) / 20


def once(at: int) -> Schedule:
    """Lower from this step on."""
    return lambda step: 0.9 if step >= at else 1.0


@pytest.mark.parametrize(
    ("seen", "code", "says"),
    [
        (lambda step: (step - BEGAN) / 20, "lr_scheduler_not_restored", "the initial one"),
        (lambda step: (step + 1) / 20, "lr_scheduler_of_another_step", "that of step 6, not of step 5"),
        (lambda step: step / 20 if step < 7 else 0.3, "lr_scheduler_not_restored", "right at first"),
        (lambda step: (BEGAN + 1) / 20, "lr_scheduler_not_restored", "stays what it was"),
    ],
)
def test_rates_without_a_scheduler_are_the_scripts_own(tmp_path: Path, seen: Schedule, code: str, says: str) -> None:
    verdict = told(tmp_path, lambda step: step / 20, seen, scheduled=False)
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert says in f"{verdict.hint}" and "a count of steps or epochs" in f"{verdict.hint}", verdict.hint
    assert "scheduler" not in verdict.cause and "learning rate" in verdict.cause


@pytest.mark.parametrize(
    ("expected", "seen", "code", "says"),
    [
        # As torch's StepLR(3) made anew: a shift by -1 fits all its steps, too.
        (stairs, lambda step: stairs(BEGAN + 1) * stairs(step - BEGAN), "lr_scheduler_not_restored", "started over"),
        (stairs, lambda step: stairs(step + 1), "lr_scheduler_of_another_step", "that of step 7, not of step 6"),
        # As ReduceLROnPlateau without its best: late by two, in that step as a shift by -2 would have it.
        (stairs, lambda step: stairs(step) if step < 7 else stairs(step - 2), "lr_scheduler_not_restored", "right at first"),
        (once(7), once(10), "lr_scheduler_not_restored", "right at first"),
        # As a scheduler within another that came out of the checkpoint with an optimizer of its own.
        (lambda step: step / 20, lambda step: (BEGAN + 1) / 20, "lr_scheduler_not_restored", "another optimizer than"),
        # Even in its beginning, and begun anew: a lost count explains that it stands still.
        (falls, lambda step: falls(step - BEGAN), "lr_scheduler_not_restored", "right at first"),
        (once(7), lambda step: 1.0 if step < 7 else 0.3, "lr_scheduler_not_restored", "right at first"),
        (lambda step: step / 20, lambda step: (step - BEGAN) / 20, "lr_scheduler_not_restored", "the initial one"),
        (once(2), once(BEGAN + 2), "lr_scheduler_not_restored", "the initial one"),
        # As a LambdaLR whose function adds the steps that were done, and whose state is loaded, too.
        (
            lambda step: step / 20,
            lambda step: (step + (BEGAN if step > BEGAN + 1 else 0)) / 20,
            "lr_scheduler_not_restored",
            "twice",
        ),
        # As an ExponentialLR that is saved before its step: begun anew, it would go on from a rate that is right.
        (
            lambda step: 0.5**step,
            lambda step: 0.5 ** (step - 1),
            "lr_scheduler_of_another_step",
            "before the scheduler's own step",
        ),
        (
            lambda step: 0.5**step,
            lambda step: 0.5 ** (step - 2),
            "lr_scheduler_of_another_step",
            "that of step 3, not of step 5",
        ),
        (once(5), lambda step: 0.3, "learning_rate", "no recorded step has this learning rate"),
        # As a change at an epoch's end that a checkpoint of its last step comes before.
        (
            once(5),
            lambda step: 1.0 if step < 8 else 0.3,
            "learning_rate",
            "of steps 1 to 4, after which it changes in the reference run",
        ),
    ],
    ids=[
        *("anew", "a step ahead", "without its best", "later", "still", "even at first"),
        *(
            "other rates",
            "of step 0",
            "of step 0, even",
            "twice",
            "exponential",
            "of two steps before",
            "no schedule",
            "a change left out",
        ),
    ],
)
def test_rates_say_where_their_schedule_stood(tmp_path: Path, expected: Schedule, seen: Schedule, code: str, says: str) -> None:
    verdict = told(tmp_path, expected, seen)
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert says in f"{verdict.hint}"
    assert verdict.code == "lr_scheduler_of_another_step" or "not of step" not in f"{verdict.hint}"
