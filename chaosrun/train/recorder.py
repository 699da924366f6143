"""Writes what one rank does to its trace, checkpoints it, and reaches its fault points. Exists only under chaosrun."""

import os
import time
from typing import Any

import torch
import xxhash
from accelerate import Accelerator

from chaosrun.plan.faults import Fault
from chaosrun.records.trace import TRACE_VERSION, TraceWriter
from chaosrun.train.buckets import BucketPrimer
from chaosrun.train.checkpointing import Checkpointer
from chaosrun.train.context import WorkerContext
from chaosrun.train.faultpoints import FaultPoints
from chaosrun.train.fingerprint import Fingerprint, fingerprint, tensor_digest
from chaosrun.train.position import Position
from chaosrun.train.rng import digest_rng
from chaosrun.train.state import TrainingState

__all__ = ["Recorder"]


class Recorder:
    """One rank of one attempt, on paper."""

    def __init__(self, accelerator: Accelerator, state: TrainingState, context: WorkerContext) -> None:
        order = context.order
        self._accelerator = accelerator
        self._state = state
        self._order = order
        self._faults = FaultPoints(
            [Fault.from_json(fault) for fault in order.faults],
            markers=context.leg.faults,
            rank=order.rank,
            attempt=order.attempt,
        )
        self._checkpointer = Checkpointer(accelerator, state, order, context.leg, self._faults)
        self._trace = TraceWriter(context.leg.attempt(order.attempt).trace(order.rank))
        self._job: dict[str, Any] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self._layout_known = False
        self.ended = False
        self._clear_window()

    def begin(self, job: dict[str, Any]) -> Position:
        """Restore the checkpoint this attempt starts from, write the `start` line, and return the position."""
        self._job = job
        position = Position()
        if self._order.resume:
            position = self._checkpointer.restore(self._order.resume, job)
        named = self._state.parameters()
        self._parameters = [parameter for _, parameter in named]
        at_start = fingerprint(self._parameters)
        self._trace.write(
            "start",
            v=TRACE_VERSION,
            attempt=self._order.attempt,
            rank=self._order.rank,
            world_size=self._order.world_size,
            pid=os.getpid(),
            time_s=time.time(),
            position=position.to_json(),
            restored=self._order.resume,
            rng=self._rng(),
            param=at_start.value,
            params=at_start.each,
            tensors=[name for name, _ in named],
        )
        if self._order.resume:
            self._faults.reach("restore.end", position.step)
        return position

    def batch(self, batch: Any, ids: list[Any] | None) -> None:
        """A micro-batch has been handed to the script."""
        if not self._digests:
            self._rng_before = self._rng()
        self._ids.append(ids)
        self._digests.append(_batch_digest(batch))

    def loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    def before_synchronised_backward(self, step: int) -> None:
        self._faults.fire_inside_reduce(self._parameters, step)

    def before_optimizer_step(self) -> None:
        """The optimizer is about to apply these gradients at this learning rate."""
        self._gradients = fingerprint([parameter.grad for parameter in self._parameters])
        self._rates = self._state.learning_rates()

    def step(self, position: Position, primer: BucketPrimer) -> None:
        """An optimizer step is complete: record it, checkpoint when due, and let step faults strike."""
        if not self._layout_known:
            self._layout_known = True
            self._trace.write("buckets", step=position.step, layout=primer.layout(), primed=primer.primed)
        parameters = fingerprint(self._parameters)
        self._trace.write(
            "step",
            step=position.step,
            epoch=position.epoch,
            batches=position.batches,
            time_s=time.time(),
            ids=None if None in self._ids else self._ids,
            batch=self._digests,
            rng=self._rng_before,
            loss=[value.hex() for value in torch.stack([loss.double().reshape(()) for loss in self._losses]).tolist()],
            lr=[rate.hex() for rate in self._rates],
            grad=self._gradients.value,
            grads=self._gradients.each,
            param=parameters.value,
            params=parameters.each,
        )
        self._clear_window()
        if position.step % self._order.every_steps == 0:
            self._checkpoint(position)
        self._faults.reach("step", position.step)

    def finish(self, position: Position) -> None:
        """The training is complete: a final checkpoint, and the digests of everything. Idempotent."""
        if self.ended:
            return
        if self._checkpointer.newest_step != position.step:
            self._checkpoint(position)
        self._trace.write(
            "end",
            step=position.step,
            position=position.to_json(),
            time_s=time.time(),
            digests=self._state.digests(),
            checkpoint=f"step-{position.step:08d}",
        )
        self.ended = True

    def _checkpoint(self, position: Position) -> None:
        started = time.monotonic()
        name = self._checkpointer.save(position, self._job)
        self._trace.write(
            "checkpoint", step=position.step, name=name, time_s=time.time(), duration_s=round(time.monotonic() - started, 6)
        )

    def _clear_window(self) -> None:
        self._ids: list[list[Any] | None] = []
        self._digests: list[str] = []
        self._losses: list[torch.Tensor] = []
        self._rng_before = ""
        # Of a step that a gradient scaler skipped there is neither.
        self._gradients = Fingerprint(value="", each="")
        self._rates: list[float] = []

    def _rng(self) -> str:
        return xxhash.xxh3_64_hexdigest("".join(digest_rng(self._accelerator.device).values()).encode())


def _batch_digest(batch: Any) -> str:
    """A digest of all bytes of a batch: tensors by content, dtype and shape, everything else by its repr."""
    hasher = xxhash.xxh3_64()

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hasher.update(tensor_digest(value).to_bytes(8, "little"))
        elif isinstance(value, dict):
            for key in value:
                hasher.update(repr(key).encode())
                visit(value[key])
        elif isinstance(value, (list, tuple)):
            hasher.update(f"[{len(value)}".encode())
            for item in value:
                visit(item)
        else:
            hasher.update(repr(value).encode())

    visit(batch)
    return hasher.hexdigest()
