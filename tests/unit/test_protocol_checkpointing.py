"""A checkpoint is restored into the job that saved it, and into no other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.errors import MisuseError
from chaosrun.protocol.checkpointing import _check_same_job
from chaosrun.records.manifest import Manifest
from chaosrun.records.order import WorkerOrder
from tests.integration.ranks import make_orders
from tests.records import manifest_of

JOB = {"batches per epoch": 5, "total batch size": 8, "even batches": True}


def manifest() -> Manifest:
    return manifest_of(3, job_fingerprint="f", digests={"job": JOB})


def order(**changes: Any) -> WorkerOrder:
    return replace(make_orders(Path("/run/chaos"), "", workers=2)[0], **{"job_fingerprint": "f", **changes})


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
