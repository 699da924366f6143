"""Delayed signals, to real processes: what is seen of them, and that they reach nobody else."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaosrun.faults.delayed_signal import pause
from chaosrun.processes import ProcessIdentity, identify, is_alive, state_of
from tests.integration.ranks import eventually


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(["sleep", "600"])
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def known(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    identity = identify(process.pid)
    assert identity is not None
    return identity


def later(identity: ProcessIdentity, seconds: float, do: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-S", "-m", "chaosrun.faults.delayed_signal"]
    return subprocess.Popen(
        [*command, str(identity.pid), str(identity.start_ticks), str(seconds), do],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def waits_for_an_end(watcher: "subprocess.Popen[bytes]") -> bool:
    """Whether it has seen the process stopped: only then does it open a descriptor of it."""
    for descriptor in Path(f"/proc/{watcher.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it reads files of /proc all the while
            if "pidfd" in os.readlink(descriptor):
                return True
    return False


def test_a_pause_is_seen_from_both_sides(process: subprocess.Popen[bytes]) -> None:
    seen = pause(known(process), 0.1)
    assert (seen["state_stopped"], seen["state_before"]) == ("T", "T")
    # It goes on: asleep, running, or waiting for a page of its own image.
    assert seen["state_after"] in ("S", "R", "D")
    assert seen["stopped_s"] >= 0.1
    assert "problem" not in seen


def test_a_process_that_ends_meanwhile_was_not_paused(process: subprocess.Popen[bytes]) -> None:
    identity = known(process)
    with later(identity, 600.0, "resume") as watcher:
        assert watcher.stdout is not None
        assert json.loads(watcher.stdout.readline()) == "ready"
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: waits_for_an_end(watcher))
        process.kill()
        seen = json.loads(watcher.stdout.readline())
    assert "did not stay stopped" in seen["problem"]


def test_a_process_that_ended_was_never_stopped(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    eventually(lambda: state_of(known(process)) == "Z")
    assert "never seen stopped" in pause(known(process), 600.0, stop=False)["problem"]


def test_somebody_else_of_the_same_pid_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    other = ProcessIdentity(process.pid, known(process).start_ticks + 1)
    assert "gone before" in pause(other, 0.1)["problem"]
    with later(other, 0.0, "kill") as killer:
        assert killer.wait(timeout=300) == 0
    assert state_of(known(process)) in ("S", "R", "D")


def test_sigkill_comes_when_the_time_has_passed_and_not_before(process: subprocess.Popen[bytes]) -> None:
    with later(known(process), 0.2, "kill"):
        assert process.wait(timeout=300) == -signal.SIGKILL


def test_who_waits_for_a_process_ends_with_it(process: subprocess.Popen[bytes]) -> None:
    with later(known(process), 600.0, "kill") as killer:
        waiting = known(killer)
        process.kill()
        eventually(lambda: not is_alive(waiting))
