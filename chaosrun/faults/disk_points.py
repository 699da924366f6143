"""The points inside the checkpoint store: before and after each fsync of a checkpoint, and the rename that commits it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chaosrun.faults.kind import Phase
from chaosrun.faults.points import FaultPoints
from chaosrun.records.filesystem import Moment, Operation, written_for
from chaosrun.records.layout import LegLayout

_AT_FSYNC: dict[Moment, Phase] = {"before": "checkpoint.fsync.before", "after": "checkpoint.fsync.after"}
_AT_RENAME: dict[Moment, Phase] = {"before": "checkpoint.rename.before", "after": "checkpoint.rename.after"}


class DiskPoints:
    """Listens to the store's file system while a checkpoint is saved, and reports the fault points that it reaches.

    Names of sync targets in plans: a file's path relative to the checkpoint; "." for the checkpoint's own directory; "staging",
    "checkpoints", "quarantine" for the directories around it, and "storage" for the one that holds these three.
    """

    def __init__(self, faults: FaultPoints, leg: LegLayout) -> None:
        self._faults = faults
        self._leg = leg
        self._around = {
            leg.staging: "staging",
            leg.checkpoints: "checkpoints",
            leg.quarantine: "quarantine",
            leg.checkpoints.parent: "storage",
        }
        self._step: int | None = None

    @contextmanager
    def saving(self, step: int) -> Iterator[ExitStack]:
        """Report points while the checkpoint of `step` is saved. Yields a stack that is closed when the save ends."""
        self._step = step
        try:
            with ExitStack() as until_saved:
                yield until_saved
        finally:
            self._step = None

    def __call__(self, operation: Operation, moment: Moment) -> None:
        if self._step is None:
            return
        if operation.kind == "fsync":
            phase = _AT_FSYNC[moment]
            if self._faults.awaits(phase) and (target := self._name(operation.path)) is not None:
                self._faults.reach(phase, self._step, target=target, path=operation.path)
        elif operation.kind == "rename" and operation.target is not None:
            commits = operation.path.parent == self._leg.staging and operation.target.parent == self._leg.checkpoints
            if commits:
                self._faults.reach(_AT_RENAME[moment], self._step, path=operation.path)

    def _name(self, path: Path) -> str | None:
        if self._leg.staging not in path.parents:
            return self._around.get(path)
        inside = written_for(path).relative_to(self._leg.staging).parts[1:]
        return "/".join(inside) or "."
