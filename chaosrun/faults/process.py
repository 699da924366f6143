"""Faults of one process: it dies, leaves, hangs, slows down, runs out of something.

Those that are signals, the rank sends to itself here; after a delay they come from outside (`faults.outside`).
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from chaosrun.faults.strike import Strike
from chaosrun.processes import PACKAGE_ROOT
from chaosrun.records.markers import start_ticks

MIB = 1 << 20
BALLAST_LIMIT = 2
"""Give up when this many times the allowance could be taken: the limit does not hold."""
TORCH_HEARS_WITHIN_S = 1.0
"""torch hears of a dead loader worker by SIGCHLD, at once; else when it has waited 5 s for a batch, which is not here."""


class InjectedError(Exception):
    """What a fault of kind `exception` raises."""


def kill(strike: Strike) -> None:
    strike.die(signal.SIGKILL)


def preempt(strike: Strike) -> None:
    """The notice, and SIGKILL when grace runs out. What the rank makes of it is `train.preemption`, or the script's own."""
    _signal_later(strike, strike.option("grace_s"), "kill")
    os.kill(strike.pid, signal.SIGTERM)


def stop(strike: Strike) -> None:
    os.kill(strike.pid, signal.SIGSTOP)


def pause(strike: Strike) -> None:
    """Stop; another process sees it stopped, tells it to go on, sees it running, and reports."""
    with _signal_later(strike, strike.option("duration_s"), "resume", stdout=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        if report := watcher.stdout.readline():  # it is there, and watches
            os.kill(strike.pid, signal.SIGSTOP)
            report = watcher.stdout.readline()
    strike.note(**(json.loads(report) if report else {"problem": "the process that watched the pause died"}))


def segfault(strike: Strike) -> None:
    """Read from address 0."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a dump of the whole process would only cost time and disk
    ctypes.string_at(0)


def exception(strike: Strike) -> None:
    raise InjectedError(f"fault {strike.fault.id}: raised on purpose {strike.fault.moment()}")


def exit_silently(strike: Strike) -> NoReturn:
    os._exit(0)


def memory(strike: Strike) -> None:
    """Limit the address space of this process to what it has and a little more, and take memory until there is none."""
    allowance = strike.option("mebibytes")
    has_bytes = _address_space_bytes()
    limit, hard = has_bytes + allowance * MIB, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    ballast: list[bytearray] = []
    try:
        while len(ballast) < BALLAST_LIMIT * allowance + 1024:
            ballast.append(bytearray(b"\1") * MIB)  # written to: these pages are there
    except MemoryError as error:
        taken = len(ballast)
        ballast.clear()  # or there would be no memory to say so
        error.args = (f"fault {strike.fault.id}: {taken} MiB taken, then the limit ({limit // MIB} MiB) of this process held",)
        raise
    taken = len(ballast)
    ballast.clear()
    strike.note(problem=f"{taken} MiB could be taken under a limit that allows {allowance} MiB")


def loader_worker(strike: Strike) -> None:
    """Kill one live loader worker of this rank; torch then raises here, or where it next wants a batch of it."""
    assert strike.training is not None
    for victim, started in strike.training.loader_workers():
        if start_ticks(victim) != started or _parent_of(victim) != strike.pid:
            continue  # it has ended
        strike.note(victim=victim, start_ticks=started)
        # Our own child: its pid is not given out again before this process has reaped it, which nobody does meanwhile.
        os.kill(victim, signal.SIGKILL)
        time.sleep(TORCH_HEARS_WITHIN_S)
        return
    strike.note(problem=f"rank {strike.rank} has no live loader worker at this point")


def slow(strike: Strike) -> None:
    strike.pace.stretch(strike, factor=strike.option("factor"), steps=strike.option("steps"))


def hang(strike: Strike) -> None:
    """Wait for ever, in C and without letting go of Python's global lock, for a mutex that this thread holds itself."""
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock during a call
    mutex = ctypes.create_string_buffer(256)  # zeroed: what PTHREAD_MUTEX_INITIALIZER is on Linux
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _signal_later(strike: Strike, seconds: float, do: str, stdout: int | None = None) -> "subprocess.Popen[bytes]":
    """A tiny process that signals this one later (`faults.delayed_signal`); in our process group, so it dies with the rank."""
    command = [sys.executable, "-P", "-S", "-m", "chaosrun.faults.delayed_signal"]
    # The script's own directory, or its PYTHONPATH, must not stand in the way.
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    return subprocess.Popen(
        [*command, str(strike.pid), str(start_ticks(strike.pid)), str(seconds), do],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=environment,
    )


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _parent_of(pid: int) -> int | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = line[line.rindex(b")") + 2 :].split()[:2]
    return None if state in (b"Z", b"X") else int(parent)
