"""One script, three launchers, the same losses to the last bit: python, accelerate launch, chaosrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, WarmDrills, job_file

SCRIPT = REPOSITORY / "jobs" / "bytelm" / "train.py"
ARGS = [
    "--epochs",
    "2",
    "--seed",
    "5",
    "--chunks",
    "85",
    "--batch-size",
    "4",
    "--context",
    "32",
    "--width",
    "32",
    "--print-losses",
]
LAUNCHERS = {
    1: [sys.executable],
    # accelerate starts several processes on CPUs only under this name; the script itself stays on the CPU.
    3: [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "3", "--num_machines", "1"],
}


def losses(text: str) -> list[str]:
    return re.findall(r"^step .*|^validation loss .*", text, re.MULTILINE)


@pytest.mark.ray
@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_plain_launchers_and_chaosrun_compute_the_same(warm_drills: WarmDrills, tmp_path: Path, workers: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}
    extra = ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"] if workers > 1 else []
    command = [*LAUNCHERS[workers], *extra, str(SCRIPT), *ARGS]
    plain = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert plain.returncode == 0, plain.stderr
    job = (
        f"name: same\nscript: {SCRIPT}\nargs: {ARGS}\nworkers: {workers}\nseed: 1\ncheckpoint: {{every_steps: 2}}\n"
        "faults: {schedule: [{rank: 0, at_step: 5}]}\n"
    )
    result = warm_drills(job_file(job, tmp_path), root=tmp_path / "root")
    assert result.verdict.status == "PASS"
    reference = losses(log(result.run.path, "reference", 1))
    assert len(reference) == 2 * {1: 11, 3: 4}[workers] + 1
    assert losses(plain.stdout) == reference
    # The killed leg prints the last steps, after its restart, and they are the same too.
    assert losses(log(result.run.path, "chaos", 2)) == reference[4:]


def log(run: Path, leg: str, attempt: int) -> str:
    return (run / leg / "attempts" / f"{attempt:03d}" / "rank-0.log").read_text()
