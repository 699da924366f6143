"""A disk that loses what was not synced, for what changes it through `records.filesystem`.

`RecordingDisk` does the real thing and writes it down; `after_power_cut` tells one state that the disk may be found in after
what was done so far (`chaosrun.faults.disk_model`).
"""

import os
from collections.abc import Callable
from pathlib import Path

from chaosrun.faults.disk_model import Model, State, after_power_cut
from chaosrun.records.filesystem import Filesystem, Moment, Operation

__all__ = ["RecordingDisk", "after_power_cut", "build"]


def build(state: State, into: Path) -> None:
    for path, content in state.items():
        if content is None:
            (into / path).mkdir()
        else:
            (into / path).write_bytes(content if isinstance(content, bytes) else content.read_bytes())


class RecordingDisk(Filesystem):
    """The real file system below `root`, and a model of what of it would survive."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.model = Model()
        self.on_operation: Callable[[], None] = lambda: None
        """Called after each."""
        self.listeners.append(self._listen)

    def sync(self, path: Path, descriptor: int) -> None:
        """In the model alone, which is what the power is cut of: real ones would be most of the time that a test takes."""
        self._do(Operation(kind="fsync", path=path), lambda: None)

    def put(self, path: Path, data: bytes) -> None:
        """Write a file as a training script does, without syncing anything."""
        if not path.parent.exists():
            self.mkdir(path.parent)
        if path.exists():
            self.unlink(path)
        descriptor = self.open(path)
        try:
            self.write(path, descriptor, data)
        finally:
            os.close(descriptor)

    def _listen(self, operation: Operation, moment: Moment) -> None:
        if moment == "after":
            self.record(operation)
            self.on_operation()

    def parts(self, path: Path) -> tuple[str, ...] | None:
        """Where it is in the model; None of what is not modelled."""
        return path.relative_to(self.root).parts

    def append(self, path: Path, data: bytes) -> None:
        parts = self.parts(path)
        node = None if parts is None else self.model.find(parts)
        if node is not None:
            file = self.model.files[node]
            assert isinstance(file.now, bytes)
            file.now, file.is_synced = file.now + data, False

    def record(self, operation: Operation) -> None:
        parts = self.parts(operation.path)
        if parts is None:
            return
        node = self.model.find(parts)
        match operation.kind:
            case "mkdir" | "open":
                if node is None:
                    self.model.new(parts, folder=operation.kind == "mkdir")
            case "write":
                assert node is not None, operation
                self.append(operation.path, operation.data)
            case "truncate":
                assert node is not None, operation
                file, left = self.model.files[node], operation.path.read_bytes()
                assert isinstance(file.durable, bytes)
                file.now, file.is_synced = left, False
                file.kept = len(left) if file.durable.startswith(left) else 0
            case "fsync":
                assert node is not None, operation
                self.model.sync(node)
            case "rename":
                target = None if operation.target is None else self.parts(operation.target)
                assert node is not None and target is not None, operation
                self.model.rename(parts, target)
            case "unlink" | "rmdir":
                self.model.change(parts, None)
