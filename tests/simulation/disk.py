"""The disk of a simulated run: a real directory, which fails as the scenario says, and what of it a power cut would leave.

All that the journal and the checkpoint store do comes by here, for it is done through `records.filesystem`. Markers and end
records are written past it: a power cut leaves those as they are.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from chaosrun.faults.disk_model import Model, after_power_cut
from chaosrun.records.filesystem import Filesystem, Moment, Operation

MODELLED = ("journal.jsonl", "checkpoints", "staging", "quarantine")
"""What of a leg's directory goes through the disk layer."""


class SimulatedDisk(Filesystem):
    def __init__(self, root: Path, *, modelled: bool) -> None:
        """`modelled`: keep account of what was synced, so that the power can be cut."""
        super().__init__()
        self.root = root
        self.is_modelled = modelled
        self.model = Model()
        self.refuses: Callable[[Operation], bool] = lambda operation: False
        """Whether there is no space left for this write."""
        self.operations = 0
        self.on_operation: Callable[[Operation, Moment], None] = lambda operation, moment: None
        self.listeners.append(self._listen)

    def sync(self, path: Path, descriptor: int) -> None:
        self._do(Operation(kind="fsync", path=path), lambda: None)

    def write(self, path: Path, descriptor: int, data: bytes) -> None:
        operation = Operation(kind="write", path=path, data=data)
        if self.refuses(operation):
            os.write(descriptor, data[: len(data) // 2])
            if self.is_modelled and (node := self._node(path)) in self.model.files:
                self._append(node, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write(path, descriptor, data)

    def put(self, path: Path, data: bytes) -> None:
        """Write a file as a training script does, without syncing anything."""
        if path.exists():
            self.unlink(path)
        descriptor = self.open(path)
        try:
            self.write(path, descriptor, data)
        finally:
            os.close(descriptor)

    def cut_power(self, fate: Random) -> None:
        """Everything that was not synced is lost, or in part, or not."""
        state = after_power_cut(self.model, fate.choice([False, fate, True]), fate.choice([None, "torn"]))
        for name in MODELLED:
            path = self.root / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.model = Model()
        for path, content in state.items():
            if path == Path():
                continue
            if content is None:
                (self.root / path).mkdir()
                self.model.new(path.parts, folder=True)
            else:
                assert isinstance(content, bytes)
                (self.root / path).write_bytes(content)
                made = self.model.new(path.parts, folder=False)
                assert made.node is not None
                self._append(made.node, content)
        for node in (*self.model.files, *self.model.folders):
            self.model.sync(node)

    def _parts(self, path: Path) -> tuple[str, ...] | None:
        if path == self.root:
            return ()
        parts = path.parts[len(self.root.parts) :]
        return parts if path.parts[: len(self.root.parts)] == self.root.parts and parts[0] in MODELLED else None

    def _node(self, path: Path) -> int | None:
        parts = self._parts(path)
        return None if parts is None else self.model.find(parts)

    def _append(self, node: int, data: bytes) -> None:
        file = self.model.files[node]
        assert isinstance(file.now, bytes)
        file.now, file.is_synced = file.now + data, False

    def _listen(self, operation: Operation, moment: Moment) -> None:
        if moment == "after" and self.is_modelled:
            self._record(operation)
        self.operations += moment == "before"
        self.on_operation(operation, moment)

    def _record(self, operation: Operation) -> None:
        parts = self._parts(operation.path)
        if parts is None:
            return
        node = self.model.find(parts)
        match operation.kind:
            case "mkdir" | "open":
                if node is None:
                    self.model.new(parts, folder=operation.kind == "mkdir")
            case "write":
                assert node is not None, operation
                self._append(node, operation.data)
            case "truncate":
                assert node is not None, operation
                self.model.files[node].now, self.model.files[node].is_synced = operation.path.read_bytes(), False
            case "fsync":
                assert node is not None, operation
                self.model.sync(node)
            case "rename":
                assert node is not None and operation.target is not None, operation
                target = self._parts(operation.target)
                assert target is not None, operation
                self.model.rename(parts, target)
            case "unlink" | "rmdir":
                self.model.change(parts, None)
