"""Faults that come from outside the ranks: after a delay, to an agent, a node, a raylet, the supervisor, Ray's head."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaosrun.errors import UsageError
from chaosrun.processes import ProcessIdentity, is_alive, marked
from chaosrun.records.layout import RunLayout
from tests.conftest import REPOSITORY, WarmDrills
from tests.e2e.drills import Shell, events, eventually, open_shell, reached

JOB = REPOSITORY / "jobs" / "probe" / "job.yaml"
SHORT = ('args=["--steps","24"]', "checkpoint.every_steps=6")


def found_of(run: RunLayout, fault: str) -> dict[str, Any]:
    (seen,) = [record for record in events(run.leg("chaos"), "fault.observed") if record["fault"] == fault]
    return seen["found"]


def gone(found: dict[str, Any]) -> dict[str, ProcessIdentity]:
    return {each["what"]: ProcessIdentity(each["pid"], each["start_ticks"]) for each in found["gone"]}


@pytest.mark.ray
def test_an_agent_a_node_and_a_rank_after_a_delay_are_killed_and_the_job_comes_back(
    warm_drills: WarmDrills, tmp_path: Path
) -> None:
    kill = "{rank: 1, kind: kill, after: 0.1s}"
    agent, node = "{rank: 1, kind: agent, at_step: 8}", "{rank: 0, kind: node, at_step: 15, phase: reduce}"
    result = warm_drills(JOB, root=tmp_path, overrides=[*SHORT, f"faults.schedule=[{kill}, {agent}, {node}]"])
    verdict, chaos = result.verdict, result.run.leg("chaos")
    assert verdict.status == "PASS", verdict.cause
    landed = {fault.description: fault.attempt for fault in verdict.faults if fault.landed}
    assert landed == {
        "SIGKILL rank 1 0.1 s after the start": 1,
        "SIGKILL the agent of the node of rank 1 after step 8": 2,
        "SIGKILL every process of the node of rank 0 inside the gradient all-reduce of step 15": 3,
    }
    assert events(chaos, "death.unplanned") == [], "whatever else died, died of a planned fault"
    assert events(chaos, "fault.withdrawn") == []
    started = events(chaos, "attempt.started")
    (kill_seen,) = [record for record in events(chaos, "fault.observed") if record["how"] == "death"]
    assert kill_seen["pid"] == started[0]["pids"]["1"]
    assert kill_seen["died_s"] >= events(chaos, "attempt.starting")[0]["time_s"] + 0.1

    for fault in verdict.faults:
        if "SIGKILL rank" in fault.description:
            continue
        found, own = found_of(result.run, fault.id), [f"rank {rank}" for rank in (0, 1)]
        whose = gone(found)
        assert {"agent", "fork server", *own} <= whose.keys()
        assert not any(map(is_alive, whose.values()))
        assert found["left"] == []
        struck = {each["what"] for each in found["struck"]}
        assert struck == {"agent"} if fault.kind == "agent" else struck >= {"agent", "fork server", *own}
        pids = next(record["pids"] for record in started if record["attempt"] == fault.attempt)
        assert [whose[name].pid for name in own] == [pids["0"], pids["1"]]
    # One placement of the leg, and one after each end of the node.
    assert len(events(chaos, "placement.acquired")) == 3


@pytest.mark.ray
@pytest.mark.parametrize(
    ("kind", "told"), [("supervisor", "there is no other to continue it"), ("head", "cannot be put back"), ("raylet", "joined")]
)
def test_what_is_not_ours_to_end_is_refused_before_anything_starts(
    warm_drills: WarmDrills, tmp_path: Path, kind: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        warm_drills(JOB, root=tmp_path, overrides=[f"faults.schedule=[{{rank: 1, kind: {kind}, at_step: 8}}]"])
    assert caught.value.hint
    (run,) = (tmp_path / "runs").iterdir()
    assert not RunLayout(run).reference.journal.exists()


@pytest.fixture
def shell_of_one(tmp_path: Path) -> Any:
    with open_shell(tmp_path) as opened:
        yield opened


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_drill_that_kills_its_supervisor_and_rays_head_ends_with_a_verdict(shell_of_one: Shell) -> None:
    supervisor, timed = "{rank: 1, kind: supervisor, at_step: 8}", "{rank: 0, kind: supervisor, after: 1ms}"
    head = "{rank: 0, kind: head, at_step: 15, phase: reduce}"
    done = shell_of_one.run("submit", JOB, *SHORT, f"faults.schedule=[{supervisor}, {timed}, {head}]", timeout_s=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults    3 of 3 landed" in done.stdout
    run = shell_of_one.only_run()
    chaos = run.leg("chaos")
    resumed = events(chaos, "supervisor.resumed")
    assert len(resumed) == 3
    supervisors = [events(chaos, "leg.started")[0]["supervisor_pid"], *(record["supervisor_pid"] for record in resumed)]
    assert len(set(supervisors)) == 4
    seen = events(chaos, "fault.observed")
    assert [record["how"] for record in seen] == ["successor"] * 3
    # Each was killed by itself, and the one after it says so.
    assert [gone(record["found"])["supervisor"].pid for record in seen] == supervisors[:-1]
    assert [record["found"]["successor"] for record in seen] == supervisors[1:]
    assert sum("head" in gone(record["found"]) for record in seen) == 1
    assert [record["event"] for record in events(chaos, "death.unplanned")] == []
    assert json.loads(shell_of_one.run("verify", "latest", "-o", "json").stdout)["verdict"]["status"] == "PASS"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("killed", [False, True])
def test_the_end_of_the_restarting_supervisor_ends_the_drill_below_it(shell_of_one: Shell, killed: bool) -> None:
    slow = ('args=["--steps","2000"]', "faults.schedule=[{rank: 1, kind: supervisor, at_step: 1900}]")
    process = shell_of_one.start("submit", JOB, *slow)
    try:
        run = eventually_trains(shell_of_one, process)
        process.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
        _, err = process.communicate(timeout=600)
    finally:
        process.kill()
    if killed:
        return  # `open_shell` waits for the rest to go, and fails when something stays
    assert process.returncode == 130, err
    assert f"chaosrun resume {run.run_id}" in err
    assert shell_of_one.left_behind() == []


def eventually_trains(shell: Shell, process: subprocess.Popen[str]) -> RunLayout:
    run = shell.run_begun()
    eventually(lambda: reached(run.reference, 1, 3), timeout_s=600, what=lambda: process.poll())
    return run


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_raylets_and_drained_nodes_are_done_without_as_long_as_the_ranks_fit(tmp_path: Path) -> None:
    """Three ranks on five raylets of this machine, of which the driver's own runs none."""
    driver = subprocess.run(
        [sys.executable, "-m", "tests.integration.drive_lost_nodes", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1500,
        cwd=REPOSITORY,
    )
    assert driver.returncode == 0, driver
    told = json.loads(driver.stdout.splitlines()[-1])
    first, second, third = (told[name] for name in ("recovers", "unplanned", "spent"))
    for drill in (first, second):
        assert drill["status"] == "PASS", drill
        assert set(drill["landed"]) == {True}

    raylet, drain = first["found"]
    assert [each["what"] for each in raylet["struck"]] == ["raylet"]
    assert {"raylet", "agent", "fork server", "rank 2"} <= gone(raylet).keys()
    assert drain["ends"]["0"] == {"exit_code": 85, "signal": None}
    assert drain["told"] == sorted(int(rank) for rank in drain["ends"])
    before, after_raylet, after_drain = first["nodes"]
    assert raylet["node"] in before and raylet["node"] not in {*after_raylet, *after_drain}
    assert drain["node"] in after_raylet and drain["node"] not in after_drain
    assert len(set(second["nodes"][1]) - set(second["nodes"][0])) >= 1, "another node stands in for the one whose raylet died"

    assert third["exit_code"] == 7, third
    lost = third["found"][-1]["node"]
    assert lost[:8] in third["message"], "the message names the node that was lost"
    assert "no place for 3 workers" in third["message"]
    assert third["beside"]["exit_code"] == 7
    assert "the node that the supervisor itself is connected to" in third["beside"]["message"]
    assert not marked(str(tmp_path)), "the cluster was not ours, but all that was ours is gone"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_lost_nodes_ranks_go_to_the_node_that_stands_by(tmp_path: Path) -> None:
    """Two ranks on four raylets of this machine; a whole node is killed, once without and once with another that stands by."""
    command = [sys.executable, "-m", "tests.integration.drive_standby", str(tmp_path)]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=REPOSITORY)
    assert driver.returncode == 0, driver
    told = json.loads(driver.stdout.splitlines()[-1])
    (cold,), (warm,) = told["cold"], told["warm"]
    for lost in (cold, warm):
        # Of itself Ray tells of a raylet that is gone after 10 s and more.
        assert lost["attempt.stopped"] < 5
        assert "its raylet is gone" in lost["unplanned"][0]
        assert len(lost["nodes"]) == 2
    assert cold["stood_by"] == [[], []]
    assert warm["stood_by"][0] == []
    (took_over,) = warm["stood_by"][1]
    assert took_over in warm["nodes"][1]
    assert took_over not in warm["nodes"][0]
    assert warm["recovery_s"] < cold["recovery_s"] / 2
