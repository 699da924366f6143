"""The forecast against published values, against its own optimum, against simulated failures; and the rows made of it."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.forecast import HERE, INTERVAL, LARGER, judge_forecast
from chaosrun.preflight.forecast import Costs, daly_interval, forecast, goodput, young_interval
from chaosrun.preflight.model import Facts, Finding, Level, Setting, Status
from chaosrun.spec.source import load_job

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.mark.parametrize(("mtbf_s", "published_min"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_intervals_are_dalys_own(mtbf_s: float, published_min: float) -> None:
    # Figures 3 to 5 of Daly 2006: dumps of 5 minutes.
    assert daly_interval(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(published_min, rel=0.006)


def test_young_by_hand() -> None:
    assert young_interval(5 * MINUTE, 24 * HOUR) == pytest.approx(120 * MINUTE)


def test_beyond_its_limit_the_interval_is_the_mtbf() -> None:
    assert daly_interval(200.0, 100.0) == 100.0
    assert daly_interval(1e6, 100.0) == 100.0
    # Both sides of the limit meet, within what is neglected.
    assert daly_interval(199.9, 100.0) == pytest.approx(100.0, rel=0.15)


@pytest.mark.parametrize("share", [1e-5, 1e-3, 0.01, 0.1, 0.5])
def test_no_other_interval_is_better_by_much(share: float) -> None:
    costs = Costs(save_s=share * DAY, restart_s=60.0)
    best = goodput(daly_interval(costs.save_s, DAY), costs, DAY)
    others = [goodput(DAY * 10 ** (exponent / 50), costs, DAY) for exponent in range(-250, 50)]
    assert max(others) <= best * 1.002


def test_goodput_by_hand() -> None:
    # τ = M, no costs: 1 / (e - 1).
    assert goodput(100.0, Costs(save_s=0.0, restart_s=0.0), 100.0) == pytest.approx(0.581977, rel=1e-5)
    assert goodput(1e9, Costs(save_s=1.0, restart_s=1.0), 1.0) == 0.0


@pytest.mark.parametrize(
    ("save_s", "restart_s", "mtbf_s"), [(30.0, 120.0, 4 * HOUR), (60.0, 300.0, 20 * MINUTE), (5.0, 600.0, 15 * MINUTE)]
)
def test_goodput_is_that_of_simulated_failures(save_s: float, restart_s: float, mtbf_s: float) -> None:
    costs = Costs(save_s=save_s, restart_s=restart_s)
    interval_s = daly_interval(save_s, mtbf_s)
    assert simulated(interval_s, costs, mtbf_s) == pytest.approx(goodput(interval_s, costs, mtbf_s), rel=0.02)


def simulated(interval_s: float, costs: Costs, mtbf_s: float, failures: int = 20_000) -> float:
    """Goodput until so many failures have struck, whatever the training was at."""
    draw = random.Random(1)
    kept_s = clock_s = 0.0
    for _ in range(failures):
        life_s = draw.expovariate(1 / mtbf_s)
        clock_s += life_s
        kept_s += max(0.0, life_s - costs.restart_s) // (interval_s + costs.save_s) * interval_s
    return kept_s / clock_s


def test_more_nodes_fail_more_often() -> None:
    costs = Costs(save_s=10.0, restart_s=60.0)
    one, many = (forecast(costs, node_mtbf_s=30 * DAY, nodes=nodes) for nodes in (1, 1000))
    assert many.mtbf_s == one.mtbf_s / 1000
    assert many.interval_s < one.interval_s and many.goodput < one.goodput
    assert not many.is_hopeless
    assert forecast(costs, node_mtbf_s=30 * DAY, nodes=1_000_000).is_hopeless


DRILLED = {"step_s": 0.006, "save_s": 0.03, "restart_s": 0.2}
RUN = {"step_s": 0.5, "save_s": 4.0, "restart_s": 30.0}
NODE = Node(name="a", node_id="1", address="192.0.2.1", hostname="a", cpus=8, gpus=0)


def rows(facts: Facts, *, nodes: int = 2, **setting: Any) -> dict[str, Finding]:
    asked = Setting(level=Level.STANDARD, root=Path("/runs"), storage=Path("/runs"), **setting)
    found = judge_forecast(asked, [replace(NODE, name=f"n{number}") for number in range(nodes)], facts)
    return {finding.name: finding for finding in found}


def facts(drill: Facts | None = DRILLED, job: Facts | None = None) -> Facts:
    return {"drill": drill, "job": job, "run": "probe-1" if job else None}


def job(folder: Path, every: int = 50, extra: str = "") -> Any:
    (folder / "train.py").touch()
    path = folder / "job.yaml"
    path.write_text(f"name: j\nscript: train.py\nworkers: 4\ncheckpoint: {{every_steps: {every}}}\n{extra}")
    return load_job(path)


def test_without_an_mtbf_it_says_what_it_knows_and_what_to_give() -> None:
    (row,) = rows(facts()).values()
    assert row.status is Status.SKIP and "--mtbf" in row.reason
    assert "30 ms" in row.measured and "200 ms" in row.measured and "small training" in row.measured


@pytest.mark.parametrize("drill", [None, {**DRILLED, "restart_s": None}])
def test_nothing_measured_is_no_pass(drill: Facts | None) -> None:
    (row,) = rows(facts(drill), mtbf_s=DAY).values()
    assert row.status is Status.SKIP and "nothing was measured" in row.reason


def test_this_cluster_and_larger_ones() -> None:
    found = rows(facts(), mtbf_s=DAY)
    assert found.keys() == {HERE, LARGER}
    assert found[HERE].status is Status.PASS
    assert "2 nodes, a failure every 12 h" in found[HERE].measured
    assert "Young 1974" in found[HERE].reason and "Daly 2006" in found[HERE].reason
    assert [part.partition(":")[0] for part in found[LARGER].measured.split("; ")] == ["4", "16", "64", "256", "1024"]


def test_a_cluster_that_only_fails_is_a_warning() -> None:
    found = rows(facts(), mtbf_s=0.5)
    assert found[HERE].status is Status.WARN and found[HERE].remedy
    # What nobody asked for warns of nothing.
    assert found[LARGER].status is Status.PASS


def test_sizes_that_were_asked_for_are_judged() -> None:
    found = rows(facts(), mtbf_s=600.0, forecast_nodes=(4, 100_000))
    assert found[HERE].status is Status.PASS
    assert found[LARGER].status is Status.WARN and "100000: 0.0%" in found[LARGER].measured


def test_a_jobs_interval_takes_a_run_of_that_job(tmp_path: Path) -> None:
    unknown = rows(facts(), mtbf_s=DAY, job=job(tmp_path))
    assert unknown[INTERVAL].status is Status.SKIP and "chaosrun submit" in unknown[INTERVAL].reason

    # δ = 4 s, M = 86400 s (one node holds all four workers): 829 s, that is 1657 steps of half a second.
    best = 1700
    good = rows(facts(job=RUN), mtbf_s=DAY, job=job(tmp_path, every=best))
    assert good[INTERVAL].status is Status.PASS
    assert "run probe-1" in good[HERE].reason and "1 node," in good[HERE].measured
    for every in (20, 40_000):
        poor = rows(facts(job=RUN), mtbf_s=DAY, job=job(tmp_path, every=every))
        assert poor[INTERVAL].status is Status.WARN
        assert f"checkpoint.every_steps to {best}" in poor[INTERVAL].remedy


def test_a_run_without_faults_takes_its_restarts_from_the_drill(tmp_path: Path) -> None:
    found = rows(facts(job={**RUN, "restart_s": None}), mtbf_s=DAY, job=job(tmp_path))
    assert "a restart 200 ms" in found[HERE].reason
