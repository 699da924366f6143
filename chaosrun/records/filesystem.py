"""Changes to the disk that must survive a crash, one operation at a time, with listeners called before and after each.

If a listener raises before an operation, it is not done. The checkpoint store and the journal write only through this module.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeVar

Moment = Literal["before", "after"]
_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    kind: Literal["mkdir", "open", "write", "truncate", "fsync", "rename", "unlink", "rmdir"]
    path: Path
    target: Path | None = None
    """The new name in a rename."""
    data: bytes = b""


Listener = Callable[[Operation, Moment], None]


class Filesystem:
    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    def mkdir(self, path: Path) -> None:
        """Make a directory unless it exists. It survives a power cut once its parent has been synced."""
        self._do(Operation(kind="mkdir", path=path), lambda: path.mkdir(exist_ok=True))

    def open(self, path: Path) -> int:
        """Open a file for appending, and make it if there is none; returns the descriptor."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return self._do(Operation(kind="open", path=path), lambda: os.open(path, flags, 0o644))

    def write(self, path: Path, descriptor: int, data: bytes) -> None:
        self._do(Operation(kind="write", path=path, data=data), lambda: write_all(descriptor, data))

    def truncate(self, path: Path, size: int) -> None:
        self._do(Operation(kind="truncate", path=path), lambda: os.truncate(path, size))

    def sync(self, path: Path, descriptor: int) -> None:
        """fsync an open file or directory."""
        self._do(Operation(kind="fsync", path=path), lambda: os.fsync(descriptor))

    def rename(self, path: Path, target: Path) -> None:
        self._do(Operation(kind="rename", path=path, target=target), lambda: os.rename(path, target))

    def unlink(self, path: Path) -> None:
        self._do(Operation(kind="unlink", path=path), lambda: os.unlink(path))

    def rmdir(self, path: Path) -> None:
        self._do(Operation(kind="rmdir", path=path), lambda: os.rmdir(path))

    # Composed of the operations above

    def make_directories(self, path: Path) -> int:
        """`mkdir -p`; returns how many directories it made."""
        missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
        for folder in reversed(missing or [path]):
            self.mkdir(folder)
        return len(missing)

    def make_directories_durably(self, path: Path, *, above: int = 0) -> None:
        """`mkdir -p` that survives a power cut: syncs the parents of new directories, of `path`, and of `above` more."""
        made = self.make_directories(path)
        for folder in (path, *path.parents)[: max(made, 1 + above)]:
            self.sync_directory(folder.parent)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(path, descriptor)
        finally:
            os.close(descriptor)

    def write_durably(self, path: Path, data: bytes) -> None:
        """Write a whole file so that a reader, or a power cut, sees all of it or none."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        # Left by a killed process that had the same pid.
        self._drop(temporary)
        descriptor = self.open(temporary)
        try:
            try:
                self.write(temporary, descriptor, data)
                self.sync(temporary, descriptor)
            finally:
                os.close(descriptor)
            self.rename(temporary, path)
        except BaseException:
            self._drop(temporary)
            raise
        self.sync_directory(path.parent)

    def remove(self, path: Path) -> None:
        """Delete a file, a link, or a directory with all that is below it; links are not followed."""
        if path.is_symlink() or not path.is_dir():
            self.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            self.remove(entry)
        self.rmdir(path)

    def _drop(self, path: Path) -> None:
        if os.path.lexists(path):
            self.unlink(path)

    def _do(self, operation: Operation, act: Callable[[], _Result]) -> _Result:
        for listener in tuple(self.listeners):
            listener(operation, "before")
        try:
            result = act()
        except OSError as error:
            if error.filename is None:  # of a write and an fsync
                error.filename = str(written_for(operation.path))
            raise
        for listener in tuple(self.listeners):
            listener(operation, "after")
        return result


def written_for(path: Path) -> Path:
    """The final path of a temporary file of `write_durably`; any other path is returned as it is."""
    match = _TEMPORARY.fullmatch(path.name)
    return path.with_name(match[1]) if match else path


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; nothing if it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink(missing_ok=True)


def write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
