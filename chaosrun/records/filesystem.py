"""Changes to the disk that have to survive a crash, one operation at a time, told to listeners before and after it.

A listener that raises before an operation keeps it from being done. The checkpoint store and the journal use this alone.
"""

import os
import re
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
    """Of a rename: the new name."""
    data: bytes = b""


Listener = Callable[[Operation, Moment], None]


class Filesystem:
    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    def mkdir(self, path: Path) -> None:
        """Make a directory, unless it is there. It survives a power cut once its parent has been synced."""
        self._do(Operation(kind="mkdir", path=path), lambda: path.mkdir(exist_ok=True))

    def open(self, path: Path) -> int:
        """Descriptor of a file to be written at its end; the file is made if there is none."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return self._do(Operation(kind="open", path=path), lambda: os.open(path, flags, 0o644))

    def write(self, path: Path, descriptor: int, data: bytes) -> None:
        """Write all of `data` to an open file."""
        self._do(Operation(kind="write", path=path, data=data), lambda: _write_all(descriptor, data))

    def truncate(self, path: Path, size: int) -> None:
        self._do(Operation(kind="truncate", path=path), lambda: os.truncate(path, size))

    def sync(self, path: Path, descriptor: int) -> None:
        """Bring an open file, or directory, to the disk."""
        self._do(Operation(kind="fsync", path=path), lambda: os.fsync(descriptor))

    def rename(self, path: Path, target: Path) -> None:
        self._do(Operation(kind="rename", path=path, target=target), lambda: os.rename(path, target))

    def unlink(self, path: Path) -> None:
        self._do(Operation(kind="unlink", path=path), lambda: os.unlink(path))

    def rmdir(self, path: Path) -> None:
        self._do(Operation(kind="rmdir", path=path), lambda: os.rmdir(path))

    # Made of the operations above

    def make_directories(self, path: Path) -> int:
        """`mkdir -p`; returns how many there were to make."""
        missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
        for folder in reversed(missing or [path]):
            self.mkdir(folder)
        return len(missing)

    def make_directories_durably(self, path: Path, *, above: int = 0) -> None:
        """`mkdir -p` whose entries survive a power cut: of new directories, of `path`, and of as many more `above` it."""
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
        # Left by a process that had our number and was killed here.
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
        result = act()
        for listener in tuple(self.listeners):
            listener(operation, "after")
        return result


def written_for(path: Path) -> Path:
    """The file that a temporary one of `write_durably` is to become; any other path is its own."""
    match = _TEMPORARY.fullmatch(path.name)
    return path.with_name(match[1]) if match else path


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
