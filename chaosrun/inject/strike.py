"""A strike: a fault at the moment it is due, with everything an arm may need to do it and to say what it did."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from chaosrun.inject.marker import write_note
from chaosrun.plan.faults import Fault
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder

__all__ = ["Strike", "Training"]

GROUP_LIMIT_S = 60.0


class Training(Protocol):
    """What there is to damage in a training: `train.state.TrainingState`."""

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]: ...

    def optimizers(self) -> list[torch.optim.Optimizer]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    fault: Fault
    step: int
    order: WorkerOrder
    leg: LegLayout
    training: Training | None
    """None before the script has attached."""
    at: Mapping[str, Any]
    """What this point hands over: `checkpoint` (Path) of a committed one, `staging` (Path) of one that is being written."""

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def rank(self) -> int:
        return self.order.rank

    def option(self, name: str) -> Any:
        return self.fault.option(name)

    def note(self, **found: Any) -> None:
        """Write down what the fault did (`inject.marker.write_note`)."""
        write_note(self.leg, self.fault.id, rank=self.rank, attempt=self.order.attempt, pid=self.pid, step=self.step, **found)

    def newest_checkpoint(self) -> Path | None:
        """Directory of the newest committed checkpoint of this leg."""
        folder = self.leg.checkpoints
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        return folder / names[-1] if names else None

    def die(self, number: signal.Signals) -> NoReturn:
        """Send this very process a signal that ends it. Nothing after this runs."""
        os.kill(self.pid, number)
        while True:
            signal.pause()  # the signal is on its way

    def wait_for_group(self) -> None:
        """Wait, at the rendezvous store, until every fault of the group has come to its own point."""
        assert self.fault.group is not None
        if self.order.world_size == 1:
            return
        store = torch.distributed.TCPStore(
            self.order.master_addr,
            self.order.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=GROUP_LIMIT_S),
        )
        key = f"chaosrun/group/{self.fault.group}"
        size = int(self.fault.group.rpartition("/")[2])
        if store.add(f"{key}/arrived", 1) >= size:
            store.set(f"{key}/go", "1")
        store.wait([f"{key}/go"])
