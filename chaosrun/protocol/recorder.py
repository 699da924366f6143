"""The work of one rank under `chaosrun.attach` besides its steps: restores, takes checkpoints, leaves on notice."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from chaosrun.observe.hooks import hook_each_step, parameters_of, uncompiled
from chaosrun.protocol.bucket_priming import BucketPrimer
from chaosrun.protocol.checkpointing import Checkpointer
from chaosrun.protocol.context import WorkerContext
from chaosrun.protocol.loader_workers import LoaderWorkers, newest_workers
from chaosrun.protocol.rendezvous import before_group_ends
from chaosrun.protocol.state import TrainingState
from chaosrun.protocol.steps import Steps, refuse_captured
from chaosrun.records.layout import checkpoint_name, checkpoint_step
from chaosrun.records.position import Position
from chaosrun.records.traces import CheckpointRecord, LoaderWorkersRecord, StateRecord


class Recorder(Steps):
    def __init__(self, accelerator: Accelerator, state: TrainingState, context: WorkerContext) -> None:
        super().__init__(state, context, accelerator.device)
        self._preemption, self._results = context.preemption, context.results
        self._results.watch()
        self._settling, self._state = context.settling, state
        about = {"faults": self.faults, "heart": self.heart, "writer": context.writer}
        self._checkpointer = Checkpointer(accelerator, state, context.order, context.leg, **about)
        self._job: dict[str, object] = {}
        self._incomplete: Position | None = None
        self._prepared = False
        self._noted_workers: LoaderWorkers | None = None
        self._stepped: list[int] = []
        """The optimizers that made the current step so far, by id."""

    def beginning(self) -> Position:
        """The position that `begin` will restore. Raises InvalidCheckpointError."""
        return self._checkpointer.position_of(self.order.resume) if self.order.resume else Position()

    def begin(self, job: dict[str, object]) -> Position:
        """Restore the checkpoint this attempt starts from, write the `start` record, and return the position."""
        self._job = job
        entered_s = time.time()
        position = Position()
        if self.order.resume:
            step = checkpoint_step(self.order.resume) or 0
            self.heart.beat("restoring", step)
            self.faults.reach("restore.begin", step)
            position = self._checkpointer.restore(self.order.resume, job)
        restored = {"digests": self._checkpointer.digests, "source": self._checkpointer.source}
        self.start(position, self.observer.beginning(), entered_s=entered_s, **restored)
        self._preemption.use_store()
        self._settling.begin()
        if self.order.resume:
            self.faults.reach("restore.end", position.step)
        return position

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients that the optimizer steps with. A closure makes them during the step: before it, the last step's
        gradients may still be there."""

        def see(stepping: torch.optim.Optimizer, given: Sequence[Any], named: Mapping[str, Any], *, closure: bool) -> None:
            refuse_captured()
            if not closure:
                self._stepped.append(id(stepping))
            # The optimizer itself is the first argument.
            if closure == any(map(callable, (*given[1:], named.get("closure")))):
                self.before_optimizer_step(parameters_of(stepping))

        hook_each_step(optimizer)
        optimizer.register_step_pre_hook(uncompiled(partial(see, closure=False)))
        optimizer.register_step_post_hook(uncompiled(partial(see, closure=True)))

    def record_step(self, position: Position, primer: BucketPrimer | None, *, items: int | None = None) -> None:
        """Record an optimizer step; `complete` ends it when the script asks for the next batch."""
        self._incomplete, stepped, self._stepped = position, self._stepped, []
        self.record(position, primer, items=items, stepped=stepped)

    def complete(self) -> None:
        """Complete the last recorded step: take a checkpoint if one is due, let step faults strike, and leave on a notice."""
        self._note_loader_workers()
        position, self._incomplete = self._incomplete, None
        if position is None:
            self.heart.beat("fetch", self.done + 1)
            return
        self.heart.beat("after", position.step)
        self._note_commits()
        if not self._prepared:
            # Optimizer state exists only from here on.
            self._prepared = True
            self._checkpointer.prepare()
        saved = self._checkpoint(position) if position.step % self.order.every_steps == 0 else None
        self.heart.beat("over", position.step)
        self.faults.pace.step_done()
        self.faults.reach("step", position.step)
        if self._preemption.due(position.step):
            if self._checkpointer.newest_step != position.step:
                self._checkpoint(position)
                self.observer.holdings(position.step + 1, settings=False)  # the reference saves nothing here
            self._wait_for_saves()
            self._preemption.leave(position.step)
        if saved or self._settling.is_due(position.step):
            record, save = partial(self._record_state, position.step), partial(self._checkpoint, position)
            if self._settling.look(position.step, saved, record, save):
                self._wait_for_saves()
                raise SystemExit(0)  # through the script, so that its `finally` blocks and exit handlers run
        self.heart.beat("fetch", position.step + 1)

    def finish(self, position: Position) -> None:
        """Complete the training: take a final checkpoint, and record the digests of everything. Idempotent; does nothing if the
        rank left on notice."""
        if self.ended or self._preemption.left is not None or self._settling.left is not None:
            return
        self.complete()
        self._note_loader_workers(at_last=True)
        if self._checkpointer.newest_step != position.step:
            self._checkpoint(position)
        self._wait_for_saves()
        self.end(position, checkpoint_name(position.step))
        self._results.complete = True

    def left(self, position: Position) -> None:
        """End the training of a script that left its loop by `break`, at the latest when it destroys the process group."""
        self.observer.left()
        before_group_ends(partial(self.finish, position))

    def _note_loader_workers(self, *, at_last: bool = False) -> None:
        """Record the loader workers' streams once all workers of the epoch have reported: a batch may come before the last
        worker has."""
        workers = newest_workers()
        if workers is None or workers is self._noted_workers:
            return
        streams = workers.streams()
        if None not in streams or (at_last and any(streams)):
            self._noted_workers = workers
            self.observer.write(LoaderWorkersRecord(epoch=workers.epoch, workers=tuple(streams)))

    def _record_state(self, step: int) -> StateRecord:
        return self.observer.state(step, self._settling.own(self._state, step))

    def _checkpoint(self, position: Position) -> CheckpointRecord:
        started = time.monotonic()
        self._wait_for_saves()
        self._checkpointer.save(position, self._job)
        saved, took_s = self._checkpointer, round(time.monotonic() - started, 6)
        own = self._settling.own(self._state, position.step)
        about = {"duration_s": took_s, "digests": saved.digests, "pending": saved.pending, "because": saved.because}
        return self.observer.checkpoint(position.step, own, changed=saved.changed, **about)

    def _note_commits(self) -> None:
        """Record checkpoints that were committed asynchronously. Raises the error of their save."""
        for committed in self._checkpointer.look():
            self.observer.write(committed)

    def _wait_for_saves(self) -> None:
        """Wait until no save is under way."""
        self._checkpointer.wait()
        self._note_commits()
