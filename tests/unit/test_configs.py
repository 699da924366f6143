"""The suites in configs/: each can be read, and every drill of it planned, with its own seeds and with those of any night."""

from pathlib import Path

import pytest

from chaosrun.campaign.planned_drill import plan_drills
from chaosrun.campaign.suite_plan import Shard, sharded
from chaosrun.spec.suite import load_suite

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_they_are_there() -> None:
    assert [path.stem for path in CONFIGS] == ["accumulation", "ddp-pitfalls", "nightly", "resume-protocols", "smoke"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_drill_can_be_planned(path: Path) -> None:
    suite = load_suite(path)
    assert suite.spec.name == path.stem
    for seed in (None, 20261121):
        planned = plan_drills(suite.drills, seed)
        assert all(drill.faults > 0 for drill in planned)
        assert len({drill.name for drill in planned}) == len(planned)


def test_the_night_shares_out_its_work() -> None:
    drills = load_suite(next(path for path in CONFIGS if path.stem == "nightly")).drills
    assert len(drills) > 40 and {drill.job.spec.workers for drill in drills} == {1, 2, 3}
    sizes = [len(plan_drills(sharded(drills, Shard(number, 5)))) for number in range(1, 6)]
    assert sum(sizes) == len(drills) and min(sizes) > 0 and max(sizes) <= 2 * len(drills) / 5, sizes
