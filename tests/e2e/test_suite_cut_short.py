"""A suite that is interrupted, whose process is killed, or whose drills are cancelled: it goes on where it was, by the command
that it says."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaosrun.campaign.files import SuiteFolder
from chaosrun.records.layout import RunLayout
from tests.conftest import REPOSITORY
from tests.e2e.drills import Shell, eventually, finish, reached, write_job

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
    chaosrun = [sys.executable, "-m", "chaosrun"]
    process, said = begin([*chaosrun, "suite", "four.yaml", "--junit", "four.xml"], tmp_path, 1)
    wait_for(said, " b begins", process)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    told = said.read_text()
    assert "error: interrupted, 1 of 4 drills done" in told or "error: interrupted, 2 of 4 drills done" in told
    shown = (tmp_path / "four.xml").read_text()
    assert 'name="data_order" classname="chaosrun.a.checks"' in shown and 'type="cut short"' in shown
    assert "CUT SHORT" in (tmp_path / "stdout-1").read_text()
    hint = re.search(r"hint: `(?P<command>chaosrun suite .*)` continues the suite", told)
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
    results = folder.progress().results
    assert {name: result.status for name, result in results.items()} == dict.fromkeys("abcd", "PASS")
    # Each drill once: those that were cut short went on with the run that they had.
    assert len(list((tmp_path / ".chaosrun" / "runs").iterdir())) == 4


HELD = """\
name: held
job: job.yaml
drills:
  - {name: a, faults: {seed: 1, schedule: [{rank: 1, at_step: 2}]}}
  - {name: b, faults: {seed: 2, schedule: [{rank: 0, at_step: 2}]}}
  - {name: c, faults: {seed: 3, schedule: [{kind: supervisor, rank: 0, at_step: 2}]}}
"""


def held(shell: Shell, seed: int) -> RunLayout:
    """The run of the drill with this seed, once it is held at its fourth step."""

    def there() -> RunLayout | None:
        for path in (shell.root / "runs").glob("*/run.json"):
            run = RunLayout(path.parent)
            if json.loads(path.read_text())["spec"]["faults"]["seed"] == seed and reached(run.leg("chaos"), 2, 4):
                return run
        return None

    return eventually(there, timeout_s=300)


@contextmanager
def carried_out(shell: Shell, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = shell.start("suite", "held.yaml", *options)
    try:
        yield process
    finally:
        process.kill()  # without effect when it has ended


def test_drills_are_cancelled_one_by_one_and_all_together(shell: Shell) -> None:
    trouble = f"while order.leg == 'chaos' and step >= 4 and not Path({str(shell.folder)!r}, 'go').exists(): time.sleep(0.05)"
    write_job(shell.folder, trouble, "recovery: {hang_timeout: 300s}", "per_worker: {cpu: 0.5}")
    (shell.folder / "held.yaml").write_text(HELD)

    with carried_out(shell) as process:
        a, b = held(shell, 1), held(shell, 2)
        watching = [shell.start(*command, a.run_id) for command in (("status", "-w"), ("logs", "-f"), ("wait",))]
        struck = shell.run("inject", b.run_id, "--rank", "1")
        assert struck.returncode == 0 and "F2  landed" in struck.stdout, struck.stdout + struck.stderr
        for run in (a, b):
            cancelled = shell.run("cancel", run.run_id)
            assert cancelled.returncode == 0 and f"chaosrun resume {run.run_id}\n" in cancelled.stdout, cancelled.stderr
        assert [finish(each).returncode for each in watching] == [0, 0, 130]
        # One with all to itself, below a process of its own.
        c = held(shell, 3)
        assert shell.run("cancel", c.run_id).returncode == 0
        done = finish(process)
    assert done.returncode == 6 and "3 cancelled" in done.stdout, done.stdout + done.stderr
    assert shell.left_behind() == []

    # Ctrl-C while one is being cancelled: whichever comes first, nothing stays.
    with carried_out(shell, "--resume", "latest") as process:
        eventually(lambda: len(list((shell.root / "runs").glob("*/control/socket"))) == 2, timeout_s=300)
        cancelling = shell.start("cancel", a.run_id)
        os.kill(process.pid, signal.SIGINT)
        finish(cancelling)
        interrupted = finish(process)
    assert interrupted.returncode == 130 and "--resume" in interrupted.stderr, interrupted.stdout + interrupted.stderr
    assert shell.left_behind() == []

    (shell.folder / "go").touch()
    again = shell.run("suite", "held.yaml", "--resume", "latest", timeout_s=600)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {path.name for path in (shell.root / "runs").iterdir()} == {run.run_id for run in (a, b, c)}
