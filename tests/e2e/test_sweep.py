"""A whole sweep of the probe by the command: interrupted with Ctrl-C, taken up again, and every point comes back exactly."""

import json
import os
import signal

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.drills import Shell, eventually, finish

PROBE = REPOSITORY / "jobs" / "probe" / "job.yaml"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_point_of_the_probe(shell: Shell) -> None:
    process = shell.start("sweep", PROBE)
    try:
        folder = eventually(lambda: next(iter(shell.root.glob("sweeps/*/sweep.json")), None), timeout_s=120)
        eventually(lambda: len(json.loads(folder.read_text())["tried"]) >= 5, timeout_s=120)
        os.killpg(process.pid, signal.SIGINT)
        done = finish(process)
    finally:
        process.kill()
    assert done.returncode == 130, done.stderr
    assert f"`chaosrun sweep {PROBE} --resume {folder.parent.name}` continues the sweep" in done.stderr
    assert "Traceback" not in done.stderr
    assert shell.left_behind() == []
    before = json.loads(folder.read_text())["tried"]

    done = shell.run("sweep", PROBE, "--resume", "latest", "--output", "json", timeout_s=1500)
    assert done.returncode == 0, done.stdout
    swept = json.loads(done.stdout)
    assert {name: swept["tried"][name] for name in before} == before
    assert len(swept["points"]) == len(swept["tried"]) >= 60
    assert all(tried["status"] == "PASS" and tried["reached"] for tried in swept["tried"].values())
    phases = {point["phase"] for point in swept["points"]}
    assert phases >= {
        "rendezvous",
        "restore.begin",
        "restore.end",
        "fetch",
        "forward",
        "reduce",
        "optimizer",
        "record",
        "checkpoint.begin",
        "checkpoint.file",
        "checkpoint.fsync.before",
        "checkpoint.fsync.after",
        "checkpoint.precommit",
        "checkpoint.rename.before",
        "checkpoint.rename.after",
        "checkpoint.postcommit",
        "checkpoint.retention",
        "step",
    }
