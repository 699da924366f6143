"""What a fork server tells of the end of a rank."""

import os
import subprocess
from pathlib import Path

import pytest

from chaosrun.cluster.attempts import RunningAttempt
from chaosrun.cluster.messages import Exited, ServerEvent
from chaosrun.records.layout import LegLayout


@pytest.mark.parametrize(("command", "killed"), [("exit 7", False), ("kill -9 $$", False), ("sleep 1000", True)])
def test_who_ended_by_himself_was_not_killed(tmp_path: Path, command: str, killed: bool) -> None:
    """Though the signal was sent, as another rank had been seen to fail a moment before."""
    child = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    if not killed:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    attempt = RunningAttempt(
        number=1, layout=LegLayout(tmp_path).attempt(1), ranks={child.pid: 0}, live={child.pid}, shared_memory=frozenset()
    )
    attempt.kill_all()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    told: list[ServerEvent] = []
    attempt.see_deaths(told.append)
    (exited,) = told
    assert isinstance(exited, Exited) and exited.killed is killed
    assert exited.exit_code == (7 if command == "exit 7" else None)
