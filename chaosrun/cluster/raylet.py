"""What an agent knows of the raylet that it is a child of: when it ends, and what it was started with. Imports no ray."""

import asyncio
import os
from pathlib import Path

_watched: set[int] = set()


def leave_with_the_raylet() -> None:
    """End this process when its raylet does. Ray lets an actor live on then, and gives its place to another: ranks would train
    twice. Call it in a running event loop; a second call does nothing."""
    parent = os.getppid()
    if parent in _watched or not _is_raylet(parent):
        return
    _watched.add(parent)
    asyncio.get_running_loop().add_reader(os.pidfd_open(parent), os._exit, 1)


def environment_of_the_raylet() -> dict[str, str]:
    """As it was when the raylet was started, before Ray changed it for its workers; empty where that cannot be read."""
    parent = os.getppid()
    try:
        if not _is_raylet(parent):
            return {}
        entries = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def _is_raylet(pid: int) -> bool:
    return "raylet" in Path(f"/proc/{pid}/comm").read_text()
