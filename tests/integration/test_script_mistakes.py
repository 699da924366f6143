"""Mistakes of a script's own, in real drills: each is told as the script's, and by what it is."""

from pathlib import Path

import pytest

from chaosrun.api import RunResult
from tests.conftest import WarmDrills

SCRIPT = Path(__file__).parent / "mistakes" / "train.py"
JOB = """
name: mistake
script: {script}
args: [{mistake}]
workers: 2
checkpoint: {{every_steps: 3}}
faults: {{schedule: [{{rank: 1, at_step: 8}}]}}
verify: {{confirm: false}}
"""


def drill(warm_drills: WarmDrills, folder: Path, mistake: str) -> RunResult:
    job = folder / "job.yaml"
    job.write_text(JOB.format(script=SCRIPT, mistake=mistake))
    return warm_drills(job, root=folder)


@pytest.mark.parametrize(
    ("mistake", "status", "code", "hint"),
    [
        ("none", "PASS", "exact", None),
        ("order", "INCONCLUSIVE", "parameter_order", "model.named_parameters()"),
        ("hook", "FAIL", "save_changes_state", "(hooks: rounding)"),
        ("passes", "FAIL", "source_keeps_its_place", "Rotating/passes is 0 when epoch 1 is opened"),
    ],
)
def test_a_mistake_is_the_scripts(
    warm_drills: WarmDrills, tmp_path: Path, mistake: str, status: str, code: str, hint: str | None
) -> None:
    verdict = drill(warm_drills, tmp_path, mistake).verdict
    assert (verdict.status, verdict.code) == (status, code), verdict.cause
    assert verdict.warnings == () or mistake == "hook"
    if hint is not None:
        assert verdict.blame.part == "script" and hint in (verdict.hint or "")


@pytest.mark.parametrize(
    ("mistake", "code", "told"),
    [
        ("scale", "gradient", "no checkpoint holds scale (1.0, undisturbed 3.814697265625)"),
        ("end", "ended_at_another_step", "patience (9, undisturbed 3)"),
    ],
)
def test_a_diagnosis_names_what_no_checkpoint_holds(
    warm_drills: WarmDrills, tmp_path: Path, mistake: str, code: str, told: str
) -> None:
    run = drill(warm_drills, tmp_path, mistake)
    assert (run.verdict.status, run.verdict.code) == ("FAIL", code), run.verdict.cause
    found = warm_drills.diagnose(run.run)
    assert found.reproduced and told in (found.hint or ""), found.hint
