"""What one rank does under chaosrun: it is observed, checkpointed, reaches its fault points, and shows that it lives."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from chaosrun.observe.trace import Observer
from chaosrun.protocol.buckets import BucketPrimer
from chaosrun.protocol.checkpointing import Checkpointer
from chaosrun.protocol.context import WorkerContext
from chaosrun.protocol.loader_workers import LoaderWorkers, newest_workers
from chaosrun.protocol.state import TrainingState
from chaosrun.records.layout import checkpoint_name, checkpoint_step
from chaosrun.records.position import Position


class Recorder:
    """One rank of one attempt."""

    def __init__(self, accelerator: Accelerator, state: TrainingState, context: WorkerContext) -> None:
        self._order = context.order
        self._faults = context.faults
        self._faults.training = state
        self._preemption = context.preemption
        self._heart = context.heart
        self._files = context.files
        self._checkpointer = Checkpointer(accelerator, state, context.order, context.leg, self._faults, self._heart)
        self._observer = Observer(state, context.order, context.leg, accelerator.device)
        self._job: dict[str, Any] = {}
        # How many DDP models were settled when the layout was last recorded.
        self._layout_of = -1
        self._unsettled: Position | None = None
        self._noted_workers: LoaderWorkers | None = None
        self._done = 0
        """Steps done: what is computed now is the one after."""
        self.ended = False

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
        began = self._observer.beginning()
        self._observer.begin(position, began, entered_s=entered_s, restored=self._checkpointer.digests)
        self._preemption.meet()
        if self._files:
            # What the script imports, it has imported by now.
            self._files.wrap_native_readers()
            if self._order.attempt == 1:
                self._files.look_at_mappings()
        if self._order.resume:
            self._faults.reach("restore.end", position.step)
        return position

    def probe(self, loader: Any) -> None:
        """See whether the loader's samples can be had again after a restart."""
        self._observer.probe(loader)

    def epoch(self) -> None:
        """The data of an epoch is about to be opened."""
        self._heart.beat("epoch", self._done + 1)

    def source(self, epoch: int, own: str | None, held: dict[str, str]) -> None:
        """What the script's samplers and dataset hold as an epoch, or the rest of one, begins."""
        self._observer.source(epoch, own, held)

    def batch(self, batch: Any, ids: list[Any] | None) -> None:
        """A micro-batch has been handed to the script."""
        if self._observer.is_between_steps:
            self._faults.pace.begin()
            self._observer.open_window()
            self._faults.reach("fetch", self._done + 1)
        self._heart.beat("forward", self._done + 1)
        self._observer.batch(batch, ids)

    def losses(self, losses: Sequence[torch.Tensor]) -> None:
        """Of the micro-batches that are done since the last call, one scalar each."""
        self._observer.losses(losses)

    def before_synchronised_backward(self, step: int) -> None:
        self._faults.reach("forward", step)
        self._heart.beat("backward", step)
        self._faults.fire_inside_reduce(self._observer.parameters, step)

    def before_optimizer_step(self) -> None:
        """The optimizer is about to apply these gradients at this learning rate."""
        self._heart.beat("optimizer", self._done + 1)
        if not self._observer.has_met_an_optimizer:
            # Once a step, however many optimizers there are.
            self._faults.reach("optimizer", self._done + 1)
        self._observer.before_optimizer_step()

    def step(self, position: Position, primer: BucketPrimer | None, *, items: int | None) -> None:
        """An optimizer step is complete: record it. It settles when the script asks for more.

        `items`: what its window counted over all ranks, None for a loop that counts nothing. `primer` is None for a batch that
        was left out: nothing went through DDP.
        """
        self._heart.beat("record", position.step)
        if primer and self._layout_of != primer.settled:
            self._layout_of = primer.settled
            self._observer.buckets(position.step, primer.layout(), primed=primer.primed)
        self._observer.step(position, items=items)
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
        if self._files:
            self._files.look_at_mappings()
        if self._checkpointer.newest_step != position.step:
            self._checkpoint(position)
        self._observer.end(position, checkpoint=checkpoint_name(position.step))
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
            self._observer.loader_workers(workers.epoch, streams)

    def _checkpoint(self, position: Position) -> None:
        started = time.monotonic()
        name = self._checkpointer.save(position, self._job)
        took_s = time.monotonic() - started
        self._observer.checkpoint(
            position.step, name, duration_s=took_s, digests=self._checkpointer.digests, changed=self._checkpointer.changed
        )
