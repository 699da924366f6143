"""A suite that is interrupted, and one whose process is killed: both go on where they were, by the command that they say."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaosrun.suites.folder import SuiteFolder
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(900)]
SUITE = f"""
name: four
job: {REPOSITORY / "jobs" / "probe" / "job.yaml"}
set: {{max_steps: 40, checkpoint.every_steps: 5}}
drills:
  - {{name: a, faults: spot}}
  - {{name: b, faults: spot, set: {{seed: 3}}}}
  - {{name: c, faults: {{schedule: [{{kind: supervisor, rank: 0, at_step: 12}}]}}}}
  - {{name: d, faults: torture}}
"""


def begin(command: list[str], folder: Path, number: int) -> tuple[subprocess.Popen[bytes], Path]:
    said = folder / f"stderr-{number}"
    with said.open("wb") as stderr, (folder / f"stdout-{number}").open("wb") as stdout:
        return subprocess.Popen(command, cwd=folder, stdout=stdout, stderr=stderr, start_new_session=True), said


def wait_for(said: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while words not in said.read_text():
        assert time.monotonic() < deadline and process.poll() is None, said.read_text()
        time.sleep(0.1)


def test_interrupted_then_killed_then_done(tmp_path: Path) -> None:
    (tmp_path / "four.yaml").write_text(SUITE)
    chaosrun = [sys.executable, "-m", "chaosrun.cli"]
    process, said = begin([*chaosrun, "suite", "four.yaml"], tmp_path, 1)
    wait_for(said, "2/4 b begins", process)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    told = said.read_text()
    assert "error: interrupted, 1 of 4 drills done" in told or "error: interrupted, 2 of 4 drills done" in told
    hint = re.search(r"hint: `(?P<command>chaosrun suite .*)` goes on", told)
    assert hint is not None, told
    go_on = [*chaosrun, *shlex.split(hint["command"])[1:]]

    process, said = begin(go_on, tmp_path, 2)
    wait_for(said, " c begins", process)
    time.sleep(2.0)
    process.kill()
    process.wait()

    process, said = begin([*chaosrun, "suite", "four.yaml", "--resume", "latest"], tmp_path, 3)
    assert process.wait(600) == 0, said.read_text()
    (folder,) = (SuiteFolder(path.parent) for path in (tmp_path / ".chaosrun" / "suites").glob("*/suite.json"))
    results = folder.done().results
    assert {name: result.status for name, result in results.items()} == dict.fromkeys("abcd", "PASS")
    # Each drill once: those that were cut short went on with the run that they had.
    assert len(list((tmp_path / ".chaosrun" / "runs").iterdir())) == 4
