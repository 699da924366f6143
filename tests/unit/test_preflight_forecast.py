"""The forecast against published values, against its own optimum, against simulated failures; and the rows made of it."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from legs import KILLS, write_run

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.forecast import (
    HERE,
    INTERVAL,
    LARGER,
    ForecastFacts,
    daly_interval,
    forecast,
    goodput,
    judge,
    young_interval,
)
from chaosrun.preflight.earlier_run import Costs, EarlierRun, earlier_run
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.spec.job_file import load_job

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
    save_s = share * DAY
    best = goodput(daly_interval(save_s, DAY), save_s, 60.0, DAY)
    others = [goodput(DAY * 10 ** (exponent / 50), save_s, 60.0, DAY) for exponent in range(-250, 50)]
    assert max(others) <= best * 1.002


def test_goodput_by_hand() -> None:
    # τ = M, no costs: 1 / (e - 1).
    assert goodput(100.0, 0.0, 0.0, 100.0) == pytest.approx(0.581977, rel=1e-5)
    assert goodput(1e9, 1.0, 1.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("save_s", "restart_s", "mtbf_s"), [(30.0, 120.0, 4 * HOUR), (60.0, 300.0, 20 * MINUTE), (5.0, 600.0, 15 * MINUTE)]
)
def test_goodput_is_that_of_simulated_failures(save_s: float, restart_s: float, mtbf_s: float) -> None:
    interval_s = daly_interval(save_s, mtbf_s)
    expected = goodput(interval_s, save_s, restart_s, mtbf_s)
    assert simulated(interval_s, save_s, restart_s, mtbf_s) == pytest.approx(expected, rel=0.02)


def simulated(interval_s: float, save_s: float, restart_s: float, mtbf_s: float, failures: int = 20_000) -> float:
    """Goodput until so many failures have struck, whatever the training was at."""
    draw = random.Random(1)
    kept_s = clock_s = 0.0
    for _ in range(failures):
        life_s = draw.expovariate(1 / mtbf_s)
        clock_s += life_s
        kept_s += max(0.0, life_s - restart_s) // (interval_s + save_s) * interval_s
    return kept_s / clock_s


def test_more_nodes_fail_more_often() -> None:
    one, many = (forecast(10.0, 60.0, node_mtbf_s=30 * DAY, nodes=nodes) for nodes in (1, 1000))
    assert many.mtbf_s == one.mtbf_s / 1000
    assert many.interval_s < one.interval_s and many.goodput < one.goodput
    assert not many.is_hopeless
    assert forecast(10.0, 60.0, node_mtbf_s=30 * DAY, nodes=1_000_000).is_hopeless


DRILLED = Costs(step_s=0.006, save_s=0.03, restart_s=0.2, steps=24)
RUN = Costs(step_s=0.5, save_s=4.0, restart_s=30.0, steps=100_000)
NODE = Node(name="a", node_id="1", address="192.0.2.1", hostname="a", cpus=8, gpus=0)


def rows(facts: ForecastFacts, *, nodes: int = 2, **setting: Any) -> dict[str, Finding]:
    asked = Setting(level=Level.STANDARD, root=Path("/runs"), storage=Path("/runs"), **setting)
    found = judge(asked, [replace(NODE, name=f"n{number}") for number in range(nodes)], facts)
    return {finding.name: finding for finding in found}


def facts(drill: Costs | None = DRILLED, job: Costs | None = None) -> ForecastFacts:
    return ForecastFacts(drill=drill, job=job, run="probe-1" if job else None)


def job(folder: Path, every: int = 50, extra: str = "") -> Any:
    (folder / "train.py").write_text("import chaosrun\n")
    path = folder / "job.yaml"
    path.write_text(f"name: j\nscript: train.py\nworkers: 4\ncheckpoint: {{every_steps: {every}}}\n{extra}")
    return load_job(path)


def test_without_an_mtbf_it_says_what_it_knows_and_what_to_give() -> None:
    (row,) = rows(facts()).values()
    assert row.status is Status.SKIP and "--mtbf" in row.reason
    assert "30 ms" in row.measured and "200 ms" in row.measured and "small training" in row.measured


@pytest.mark.parametrize("drill", [None, Costs(step_s=0.006, save_s=0.03)])
def test_nothing_measured_is_no_pass(drill: Costs | None) -> None:
    (row,) = rows(facts(drill), mtbf_s=DAY).values()
    assert row.status is Status.SKIP and "nothing was measured" in row.reason


def test_this_cluster_and_what_was_asked_for_besides() -> None:
    found = rows(facts(), mtbf_s=DAY)
    assert found.keys() == {HERE}
    assert found[HERE].status is Status.PASS
    assert "2 nodes, a failure every 12 h" in found[HERE].measured
    assert "Young 1974" in found[HERE].reason and "Daly 2006" in found[HERE].reason
    others = rows(facts(), mtbf_s=DAY, forecast_nodes=(64, 8))[LARGER]
    assert [part.partition(":")[0] for part in others.measured.split("; ")] == ["8", "64"]


def test_a_cluster_that_only_fails_is_a_warning() -> None:
    found = rows(facts(), mtbf_s=0.5)
    assert found[HERE].status is Status.WARN and found[HERE].remedy


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
    found = rows(facts(job=Costs(step_s=0.5, save_s=4.0, steps=100_000)), mtbf_s=DAY, job=job(tmp_path))
    assert "a restart 200 ms" in found[HERE].reason


def test_a_job_that_is_over_before_the_best_interval_is_too_short_to_forecast(tmp_path: Path) -> None:
    short = Costs(step_s=0.5, save_s=4.0, restart_s=30.0, steps=32)
    template = job(tmp_path, extra="max_steps: 32")
    # However often nodes fail, nothing is advised, and --strict has nothing to count.
    for mtbf_s, best in ((DAY, "13 min"), (60.0, "19.3 s")):
        found = rows(facts(job=short), mtbf_s=mtbf_s, job=template)
        for row in (found[HERE], found[INTERVAL]):
            assert row.status is Status.SKIP and not row.remedy
            assert row.reason.startswith(f"too short to forecast: 32 steps in 16 s (run probe-1), the best interval is {best}")
    long = rows(facts(job=Costs(step_s=0.5, save_s=4.0, restart_s=30.0, steps=3200)), mtbf_s=60.0, job=template)
    assert long[HERE].status is Status.WARN and long[INTERVAL].status is Status.PASS


def test_only_runs_of_this_very_job_that_went_through_count(tmp_path: Path) -> None:
    asked = job(tmp_path, every=4)
    spec, path = asked.spec.model_dump(mode="json"), str(asked.path)

    def ran(name: str, created_s: float, outcome: str = "completed", job: str = path, **changes: Any) -> None:
        run = write_run(tmp_path / "runs" / "new", workers=2, kills=KILLS[:1], created_s=created_s, job=job)
        told = {**json.loads(run.run_json.read_text()), "run_id": name, "spec": {**spec, **changes}}
        run.run_json.write_text(json.dumps(told))
        run.verdict_json.write_text(json.dumps({"outcome": outcome}))
        run.path.rename(tmp_path / "runs" / name)
        (tmp_path / "runs" / "new").rmdir()

    assert earlier_run(tmp_path, asked) is None
    ran("interrupted", 4.0, outcome="interrupted")
    ran("elsewhere", 5.0, job="/elsewhere/job.yaml")
    ran("larger", 6.0, workers=8)
    ran("shorter", 7.0, max_steps=3)
    ran("shrunk", 8.0, faults={"schedule": []})
    assert earlier_run(tmp_path, asked) is None
    ran("older", 1.0)
    # Another interval makes no other job.
    ran("newer", 2.0, checkpoint={**spec["checkpoint"], "every_steps": 9})
    last = earlier_run(tmp_path, asked)
    assert last is not None and (last.run, last.costs.steps) == ("newer", 12) and last.bytes
    assert all((last.costs.step_s, last.costs.save_s, last.costs.restart_s))
    for leg in ("chaos", "reference"):
        shutil.rmtree(tmp_path / "runs" / "newer" / leg / "checkpoints")
    assert earlier_run(tmp_path, asked) == EarlierRun(run="newer", costs=last.costs)
    (tmp_path / "runs" / "newer" / "run.json").write_text("[]")
    last = earlier_run(tmp_path, asked)
    assert last is not None and last.run == "older"
