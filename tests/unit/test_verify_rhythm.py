"""Steps at which a file is saved: what follows when a process started, and what follows something that it has learnt."""

import pytest

from chaosrun.verify.rhythm import FileSaves, is_of_its_start

STEP_S = 0.1


def saves(steps: tuple[int, ...], *, begun: int, final: int, step_s: float) -> FileSaves:
    times = {step: (step - begun) * step_s for step in steps}
    last_s = (final - begun) * step_s
    return FileSaves(times=times, begun=begun, final=final, began_s=0.0, ended_s=last_s, longest_step_s=step_s)


def explained(
    expected: tuple[int, ...], begun: int, seen: tuple[int, ...], final: int, *, weights: bool = True, step_s: float = 0.001
) -> bool:
    sides = (saves(expected, begun=0, final=final, step_s=step_s), saves(seen, begun=begun, final=final, step_s=step_s))
    return is_of_its_start(*sides, holds_weights=weights)


@pytest.mark.parametrize("step_s", [0.001, 1.0])
@pytest.mark.parametrize(
    ("expected", "begun", "seen", "final"),
    [
        ((12, 36, 48), 49, (60,), 60),  # the best came late
        ((12, 24, 36, 48), 49, (60,), 60),  # always better but at last
        ((12, 36, 48, 72), 63, (), 84),  # a best value that nothing is better than
        ((12, 24), 24, (36,), 60),  # the best came early
        ((4,), 10, (12,), 18),  # the first is the best
        ((1, 11, 31), 38, (41,), 48),  # evaluated at the loop's head
        ((10, 30), 35, (40, 48), 48),  # evaluated every 10 steps and at the end
        ((12, 24, 36), 24, (), 36),  # always better
        ((5, 12, 33), 42, (44,), 50),  # uneven epochs
    ],
)
def test_a_best_value_that_a_restart_has_forgotten(
    expected: tuple[int, ...], begun: int, seen: tuple[int, ...], final: int, step_s: float
) -> None:
    assert not explained(expected, begun, seen, final, step_s=step_s)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("expected", "begun", "seen", "final"),
    [
        ((3,), 20, (23,), 36),  # once, so many steps after a start
        ((5, 6, 7, 8), 20, (25, 26, 27, 28), 36),
        ((7, 14, 21, 28, 35), 20, (27, 34), 36),  # every 7 steps
        ((7, 14, 21, 28, 35), 20, (24, 31), 36),
        ((24, 48), 18, (36, 60), 60),  # every second evaluation
        ((12, 36, 60), 42, (48, 72), 72),
        ((1, 20), 30, (31,), 36),  # at once
        ((30,), 20, (), 40),
    ],
)
def test_when_a_process_started(
    expected: tuple[int, ...], begun: int, seen: tuple[int, ...], final: int, weights: bool
) -> None:
    assert explained(expected, begun, seen, final, weights=weights)


@pytest.mark.parametrize(
    ("expected", "begun", "seen", "final"),
    [
        ((10,), 20, (30,), 36),
        ((8, 16), 16, (24, 32), 36),
        ((12,), 28, (36,), 60),
        ((1, 2, 3, 5, 9, 14), 20, (21,), 36),  # at once, or evaluated at every step
    ],
)
def test_of_what_may_be_both_weights_follow_the_best(
    expected: tuple[int, ...], begun: int, seen: tuple[int, ...], final: int
) -> None:
    assert explained(expected, begun, seen, final, weights=False)
    assert not explained(expected, begun, seen, final, weights=True)


@pytest.mark.parametrize(
    ("expected", "begun", "seen", "final"),
    [
        ((17, 35, 52), 23, (40, 58), 60),
        ((4, 8), 8, (11,), 12),
        ((5, 20, 35), 20, (25, 40), 48),  # at a checkpoint, the first of them, and when so long has passed
        ((12, 36, 60), 40, (48, 72), 80),
    ],
)
def test_the_clock(expected: tuple[int, ...], begun: int, seen: tuple[int, ...], final: int) -> None:
    assert explained(expected, begun, seen, final, step_s=STEP_S)
