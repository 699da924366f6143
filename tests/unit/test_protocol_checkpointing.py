"""A checkpoint is restored into the job that saved it, and into no other."""

from typing import Any

import pytest

from chaosrun.errors import MisuseError
from chaosrun.protocol.checkpointing import _check_same_job
from chaosrun.records.manifest import Manifest, Position
from chaosrun.records.order import WorkerOrder

JOB = {"batches per epoch": 5, "total batch size": 8, "even batches": True}


def manifest() -> Manifest:
    return Manifest(
        step=3,
        position=Position(epoch=0, batches=3, step=3),
        world_size=2,
        attempt=1,
        time_s=1.0,
        job_fingerprint="f",
        files={},
        digests={"job": JOB},
    )


def order(**changes: Any) -> WorkerOrder:
    values: dict[str, Any] = {
        "leg": "chaos",
        "leg_path": "/run/chaos",
        "storage_path": None,
        "attempt": 2,
        "rank": 0,
        "world_size": 2,
        "local_rank": 0,
        "local_world_size": 2,
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "script": "/train.py",
        "cwd": "/",
        "seed": 0,
        "deterministic": "strict",
        "threads": 1,
        "every_steps": 3,
        "keep": 2,
        "job_fingerprint": "f",
    }
    return WorkerOrder(**{**values, **changes})


def test_the_same_job_goes_on() -> None:
    _check_same_job("step-00000003", manifest(), order(), JOB)


@pytest.mark.parametrize(
    ("changes", "job", "told"),
    [
        ({"world_size": 3}, JOB, "world size: 2 then, 3 now"),
        ({"job_fingerprint": "g"}, JOB, "spec: f then, g now"),
        ({}, {**JOB, "total batch size": 16}, "total batch size: 8 then, 16 now"),
        ({}, {**JOB, "even batches": False}, "even batches: True then, False now"),
    ],
)
def test_another_configuration_is_refused(changes: dict[str, Any], job: dict[str, Any], told: str) -> None:
    with pytest.raises(MisuseError, match="belongs to another configuration") as caught:
        _check_same_job("step-00000003", manifest(), order(**changes), job)
    assert told in caught.value.message
