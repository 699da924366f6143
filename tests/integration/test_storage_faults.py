"""Faults of the storage, with the real thing: each is met, older checkpoints hold, and the job comes back exactly."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import UsageError
from tests.conftest import WarmDrills, job_file
from tests.records import read_lines

pytestmark = pytest.mark.ray

PROBE = Path(__file__).parents[2] / "jobs" / "probe" / "train.py"
JOB = """\
name: storage
script: {script}
args: [--steps, "22"]
workers: 2
seed: 1
max_steps: 22
checkpoint: {{every_steps: 2}}
faults:
  schedule:
{faults}
timeout: 300s
"""
Drill = Callable[..., Any]


@pytest.fixture
def drill(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Drill:
    """All drills of this file share their reference."""

    def run(*faults: str) -> Any:
        return warm_drills(write_job(tmp_path, faults), root=tmp_path_factory.getbasetemp() / "storage")

    return run


def write_job(folder: Path, faults: tuple[str, ...]) -> Path:
    return job_file(JOB.format(script=PROBE, faults="\n".join(f"    - {{{fault}}}" for fault in faults)), folder)


def journal(result: Any) -> list[dict[str, Any]]:
    return list(read_lines(result.run.leg("chaos").journal))


def found(result: Any) -> dict[str, dict[str, Any]]:
    """What was seen of each fault."""
    return {record["fault"]: record for record in journal(result) if record["event"] == "fault.observed"}


def expect_exact(result: Any, resumed: list[int]) -> None:
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert [(fault.id, fault.landed) for fault in verdict.faults] == [(fault.id, True) for fault in verdict.faults]
    assert [attempt.resumed_step for attempt in verdict.attempts] == resumed
    assert [record for record in journal(result) if record["event"] == "death.unplanned"] == []
    leg = result.run.leg("chaos")
    store = CheckpointStore(leg, keep=3)
    assert [store.audit(name).step for name in sorted(os.listdir(leg.checkpoints))][-1] == 22
    assert os.listdir(leg.staging) == []


def test_damaged_checkpoints_are_met_and_older_ones_used(drill: Drill) -> None:
    result = drill(
        "kind: truncate, rank: 1, at_step: 4",
        "rank: 1, at_step: 5",
        "kind: flip_file_bit, rank: 0, at_step: 6, file: model.safetensors",
        "rank: 0, at_step: 7",
        "kind: missing_file, rank: 1, at_step: 8",
        "rank: 1, at_step: 9",
        "kind: foreign_manifest, rank: 1, phase: step, at_step: 10",
        "rank: 1, at_step: 11, phase: reduce",
        "kind: zero_tail, rank: 0, at_step: 12",
        "rank: 0, at_step: 13, phase: record",
        "kind: stale_staging, rank: 0, at_step: 14",
        "kind: missing_manifest, rank: 1, at_step: 16",
        "rank: 0, at_step: 17",
    )
    expect_exact(result, [0, 2, 4, 6, 8, 10, 14])
    reasons = {r["step"]: r["reason"] for r in journal(result) if r["event"] == "checkpoint.quarantined"}
    assert reasons.keys() == {4, 6, 8, 10, 12, 16}
    for step, reason in {
        4: "bytes instead of",
        6: "model.safetensors has the right size but other contents",
        8: "chaosrun-rank-1.pt is missing",
        10: "MANIFEST.json belongs to step 8, not 10",
        12: "has the right size but other contents",
        16: "MANIFEST.json is missing",
    }.items():
        assert reason in reasons[step]
    seen = {fault: record["found"] for fault, record in found(result).items() if record["how"] == "note"}
    assert [note["file"] for note in seen.values() if "file" in note] == [
        "optimizer.bin",
        "model.safetensors",
        "chaosrun-rank-1.pt",
        "MANIFEST.json",
        "optimizer.bin",
        "MANIFEST.json",
    ]
    for note in (note for note in seen.values() if "file" in note):
        assert note["before"]["sha256"] != (note["after"] or {}).get("sha256")
        assert note["path"] == f"checkpoints/{note['checkpoint']}/{note['file']}"
    cleared = [name for record in journal(result) if record["event"] == "staging.cleared" for name in record["names"]]
    (stale,) = [note["staged"] for note in seen.values() if "staged" in note]
    assert stale in cleared


def test_writes_that_fail_leave_the_older_checkpoints_alone(drill: Drill) -> None:
    result = drill(
        "kind: no_space, rank: 1, at_step: 4",
        "kind: io_error, rank: 0, at_step: 6",
        "kind: slow_storage, rank: 0, at_step: 8, duration: 20ms",
        "kind: failed_rename, rank: 0, at_step: 8",
        "kind: no_space, rank: 0, at_step: 10, phase: checkpoint.fsync.before, file: MANIFEST.json",
        "kind: io_error, rank: 1, at_step: 12, phase: checkpoint.fsync.before, file: random_states_1.pkl",
    )
    # Each ends an attempt, as planned and not for want of resources, and the checkpoint before is the one that is left.
    expect_exact(result, [0, 2, 4, 6, 8, 10])
    assert [attempt.ended_by.partition(" ")[0] for attempt in result.verdict.attempts[:2]] == ["F1", "F2"]
    seen = found(result)
    ends = {fault: record["found"]["end"]["error"] for fault, record in seen.items() if record["how"] == "death"}
    words = {fault: error.rpartition(": ")[2] for fault, error in ends.items()}
    full, broken = "No space left on device", "Input/output error"
    assert words == {"F1": full, "F2": broken, "F4": broken, "F5": full, "F6": broken}
    assert {seen[fault]["exit_code"] for fault in ends} == {7}
    assert "MANIFEST.json" in ends["F5"] and "random_states_1.pkl" in ends["F6"]
    slow = seen["F3"]["found"]
    assert slow["waits"] >= 8 and slow["waited_s"] >= 0.02 * slow["waits"]
    # What each left half-written was there, and is cleared.
    cleared = [name for record in journal(result) if record["event"] == "staging.cleared" for name in record["names"]]
    assert cleared == [f"step-{2 + 2 * attempt:08}.attempt-{attempt}" for attempt in range(1, 6)]


def test_a_damage_that_did_not_happen_is_not_counted(drill: Drill) -> None:
    """The control: the job comes back exactly, and still the drill proves nothing of what was planned."""
    result = drill("kind: truncate, rank: 1, at_step: 4, file: nothing.bin", "rank: 1, at_step: 5")
    verdict = result.verdict
    assert verdict.status == "INCONCLUSIVE"
    assert [fault.landed for fault in verdict.faults] == [False, True]
    assert "nothing was damaged" in (verdict.faults[0].problem or "")
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 4]


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (("kind: truncate, rank: 1, at_step: 4",), "nobody reads the checkpoint again"),
        (("kind: truncate, rank: 1, at_step: 4", "rank: 1, at_step: 7"), "nobody reads the checkpoint again"),
        (("kind: stale_staging, rank: 1, at_step: 20",), "nobody reads the checkpoint again"),
        (("kind: failed_rename, rank: 1, at_step: 4",), "rank 1 never reaches checkpoint.rename.before, only rank 0 does"),
        (
            ("kind: truncate, rank: 1, at_step: 4, file: ../../journal.jsonl", "rank: 1, at_step: 5"),
            "is not a path within a checkpoint",
        ),
        (
            ("kind: io_error, rank: 1, at_step: 4, phase: checkpoint.fsync.before, file: model.safetensors",),
            "rank 1 never syncs model.safetensors, only rank 0 does",
        ),
    ],
)
def test_what_would_prove_nothing_is_refused_before_the_start(tmp_path: Path, faults: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        api.plan(write_job(tmp_path, faults))


@pytest.mark.nightly
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin", "chaosrun-rank-0.pt", "MANIFEST.json", "."])
@pytest.mark.parametrize("kind", ["kill", "io_error", "no_space"])
def test_any_file_of_a_checkpoint_may_be_the_one(drill: Drill, kind: str, file: str) -> None:
    phases = ["before", "after"] if kind == "kill" else ["before"]
    faults = [
        f"kind: {kind}, rank: 0, at_step: {4 + 2 * index}, phase: checkpoint.fsync.{phase}, file: {file!r}"
        for index, phase in enumerate(phases)
    ]
    expect_exact(drill(*faults), [0, 2, 4][: len(faults) + 1])


@pytest.mark.nightly
def test_every_checkpoint_damaged_means_the_beginning(drill: Drill) -> None:
    steps = (2, 4, 6)
    result = drill(*[f"kind: zero_tail, rank: 1, at_step: {step}" for step in steps], "rank: 1, at_step: 7")
    expect_exact(result, [0, 0])
    assert [r["step"] for r in journal(result) if r["event"] == "checkpoint.quarantined"] == [6, 4, 2]
