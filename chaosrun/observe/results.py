"""Which files a script that attached writes, as it trains and when its training is complete.

Python tells of each file that it opens (`sys.addaudithook`); the native writers of tensors are wrapped. Others are not seen.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chaosrun.observe.writers import wrap_imported

_NATIVE_WRITERS = (
    ("torch", "save"),
    ("torch.jit", "save"),
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save_model"),
    ("safetensors.numpy", "save_file"),
    # As they have imported it.
    ("accelerate.utils.other", "safe_save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
)
_WRITING = os.O_WRONLY | os.O_RDWR
_NO_FILES = ("/dev/", "/proc/", "/sys/")
MOST = 1000
"""So many paths are kept, and writes of a path: what is beyond is not compared."""


class Results:
    """Of this process, from `watch` on; `step` tells the last step that is done. Files in the folders `ours` are no results."""

    def __init__(self, step: Callable[[], int], ours: Iterable[Path]) -> None:
        self._pid, self._step = os.getpid(), step
        self._ours = (*_NO_FILES, *(os.path.join(os.path.realpath(folder), "") for folder in ours))
        self._complete = False
        self.at_the_end: dict[str, None] = {}
        """Absolute paths that were written to when the training was complete, the first of them first."""
        self.before: dict[str, dict[int, float]] = {}
        """Those that were written to as it went on: after which steps, and when."""

    def watch(self) -> None:
        """To the end of the process: each path is noted before anything is written there."""
        wrap_imported(_NATIVE_WRITERS, self._note)
        sys.addaudithook(self._hear)

    def complete(self) -> None:
        """What is written from now on is the outcome."""
        self._complete = True

    def saves(self) -> dict[str, tuple[tuple[int, float], ...]]:
        """After which steps each was written to, and when. Nothing is opened to see what it is: that would count as a read."""
        return {path: tuple(writes.items()) for path, writes in self.before.items() if len(writes) <= MOST}

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            self._note(arguments[0])
        elif event in ("os.rename", "os.link"):
            self._note(arguments[1])

    def _note(self, target: Any) -> None:
        if not isinstance(target, str | bytes | os.PathLike) or os.getpid() != self._pid:
            return
        path = os.path.abspath(os.fsdecode(target))
        noted = self.at_the_end if self._complete else self.before
        if (path not in noted and len(noted) >= MOST) or path.startswith(self._ours):
            return
        if self._complete:
            self.at_the_end[path] = None
        elif len(writes := self.before.setdefault(path, {})) <= MOST:
            writes[self._step()] = time.time()
