"""What only GPUs show: CUDA's random streams, NCCL, sharding by accelerate's plugin. `make test-gpu` runs these.

They never ran: no machine on which this was developed had a GPU. The first one may find as much wrong with them as with
the code.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.records.layout import RunLayout
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.ray

PROBE = REPOSITORY / "jobs" / "probe" / "job.yaml"
PLUGIN = REPOSITORY / "tests" / "integration" / "sharded" / "plugin.py"


def exact(tmp_path: Path, workers: int, *overrides: str) -> dict[str, Any]:
    """Drill the job on GPUs, killed once; the environment of its workers."""
    result = api.submit(PROBE, root=tmp_path, overrides=[f"workers={workers}", "per_worker.gpu=1", *overrides])
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert [fault.landed for fault in verdict.faults] == [True]
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


@pytest.mark.gpu(2)
def test_a_model_sharded_by_accelerate_s_plugin_comes_back_exactly(tmp_path: Path) -> None:
    exact(tmp_path, 2, f"script={PLUGIN}", "args=[]", "checkpoint.every_steps=4", "faults.schedule=[{rank: 1, at_step: 6}]")
