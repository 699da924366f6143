"""Writes what one rank does to its trace, checkpoints it, and reaches its fault points. Exists only under chaosrun."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator

from chaosrun.observe.canary import canary
from chaosrun.observe.contents import content_digest
from chaosrun.observe.fingerprint import Fingerprint, fingerprint
from chaosrun.observe.position import Position
from chaosrun.observe.probe import probe
from chaosrun.observe.rng import digest_rng
from chaosrun.protocol.buckets import BucketPrimer
from chaosrun.protocol.checkpointing import Checkpointer
from chaosrun.protocol.context import WorkerContext
from chaosrun.protocol.determinism import environment_facts
from chaosrun.protocol.inspection import Inspector
from chaosrun.protocol.loader_workers import LoaderWorkers, newest_workers
from chaosrun.protocol.state import TrainingState
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import checkpoint_step
from chaosrun.records.trace import TRACE_VERSION, TraceWriter


class Recorder:
    """One rank of one attempt, on paper."""

    def __init__(self, accelerator: Accelerator, state: TrainingState, context: WorkerContext) -> None:
        order = context.order
        self._accelerator = accelerator
        self._state = state
        self._order = order
        self._leg = context.leg
        self._faults = context.faults
        self._faults.training = state
        self._preemption = context.preemption
        self._heart = context.heart
        self._checkpointer = Checkpointer(accelerator, state, order, context.leg, self._faults, self._heart)
        self._trace = TraceWriter(context.leg.attempt(order.attempt).trace(order.rank))
        self._inspector = Inspector(state, order, context.leg, accelerator.device) if order.inspect else None
        self._job: dict[str, Any] = {}
        self._parameters: list[torch.nn.Parameter] = []
        # How many DDP models were settled when the layout was last recorded.
        self._layout_of = -1
        self._unsettled: Position | None = None
        self._noted_workers: LoaderWorkers | None = None
        self._done = 0
        """Steps done: what is computed now is the one after."""
        self.ended = False
        self._clear_window()

    def beginning(self) -> Position:
        """The position that `begin` will restore. Raises InvalidCheckpointError."""
        return self._checkpointer.position_of(self._order.resume) if self._order.resume else Position()

    def begin(self, job: dict[str, Any]) -> Position:
        """Restore the checkpoint this attempt starts from, write the `start` line, and return the position."""
        self._job = job
        entered_s = time.time()
        position = Position()
        if self._order.resume:
            step = checkpoint_step(self._order.resume) or 0
            self._heart.beat("restoring", step)
            self._faults.reach("restore.begin", step)
            position = self._checkpointer.restore(self._order.resume, job)
        self._done = position.step
        self._heart.beat("restored", position.step)
        if self._order.rank == 0:
            # Here, when the script has chosen its device: asking for the GPU's name earlier would initialise CUDA.
            _record_environment(self._leg.environment)
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
            entered_s=entered_s,
            time_s=time.time(),
            position=position.to_json(),
            restored=self._order.resume,
            rng=self._rng(),
            canary=canary(self._accelerator.device),
            param=at_start.value,
            params=at_start.each,
            tensors=[name for name, _ in named],
            digests=self._checkpointer.digests,
        )
        if self._inspector:
            self._inspector.begin(position, named)
        self._preemption.meet()
        if self._order.resume:
            self._faults.reach("restore.end", position.step)
        return position

    def probe(self, loader: Any) -> None:
        """See whether the loader's samples can be had again after a restart. Once a leg: no recovery waits for it."""
        if self._order.probe and self._order.rank == 0 and self._order.attempt == 1:
            self._trace.write("probe", **probe(loader).to_json())

    def epoch(self) -> None:
        """The data of an epoch is about to be opened."""
        self._heart.beat("epoch", self._done + 1)

    def batch(self, batch: Any, ids: list[Any] | None) -> None:
        """A micro-batch has been handed to the script."""
        if not self._digests:
            self._faults.pace.begin()
            self._rng_before = self._rng()
            self._faults.reach("fetch", self._done + 1)
        self._heart.beat("forward", self._done + 1)
        self._ids.append(ids)
        self._digests.append(content_digest(batch))
        if self._inspector:
            self._inspector.batch(batch, ids)

    def losses(self, losses: Sequence[torch.Tensor]) -> None:
        """Of the micro-batches that are done since the last call, one scalar each."""
        self._losses.extend(loss.detach() for loss in losses)
        if self._inspector:
            self._inspector.losses(losses)

    def before_synchronised_backward(self, step: int) -> None:
        self._faults.reach("forward", step)
        self._heart.beat("backward", step)
        self._faults.fire_inside_reduce(self._parameters, step)

    def before_optimizer_step(self) -> None:
        """The optimizer is about to apply these gradients at this learning rate."""
        self._heart.beat("optimizer", self._done + 1)
        if not self._rates:
            # Once a step, however many optimizers there are.
            self._faults.reach("optimizer", self._done + 1)
        self._gradients = fingerprint([parameter.grad for parameter in self._parameters])
        self._rates = self._state.learning_rates()
        if self._inspector:
            self._inspector.before_optimizer_step()

    def step(self, position: Position, primer: BucketPrimer | None, *, items: int | None) -> None:
        """An optimizer step is complete: record it. It settles when the script asks for more.

        `items`: what its window counted over all ranks, None for a loop that counts nothing. `primer` is None for a batch that
        was left out: nothing went through DDP.
        """
        self._heart.beat("record", position.step)
        if primer and self._layout_of != primer.settled:
            self._layout_of = primer.settled
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
            loss=_as_hex(self._losses),
            lr=[rate.hex() for rate in self._rates],
            grad=self._gradients.value,
            grads=self._gradients.each,
            param=parameters.value,
            params=parameters.each,
            **({} if items is None else {"items": items}),
        )
        if self._inspector:
            self._inspector.step()
        self._clear_window()
        self._unsettled = position
        self._done = position.step
        self._faults.reach("record", position.step)
        self._heart.beat("own", position.step)

    def settle(self) -> None:
        """The script is done with the step it last recorded: checkpoint when one is due, let step faults strike, and leave when
        that has been asked for."""
        self._note_loader_workers()
        position, self._unsettled = self._unsettled, None
        if position is None:
            self._heart.beat("fetch", self._done + 1)
            return
        self._heart.beat("settle", position.step)
        if position.step % self._order.every_steps == 0:
            self._checkpoint(position)
        self._heart.beat("settled", position.step)
        self._faults.pace.step_done()
        self._faults.reach("step", position.step)
        if self._preemption.due(position.step):
            if self._checkpointer.newest_step != position.step:
                self._checkpoint(position)
            self._preemption.leave(position.step)
        self._heart.beat("fetch", position.step + 1)

    def finish(self, position: Position) -> None:
        """The training is complete: a final checkpoint, and the digests of everything. Idempotent, and nothing when it was left
        on notice."""
        if self.ended or self._preemption.left is not None:
            return
        self.settle()
        self._note_loader_workers(at_last=True)
        if self._checkpointer.newest_step != position.step:
            self._checkpoint(position)
        if self._inspector:
            self._inspector.end()
        self._trace.write(
            "end",
            step=position.step,
            position=position.to_json(),
            time_s=time.time(),
            digests=self._state.digests(),
            checkpoint=f"step-{position.step:08d}",
        )
        self._heart.beat("ended", position.step)
        self.ended = True

    def _note_loader_workers(self, *, at_last: bool = False) -> None:
        """When all workers of the epoch have said what they begin with: a batch may come before the last worker does."""
        workers = newest_workers()
        if workers is None or workers is self._noted_workers:
            return
        streams = workers.streams()
        if None not in streams or (at_last and any(streams)):
            self._noted_workers = workers
            self._trace.write("loader_workers", epoch=workers.epoch, workers=streams)

    def _checkpoint(self, position: Position) -> None:
        started = time.monotonic()
        name = self._checkpointer.save(position, self._job)
        self._trace.write(
            "checkpoint",
            step=position.step,
            name=name,
            time_s=time.time(),
            duration_s=round(time.monotonic() - started, 6),
            digests=self._checkpointer.digests,
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


def _as_hex(losses: Sequence[torch.Tensor]) -> list[str]:
    """Each scalar as `float.hex()`, by one transfer from the device; of a step whose batch was left out there is none."""
    return [value.hex() for value in torch.stack([loss.double().reshape(()) for loss in losses]).tolist()] if losses else []


def _record_environment(path: Path) -> None:
    facts = json.dumps(environment_facts(), indent=1).encode()
    # The attempts before this one have mostly said the same: a recovery need not wait for the disk then.
    if not path.exists() or path.read_bytes() != facts:
        write_durably(path, facts)
