"""Bugs that are put into the real code on purpose are found, each within so many seeds, and shrunk to what it takes."""

import pytest

from tests.simulation.__main__ import failures, shrunk
from tests.simulation.bugs import BUGS
from tests.simulation.drill import run
from tests.simulation.scenario import draw

WITHIN = 10_000
EXPECTED = {
    "lost_stop": {"without_cause", "outlived", "ends"},
    "double_start": {"two_attempts", "outlived"},
    "early_commit": {"early_commit"},
    "ignored_late_death": {"unseen"},
    "skipped_fsync": {"lost", "passed_over"},
}


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_bug_is_found(name: str) -> None:
    with BUGS[name]():
        seed, ended = next(iter(failures(range(WITHIN))))
        assert ended.violation is not None
        rule = ended.violation.rule
        assert rule in EXPECTED[name], f"seed {seed}: {ended.violation}"
        smaller = shrunk(draw(seed), rule)
        again = run(smaller)
        assert again.violation is not None and again.violation.rule == rule
        assert len(smaller.faults) + len(smaller.troubles) <= 3
    assert run(smaller).violation is None, "without the bug"
