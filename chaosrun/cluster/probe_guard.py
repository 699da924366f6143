"""The guard of one probe: `python -m chaosrun.cluster.probe_guard FD LIMIT_S COMMAND…` runs the command, and kills all
processes that it leaves. Ranks have no guard: if their agent dies, the fork server kills them.

FD is an inherited socket to the agent of probes. When the command has ended, when LIMIT_S have passed, or when the other end of
the socket is closed, every process below this one is killed. Then one JSON line is sent: {"code": the command's exit code, or
minus the signal that ended it; "limit": whether the limit passed; "left": pids that could not be killed}. Folders that the
command announces before it makes them are removed with it. Standard library only.
"""

import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from chaosrun.processes import become_subreaper, children

KILL_S = 5.0
"""A process that is not ended this long after a SIGKILL waits in the kernel, perhaps for ever."""

PREFIX = ".chaosrun-preflight-"
"""Only folders with this prefix are ever removed."""
VARIABLE = "CHAOSRUN_GUARD_FOLDERS"
"""The environment variable with the descriptor that announcements are written to."""
REMOVAL_LIMIT_S = 3.0
"""Longest wait for the removal, if the storage hangs."""


def main(descriptor: int, limit_s: float, command: Sequence[str]) -> None:
    # Orphaned descendants become its children, so that it finds all processes to kill.
    become_subreaper()
    asker = socket.socket(fileno=descriptor)
    folders = os.memfd_create("folders", 0)
    child = subprocess.Popen(command, pass_fds=[folders], env={**os.environ, VARIABLE: str(folders)})
    ended = os.pidfd_open(child.pid)
    poller = select.poll()
    poller.register(asker, select.POLLIN)
    poller.register(ended, select.POLLIN)
    limit = not poller.poll(limit_s * 1000)
    left = _kill_everything(child)
    remove_announced(folders)
    with suppress(BrokenPipeError):
        asker.sendall(json.dumps({"code": child.returncode, "limit": limit, "left": left}).encode() + b"\n")


def _kill_everything(child: "subprocess.Popen[bytes]") -> list[int]:
    # It may have ended by itself, which must be reported: reap it before anything is killed.
    child.poll()
    deadline = time.monotonic() + KILL_S
    while below := children(os.getpid()):
        if time.monotonic() > deadline:
            return below
        for pid in below:
            # Not reaped yet, so the pid has not been reused.
            os.kill(pid, signal.SIGKILL)
            if pid != child.pid:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        child.poll()
        time.sleep(0.005)
    return []


def new_name() -> str:
    return PREFIX + secrets.token_hex(8)


def announce(folder: Path) -> None:
    """Announce that this folder will be made; has no effect without a guard."""
    assert folder.is_absolute() and folder.name.startswith(PREFIX), folder
    if VARIABLE in os.environ:
        os.write(int(os.environ[VARIABLE]), os.fsencode(folder) + b"\0")


def remove_announced(descriptor: int) -> None:
    """Remove announced folders that still exist. Tries for at most REMOVAL_LIMIT_S."""
    announced = os.pread(descriptor, 1 << 20, 0).split(b"\0")
    folders = [Path(os.fsdecode(path)) for path in announced if os.path.basename(path).startswith(os.fsencode(PREFIX))]
    if not folders:
        return
    # In a separate process: one that waits for storage cannot be interrupted, but it can be abandoned.
    child = os.fork()
    if child == 0:
        try:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(0)
    deadline = time.monotonic() + REMOVAL_LIMIT_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return
        time.sleep(0.002)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
