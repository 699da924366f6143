"""Drills of a preflight, for real: on a sound node, on one whose restarts change a bit, over several; and ended early."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.drill import DrillFacts, DrillRequest, Terms, request_on
from chaosrun.preflight.checks.forecast import CHECK as FORECAST
from chaosrun.preflight.drills.on_ray import JOB, run_drills
from chaosrun.preflight.earlier_run import earlier_run
from chaosrun.preflight.model import Level, Setting, Status
from chaosrun.records.layout import RunLayout
from chaosrun.spec.job_file import load_job
from tests.conftest import REPOSITORY
from tests.integration.ranks import eventually

pytestmark = pytest.mark.ray

DRIVER = "tests.integration.drive_preflight_drills"


def here() -> DrillRequest:
    """A drill on the one node of the tests' Ray."""
    import ray

    (info,) = ray.nodes()
    node = Node(name="here", node_id=info["NodeID"], address="127.0.0.1", hostname="here", cpus=2.0, gpus=0)
    root = Path("/runs")
    request = request_on(Setting(level=Level.STANDARD, root=root, storage=root), node, [node])
    assert isinstance(request, DrillRequest)
    return request


def terms(root: Path, *, limit_s: float = 400.0, begin_within_s: float | None = None, repeat_s: float = 0.0) -> Terms:
    return Terms(root=root, limit_s=limit_s, begin_within_s=begin_within_s, repeat_s=repeat_s)


@pytest.mark.nightly
def test_a_sound_node_comes_back_and_nothing_is_left(local_ray: None, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (told,) = run_drills([here()], terms(root, repeat_s=0.1))
    assert (told.status, told.landed, told.rounds) == ("PASS", 2, 1), told
    assert all((told.costs.step_s, told.costs.save_s, told.costs.restart_s))
    assert not list((root / "runs").iterdir())

    # What a forecast then goes by.
    setting = Setting(
        level=Level.STANDARD, root=root, storage=root, mtbf_s=86400.0, earlier={"drill": DrillFacts(nodes={"here": told})}
    )
    assert FORECAST.gather is not None
    found = FORECAST.judge(setting, here().nodes, FORECAST.gather(setting, nobody()))
    assert {finding.status for finding in found} == {Status.PASS}


@pytest.mark.parametrize("how", ["interrupt", pytest.param("limit", marks=pytest.mark.nightly)])
def test_a_drill_that_is_ended_leaves_nothing(how: str, local_ray: None, tmp_path: Path) -> None:
    before = fork_servers()
    root = tmp_path / "root"
    if how == "limit":
        (told,) = run_drills([here()], terms(root, limit_s=1.0))
        assert told.status == "ERROR" and "did not end" in told.cause
    else:
        threading.Thread(target=lambda: when(lambda: any(root.glob("runs/*/reference")), interrupt), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            run_drills([here()], terms(root))
    # Where the machine is slow, its thread ends later than `run_drills` waits for it.
    eventually(lambda: not list((root / "runs").iterdir()))
    eventually(lambda: not fork_servers() - before)


def test_what_there_is_no_time_for_is_not_begun(local_ray: None, tmp_path: Path) -> None:
    told = run_drills([here(), here()], terms(tmp_path / "root", begin_within_s=-1.0))
    assert [each.status for each in told] == ["LATE", "LATE"]


@pytest.mark.nightly
def test_a_node_that_changes_a_bit_after_a_restart_is_named(tmp_path: Path) -> None:
    facts, rows = driven(tmp_path, "bit_after_restore")
    sound, bad = facts["nodes"]
    assert (rows[sound]["status"], rows[bad]["status"]) == ("PASS", "FAIL")
    told = facts["nodes"][sound]
    assert (told["status"], told["landed"]) == ("PASS", 2) and all(told["costs"].values()), told
    # The checkpoint of step 10 is the first that is restored.
    assert all(word in rows[bad]["measured"] for word in ("step 11", "rank 0", "0.weight")), rows[bad]
    kept = Path(facts["nodes"][bad]["run"])
    assert str(kept) in rows[bad]["reason"] and [path.name for path in (tmp_path / "root" / "runs").iterdir()] == [kept.name]

    # To a forecast it is a run of its job like any other, once it has come to its end.
    root, job = tmp_path / "root", load_job(JOB, ["per_worker.cpu=1.0", "per_worker.gpu=0"])
    last = earlier_run(root, job)
    assert last is not None and last.run == kept.name
    assert all((last.costs.step_s, last.costs.save_s, last.costs.restart_s))
    RunLayout(kept).verdict_json.unlink()
    assert earlier_run(root, job) is None


@pytest.mark.nightly
def test_sound_nodes_are_drilled_together(tmp_path: Path) -> None:
    facts, rows = driven(tmp_path, "lost_streams", "sound")
    sound, bad, other = facts["nodes"]
    assert {name: rows[name]["status"] for name in (sound, bad, other)} == {sound: "PASS", bad: "FAIL", other: "PASS"}
    assert "rng" in rows[bad]["measured"]
    assert rows["all"]["status"] == "PASS"
    assert sorted(facts["all"]["ranks"].values()) == sorted([sound, other])


def driven(tmp_path: Path, *layers: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The check's facts and rows, by node, on raylets of this machine: a sound one, and one more for each layer."""
    command = [sys.executable, "-m", DRIVER, str(tmp_path / "root"), *layers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return told["facts"], {row["node"] or "all": row for row in told["rows"] if row["name"] != "restart"}


def nobody() -> Any:
    """No node is asked by a forecast."""
    return None


def fork_servers() -> set[psutil.Process]:
    """Those of the drills of this process. Their forks count only once they have another parent: the server of another test
    that is kept may fork new standbys at any time."""
    found: dict[psutil.Process, int] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "chaosrun.cluster.forkserver" in process.cmdline():
                found[process] = process.ppid()
    pids = {process.pid for process in found}
    return {process for process, parent in found.items() if parent not in pids}


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def when(is_so: Callable[[], bool], act: Callable[[], None]) -> None:
    while not is_so():
        time.sleep(0.01)
    act()
