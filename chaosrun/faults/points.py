"""The named points of a worker, and which fault is due when the worker reaches one; the points inside the checkpoint store
(`DiskPoints`). Those inside a script's own saves: `save_points`.

Every rank of every attempt has one `FaultPoints`, from its first moment on. The code reaches points at the same places whether
or not a fault is armed there; with none armed a point costs a dictionary lookup.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import Phase
from chaosrun.faults.strike import Pace, Strike
from chaosrun.records.codec import Record, encode
from chaosrun.records.filesystem import Moment, Operation, written_for
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import read_note, write_marker
from chaosrun.records.order import WorkerOrder

if TYPE_CHECKING:
    import torch

    from chaosrun.faults.strike import DamageableTraining

Ask = Callable[[Fault, int, Mapping[str, object]], None]

NOTICE_LIMIT_S = 10.0
LOOK_EVERY_S = 0.002


class SurveyedPoint(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A point that a surveyed rank reached."""

    phase: str
    step: int
    target: str | None


class FaultPoints:
    """The faults armed for this rank in this attempt."""

    def __init__(self, order: WorkerOrder, leg: LegLayout, *, rank_pid: int | None = None, ask: Ask | None = None) -> None:
        """In a process that saves for the rank, `rank_pid` is the rank's process, and `ask` makes the rank strike itself."""
        self._order = order
        self._leg = leg
        self._pid, self._ask = rank_pid or os.getpid(), ask
        faults = [Fault.from_json(fault) for fault in order.faults]
        # A fault without a phase comes after a delay, from outside.
        self._armed: dict[str, list[Fault]] = {}
        self._witnessed: list[Fault] = []
        """Faults of other ranks, during which this rank records its own operations."""
        for fault in faults:
            if fault.phase is not None and fault.attempt in (None, order.attempt):
                own = self._armed.setdefault(fault.phase, []) if fault.rank == order.rank else self._witnessed
                own.append(fault)
        self._seen: Counter[tuple[str, str | None, int | None]] = Counter()
        """How often a phase was reached: for this target and at this step, None being any."""
        for phase, count in order.passed.items():
            self._seen[phase, None, None] = count
        self._survey: int | None = None
        """Descriptor of the file that lists the points which a surveyed rank reached."""
        if order.survey:
            path = leg.attempt(order.attempt).points(order.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._survey = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.training: DamageableTraining | None = None
        """The training that faults may damage; None until the script has attached."""
        self.pace = Pace()

    def reach(self, phase: Phase, step: int, *, target: str | None = None, **at: Any) -> None:
        """Strike with the faults that are due here, if any. Most kinds do not return.

        `step`: the step that `Fault.at_step` means at this phase; 0 at the rendezvous. `target`: the checkpoint's file of an
        fsync. `at` is passed on to the strike.
        """
        for fault in self.due(phase, step, target=target):
            self.fire(fault, step, **at)

    def awaits(self, phase: Phase) -> bool:
        """Whether a fault or the survey waits for this phase; if not, its arguments need not be worked out."""
        return phase in self._armed or self._survey is not None

    def witnesses(self, phase: Phase, step: int) -> bool:
        """Whether a fault of another rank needs a record of this rank's operations here."""
        return any(fault.phase == phase and fault.at_step in (None, step) for fault in self._witnessed)

    def due(self, phase: Phase, step: int, *, target: str | None = None) -> list[Fault]:
        """The faults that strike now, as `phase` is reached at `step`. Counts its calls: call it once for each time a point is
        reached."""
        if self._survey is not None:
            # No fsync: the line survives even if this rank is killed at this point.
            os.write(self._survey, encode(SurveyedPoint(phase=phase, step=step, target=target)) + b"\n")
        armed = self._armed.get(phase)
        if not armed:
            return []
        self._seen.update({(phase, each, at) for each in (None, target) for at in (None, step)})
        here = [fault for fault in armed if fault.at_step in (None, step) and fault.target in (None, target)]
        # "Or later": a fault that has struck is disarmed, so one that is still armed after its n-th time is overdue.
        return [fault for fault in here if self._seen[phase, fault.target, fault.at_step] >= fault.occurrence]

    def fire(self, fault: Fault, step: int, **at: Any) -> None:
        """Claim the fault durably, wait for the others of its group, then strike."""
        self._armed[fault.phase or ""].remove(fault)
        if self._ask and not fault.facts.beside:
            return self._ask(fault, step, at)
        about = {"order": self._order, "leg": self._leg, "training": self.training, "pace": self.pace, "pid": self._pid}
        strike = Strike(fault=fault, step=step, at=at, **about)
        claim = {"rank": self._order.rank, "attempt": self._order.attempt, "step": step, "notice": fault.facts.notice}
        if not write_marker(self._leg, fault.id, pid=strike.pid, phase=fault.phase, group=fault.group, **claim):
            # Fired in an earlier attempt: a fault id strikes once.
            return
        if fault.group is not None:
            strike.wait_for_group()
        (fault.facts.inside or wait_for_the_supervisor)(strike)

    def fire_by_id(self, fault: str, step: int, **at: Any) -> None:
        """Fire a fault that another process of this rank found due."""
        self.fire(next(each for armed in self._armed.values() for each in armed if each.id == fault), step, **at)

    def fire_inside_reduce(self, tensors: Sequence[torch.Tensor], step: int) -> None:
        """Arrange for a due `reduce` fault to fire in the coming backward pass, after this rank has launched its gradient
        all-reduces and before it has waited for them.

        `tensors`: the loss, or all parameters. Their first gradient to arrive queues the strike as an engine callback. DDP and
        FSDP queue their callbacks, which wait for the all-reduces, after it: DDP when the last bucket is ready, FSDP when a
        gradient first reaches the model.
        """
        import torch

        faults = self.due("reduce", step)
        if not faults:
            return
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        handles: list[torch.utils.hooks.RemovableHandle] = []

        def shoot() -> None:
            for fault in faults:
                self.fire(fault, step)

        def queue(_gradient: torch.Tensor) -> None:
            if handles:
                for handle in handles:
                    handle.remove()
                handles.clear()
                engine.queue_callback(shoot)

        handles.extend(tensor.register_hook(queue) for tensor in tensors if tensor.requires_grad)


def wait_for_the_supervisor(strike: Strike) -> None:
    """Stay at exactly this point until the supervisor, which polls for the marker, has struck.

    At a drain it waits only for the notice, on which the ranks themselves must act.
    """
    while strike.fault.facts.waits:
        signal.pause()
    deadline = time.monotonic() + NOTICE_LIMIT_S
    while read_note(strike.leg, strike.fault.id, strike.fault.facts.note) is None and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)


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
