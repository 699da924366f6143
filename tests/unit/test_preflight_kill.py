"""What is made of a worker that was killed: gone with all it held, or what is left."""

from collections.abc import Mapping
from typing import Any

import pytest

from chaosrun.preflight.checks.kill import CHECK as KILL
from chaosrun.preflight.model import Finding, Status
from tests.preflight_answers import SETTING, judged, node_of

GOOD: Mapping[str, Any] = {**{"alive": [], "killed_s": 0.006}, **{"devices": {}, "device_error": ""}}
STUCK = {"alive": [{"what": "child", "pid": 7, "state": "D"}]}


def memory(after: int, seconds: float | None) -> Mapping[str, Any]:
    return {"devices": {"cuda:1": {"before": 10, "held": 300, "after": after, "seconds": seconds}}}


def judge(found: Mapping[str, Any], gpus: int = 0) -> dict[str, Finding]:
    findings = judged(KILL, SETTING, [node_of("a", gpus=gpus)], {"a": found})
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("changed", "name", "status", "says"),
    [
        (STUCK, "time until gone", Status.FAIL, "child (process 7, state D): alive 5 s"),
        (memory(290, None), "device memory", Status.FAIL, "290 MiB in use 5 s after the kill, 10 MiB before"),
        (memory(12, 0.4), "device memory", Status.PASS, "288 MiB free again after 0.4 s"),
        ({"device_error": "no CUDA"}, "device memory", Status.SKIP, ""),
        ({}, "device memory", Status.SKIP, ""),
    ],
)
def test_what_is_left_is_judged(changed: Mapping[str, Any], name: str, status: Status, says: str) -> None:
    finding = judge({**GOOD, **changed}, gpus=1)[name]
    assert finding.status is status and says in finding.measured


def test_the_call_has_time_for_all_its_waiting() -> None:
    assert KILL.call is not None
    call = KILL.call(SETTING, node_of())
    assert call.limit_s > 2 * call.parameters["within_s"]
