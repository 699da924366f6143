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
from chaosrun.records.filesystem import Moment, Operation
from tests.unit.powercut import RecordingDisk

MODELLED = ("journal.jsonl", "checkpoints", "staging", "quarantine")
"""What of a leg's directory goes through the disk layer."""


class SimulatedDisk(RecordingDisk):
    def __init__(self, root: Path, *, modelled: bool) -> None:
        """`modelled`: keep account of what was synced, so that the power can be cut."""
        super().__init__(root)
        self._is_modelled = modelled
        self.refuses: Callable[[Operation], bool] = lambda operation: False
        """Whether there is no space left for this write."""
        self.operations = 0
        self.on_moment: Callable[[Operation, Moment], None] = lambda operation, moment: None

    def write(self, path: Path, descriptor: int, data: bytes) -> None:
        operation = Operation(kind="write", path=path, data=data)
        if self.refuses(operation):
            os.write(descriptor, data[: len(data) // 2])
            self.append(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write(path, descriptor, data)

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
                self.model.new(path.parts, folder=False)
                self.append(self.root / path, content)
        for node in (*self.model.files, *self.model.folders):
            self.model.sync(node)

    def parts(self, path: Path) -> tuple[str, ...] | None:
        if path == self.root:
            return ()
        parts = path.parts[len(self.root.parts) :]
        return parts if path.parts[: len(self.root.parts)] == self.root.parts and parts[0] in MODELLED else None

    def _listen(self, operation: Operation, moment: Moment) -> None:
        if moment == "after" and self._is_modelled:
            self.record(operation)
        self.operations += moment == "before"
        self.on_moment(operation, moment)
