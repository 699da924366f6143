"""The supervisor is SIGKILLed, or the agent between it and the ranks: nothing is left, and the drill still ends with PASS."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from chaosrun.processes import ProcessIdentity, children, identify, is_alive
from chaosrun.records.layout import RunLayout
from tests.conftest import Submit
from tests.e2e.drills import STEPS, Shell, events, eventually, finish, journal, kills, reached, write_job


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ranks_and_loader_workers(run: RunLayout) -> list[ProcessIdentity]:
    ranks = events(run.leg("chaos"), "attempt.started")[-1]["pids"].values()
    pids = [*ranks, *(child for rank in ranks for child in children(rank))]
    return [identity for pid in pids if (identity := identify(pid))]


# At these steps it waits for a file that is called like the leg.
HELD = """\
while (order.leg, order.attempt, step) in {("reference", 1, 2), ("chaos", 2, 8)}:
    if (Path(order.leg_path).parent / f"go-{order.leg}").exists():
        break
    time.sleep(0.01)
"""


def test_a_killed_supervisor_leaves_nothing_and_its_run_goes_on_from_the_journal(shell: Shell) -> None:
    job = write_job(shell.folder, HELD, kills(5, 11), "recovery: {hang_timeout: 300s}", loader_workers=2)
    process = shell.start("submit", job)
    try:
        run = shell.run_begun()
        eventually(lambda: reached(run.reference, 1, 2), what=lambda: process.poll())
        refused = shell.call("resume", "latest")
        assert refused.returncode == 2
        assert f"is being supervised by process {process.pid}" in refused.stderr
        (run.path / "go-reference").touch()
        eventually(lambda: reached(run.leg("chaos"), 2, 8), what=lambda: process.poll())
        # Two ranks with two loader workers each.
        everybody = eventually(lambda: len(found := ranks_and_loader_workers(run)) == 6 and found)
        process.kill()
        finish(process)
        eventually(lambda: not any(map(is_alive, everybody)))
        eventually(lambda: not shell.left_behind(), what=shell.left_behind)
    finally:
        process.kill()
    (run.path / "go-chaos").touch()
    assert f"{run.run_id}  small  interrupted" in shell.call("list").stdout
    before = journal(run.leg("chaos"))
    done = shell.run("resume", run.run_id, "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    assert verdict["status"] == "PASS"
    assert [fault["landed"] for fault in verdict["faults"]] == [True, True]
    assert [attempt["attempt"] for attempt in verdict["attempts"]] == [1, 2, 3, 4]
    assert journal(run.leg("chaos"))[: len(before)] == before, "the journal is continued, not rewritten"
    assert len(events(run.leg("chaos"), "supervisor.resumed")) == 1
    again = shell.call("resume", run.run_id)
    assert again.returncode == 0
    assert again.stderr == "", "a run that has ended is judged again, nothing is started"


# Rank 0 kills the supervisor where it likes: in the reference leg, then in the chaos leg just before the second fault, which
# then fires with nobody there to see it, or not yet: no checkpoint lies between, so the job comes by there again.
KILL_THE_SUPERVISOR = """\
if rank == 0 and (order.leg, order.attempt, step) in {("reference", 1, 7), ("chaos", 2, 8)}:
    once = Path(order.leg_path).parent / f"killed-in-{order.leg}"
    if not once.exists():
        once.touch()
        os.kill(int((Path(order.leg_path).parent / "lock").read_text()), signal.SIGKILL)
"""


@pytest.mark.nightly
def test_a_supervisor_killed_in_the_reference_and_again_before_a_fault(shell: Shell) -> None:
    job = write_job(shell.folder, KILL_THE_SUPERVISOR, kills(5, 8, rank=0))
    assert shell.run("submit", job).returncode == -signal.SIGKILL
    run = shell.only_run()
    assert reached(run.reference, 1, 7)
    assert not run.leg("chaos").journal.exists()
    # At once: what is left of the first one may still be dying.
    assert shell.run("resume", "latest").returncode == -signal.SIGKILL
    reference = events(run.reference, "attempt.starting")
    assert [record["attempt"] for record in reference] == [1], "a reference is undisturbed: it was run anew, not resumed"
    assert len(events(run.leg("chaos"), "fault.observed")) == 1
    done = shell.run("resume", "latest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults    2 of 2 landed" in done.stdout
    assert "PASS" in done.stdout
    (shown,) = [path.read_text() for path in run.path.glob("report.md")]
    assert "the death of its supervisor" in shown


@pytest.mark.ray
@pytest.mark.nightly
def test_a_killed_agent_is_replaced_and_the_drill_passes(submit: Submit, tmp_path: Path) -> None:
    victims: list[ProcessIdentity] = []

    def kill_the_agent(run: RunLayout, rank_pid: int) -> None:
        eventually(lambda: reached(run.leg("chaos"), 1, 4))
        server = parent_of(rank_pid)
        agent = parent_of(server)
        assert "NodeAgent" in Path(f"/proc/{agent}/cmdline").read_text()
        victims.extend(identity for pid in (agent, server, rank_pid) if (identity := identify(pid)))
        os.kill(agent, signal.SIGKILL)

    created: list[RunLayout] = []
    killers: list[threading.Thread] = []

    def on_event(record: dict[str, Any]) -> None:
        if record["event"] == "run.created":
            created.append(RunLayout(Path(record["path"])))
        elif (record["leg"], record["event"], record.get("attempt")) == ("chaos", "attempt.started", 1):
            killers.append(threading.Thread(target=kill_the_agent, args=(created[0], record["pids"]["0"])))
            killers[0].start()

    result = submit(write_job(tmp_path, "time.sleep(0.1)", kills(8), loader_workers=2), on_event=on_event)
    killers[0].join()
    assert len(victims) == 3
    assert not any(map(is_alive, victims))
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert verdict.steps == STEPS
    assert [fault.landed for fault in verdict.faults] == [True]
    chaos = result.run.leg("chaos")
    (death,) = events(chaos, "death.unplanned")
    assert "agent" in death["reason"]
    assert len(events(chaos, "placement.acquired")) == 2, "a new agent was put in its place"
    assert [attempt.attempt for attempt in verdict.attempts] == [1, 2, 3]
