"""Records which files an attached script writes, while it trains and after its training is complete.

Python reports each file that it opens (`observe.audit`); the native writers of tensors are wrapped. Other writers are not
seen.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chaosrun.observe.audit import listen
from chaosrun.observe.writers import NATIVE_WRITERS, path_of, wrap_imported

_WRITING = os.O_WRONLY | os.O_RDWR
_NO_FILES = ("/dev/", "/proc/", "/sys/")
MOST = 1000
"""At most so many paths, and writes of each path, are kept; further ones are not compared."""


class Results:
    """Files that this process writes after `watch`. `step` returns the last complete step. Files below `ours` are left out."""

    def __init__(self, step: Callable[[], int], ours: Iterable[Path]) -> None:
        self._pid, self._step = os.getpid(), step
        self._ours = (*_NO_FILES, *(os.path.join(os.path.realpath(folder), "") for folder in ours))
        self.complete = False
        """Whether the training is complete: files written from then on are its outcome."""
        self.at_the_end: dict[str, None] = {}
        """Absolute paths that were written to after the training was complete, in that order."""
        self.before: dict[str, dict[int, float]] = {}
        """Paths that were written to during the training: by path, the time of the write after each step."""

    def watch(self) -> None:
        """Watch until the end of the process; each path is noted before it is written to."""
        wrap_imported(NATIVE_WRITERS, self._note)
        listen(("open", "os.rename", "os.link"), self._hear)

    def saves(self) -> dict[str, tuple[tuple[int, float], ...]]:
        """By path, after which steps it was written to, and when. Opens no file: that would count as a read."""
        return {path: tuple(writes.items()) for path, writes in self.before.items() if len(writes) <= MOST}

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            self._note(arguments[1])
        elif isinstance(arguments[2], int) and arguments[2] & _WRITING:
            self._note(arguments[0])

    def _note(self, target: Any) -> None:
        if os.getpid() != self._pid or (path := path_of(target)) is None:
            return
        noted = self.at_the_end if self.complete else self.before
        if (path not in noted and len(noted) >= MOST) or path.startswith(self._ours):
            return
        if self.complete:
            self.at_the_end[path] = None
        elif len(writes := self.before.setdefault(path, {})) <= MOST:
            writes[self._step()] = time.time()
