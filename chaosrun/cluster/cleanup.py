"""The cleanup process: removes what is left of a private local Ray if the driver dies without a goodbye.

Ray's own processes do not all end with a SIGKILLed driver (two of its agents hold each other's pipes open and stay), and its
directory stays. Its standard input is a pipe from the driver: first one JSON line with the process to watch and what to remove,
then, after an orderly end, a goodbye. Standard library only; imports no ray.
"""

import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from chaosrun.processes import ProcessIdentity, identify, is_alive, kill_marked, remove_shared_memory_leftovers, with_package

GOODBYE = b"goodbye\n"
RAY_TITLES = (b"ray::",)
KILL_LIMIT_S = 30.0


class CleanupProcess:
    """The driver's end: started before Ray is, told goodbye after the driver has cleaned up itself."""

    def __init__(self, folder: Path, shared_memory_before: frozenset[str]) -> None:
        driver = identify(os.getpid())
        assert driver is not None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaosrun.cluster.cleanup"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Its own session: a Ctrl-C or a hang-up of the driver's terminal must not end the cleaner.
            start_new_session=True,
            env=with_package(os.environ),
        )
        watch = {
            "pid": driver.pid,
            "start_ticks": driver.start_ticks,
            # Not in the arguments: a process that names the folder in them counts as one of the session.
            "folder": str(folder),
            "shared_memory": sorted(shared_memory_before),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(watch).encode() + b"\n")
        self._process.stdin.flush()

    def goodbye(self) -> None:
        """End the cleanup process; it removes nothing."""
        self._process.communicate(GOODBYE)


def clean_up(folder: Path, shared_memory_before: frozenset[str]) -> None:
    """Kill every process of the session in `folder`, remove it and their files in /dev/shm."""
    kill_marked(str(folder), titles=RAY_TITLES, timeout_s=KILL_LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)
    remove_shared_memory_leftovers(shared_memory_before)


def _driver_said_goodbye(driver: ProcessIdentity, pipe: int) -> bool:
    """Wait for a goodbye or for the driver's end, whichever comes first."""
    try:
        descriptor = os.pidfd_open(driver.pid)
    except ProcessLookupError:
        return os.read(pipe, len(GOODBYE)) == GOODBYE
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    # The pidfd shows the driver's death even while a child that it forked holds the pipe open.
    poller.register(descriptor, select.POLLIN)
    ready = dict(poller.poll()) if is_alive(driver) else {pipe: select.POLLIN}
    return pipe in ready and os.read(pipe, len(GOODBYE)) == GOODBYE


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe = io.FileIO(0, closefd=False)  # unbuffered: the goodbye stays in the pipe, for the poll
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return 0  # the driver died before it sent the line, so before it started Ray
    watch = json.loads(line)
    if not _driver_said_goodbye(ProcessIdentity(watch["pid"], watch["start_ticks"]), pipe.fileno()):
        clean_up(Path(watch["folder"]), frozenset(watch["shared_memory"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
