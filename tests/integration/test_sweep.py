"""Sweeps and shrinks for real: every point is killed at and comes back; a job that does not come back is told, and its plan
reduced to the fault that matters."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from chaosrun import api
from chaosrun.campaign.report.text import render_sweep
from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_run
from chaosrun.report.output import rendered
from tests.conftest import REPOSITORY, WarmDrills

pytestmark = pytest.mark.ray

PROBE = REPOSITORY / "jobs" / "probe" / "job.yaml"
SHORT = ("args=[--steps, 20, --seed, 1]",)
MUTANT = """\
name: mutant
script: {script}
args: [--mutant, final-bit, --data, {data}]
workers: 2
checkpoint: {{every_steps: 5}}
faults: {{schedule: [{schedule}]}}
verify: {{confirm: false}}
timeout: 300s
"""
"""12 steps; ends with one bit changed when it was restored. Attempts from the beginning are sound."""
SYMPTOM = "FAIL: final_weights"
EIGHT = (
    "{rank: 0, at_step: 1}",
    "{rank: 1, at_step: 2, phase: reduce}",
    "{rank: 1, at_step: 5, phase: checkpoint.begin}",
    "{rank: 0, phase: rendezvous, occurrence: 2}",
    "{rank: 0, at_step: 2, phase: forward}",
    "{rank: 1, at_step: 1, phase: fetch}",
    "{rank: 0, at_step: 1, phase: optimizer}",
    "{rank: 1, at_step: 10, phase: reduce}",
)
"""The last one alone strikes after a checkpoint."""


def mutant(folder: Path, schedule: tuple[str, ...] = ()) -> Path:
    path = folder / "job.yaml"
    script, data = REPOSITORY / "tests" / "integration" / "mutants" / "train.py", folder / "data.npz"
    draw = numpy.random.default_rng(1)
    numpy.savez(data, features=draw.normal(size=(64, 8)).astype("float32"), classes=draw.integers(0, 4, 64))
    path.write_text(MUTANT.format(script=script, data=data, schedule=", ".join(schedule)))
    return path


@pytest.mark.nightly
def test_an_interrupted_sweep_goes_on_to_a_pass(local_ray: None, tmp_path: Path) -> None:
    only = ("reduce@7/*", "checkpoint.fsync.after@10/rank1/*", "recovery/restore.end*", "checkpoint.rename.*@22/*")
    heard: list[dict[str, Any]] = []

    def interrupted(record: dict[str, Any]) -> None:
        heard.append(record)
        if record["event"] == "sweep.tried" and record["number"] == 3:
            raise KeyboardInterrupt

    root = tmp_path / "root"
    with pytest.raises(InterruptedRunError, match="of 8 points tried") as caught:
        api.sweep(PROBE, overrides=SHORT, steps=(7,), only=only, at_once=2, root=root, on_event=interrupted)
    assert caught.value.hint and "--resume probe-" in caught.value.hint
    (folder,) = (root / "sweeps").iterdir()

    with pytest.raises(UsageError, match="is resumed as it began"):
        api.sweep(PROBE, overrides=("seed=2",), resume="latest", root=root)
    swept = api.sweep(PROBE, resume="latest", root=root, at_once=1, on_event=heard.append)

    assert swept.sweep_id == folder.name and swept.exit_code == 0
    assert len(swept.points) == 8 == len(swept.tried) and all(tried.reached for tried in swept.tried.values())
    assert {tried.status for tried in swept.tried.values()} == {"PASS"}
    # No point is tried twice; one survey for both.
    tried = [record["point"] for record in heard if record["event"] == "sweep.tried"]
    assert len(tried) == len(set(tried)) <= 8
    assert [record["event"] for record in heard].count("sweep.survey") == 1
    # Of runs that passed nothing is left but the verdict.
    assert [path.name for path in (folder / "runs").iterdir()] == [swept.survey]
    assert api.list_runs(root) == []
    page = rendered(render_sweep(swept), width=120, colour=False)
    assert "8 of 8 points reached" in page and "Not passed" not in page


@pytest.mark.nightly
def test_a_point_whose_drill_is_cancelled_is_left(local_ray: None, tmp_path: Path) -> None:
    only = ("forward@7/*", "reduce@7/*")
    root = tmp_path / "root"
    heard: list[dict[str, Any]] = []
    cancelled: list[RunLayout] = []

    def cancel_one() -> None:
        while not cancelled:
            for path in root.glob("sweeps/*/runs/*/control/socket"):
                run = RunLayout(path.parents[1])
                if "schedule" in str(read_run(run).overrides) and run.leg("chaos").journal.is_file():
                    api.cancel(run)
                    cancelled.append(run)
                    return
            time.sleep(0.01)

    def on_event(record: dict[str, Any]) -> None:
        heard.append(record)
        if record["event"] == "sweep.tried" and record["number"] == 1:
            threading.Thread(target=cancel_one, daemon=True).start()

    swept = api.sweep(PROBE, overrides=SHORT, steps=(7,), only=only, at_once=1, root=root, on_event=on_event)
    assert len(swept.left) == 1 and {tried.status for tried in swept.tried.values()} == {"PASS"} and swept.exit_code == 6
    assert [record["point"] for record in heard if record["event"] == "sweep.cancelled"] == [swept.left[0].id]
    again = api.sweep(PROBE, resume="latest", root=root, at_once=1)
    assert again.exit_code == 0 and len(again.tried) == len(swept.points)
    assert not list(root.glob("sweeps/*/runs/*/control"))


def test_a_sweep_tells_where_a_job_does_not_come_back(local_ray: None, tmp_path: Path) -> None:
    """Killed before its first checkpoint the mutant is sound, killed after it, it is not."""
    job, root = mutant(tmp_path), tmp_path / "root"
    swept = api.sweep(job, steps=(1, 7), only=["forward@*/rank0"], at_once=1, root=root)
    assert swept.exit_code == 3
    assert {name: tried.status for name, tried in swept.tried.items()} == {"forward@1/rank0": "PASS", "forward@7/rank0": "FAIL"}
    failed = swept.tried["forward@7/rank0"]
    assert failed.reached and "final" in failed.cause
    # Its run is kept, and says the same.
    run = api.find_run(str(root / "sweeps" / swept.sweep_id / "runs" / str(failed.run)))
    assert api.verify(run).cause == failed.cause
    page = rendered(render_sweep(swept), width=120, colour=False)
    assert "FAIL  forward@7/rank0" in page
    assert f"chaosrun submit {job} 'faults.schedule=[{{rank: 0, phase: forward, at_step: 7}}]'" in page


@pytest.mark.nightly
def test_eight_faults_shrink_to_the_one_that_matters(warm_drills: WarmDrills, tmp_path: Path) -> None:
    job, root = mutant(tmp_path, EIGHT), tmp_path / "root"
    failed = warm_drills(job, root=root)
    assert failed.verdict.status == "FAIL" and len(failed.verdict.faults) == 8
    shrunk = api.shrink(failed.run)
    assert (shrunk.symptom, shrunk.seen, shrunk.exit_code) == (SYMPTOM, SYMPTOM, 0)
    assert shrunk.smallest and shrunk.drills <= 14
    (left,) = shrunk.schedule
    # A plain kill now, at the first step from which there is something to restore.
    assert left == {"rank": 1, "at_step": 5}

    # What it printed is what it takes: in the place of the job's own faults the part of the job file fails alike.
    assert shrunk.path.read_text() == shrunk.fragment
    rewritten = job.read_text().split("faults:")[0] + shrunk.fragment + "verify: {confirm: false}\ntimeout: 300s\n"
    job.write_text(rewritten)
    again = warm_drills(job, root=root)
    assert again.verdict.status == "FAIL" and "final_weights" in again.verdict.cause
    assert shrunk.verified is not None and api.verify(shrunk.verified).status == "FAIL"
    assert not (failed.run.path / "shrink").exists()


@pytest.mark.nightly
def test_faults_of_more_than_workers_shrink_in_drills_of_their_own(local_ray: None, tmp_path: Path) -> None:
    """The agent's death would take the warm place along, the supervisor's this very process."""
    schedule = ("{kind: agent, rank: 0, at_step: 2}", "{kind: supervisor, rank: 1, at_step: 3}", "{rank: 1, at_step: 10}")
    job, root = mutant(tmp_path, schedule), tmp_path / "root"
    failed = api.submit(job, root=root)
    assert failed.verdict.status == "FAIL", failed.verdict.cause
    shrunk = api.shrink(failed.run)
    assert (shrunk.symptom, shrunk.seen, shrunk.exit_code) == (SYMPTOM, SYMPTOM, 0)
    assert shrunk.schedule == ({"rank": 1, "at_step": 5},)
