"""The places in a worker where a planned fault strikes, and the durable marker that makes each fault strike once.

The process that fires writes the marker: exclusive creation is the lock, so no restart, supervisor death or second rank can
fire the same fault id again (hazard P10). The marker is on disk before the signal is sent; the supervisor copies it into the
journal as `fault.requested`.
"""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from chaosrun.plan.faults import Fault, Phase
from chaosrun.records.journal import fsync_directory

__all__ = ["FaultPoints"]


class FaultPoints:
    """The faults armed for this rank in this attempt."""

    def __init__(self, faults: Sequence[Fault], *, markers: Path, rank: int, attempt: int) -> None:
        self._armed = list(faults)
        self._markers = markers
        self._rank = rank
        self._attempt = attempt

    def armed(self, phase: Phase, step: int) -> Fault | None:
        """The fault that is due when `phase` is reached at `step`, None when there is none."""
        for fault in self._armed:
            if fault.phase == phase and fault.at_step in (None, step):
                return fault
        return None

    def reach(self, phase: Phase, step: int) -> None:
        """Fire the fault that is due here, if any. Does not return when one is."""
        fault = self.armed(phase, step)
        if fault is not None:
            self.fire(fault, step)

    def fire(self, fault: Fault, step: int) -> None:
        """Write the marker durably, then SIGKILL this very process."""
        record = {
            "v": 1,
            "fault": fault.id,
            "rank": self._rank,
            "attempt": self._attempt,
            "pid": os.getpid(),
            "phase": fault.phase,
            "step": step,
            "time_s": time.time(),
        }
        self._markers.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._markers / f"{fault.id}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            # Fired in an earlier attempt: a fault id strikes once.
            self._armed.remove(fault)
            return
        os.write(descriptor, json.dumps(record).encode())
        os.fsync(descriptor)
        os.close(descriptor)
        fsync_directory(self._markers)
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # the signal is on its way; nothing after this point may run

    def fire_inside_reduce(self, parameters: Sequence[torch.nn.Parameter], step: int) -> None:
        """Arrange for a due `reduce` fault to fire in the coming backward pass, after this rank has launched its gradient
        all-reduces and before it has waited for them.

        The first gradient to arrive queues the shot as an engine callback; DDP queues its own, which waits for the
        all-reduces, when the last bucket is ready, hence behind ours.
        """
        fault = self.armed("reduce", step)
        if fault is None:
            return
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        handles: list[torch.utils.hooks.RemovableHandle] = []

        def shoot() -> None:
            self.fire(fault, step)

        def queue(_gradient: torch.Tensor) -> None:
            if handles:
                for handle in handles:
                    handle.remove()
                handles.clear()
                engine.queue_callback(shoot)

        handles.extend(parameter.register_hook(queue) for parameter in parameters if parameter.requires_grad)
