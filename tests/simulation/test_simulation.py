"""The control plane under simulated time, network, processes and disks: each seed a leg with faults, and with troubles.

`python -m tests.simulation =SEED` tells the story of one.
"""

import pytest

from tests.simulation.__main__ import failures, report, seeds_of, shrunk
from tests.simulation.drill import run
from tests.simulation.scenario import draw

BY_DAY = 300


def expect_none(seeds: range) -> None:
    reports = [report(seed, ended) for seed, ended in failures(seeds)]
    assert not reports, "\n\n".join(reports)


def test_no_invariant_is_violated() -> None:
    expect_none(range(BY_DAY))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 20_000, 2_000))
def test_no_invariant_is_violated_at_night(first: int) -> None:
    expect_none(range(first, first + 2_000))


def test_a_seed_is_replayed_exactly() -> None:
    for seed in (0, 9, 43, 501):
        assert told(seed) == told(seed)


def told(seed: int) -> list[str]:
    """The story, without what is another in every run of the tests: pids, folders."""
    ended = run(draw(seed))
    return [*(line for line in ended.story if "supervisor_pid" not in line), ended.outcome]


def test_what_seeds_are_called() -> None:
    assert (seeds_of("3"), seeds_of("5-7"), seeds_of("=9")) == (range(3), range(5, 8), range(9, 10))


def test_a_scenario_is_shrunk_as_long_as_it_fails_likewise() -> None:
    scenario = draw(501)
    assert len(scenario.troubles) > 1
    assert shrunk(scenario, "no such rule") == scenario
