"""Killing a worker with the real probe: where all is well, and under layers that keep something alive."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaosrun.preflight.checks.kill import CHECK
from chaosrun.preflight.model import Finding, Status, ask
from tests.local_pool import FAULTY, LocalPool
from tests.preflight_answers import SETTING, judged


def found_with(layer: str | None, limit_s: float) -> tuple[Mapping[str, Any], dict[str, Finding]]:
    pool = LocalPool({"a": {"PYTHONPATH": str(FAULTY / layer)} if layer else {}})
    outcome = pool.probe({"a": ask("kill", 300, within_s=limit_s, gpus=0)})["a"]
    assert outcome.facts is not None, outcome.error
    findings = judged(CHECK, SETTING, pool.nodes, {"a": outcome.facts})
    return outcome.facts, {finding.name: finding for finding in findings}


def test_a_worker_is_killed_with_everything_below_it() -> None:
    _, found = found_with(None, 60)
    assert {name: finding.status for name, finding in found.items()} == {
        "time until gone": Status.PASS,
        "device memory": Status.SKIP,
    }


def test_where_a_kill_is_lost_every_survivor_is_named() -> None:
    facts, found = found_with("immortal", 0.3)
    assert [each["what"] for each in facts["alive"]] == ["worker", "child", "grandchild"]
    assert {name: finding.status for name, finding in found.items()} == {
        "time until gone": Status.FAIL,
        "device memory": Status.SKIP,
    }
    gone = found["time until gone"]
    assert gone.node == "a" and gone.device is None
    pids = [each["pid"] for each in facts["alive"]]
    assert all(f"(process {pid}, state " in gone.measured for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "the guard has let them go"
