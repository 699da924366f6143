"""Ray's head dies, and nobody had planned it: the command ends at once and says what happened, and the run can be resumed."""

from collections.abc import Callable

import pytest

from chaosrun.processes import send_signal
from tests.e2e.drills import Shell, events, eventually, finish, head_below, kills, reached, write_job


def starts(shell: Shell) -> bool:
    """Ray does, which then holds Python's lock for a while."""
    return True


def trains(shell: Shell) -> bool:
    """In the chaos leg, after the planned kill."""
    return any(reached(run.leg("chaos"), 2, 7) for run in shell.runs())


@pytest.mark.nightly
@pytest.mark.parametrize("when", [starts, trains])
def test_a_drill_whose_ray_loses_its_head_is_ended_and_goes_on(shell: Shell, when: Callable[[Shell], bool]) -> None:
    process = shell.start("submit", write_job(shell.folder, "time.sleep(0.15)", kills(5)))
    try:
        head = eventually(lambda: head_below(process.pid))
        eventually(lambda: when(shell))
        send_signal(head, 9)
        # Ray itself would take a minute, and end the process with exit code 1.
        done = finish(process, timeout_s=30)
    finally:
        process.kill()
    run = shell.only_run()
    assert done.returncode == 7, done.stderr
    assert f"Ray's head (gcs_server, process {head.pid}) has died" in done.stderr
    assert f"chaosrun resume {run.run_id}" in done.stderr
    assert "bug" not in done.stderr and "Traceback" not in done.stderr
    assert shell.left_behind() == []
    again = shell.run("resume", run.run_id)
    assert again.returncode == 0, again.stderr
    assert "PASS" in again.stdout
    assert len(events(run.leg("chaos"), "supervisor.resumed")) == (when is trains)


@pytest.mark.nightly
def test_a_suite_whose_ray_loses_its_head_is_ended_and_goes_on(shell: Shell) -> None:
    write_job(shell.folder, "time.sleep(0.15)", kills(5))
    suite = shell.folder / "suite.yaml"
    suite.write_text("name: two\njob: job.yaml\ndrills: [{name: one}, {name: other, set: {seed: 2}}]\n")
    process = shell.start("suite", suite, "--at-once", "1")
    try:
        head = eventually(lambda: head_below(process.pid))
        eventually(lambda: trains(shell))
        send_signal(head, 9)
        done = finish(process, timeout_s=30)
    finally:
        process.kill()
    assert done.returncode == 7, done.stderr
    assert f"Ray's head (gcs_server, process {head.pid}) has died" in done.stderr
    assert "--resume latest" in done.stderr
    eventually(lambda: not shell.left_behind(), what=shell.left_behind)
    again = shell.run("suite", suite, "--resume", "latest")
    assert again.returncode == 0, again.stderr + again.stdout
