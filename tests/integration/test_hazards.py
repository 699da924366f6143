"""Hazards that lie in the script and its surroundings: each is prevented, or found and named. docs/hazards.md is the table."""

from pathlib import Path

import pytest

from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills, job_file

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "hazards" / "train.py"
JOB = """\
name: hazards
script: {script}
args: [--case, {case}]
workers: 2
seed: 1
checkpoint: {{every_steps: 3}}
faults: {{schedule: [{{rank: 1, at_step: 8}}]}}
timeout: 300s
"""
RESUMED = 7
"""The first step after the restore, in the second epoch."""


def drill(warm_drills: WarmDrills, folder: Path, case: str) -> Verdict:
    path = job_file(JOB.format(script=SCRIPT, case=case), folder)
    return warm_drills(path, root=folder / "root").verdict


@pytest.mark.parametrize(
    "case",
    [
        "no-seed",
        "hash-order",
        "generator-registered",
        *(pytest.param(case, marks=pytest.mark.nightly) for case in ("none", "tied", "running-mean-registered")),
    ],
)
def test_prevented(warm_drills: WarmDrills, tmp_path: Path, case: str) -> None:
    verdict = drill(warm_drills, tmp_path, case)
    assert verdict.status == "PASS", verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, RESUMED - 1]
    assert verdict.warnings == ()


@pytest.mark.parametrize(
    ("case", "kind", "cause"),
    [
        ("generator", "loss", "forward pass"),
        ("running-mean", "loss", "forward pass"),
        ("own-warm-up", "learning rate", "learning rate"),
    ],
)
def test_a_state_of_the_scripts_own_that_nobody_restored_is_found(
    warm_drills: WarmDrills, tmp_path: Path, case: str, kind: str, cause: str
) -> None:
    verdict = drill(warm_drills, tmp_path, case)
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3), verdict.cause
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.cause, verdict.divergence.step) == (kind, cause, RESUMED)
    assert "run.register" in verdict.divergence.hint


def test_a_schedule_by_the_clock_is_the_jobs_own_doing(warm_drills: WarmDrills, tmp_path: Path) -> None:
    verdict = drill(warm_drills, tmp_path, "wall-clock")
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6), verdict.cause
    assert "already differ" in verdict.cause or "does not repeat itself" in verdict.cause
    assert "learning rate" in verdict.cause or "lr" in verdict.cause


def test_another_thread_count_after_the_restart_is_not_blamed_on_recovery(warm_drills: WarmDrills, tmp_path: Path) -> None:
    verdict = drill(warm_drills, tmp_path, "threads")
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6), verdict.cause
    assert "threads was 1, then 2" in verdict.cause


def test_a_checkpoint_of_another_batch_size_is_refused(warm_drills: WarmDrills, tmp_path: Path) -> None:
    verdict = drill(warm_drills, tmp_path, "batch-size")
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 4), verdict.cause
    assert "belongs to another configuration of this job" in verdict.cause
    assert "total batch size: 8 then, 10 now" in verdict.cause


def test_ranks_that_shuffle_differently_are_warned_of(warm_drills: WarmDrills, tmp_path: Path) -> None:
    verdict = drill(warm_drills, tmp_path, "device-specific")
    assert verdict.status == "PASS", verdict.cause
    (warning,) = verdict.warnings
    assert "epoch 0" in warning and "ranks" in warning and "data_seed" in warning
