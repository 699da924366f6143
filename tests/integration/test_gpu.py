"""What only GPUs show: CUDA's random streams, NCCL, sharding by accelerate's plugin. `make test-gpu` runs these.

Those of one GPU were run on an H200. Those of several never ran: the first machine with two may find as much wrong with them as
with the code.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chaosrun import api
from chaosrun.observe.fingerprint import CHUNK_WORDS, _partial_sums, _weights, _words, tensor_digests
from chaosrun.records.layout import RunLayout
from chaosrun.records.trace_reader import read_ends
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.ray

PROBE = REPOSITORY / "jobs" / "probe" / "job.yaml"
GRAPHED = REPOSITORY / "tests" / "integration" / "graphed" / "train.py"
PLUGIN = REPOSITORY / "tests" / "integration" / "sharded" / "plugin.py"


def exact(tmp_path: Path, workers: int, *overrides: str) -> dict[str, Any]:
    """Drill the job on GPUs, killed once; the environment of its workers."""
    result = api.submit(PROBE, root=tmp_path, overrides=[f"workers={workers}", "per_worker.gpu=1", *overrides])
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert [fault.landed for fault in verdict.faults] == [True] * len(verdict.faults)
    placed = _events(result.run, "placement.acquired")[-1]["nodes"].values()
    assert sum(len(node["gpus"]) for node in placed) == workers, "a device for each rank"
    return json.loads(result.run.leg("chaos").environment.read_text())


def _events(run: RunLayout, kind: str) -> list[dict[str, Any]]:
    records = map(json.loads, run.leg("chaos").journal.read_text().splitlines())
    return [record for record in records if record["event"] == kind]


@pytest.mark.gpu
def test_one_rank_on_a_gpu_comes_back_exactly(tmp_path: Path) -> None:
    exact(tmp_path, 1, "faults.schedule=[{rank: 0, at_step: 27}]")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("phase", ["step", "reduce"])
def test_ranks_under_nccl_come_back_exactly(tmp_path: Path, phase: str) -> None:
    environment = exact(tmp_path, 2, f"faults.schedule=[{{rank: 1, at_step: 27, phase: {phase}}}]")
    assert "NCCL_ALGO" in json.dumps(environment), "what was fixed is recorded"


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu(2))])
def test_a_model_sharded_by_accelerate_s_plugin_comes_back_exactly(tmp_path: Path, workers: int) -> None:
    kill = f"faults.schedule=[{{rank: {workers - 1}, at_step: 6}}]"
    exact(tmp_path, workers, f"script={PLUGIN}", "args=[]", "checkpoint.every_steps=4", kill)


@pytest.mark.gpu
def test_graphs_that_are_captured_come_back_exactly(tmp_path: Path) -> None:
    exact(tmp_path, 1, f"script={GRAPHED}", "args=[]", "checkpoint.every_steps=4", "faults.schedule=[{rank: 0, at_step: 6}]")


@pytest.mark.gpu
def test_a_step_inside_a_graph_is_refused(tmp_path: Path) -> None:
    overrides = ["workers=1", f"script={GRAPHED}", "args=[whole]", "faults.schedule=[{rank: 0, at_step: 6}]"]
    verdict = api.submit(PROBE, root=tmp_path, overrides=overrides).verdict
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 4)
    assert "an optimizer steps inside a CUDA graph" in verdict.headline


@pytest.mark.gpu
def test_saves_beside_the_training_of_a_gpu_are_whole_or_none(tmp_path: Path) -> None:
    """Of a state whose copy takes a while, on a GPU that goes on at once."""
    args = "args=[--epochs, 3, --seed, 1, --frozen-megabytes, 200]"
    phases = {"checkpoint.begin": 20, "checkpoint.precommit": 30, "checkpoint.postcommit": 40}
    faults = ", ".join(f"{{rank: 0, at_step: {step}, phase: {phase}}}" for phase, step in phases.items())
    environment = exact(tmp_path, 1, args, "checkpoint.mode=async", f"faults.schedule=[{faults}, {{rank: 0, at_step: 55}}]")
    assert environment["gpu"]
    leg = RunLayout(next(tmp_path.rglob("run.json")).parent).leg("chaos")
    trace = read_ends(leg.attempt(1).trace(0), 1, 0, [])
    assert trace.checkpoints and all(saved.pending for saved in trace.checkpoints), "the training did not wait"


@pytest.mark.gpu
def test_a_gpu_digests_as_a_cpu_would_by_the_same_sum() -> None:
    torch.manual_seed(0)
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8]
    tensors = [torch.randn(CHUNK_WORDS + 33).mul(50).to(kind) for kind in kinds]
    on_gpu = [tensor.cuda() for tensor in tensors]
    for tensor, there in zip(tensors, on_gpu, strict=True):
        sums = [
            [int(each) for each in _partial_sums(_words(where), lambda device: _weights(device))] for where in (tensor, there)
        ]
        assert sums[0] == sums[1]
    small = [torch.randn(size, device="cuda") for size in (1, 7, 0, 4096)]
    on_gpu += small
    before = tensor_digests(on_gpu)
    assert tensor_digests(on_gpu) == before == [tensor_digests([tensor])[0] for tensor in on_gpu], "together as alone"
    del on_gpu[-len(small) :], before[-len(small) :]
    for tensor in on_gpu:
        # One bit of one element, anywhere.
        tensor.view(torch.uint8)[tensor.nbytes // 3] ^= 4
    after = tensor_digests(on_gpu)
    assert all(one != other for one, other in zip(before, after, strict=True))
