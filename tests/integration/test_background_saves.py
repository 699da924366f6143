"""Drills of a job whose checkpoints are saved beside the training: killed while one is under way, it comes back exactly."""

import os
from pathlib import Path
from typing import Any

import pytest

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.records.trace_reader import read_ends
from tests.conftest import WarmDrills, job_file
from tests.records import read_lines

pytestmark = pytest.mark.ray

PROBE = Path(__file__).parents[2] / "jobs" / "probe" / "train.py"
LAST, EVERY = 38, 4
JOB = """\
name: beside
script: {script}
args: [--steps, "{last}", --step-seconds, "0.02"]
workers: 2
seed: 1
max_steps: {last}
checkpoint: {{every_steps: {every}, mode: async}}
faults:
  schedule:
{faults}
timeout: 300s
"""


@pytest.fixture
def drill(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Any:
    """All drills of this file share their reference."""

    def run(*faults: str, **about: Any) -> Any:
        listed = "\n".join(f"    - {{{fault}}}" for fault in faults)
        job = job_file(JOB.format(script=PROBE, faults=listed, last=LAST, every=EVERY), tmp_path)
        return warm_drills(job, root=tmp_path_factory.getbasetemp() / "beside", **about)

    return run


def expect_exact(result: Any) -> list[int]:
    """Returns from which steps its attempts went on."""
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert [fault.landed for fault in verdict.faults] == [True] * len(verdict.faults)
    assert not [record for record in read_lines(result.run.leg("chaos").journal) if record["event"] == "death.unplanned"]
    leg = result.run.leg("chaos")
    assert [CheckpointStore(leg, keep=3).audit(name).step for name in sorted(os.listdir(leg.checkpoints))][-1] == LAST
    assert os.listdir(leg.staging) == []
    return [attempt.resumed_step for attempt in verdict.attempts]


def test_kills_at_phases_of_a_save_beside_the_training(drill: Any) -> None:
    """Killed before the commit it goes on from the checkpoint before, killed after it from that one."""
    result = drill(
        "rank: 0, at_step: 8, phase: checkpoint.begin",
        "rank: 1, at_step: 12, phase: checkpoint.file",
        "rank: 0, at_step: 16, phase: checkpoint.fsync.before",
        "rank: 1, at_step: 20, phase: checkpoint.precommit",
        "rank: 0, at_step: 24, phase: checkpoint.rename.before",
        "rank: 0, at_step: 28, phase: checkpoint.rename.after",
        "rank: 1, at_step: 32, phase: checkpoint.postcommit",
    )
    assert expect_exact(result) == [0, 4, 8, 12, 16, 20, 28, 32]
    leg = result.run.leg("chaos")
    traces = [read_ends(leg.attempt(number).trace(0), number, 0, []) for number in range(1, 6)]
    assert all(saved.pending for trace in traces for saved in trace.checkpoints)
    # Killed with a copy that was not committed.
    assert [max(trace.committed, default=0) for trace in traces] == [4, 8, 12, 16, 20]


def test_other_faults_strike_in_the_rank_while_its_writer_waits(drill: Any) -> None:
    result = drill(
        "kind: exception, rank: 1, at_step: 8, phase: checkpoint.precommit",
        "kind: preempt, rank: 0, at_step: 13, grace: 20s",
        "kind: exit, rank: 0, at_step: 20, phase: checkpoint.postcommit",
    )
    assert expect_exact(result) == [0, 4, 14, 20], "whoever leaves on notice waits for its checkpoint"


def test_a_storage_that_fails_beside_the_training_is_told(drill: Any) -> None:
    result = drill(
        "kind: no_space, rank: 1, at_step: 8",
        "kind: io_error, rank: 0, at_step: 12, phase: checkpoint.fsync.before",
        "kind: failed_rename, rank: 0, at_step: 16",
        "kind: slow_storage, rank: 0, at_step: 20, duration: 100ms",
        "rank: 1, at_step: 25",
    )
    expect_exact(result)
    seen = {
        record["fault"]: record for record in read_lines(result.run.leg("chaos").journal) if record["event"] == "fault.observed"
    }
    assert "ENOSPC" in str(seen["F1"]) or "No space left" in str(seen["F1"])


def sources(result: Any) -> list[str | None]:
    return [attempt.source for attempt in result.verdict.attempts]


def test_restarted_ranks_are_restored_from_memory(drill: Any) -> None:
    """Where they were killed before a commit, too: the newest checkpoint's copy is there until the next is committed."""
    kills = ("rank: 1, at_step: 11", "rank: 0, at_step: 16, phase: checkpoint.precommit", "rank: 0, at_step: 23")
    result = drill(*kills, overrides=["checkpoint.memory=64MiB"])
    assert expect_exact(result) == [0, 8, 12, 20]
    assert sources(result) == [None, "memory", "memory", "memory"]
    assert "3 restarts from copies in memory" in result.verdict.cause
    assert sources(drill(*kills)) == [None, "storage", "storage", "storage"], "what a drill is to prove is in the storage"


def test_files_that_a_fault_damages_are_read(drill: Any) -> None:
    damage = "kind: flip_file_bit, rank: 0, at_step: 12, file: model.safetensors"
    result = drill(damage, "rank: 1, at_step: 16, phase: checkpoint.begin", overrides=["checkpoint.memory=64MiB"])
    assert result.verdict.status == "PASS", result.verdict.cause
    assert sources(result) == [None, "storage"]
    assert result.verdict.attempts[1].resumed_step == 8, "the damaged one was refused"
