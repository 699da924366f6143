"""What `chaosrun init` writes passes as it is, and its faults strike where its comments say."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from chaosrun.integrations.scaffold import init
from tests.conftest import WarmDrills

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    "template",
    [
        "accelerate",
        pytest.param("torch", marks=pytest.mark.nightly),
        pytest.param("trainer", marks=pytest.mark.nightly),
        pytest.param("lightning", marks=pytest.mark.nightly),
    ],
)
def test_it_passes(template: Any, tmp_path: Path, warm_drills: WarmDrills) -> None:
    if template == "lightning" and not find_spec("pytorch_lightning"):
        pytest.skip("pytorch_lightning is not installed: pip install 'chaosrun[frameworks]'")
    made = init(tmp_path / template, template=template)
    result = warm_drills(made.job, root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause
    assert result.verdict.resume_by == "script"
    assert [fault.landed for fault in result.verdict.faults] == [True, True, True]
    assert [attempt.resumed_step for attempt in result.verdict.attempts] == [0, 5, 15, 15]


@pytest.mark.nightly
def test_one_that_forgets_its_optimizer_fails(tmp_path: Path, warm_drills: WarmDrills) -> None:
    """The control: a script that is no longer right is not passed."""
    made = init(tmp_path / "job", template="torch")
    script = made.directory / "train.py"
    text = script.read_text()
    changed = text.replace('optimizer.load_state_dict(saved["optimizer"])', "pass")
    assert changed != text
    script.write_text(changed)
    result = warm_drills(made.job, root=tmp_path / "root")
    assert (result.verdict.status, result.verdict.code) == ("FAIL", "optimizer_state_not_restored"), result.verdict.cause
