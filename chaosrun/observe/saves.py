"""Observes a script's saves in Python: calls of torch.save and safetensors, files that Python opens, renames and removes, and
folders that it makes.

Reports each change below the outputs before it is made, and each saved file. Files opened by native code are not seen here but
in the system calls (`faults.tracer`), which are traced from the first reported change on.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from chaosrun.observe.audit import listen
from chaosrun.observe.contents import contents
from chaosrun.observe.modes import outside_modes
from chaosrun.observe.writers import path_of, wrap_writers
from chaosrun.records.tensor_files import unnumbered
from chaosrun.records.traces import SaveRecord

_BY_ENDING = {".distcp": "dcp", ".metadata": "dcp", ".metadata.tmp": "dcp", ".safetensors": "safetensors"}
_TWO_NAMES = ("os.rename", "os.link", "os.symlink")
_NAMES_ANEW = {"os.rename": "rename", "os.link": "link"}
MOST_LOOKS = 3
"""Once so many files of one name held no weights, further ones are not read."""
_CHANGES = frozenset({*_TWO_NAMES, "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"})


class _Opened(NamedTuple):
    """A file that apparently no known writer has written."""

    step: int
    writer: threading.Thread
    size: int = -1
    """Size in bytes at the last `look`, while its writer lives."""


class SaveWatch:
    """Watches one rank until the process ends. `step` returns how many steps have been made, None before the first."""

    def __init__(
        self,
        outputs: Sequence[str],
        step: Callable[[], int | None],
        begins: Callable[[int], None],
        found: Callable[[SaveRecord], None],
    ) -> None:
        self._outputs = tuple(os.path.join(os.path.realpath(output), "") for output in outputs)
        self._step = step
        self._begins = begins
        self._found = found
        self._pid = os.getpid()
        self._told: set[tuple[int, str]] = set()
        self._inside: set[int] = set()
        """Threads in which a writer runs: what it opens and renames is no change of its own."""
        self._opened: dict[str, _Opened] = {}
        """Opened since the last look, or not yet complete then. Other threads write here, too."""
        self._looks: Counter[str] = Counter()
        """How many of them were looked into in vain, by the path without digits."""
        self._news = False

    def install(self) -> None:
        wrap_writers(self._write)
        listen(("open", *_CHANGES), self._hear)

    def _write(self, target: Any, how: str, given: Any, write: Callable[[], Any]) -> Any:
        path = self._below(target)
        step = self._begin(path)
        thread = threading.get_ident()
        if path is None or step is None or thread in self._inside:
            return write()
        self._inside.add(thread)
        if how != "pickle":
            self._opened.pop(path, None)  # if it was opened earlier
        try:
            self._tell(step, path, how, done=False, held=self._contents(given))
            result = write()
            self._tell(step, path, how, done=True)
            return result
        finally:
            self._inside.discard(thread)

    def look(self, holds_weights: Callable[[Path, bool], bool]) -> bool:
        """Report files that hold the weights and that no known writer has written (a buffer's bytes, a pickle, an archive of
        arrays). Call when a step is over: its saves are written by then, unless by another thread.

        `holds_weights` gets a file, and whether it was written by another thread: then they are the weights of some step.
        Returns whether anything was reported since the last call.
        """
        for path in list(self._opened):
            if (opened := self._opened.pop(path, None)) is None:
                continue  # another thread has renamed it meanwhile
            aside, kind = opened.writer is not threading.main_thread(), unnumbered(path)
            with suppress(OSError):  # gone or unreadable
                if aside and opened.writer.is_alive() and (size := os.path.getsize(path)) != opened.size:
                    self._opened[path] = opened._replace(size=size)
                elif self._looks[kind] < MOST_LOOKS:
                    if holds_weights(Path(path), aside):
                        self._tell(opened.step, path, "file", done=True, aside=aside)
                    else:
                        self._looks[kind] += 1
        news, self._news = self._news, False
        return news

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() in self._inside:
            return
        if event == "open":
            target, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_CREAT | os.O_TRUNC) or flags & os.O_APPEND:
                return
            path = self._below(target)
            if (step := self._begin(path)) is not None and path is not None:
                how = next((how for ending, how in _BY_ENDING.items() if path.endswith(ending)), "open")
                self._tell_once(step, path, how, done=False)
                if how == "open":
                    self._opened[path] = _Opened(step, threading.current_thread())
            return
        if event in ("os.remove", "shutil.rmtree"):
            self._removed(self._below(arguments[0]))
        paths = [self._below(each) for each in arguments[: 2 if event in _TWO_NAMES else 1]]
        step = self._begin(next(filter(None, paths), None))
        if event in _NAMES_ANEW and step is not None and (path := paths[-1]) is not None:
            if opened := self._opened.pop(paths[0] or "", None):
                self._opened[path] = opened
            self._tell_once(step, path, _NAMES_ANEW[event], done=True, before=paths[0] or "")

    def _removed(self, path: str | None) -> None:
        if path is not None and os.getpid() == self._pid and (step := self._step()) is not None:
            self._tell(step, path, "remove", done=True)

    def _begin(self, path: str | None) -> int | None:
        """The step to which a change belongs; None if the change does not count."""
        if path is None or os.getpid() != self._pid or (step := self._step()) is None:
            return None
        self._begins(step)
        return step

    def _below(self, target: Any) -> str | None:
        """The absolute path if it is below the outputs, else None."""
        if (path := path_of(target)) is None:
            return None
        if not path.startswith(self._outputs):
            folder, name = os.path.split(path)
            path = os.path.join(os.path.realpath(folder), name)
        return path if path.startswith(self._outputs) else None

    def _tell_once(self, step: int, path: str, how: str, *, done: bool, before: str = "") -> None:
        if (step, path) not in self._told:
            self._told.add((step, path))
            self._tell(step, path, how, done=done, before=before)

    def _contents(self, given: Any) -> dict[str, str]:
        """The saved contents; empty in a background thread, where their step is unknown."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        with suppress(Exception), outside_modes():  # an object of the script may raise any error, which must not reach its save
            return contents(given)
        return {}

    def _tell(self, step: int, path: str, how: str, *, before: str = "", **more: Any) -> None:
        self._news = True
        earlier, path = before and self._relative(before), self._relative(path)
        self._found(SaveRecord(step=step, path=path, how=how, time_s=time.time(), before=earlier, **more))

    def _relative(self, path: str) -> str:
        return next((os.path.relpath(path, output) for output in self._outputs if path.startswith(output)), path)
