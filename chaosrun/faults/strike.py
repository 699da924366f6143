"""A strike: a fault that is due, with everything needed to carry it out and to note its effect."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from chaosrun.errors import RecoveryError
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import Note, read_markers, write_note
from chaosrun.records.order import WorkerOrder

if TYPE_CHECKING:
    import torch

    from chaosrun.faults.fault import Fault
    from chaosrun.faults.stalls import Stretch

GROUP_LIMIT_S = 60.0
MEASURED_STEPS = 20
"""How many steps before a fault are compared with those during it."""
LOOK_EVERY_S = 0.002


class DamageableTraining(Protocol):
    """The parts of a training that faults may damage; implemented by `protocol.state.TrainingState`."""

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]: ...

    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    def loader_workers(self) -> list[tuple[int, int]]: ...


class Pace:
    """Times one rank's steps, each from the end of the step before; the first of an attempt from its first batch.

    The time of a step includes waiting for other ranks, as in any training.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self.took: deque[float] = deque(maxlen=MEASURED_STEPS)
        self.stretches: list[Stretch] = []
        """Slow-downs in force, which make this rank a straggler."""

    def begin(self) -> None:
        """Note a batch: the first step of the attempt begins, if none has begun."""
        if self._since_s is None:
            self._since_s = time.monotonic()

    def step_done(self) -> None:
        """Note that a step is over, except for its faults. Waits here if the step is slowed."""
        if self._since_s is not None:
            own_s = time.monotonic() - self._since_s
            for stretch in self.stretches:
                stretch.delay(own_s)
            self.took.append(time.monotonic() - self._since_s)
            for stretch in self.stretches:
                stretch.took(self.took[-1])
            self.stretches = [stretch for stretch in self.stretches if stretch.left]
        self._since_s = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    fault: Fault
    step: int
    order: WorkerOrder
    leg: LegLayout
    training: DamageableTraining | None
    """None before the script has attached."""
    pace: Pace
    at: Mapping[str, Any]
    """The objects that the point passes on. After a commit: `checkpoint` (Path). Before a checkpoint is written: `disk`
    (Filesystem), `objects` (ObjectStorage, where there is one) and `until_saved` (ExitStack, closed when it is saved). While it
    is: `path` of the file concerned, and its `descriptor` if it is being written. At the rendezvous: `listen_fd`. Inside a
    script's save: `points` (SavePoints)."""
    pid: int = field(default_factory=os.getpid)
    """The rank's process, even if another process strikes for it."""

    @property
    def rank(self) -> int:
        return self.order.rank

    def option(self, name: str) -> Any:
        return self.fault.option(name)

    def note(self, note: Note) -> None:
        """Record what the fault did."""
        write_note(self.leg, self.fault.id, note)

    def die(self, number: signal.Signals) -> NoReturn:
        """Send the rank a signal that ends it. Nothing after this runs."""
        os.kill(self.pid, number)
        while True:
            signal.pause()  # the signal is on its way

    def wait_for_group(self) -> None:
        """Wait until every fault of the group has reached its own point, that is, until all of them have a marker.

        It uses markers, as the rendezvous store does not exist yet at a rendezvous. Each rank checks them once, after writing
        its own: the last one sees them all, and signals the others. Raises RecoveryError after GROUP_LIMIT_S.
        """
        size = int((self.fault.group or "").rpartition("/")[2])
        complete = self.leg.complete(self.fault.group, self.order.attempt)
        deadline_s = time.monotonic() + GROUP_LIMIT_S
        if self._came() == size:
            complete.touch()
        while not complete.exists():
            if time.monotonic() > deadline_s:
                message = f"fault {self.fault.id}: {self._came()} of the {size} ranks that it strikes at once reached its point"
                raise RecoveryError(message, hint="another fault, or the script, keeps the others from it")
            time.sleep(LOOK_EVERY_S)

    def _came(self) -> int:
        # Markers of an earlier attempt may still exist.
        ours = (self.fault.group, self.order.attempt)
        return sum(each is not None and (each.group, each.attempt) == ours for each in read_markers(self.leg).values())
