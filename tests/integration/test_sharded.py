"""Sharded models under `chaosrun.attach`: killed wherever it hurts they end bit-identical; a shard that comes back wrong is
named; what is saved is a checkpoint of torch.distributed.checkpoint.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.observe.fingerprint import tensor_digest
from chaosrun.records.layout import LegLayout
from tests.conftest import REPOSITORY, WarmDrills

JOB = REPOSITORY / "jobs" / "fsdp" / "job.yaml"
WINDOWS = REPOSITORY / "tests" / "integration" / "sharded" / "windows.py"
MUTANTS = REPOSITORY / "tests" / "integration" / "sharded" / "train.py"
ONE_KILL = "faults.schedule=[{rank: 0, at_step: 6}]"
PART = re.compile(r"(?P<name>.*)\[(?P<part>.*)\]")
WAYS = [
    ("fsdp", 2, 3),
    pytest.param("tp", 2, 2, marks=pytest.mark.nightly),
    pytest.param("fsdp", 4, 6, marks=pytest.mark.nightly),
    pytest.param("hsdp", 4, 6, marks=pytest.mark.nightly),
    pytest.param("fsdp+tp", 4, 3, marks=pytest.mark.nightly),
]


def overrides(workers: int, *args: object) -> list[str]:
    return [f"workers={workers}", "per_worker.cpu=0.1", f"args=[{', '.join(map(str, args))}]"]


@pytest.mark.ray
@pytest.mark.parametrize(("way", "workers", "epochs"), WAYS)
def test_a_sharded_model_comes_back_exactly(
    warm_drills: WarmDrills, tmp_path: Path, way: str, workers: int, epochs: int
) -> None:
    told = [*overrides(workers, "--way", way, "--epochs", epochs), "max_steps=30"]  # the last kill is in step 27
    drill = warm_drills(JOB, root=tmp_path, overrides=told)
    run, verdict = drill.run, drill.verdict
    assert verdict.status == "PASS", verdict.cause
    assert [fault.landed for fault in verdict.faults] == [True] * 3
    # Ranks hold parts of their own under FSDP alone.
    skipped = {check.name for check in verdict.checks if check.status == "skip"}
    assert skipped == {"bucket_layout", "final_registered", *(["rank_agreement"] if way == "fsdp" else [])}
    assert_read_by_torch(run.reference, tmp_path, workers, whole=way == "tp")


@pytest.mark.ray
@pytest.mark.nightly
def test_a_single_rank_that_makes_its_own_process_group_comes_back_exactly(warm_drills: WarmDrills, tmp_path: Path) -> None:
    drill = warm_drills(JOB, root=tmp_path, overrides=[*overrides(1, "--epochs", 1), ONE_KILL])
    assert drill.verdict.status == "PASS", drill.verdict.cause


@pytest.mark.ray
@pytest.mark.parametrize(("way", "workers"), [("fsdp", 2), ("tp", 2), ("fsdp+tp", 4)])
@pytest.mark.nightly
def test_windows_of_a_sharded_model_come_back_exactly(warm_drills: WarmDrills, tmp_path: Path, way: str, workers: int) -> None:
    """The script holds its first gradients against those of the whole model."""
    told = [*overrides(workers, "--way", way), f"script={WINDOWS}", "faults.schedule=[{rank: 1, at_step: 6}]", "max_steps=12"]
    verdict = warm_drills(JOB, root=tmp_path, overrides=told).verdict
    assert verdict.status == "PASS", verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 4]


@pytest.mark.ray
@pytest.mark.nightly
def test_diagnose_names_the_shard(warm_drills: WarmDrills, tmp_path: Path) -> None:
    told = [*overrides(2, "moments_lost_later", "--way", "fsdp"), f"script={MUTANTS}", ONE_KILL]
    run = warm_drills(JOB, root=tmp_path, overrides=told).run
    diagnosis = warm_drills.diagnose(run)
    finding = diagnosis.comparison.finding
    assert diagnosis.reproduced and finding, diagnosis.account
    assert (finding.step, finding.rank, finding.tensor) == (5, 1, "0.0.weight[5:10, 0:16]")


def assert_read_by_torch(leg: LegLayout, folder: Path, workers: int, *, whole: bool) -> None:
    """Of every rank every shard, of weights and moments: as torch makes tensors of the checkpoint, it has the digest that its
    rank had when it was saved."""
    store = CheckpointStore(leg, keep=3)
    name = f"step-{max(store.steps()):08d}"
    manifest = store.audit(name)
    assert {f"__{rank}_0.distcp" for rank in range(workers)} | {".metadata"} <= manifest.files.keys()
    dcp_to_torch_save(leg.checkpoints / name, folder / "whole.pt")
    state = torch.load(folder / "whole.pt", weights_only=True)
    # And in another process, of no ranks at all.
    loaded = {"model": {path: torch.full_like(value, torch.nan) for path, value in state["model"].items()}}
    dcp.load(loaded, checkpoint_id=leg.checkpoints / name, no_dist=True)
    assert all(torch.equal(loaded["model"][path], value) for path, value in state["model"].items())
    moments = {
        f"0/state/{parameter}/{key}": value
        for parameter, own in state["optimizer"]["state"].items()
        for key, value in own.items()
    }
    compared = 0
    for component, tensors in (("model", state["model"]), ("optimizer", moments)):
        for rank, digests in enumerate(manifest.digests["ranks"]):
            for path, digest in digests[component].items():
                part = PART.fullmatch(path)
                nothing = part is not None and part["part"] == f"nothing, rank {rank}"
                if nothing or (part is None and (not whole or path not in tensors)):
                    continue
                sizes = [slice(*map(int, size.split(":"))) for size in part["part"].split(", ")] if part else ()
                tensor = tensors[part["name"] if part else path][tuple(sizes)]
                assert f"{tensor_digest(tensor):016x}" == digest, (rank, path)
                compared += 1
    assert compared >= workers * 3 * (12 if whole else 18)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("mutant", "code", "tensor"),
    [
        ("shard_of_another", "state_changed_on_load", "0.0.weight[5:10, 0:16]"),
        pytest.param(
            "moments_forgotten", "state_changed_on_load", "0/state/0.0.weight/exp_avg[5:10, 0:16]", marks=pytest.mark.nightly
        ),
        pytest.param("moments_lost_later", "optimizer_update", "0.0.weight[5:10, 0:16]", marks=pytest.mark.nightly),
    ],
)
def test_a_shard_that_comes_back_wrong_is_named(
    warm_drills: WarmDrills, tmp_path: Path, mutant: str, code: str, tensor: str
) -> None:
    told = [*overrides(2, mutant, "--way", "fsdp", "--epochs", 1), f"script={MUTANTS}", ONE_KILL, "verify.confirm=false"]
    verdict = warm_drills(JOB, root=tmp_path, overrides=told).verdict
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert tensor in verdict.cause
    assert "rank 1" in verdict.cause
    assert ("step 5" if code == "optimizer_update" else "step-00000004") in verdict.cause
