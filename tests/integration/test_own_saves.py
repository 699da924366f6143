"""A script's own saves under real strikes: killed between two operations, the power cut, storage that fails, spoilt files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.records.layout import LegLayout
from chaosrun.records.operations import read_operations
from chaosrun.supervise.drill import leg_of
from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills, job_file

pytestmark = [pytest.mark.ray, pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed here")]

SCRIPTS = Path(__file__).parent / "scripts"
JOB = f"""\
name: saving
script: {SCRIPTS / "saving.py"}
workers: 2
seed: 1
outputs: [out]
resume: {{by: script}}
recovery: {{max_restarts: 1}}
verify: {{confirm: false}}
"""


Drilled = Callable[..., tuple[Verdict, LegLayout]]


@pytest.fixture
def drilled(warm_drills: WarmDrills, tmp_path: Path) -> Drilled:
    """`drilled(how, *faults)`: what came of it, and the leg under faults."""

    def drill(how: str, *faults: str, more: str = "") -> tuple[Verdict, LegLayout]:
        overrides = [f"args=[--how, {how}{more}]", f"faults.schedule=[{', '.join(faults)}]"]
        result = warm_drills(job_file(JOB, tmp_path), root=tmp_path / "root", overrides=overrides)
        return result.verdict, leg_of(result.run, "chaos")

    return drill


def landed(verdict: Verdict) -> list[bool]:
    return [fault.landed for fault in verdict.faults]


def test_a_save_that_is_cut_short_costs_the_steps_since_the_last(drilled: Drilled) -> None:
    verdict, chaos = drilled("atomic", "{rank: 0, phase: save, at_step: 8, operation: 4}")
    assert (verdict.status, landed(verdict)) == ("PASS", [True])
    attempt = chaos.attempt(1)
    done = [(each.kind, Path(each.path).name) for each in read_operations(attempt.operations(0))]
    assert done == [("create", "last.pt.tmp"), ("write", "last.pt.tmp"), ("write", "last.pt.tmp")]
    # The control: written in place, the same kill leaves a torn checkpoint, and nothing to fall back to.
    verdict, _ = drilled("plain", "{rank: 0, phase: save, at_step: 8}")
    assert (verdict.status, landed(verdict)) == ("FAIL", [True])
    assert "never recovered" in verdict.cause


def test_a_power_cut_shows_what_was_not_synced(drilled: Drilled) -> None:
    cut = "{{kind: power_cut, rank: 0, phase: save, at_step: 8, unsynced: {}}}"
    verdict, _ = drilled("synced", cut.format("torn"))
    assert (verdict.status, landed(verdict)) == ("PASS", [True])
    # The control: renamed before its bytes were on the disk.
    verdict, chaos = drilled("atomic", cut.format("empty"))
    assert (verdict.status, landed(verdict)) == ("FAIL", [True])
    assert (chaos.work / "out" / "last.pt").read_bytes() == b""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "more", "status"),
    [
        # It dies of the error, and comes back; or goes on, without that checkpoint.
        ("{kind: no_space, rank: 0, phase: save, at_step: 8}", "", "PASS"),
        ("{kind: io_error, rank: 0, phase: save, at_step: 8}", ", --keep-on", "PASS"),
        ("{kind: slow_storage, rank: 0, phase: save, at_step: 8, duration: 0.2s}", "", "PASS"),
        ("{kind: missing_file, rank: 0, phase: save, at_step: 8}", "", "PASS"),
        # Silently from a fresh optimizer.
        ("{kind: missing_file, rank: 0, phase: save, at_step: 8}", ", --without-optimizer", "FAIL"),
        ("{kind: truncate, rank: 0, phase: save, at_step: 8, file: '*last.pt'}", "", "FAIL"),
    ],
)
def test_failing_storage_and_spoilt_files(drilled: Drilled, fault: str, more: str, status: str) -> None:
    verdict, _ = drilled("synced", fault, "{rank: 1, at_step: 10}", more=more)
    assert (verdict.status, landed(verdict)) == (status, [True, True])


@pytest.mark.nightly
def test_a_sweep_strikes_at_every_operation_of_a_save(local_ray: None, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)

    def sweep(how: str, **more: Any) -> dict[str, str]:
        swept = api.sweep(job, overrides=[f"args=[--how, {how}]"], saves=True, root=tmp_path, **more)
        assert len(swept.tried) == len(swept.points) and all(tried.reached for tried in swept.tried.values())
        return {point: tried.status for point, tried in swept.tried.items()}

    synced = sweep("synced", steps=[8])
    assert set(synced.values()) == {"PASS"} and len(synced) > 8
    atomic = sweep("atomic", steps=[8], only=["*power_cut*"])
    assert {status for point, status in atomic.items() if point.endswith("end/power_cut-empty")} == {"FAIL"}
    assert {status for point, status in atomic.items() if point.endswith("lost")} == {"PASS"}
