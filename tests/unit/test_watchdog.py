"""A process whose Ray's head dies, or whose time is over, is ended at once; one that ends its Ray in order is left alone."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaosrun.processes import ProcessIdentity, child_called, send_signal
from chaosrun.supervise import watchdog
from chaosrun.supervise.watchdog import Watchdog
from tests.integration.ranks import eventually

DRIVER = """\
import ctypes, subprocess, sys
PR_SET_PDEATHSIG = 1
head = subprocess.Popen([sys.argv[1], "600"], preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9))
input()
head.kill()
head.wait()
input()
"""
"""Starts what is called as Ray's head is, which goes with it, and ends it in order when it is told to."""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    head = shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / "gcs_server")
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(head)], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def head_of(driver: subprocess.Popen[bytes]) -> ProcessIdentity:
    return eventually(lambda: child_called("gcs_server", driver.pid))


def test_a_process_ends_with_rays_head(driver: subprocess.Popen[bytes]) -> None:
    with Watchdog(driver.pid) as watch:
        head = head_of(driver)
        send_signal(head, 9)
        assert driver.wait(30) == -9
    assert watch.lost == f"Ray's head (gcs_server, process {head.pid}) has died"


def test_a_process_that_ends_its_ray_in_order_is_left_alone(driver: subprocess.Popen[bytes]) -> None:
    with Watchdog(driver.pid) as watch:
        eventually(lambda: watch.head)
        assert driver.stdin is not None
        driver.stdin.write(b"\n")
        driver.stdin.flush()
        eventually(lambda: child_called("gcs_server", driver.pid) is None)
        # It has seen that, and asks no more.
        watch._thread.join(30)
        assert not watch._thread.is_alive()
        assert driver.poll() is None
    assert watch.lost is None


def test_a_process_ends_when_nobody_listens_at_the_head_that_it_joined(
    driver: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.2)  # on this machine
    with socket.create_server(("127.0.0.1", 0)) as listening, Watchdog(driver.pid) as watch:
        watch._pid = -1  # it has no head of its own
        watch.joined(f"127.0.0.1:{listening.getsockname()[1]}")
        listening.accept()
        listening.accept()
        assert driver.poll() is None
        listening.close()
        assert driver.wait(30) == -9
    assert watch.lost is not None and "nobody listens" in watch.lost


@pytest.mark.parametrize(("over", "code"), [(True, -9), (False, 0)])
def test_a_process_is_ended_when_its_time_is_over(driver: subprocess.Popen[bytes], over: bool, code: int) -> None:
    with Watchdog(driver.pid, time.time() + 600) as watch:
        eventually(lambda: watch.head)
        if over:
            watch.limit_s = time.time()
            assert driver.wait(30) == code
        else:
            driver.communicate(b"\n\n", timeout=30)
            assert driver.returncode == code
    assert watch.overdue == over
