"""Ctrl-C and SIGTERM at any moment: exit code 130, nothing left behind, and `chaosrun resume latest` ends the drill in PASS."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.drills import Shell, events, eventually, finish, kills, reached, write_job

# Slow enough to be caught in the middle, and with loader workers to be left behind.
SLOW = "time.sleep(0.15)"


def ctrl_c(process: subprocess.Popen[str]) -> None:
    """As a terminal does: to the whole foreground process group."""
    os.killpg(process.pid, signal.SIGINT)


def sigterm(process: subprocess.Popen[str]) -> None:
    """As `timeout` does, and Slurm: likewise."""
    os.killpg(process.pid, signal.SIGTERM)


def has_a_run(shell: Shell) -> bool:
    return any(run.lock.exists() for run in shell.runs())


def starts_ray(shell: Shell) -> bool:
    return has_a_run(shell) and any(shell.temporary.glob("chaosrun-ray-*/session_*"))


def imports_torch(shell: Shell) -> bool:
    return has_a_run(shell) and events(shell.only_run().reference, "leg.started") != []


def trains(shell: Shell) -> bool:
    return has_a_run(shell) and reached(shell.only_run().reference, 1, 4)


def trains_again(shell: Shell) -> bool:
    """In the chaos leg, after the first kill and before the second."""
    return has_a_run(shell) and reached(shell.only_run().leg("chaos"), 2, 4)


def interrupt(
    shell: Shell, when: Callable[[Shell], bool], send: Callable[[subprocess.Popen[str]], None], *arguments: str | Path
) -> str:
    """Run a command, interrupt it, and return what it said; nothing of it is left then."""
    process = shell.start(*arguments)
    try:
        eventually(lambda: when(shell), what=lambda: f"{when.__name__}; exit code {process.poll()}")
        send(process)
        done = finish(process)
    finally:
        process.kill()
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "GCS" not in done.stderr, "Ray was ended in order, not under the command's feet"
    assert "error: interrupted" in done.stderr
    assert shell.left_behind() == [], "nothing is left when the command returns, not only some time later"
    again = "diagnose" if "diagnose" in arguments else "resume"
    run = shell.only_run()
    assert f"chaosrun {again} {run.run_id}" in done.stderr
    assert run.verdict_json.exists() == (again == "diagnose")
    return done.stderr


@pytest.mark.parametrize(
    ("when", "send"),
    [pytest.param(starts_ray, ctrl_c, marks=pytest.mark.nightly), (imports_torch, sigterm)],
    ids=["Ctrl-C while Ray starts", "SIGTERM while torch loads"],
)
def test_an_interrupt_during_start_up_leaves_nothing(
    shell: Shell, when: Callable[[Shell], bool], send: Callable[..., None]
) -> None:
    interrupt(shell, when, send, "submit", write_job(shell.folder, "", kills(5)))


@pytest.mark.nightly
def test_a_run_that_is_interrupted_in_both_legs_ends_in_pass(shell: Shell) -> None:
    job = write_job(shell.folder, SLOW, kills(5, 9), loader_workers=2)
    assert "interrupted in the reference leg" in interrupt(shell, trains, ctrl_c, "submit", job)
    assert "interrupted in the chaos leg" in interrupt(shell, trains_again, sigterm, "resume", "latest")
    run = shell.only_run()
    assert f"{run.run_id}  small  interrupted" in shell.run("list").stdout
    done = shell.run("resume", "latest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    assert "faults    2 of 2 landed" in done.stdout
    assert [record["attempt"] for record in events(run.leg("chaos"), "attempt.starting")] == [1, 2, 3, 4]


def replays(shell: Shell) -> bool:
    return reached(shell.only_run().replay("chaos"), 1, 4)


@pytest.mark.nightly
def test_a_diagnosis_that_is_interrupted_can_be_made_again(shell: Shell) -> None:
    # Draws a random number too many at every step after a restore.
    trouble = f"{SLOW}\nif order.resume:\n    torch.rand(1)"
    assert shell.run("submit", write_job(shell.folder, trouble, kills(5))).returncode == 3
    said = interrupt(shell, replays, ctrl_c, "diagnose", "latest")
    assert "interrupted in a replay" in said
    done = shell.run("diagnose", "latest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SHOWN     rng first (step 5, rank 0, torch)" in done.stdout
    assert "hazard    R7" in done.stdout
    assert shell.left_behind() == []
