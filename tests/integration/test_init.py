"""What `chaosrun init` writes passes as it is, and its faults strike where its comments say."""

from pathlib import Path
from typing import Any

import pytest

from chaosrun.integrations.scaffold import init
from tests.conftest import WarmDrills

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    "template",
    ["accelerate", pytest.param("torch", marks=pytest.mark.nightly), pytest.param("trainer", marks=pytest.mark.nightly)],
)
def test_it_passes(template: Any, tmp_path: Path, warm_drills: WarmDrills) -> None:
    made = init(tmp_path / template, template=template)
    result = warm_drills(made.job, root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause
    assert [fault.landed for fault in result.verdict.faults] == [True, True, True]
    assert [attempt.resumed_step for attempt in result.verdict.attempts] == [0, 5, 10, 19]
    checked = {check.name for check in result.verdict.checks if check.status == "pass"}
    # The Trainer's scheduler is registered, not prepared.
    assert ("final_registered" if template == "trainer" else "final_scheduler") in checked


@pytest.mark.nightly
def test_one_that_forgets_its_scheduler_fails(tmp_path: Path, warm_drills: WarmDrills) -> None:
    """The control: a script that is no longer right is not passed."""
    made = init(tmp_path / "job")
    script = made.directory / "train.py"
    text = script.read_text()
    changed = text.replace(
        "model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    )
    assert changed != text
    script.write_text(changed)
    result = warm_drills(made.job, root=tmp_path / "root")
    assert result.verdict.status == "FAIL"
    assert result.verdict.divergence is not None
