"""A process whose Ray's head dies, or whose time is over, is ended at once; one that ends its Ray in order is left alone."""

import resource
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
from chaosrun.supervise.watchdog import Watchdog, suspicion
from tests.integration.ranks import eventually

DRIVER = """\
import ctypes, subprocess, sys
PR_SET_PDEATHSIG = 1
start = lambda path: subprocess.Popen([path, "600"], preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9))
processes = [start(path) for path in sys.argv[1:]]
input()
for process in processes:
    process.kill()
    process.wait()
input()
"""
"""Starts what is called as Ray's node and head are, which go with it, and ends them in order when it is told to."""


@pytest.mark.parametrize(
    ("number", "limit", "expected"),
    [
        (resource.RLIMIT_NOFILE, 40, "is `ulimit -n` too low here?"),
        (resource.RLIMIT_FSIZE, 10 << 20, "is `ulimit -f` too low here?"),
        (resource.RLIMIT_AS, 2 << 30, "is `ulimit -v` too low here?"),
        (resource.RLIMIT_NOFILE, 1024, "was memory short?"),
    ],
)
def test_a_low_limit_is_asked_for_before_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, number: int, limit: int, expected: str
) -> None:
    endless = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (limit if asked == number else endless, endless))
    assert suspicion() == expected


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    paths = [shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / name) for name in ("raylet", "gcs_server")]
    process = subprocess.Popen([sys.executable, "-c", DRIVER, *map(str, paths)], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("what", "program"), [("head", "gcs_server"), ("node", "raylet")])
def test_a_process_ends_with_rays_head_and_with_its_only_node(driver: subprocess.Popen[bytes], what: str, program: str) -> None:
    with Watchdog(driver.pid) as watch:
        process: ProcessIdentity = eventually(lambda: watch.head and watch.node and child_called(program, driver.pid))
        send_signal(process, 9)
        assert driver.wait(30) == -9
    assert watch.lost == f"Ray's {what} ({program}, process {process.pid}) has died"


PARENT = """\
import subprocess, sys, time
from chaosrun.processes import become_subreaper, state_of
from chaosrun.supervise.watchdog import Watchdog
become_subreaper()
driver = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE)
with Watchdog(driver.pid) as watch:
    while not (watch.head and watch.node):
        time.sleep(0.05)
    driver.kill()
    while state_of(watch.head) != "Z" or state_of(watch.node) != "Z":
        time.sleep(0.05)
    time.sleep(2)
    print(watch.lost, driver.wait())
"""
"""Watches a driver as a parent does to which its orphans fall, and kills it."""


def test_a_killed_process_is_not_laid_to_rays_that_end_with_it(tmp_path: Path) -> None:
    paths = [shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / name) for name in ("raylet", "gcs_server")]
    parent = [sys.executable, "-c", PARENT, DRIVER, *map(str, paths)]
    assert subprocess.run(parent, capture_output=True, text=True, timeout=60, check=True).stdout == "None -9\n"


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
def test_a_process_is_ended_when_its_time_is_over(
    driver: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, over: bool, code: int
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e12)  # a clock that somebody sets ends nothing
    with Watchdog(driver.pid, time.monotonic() + 600) as watch:
        eventually(lambda: watch.head)
        if over:
            watch.limit_s = time.monotonic()
            assert driver.wait(30) == code
        else:
            driver.communicate(b"\n\n", timeout=30)
            assert driver.returncode == code
    assert watch.overdue == over
