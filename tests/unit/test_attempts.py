"""What a fork server tells of the end of a rank."""

import os
import subprocess
from pathlib import Path

import pytest

from chaosrun.cluster.attempts import RunningAttempt
from chaosrun.cluster.messages import Exited, ServerEvent
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import write_marker


@pytest.mark.parametrize(("command", "killed"), [("exit 7", False), ("kill -9 $$", False), ("sleep 1000", True)])
def test_who_ended_by_himself_was_not_killed(tmp_path: Path, command: str, killed: bool) -> None:
    """Though the signal was sent, as another rank had been seen to fail a moment before."""
    child = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    if not killed:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    attempt = RunningAttempt(
        number=1, leg=LegLayout(tmp_path), ranks={child.pid: 0}, live={child.pid}, shared_memory=frozenset()
    )
    attempt.kill_all()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    told: list[ServerEvent] = []
    attempt.see_deaths(told.append)
    (exited,) = told
    assert isinstance(exited, Exited) and exited.killed is killed
    assert exited.exit_code == (7 if command == "exit 7" else None)


@pytest.mark.parametrize(
    ("notice", "attempt", "killed"), [(True, 1, False), (False, 1, True), (True, 2, True), (None, 1, True)]
)
def test_a_rank_that_was_told_to_leave_outlives_another_that_has_left(
    tmp_path: Path, notice: bool, attempt: int, killed: bool
) -> None:
    left, other = (subprocess.Popen(["sh", "-c", what], start_new_session=True) for what in ("exit 0", "sleep 1000"))
    os.waitid(os.P_PID, left.pid, os.WEXITED | os.WNOWAIT)
    leg = LegLayout(tmp_path)
    write_marker(leg, "F2", rank=1, attempt=attempt, pid=other.pid, phase="step", step=6, group=None, notice=notice)
    ranks = {left.pid: 0, other.pid: 1}
    running = RunningAttempt(number=1, leg=leg, ranks=ranks, live=set(ranks), shared_memory=frozenset())
    running.see_deaths(lambda _event: None)
    assert running.killed == ({1} if killed else set())
    running.kill_all()
    other.wait()
