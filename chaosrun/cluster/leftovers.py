"""Folders that a guarded command makes for a while: it announces them before it makes them, and its guard removes what is
left of them when everything below it is gone. Standard library only.
"""

import os
import secrets
import shutil
import signal
import time
from pathlib import Path

PREFIX = ".chaosrun-preflight-"
"""Nothing that is called otherwise is ever removed."""
VARIABLE = "CHAOSRUN_GUARD_FOLDERS"
"""Names the descriptor that announcements are written to."""
LIMIT_S = 3.0
"""Storage that hangs keeps nobody waiting for longer."""


def new_name() -> str:
    return PREFIX + secrets.token_hex(8)


def announce(folder: Path) -> None:
    """Say that this folder will be made; of no effect without a guard."""
    assert folder.is_absolute() and folder.name.startswith(PREFIX), folder
    if VARIABLE in os.environ:
        os.write(int(os.environ[VARIABLE]), os.fsencode(folder) + b"\0")


def remove_announced(descriptor: int) -> None:
    """Remove what was announced and is still there. Tries for LIMIT_S at most."""
    announced = os.pread(descriptor, 1 << 20, 0).split(b"\0")
    folders = [Path(os.fsdecode(path)) for path in announced if os.path.basename(path).startswith(os.fsencode(PREFIX))]
    if not folders:
        return
    # In a process of its own: one that waits for storage cannot be interrupted, but be left.
    child = os.fork()
    if child == 0:
        try:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(0)
    deadline = time.monotonic() + LIMIT_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return
        time.sleep(0.002)
