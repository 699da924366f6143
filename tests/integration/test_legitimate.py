"""No false alarm: unusual but legitimate training scripts are killed, come back exactly, and PASS."""

from pathlib import Path

import pytest

from tests.conftest import WarmDrills, job_file

SCRIPT = Path(__file__).parent / "variants" / "train.py"
JOB = """\
name: legitimate
script: {script}
args: [--variant, {variant}]
workers: {workers}
seed: 1
checkpoint: {{every_steps: 3}}
faults: {{schedule: [{{rank: 1, at_step: 5}}, {{rank: 0, at_step: 8}}]}}
timeout: 300s
"""
VARIANTS = [
    "validate",
    "break",
    "stream",
    "unlucky",
    "seeding-dispatched",
    "hook",
    "skips",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("own-pass", "numpy-sampler", "userdict", "sparse", "seeding")),
]


@pytest.mark.ray
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_legitimate_script_passes(warm_drills: WarmDrills, tmp_path: Path, variant: str) -> None:
    workers = 3 if variant == "hook" else 2
    path = job_file(JOB.format(script=SCRIPT, variant=variant, workers=workers), tmp_path)
    verdict = warm_drills(path, root=tmp_path / "root").verdict
    assert verdict.status == "PASS", verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 3, 6]
    # The meter that the script gave to accelerate was compared too, on both ranks.
    registered = next(check for check in verdict.checks if check.name == "final_registered")
    assert registered.status == "pass"


@pytest.mark.ray
def test_a_reference_of_another_job_is_not_taken_for_this_one(warm_drills: WarmDrills, tmp_path: Path) -> None:
    root = tmp_path / "root"
    other = warm_drills(job_file(JOB.format(script=SCRIPT, variant="sparse", workers=2), tmp_path), root=root)
    path = job_file(JOB.format(script=SCRIPT, variant="validate", workers=2), tmp_path)
    verdict = warm_drills(path, root=root, reference=str(other.run.path)).verdict
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6)
    assert other.run.run_id in verdict.cause
