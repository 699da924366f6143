"""A script's effects outside its process, which no digest covers: files it writes, programs it starts, services it talks to.
The first effect is reported in words. Writes by chaosrun, accelerate's checkpoints and compilers' caches do not count.

Python reports the files it opens (`observe.audit`), also in forked processes; torch's and safetensors' own writers are
wrapped; files open or mapped for writing are looked up. Not seen: native code that opens, writes and closes a file.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from chaosrun.observe.audit import listen
from chaosrun.observe.opened import caches, mapped_files, open_files
from chaosrun.observe.writers import NATIVE_WRITERS, path_of, wrap_imported
from chaosrun.records.layout import LegLayout

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FILES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "sqlite3.connect")
"""Events whose first argument is a path that is changed."""
PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
TALKING = ("socket.connect", "socket.sendto")
"""Events that count once the training has begun: another process may answer differently each time."""
OF_MULTIPROCESSING = ("/dev/shm/torch_", "/dev/shm/pym-")
"""Beginnings of files in shared memory that hold objects, which are examined themselves."""
PROBE = tempfile._get_default_tempdir.__code__  # pyright: ignore[reportAttributeAccessIssue]


class Effects:
    """The effects of one rank and of all processes that it forks."""

    def __init__(self, leg: LegLayout, storage: str | None, *, attempt: int, rank: int) -> None:
        self._leg, self._rank = leg, rank
        self._told = leg.attempt(attempt).effects(rank)
        self._ours = tuple(f"{place}/" for place in (leg.path, os.path.realpath(leg.path), storage) if place)
        self._output = tuple(f"{place}/" for place in (leg.output, os.path.realpath(leg.output)))
        self._caches = tuple(caches())
        self._has_told = False
        self.has_begun = False
        """Whether the first batch has been handed out."""

    def begin(self) -> None:
        """Listen from now until the end of the process."""
        listen(("open", *FILES, *PROGRAMS, *TALKING), self._hear)
        wrap_imported(NATIVE_WRITERS, self._written)

    def seen(self) -> Iterator[str]:
        """The first effect of each attempt so far, and files that are open for writing now."""
        told = (self._leg.attempt(attempt).effects(self._rank) for attempt in self._leg.attempts())
        yield from (path.read_text(errors="replace") for path in told if path.exists())
        yield from (
            f"it holds {path} open for writing"
            for path in (*(path for path, writes, _ in open_files() if writes), *mapped_files(" rw-s "))
            if self._counts(path) and not path.startswith("/dev/")
        )

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & WRITING:
                self._written(path)
        elif event in FILES:
            if self._counts(arguments[0]) and not (event == "os.mkdir" and _is_there(arguments[0], arguments[2])):
                self._note(f"it changed {os.fsdecode(arguments[0])} ({event})")
        elif event in PROGRAMS or self.has_begun:
            self._note(f"it talked to another process ({event})")

    def _written(self, path: Any) -> None:
        if self._counts(path):
            self._note(f"it wrote {os.fsdecode(path)}")

    def _counts(self, path: Any) -> bool:
        if (absolute := path_of(path)) is None:
            return False
        name = f"{absolute}/"
        if name.startswith(self._ours) and not name.startswith(self._output):
            return False
        if name.startswith("/dev/") and (not name.startswith("/dev/shm/") or name.startswith(OF_MULTIPROCESSING)):
            return False
        return not name.startswith((*self._caches, "/memfd:")) and "__pycache__" not in name

    def _note(self, words: str) -> None:
        """Append to the file of effects, which survives any death of this process and is shared with forked processes."""
        if not self._has_told and not _is_of_a_probe():
            self._has_told = True
            with self._told.open("a") as file:
                file.write(words)


def _is_there(folder: Any, below: int) -> bool:
    """Whether a folder that is about to be made is there: `makedirs(exist_ok=True)` tries it, and changes nothing."""
    return below == -1 and os.path.isdir(folder)


def _is_of_a_probe() -> bool:
    """Whether Python is looking, once in each process, for a folder in which temporary files can be written and removed."""
    return any(frame.f_code is PROBE for frame, _ in traceback.walk_stack(sys._getframe(1)))
