"""`attach` and `Session`: the few lines that a training script adds.

Everything that decides the numbers (epoch order, loader seeds, bucket priming) happens outside chaosrun too, so that a script
prints the same losses under `python`, `accelerate launch` and `chaosrun submit`. Recording, checkpoints and faults happen only
inside.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from chaosrun.errors import MisuseError
from chaosrun.observe.ledger import SampleLedger
from chaosrun.observe.position import Position
from chaosrun.protocol.buckets import BucketPrimer
from chaosrun.protocol.context import WorkerContext, current
from chaosrun.protocol.resume import batches_of, total_batch_size
from chaosrun.protocol.state import TrainingState
from chaosrun.protocol.strategies import check_loader, open_epoch, resumed_position
from chaosrun.protocol.windows import Window, WindowCutter
from chaosrun.records.order import DataResume

if TYPE_CHECKING:
    from chaosrun.protocol.recorder import Recorder

UNSUPPORTED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def attach(accelerator: Accelerator) -> "Session":
    """Bind chaosrun to a prepared training: call it once, after the last `accelerator.prepare()`.

    Raises MisuseError when nothing is prepared yet, or when called twice. Outside chaosrun the session neither writes nor
    kills anything, and computes the same numbers.
    """
    if accelerator.distributed_type in UNSUPPORTED:
        raise MisuseError(
            f"chaosrun cannot yet restore sharded training ({accelerator.distributed_type.value}) exactly",
            hint="use distributed data parallelism (DDP)",
        )
    if not accelerator._models or not accelerator._optimizers:
        raise MisuseError(
            "chaosrun.attach() came before accelerator.prepare(): there is no prepared model and optimizer to watch",
            hint="model, optimizer, loader, scheduler = accelerator.prepare(...), then run = chaosrun.attach(accelerator)",
        )
    return Session(accelerator)


class Session:
    """One rank's training loop. Made by `attach`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        context = current()
        self._state = TrainingState(accelerator, context.order.classes if context else ())
        self._prepared = (len(accelerator._models), len(accelerator._optimizers))
        configured = accelerator.dataloader_config.data_seed
        self._seed = torch.initial_seed() if configured is None else configured
        self._ledger = SampleLedger()
        self._primer = BucketPrimer(accelerator._models)
        self._backward = accelerator.backward
        accelerator.backward = self._primed_backward  # type: ignore[method-assign]
        self._accelerator_end_training = accelerator.end_training
        accelerator.end_training = self._end_training  # type: ignore[method-assign]
        if context:
            context.adopt(self)
        self._recorder = _recorder(accelerator, self._state, context) if context else None
        self._max_steps = context.order.max_steps if context else None
        self._protocol: DataResume = context.order.data_resume if context else "seedable"
        self._position = Position()
        self._batch_open = False
        self._cutter: WindowCutter | None = None
        self._window: Window | None = None
        self._begun = False
        self._met_backward = False
        self._optimizer_steps = 0
        self._seen_optimizer_steps = 0
        for optimizer in self._state.optimizers():
            optimizer.register_step_pre_hook(self._before_optimizer_step)

    @property
    def is_active(self) -> bool:
        """True under chaosrun."""
        return self._recorder is not None

    @property
    def position(self) -> Position:
        return self._position

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._position.epoch

    @property
    def finished(self) -> bool:
        return self._recorder is not None and self._recorder.ended

    def register(self, name: str, item: Any) -> None:
        """Save and restore `item` (state_dict / load_state_dict) with every checkpoint: EMA weights, meters, best metric.

        Raises MisuseError after the first batch, for a second object of the same name, or for one without a state.
        """
        if self._begun:
            raise MisuseError(
                f"run.register({name!r}) came after the first batch", hint="register before the run.batches() loop"
            )
        self._state.register(name, item)

    def batches(self, loader: Any, *, epochs: int) -> Iterator[Any]:
        """Yield the training batches from wherever the job stands to the end of `epochs` epochs (or `max_steps` steps).

        The first call restores the checkpoint of a restarted attempt. Call `run.step(loss)` once for every batch. Raises
        MisuseError for a loader whose order cannot be restored and for a loop that forgets `run.step`.
        """
        yield from self._epochs(loader, epochs, self._epoch)

    def windows(
        self, loader: Any, *models: Any, epochs: int, accumulation_steps: int, count: Callable[[Any], SupportsIndex]
    ) -> Iterator[Window]:
        """Yield accumulation windows: the batches of one optimizer step each, and how many items they hold on all ranks.

        Loop over a window's micro-batches, `window.backward(loss_sum)` in each; then optimizer.step(), scheduler.step(),
        optimizer.zero_grad() and `run.step(window.loss)`. `models` are those that prepare() returned; `count(batch)` is the
        number of items that `loss_sum` sums over. The last window of an epoch may be shorter. Restores, ends and raises as
        `batches` does, and MisuseError as `Window` says.
        """
        self._cutter = WindowCutter(self._accelerator, models, steps=accumulation_steps, count=count)
        yield from self._epochs(loader, epochs, self._windows)

    def _epochs(
        self, loader: Any, epochs: int, rest_of: Callable[[Any, Position], Generator[Any, None, None]]
    ) -> Iterator[Any]:
        if self._begun:
            raise MisuseError(
                "run.batches() or run.windows() was called twice",
                hint="give all epochs to one run.batches(loader, epochs=...) loop",
            )
        check_loader(self._protocol, self._accelerator, loader)
        if (len(self._accelerator._models), len(self._accelerator._optimizers)) != self._prepared:
            raise MisuseError(
                "a model or optimizer was prepared after chaosrun.attach()", hint="attach after the last accelerator.prepare()"
            )
        self._begun = True
        per_epoch = batches_of(loader)
        if self._recorder:
            self._position = self._recorder.begin(_data_facts(self._accelerator, loader, per_epoch, self._cutter))
            self._recorder.probe(loader)
            per_epoch = self._length_where_it_stands(loader, per_epoch)
        position = resumed_position(self._protocol, self._position.normalised(per_epoch))
        while position.epoch < epochs and not self._reached_max_steps():
            self._position = position
            if self._recorder:
                self._recorder.epoch()
            with contextlib.closing(rest_of(loader, position)) as rest:
                yield from rest
            position = Position(epoch=position.epoch + 1, step=self._position.step)
        self.finish()

    def _length_where_it_stands(self, loader: Any, of_first: int | None) -> int | None:
        """Batches in the epoch that was restored: a batch sampler, or a dataset that grows, may have other numbers in each."""
        if of_first is None or not self._position.step or self._protocol != "seedable":
            return of_first
        return batches_of(loader, epoch=self._position.epoch)

    def _epoch(self, loader: Any, start: Position) -> Generator[Any, None, None]:
        for batch in self._open(loader, start):
            self._batch_open = True
            self._hand_out(batch)
            yield batch
            self._settle(f"run.step(loss) after batch {self._position.batches} of epoch {start.epoch}")
            if self._reached_max_steps():
                return

    def _windows(self, loader: Any, start: Position) -> Generator[Window, None, None]:
        assert self._cutter
        for window in self._cutter.cut(self._open(loader, start), self._hand_out):
            self._batch_open, self._window = True, window
            yield window
            self._settle(f"run.step(window.loss) after the window at batch {self._position.batches} of epoch {start.epoch}")
            if self._reached_max_steps():
                return

    def _open(self, loader: Any, start: Position) -> Iterable[Any]:
        return open_epoch(
            self._protocol,
            self._accelerator,
            loader,
            epoch=start.epoch,
            batches_done=start.batches,
            seed=self._seed,
            ledger=self._ledger,
        )

    def _hand_out(self, batch: Any) -> None:
        ids = self._ledger.next_ids()
        if self._recorder:
            self._recorder.batch(batch, ids)

    def _settle(self, expected: str) -> None:
        """The script asks for more: what it has done is complete, unless the `expected` call is missing."""
        if self._recorder:
            self._recorder.settle()
        if self._batch_open:
            raise MisuseError(
                f"the loop went on without {expected}",
                hint="call run.step once for every batch of run.batches() or window of run.windows(), after optimizer.step()",
            )

    def step(self, loss: torch.Tensor) -> None:
        """Tell chaosrun that a batch is done. On the batch that completed an optimizer step this records it; the checkpoint, if
        one is due, is taken and step faults strike when the loop asks for the next batch, so whatever the loop does after
        `step` (a validation pass, a moving average) belongs to the step. `loss` is this batch's scalar, before any division.

        Raises MisuseError outside the loop, for a loss that is no scalar, when the optimizer was not stepped, and when DDP's
        gradients came past `accelerator.backward`.
        """
        if not self._batch_open:
            raise MisuseError(
                "run.step() was called without a batch",
                hint="call it once for every batch of run.batches(), or window of run.windows()",
            )
        if loss.numel() != 1:
            raise MisuseError(
                f"run.step() got a loss of shape {tuple(loss.shape)}", hint="pass the scalar you called backward on"
            )
        window = self._window
        shares = [loss] if window is None else window.shares_of(loss)
        self._batch_open = False
        at = self._position
        batches_done = at.batches + len(shares)
        self._position = Position(epoch=at.epoch, batches=batches_done, step=at.step)
        if self._recorder:
            self._recorder.losses(shares)
        if not self._accelerator.sync_gradients:
            return
        skipped = any(optimizer.step_was_skipped for optimizer in self._accelerator._optimizers)
        if self._optimizer_steps == self._seen_optimizer_steps and not skipped:
            raise MisuseError(
                f"run.step(loss) came before optimizer.step() (step {at.step + 1})",
                hint="the order is backward, optimizer.step, scheduler.step, optimizer.zero_grad, run.step; "
                "accumulate gradients with accelerator.accumulate(model)",
            )
        if not (self._met_backward or self._primer.done):
            raise MisuseError(
                "the gradients came from loss.backward(): past accelerator.backward(loss), DDP's buckets cannot be primed, and "
                "no restart at three or more ranks would be exact",
                hint="call accelerator.backward(loss) after chaosrun.attach(accelerator), or window.backward(loss_sum)",
            )
        self._seen_optimizer_steps = self._optimizer_steps
        self._position = Position(epoch=at.epoch, batches=batches_done, step=at.step + 1)
        if self._recorder:
            self._recorder.step(self._position, self._primer, items=window.items if window else None)

    def finish(self) -> None:
        """End the training here, after leaving the loop by `break`. A collective; called by itself when the loop runs to its
        end, when the script returns, and by `accelerator.end_training()`."""
        if self._recorder and self._begun:
            self._recorder.finish(self._position)

    def _end_training(self) -> None:
        # The last checkpoint needs the process group that this destroys.
        self.finish()
        self._accelerator_end_training()

    def _reached_max_steps(self) -> bool:
        return self._max_steps is not None and self._position.step >= self._max_steps

    def _primed_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._met_backward = True
        if not self._accelerator.sync_gradients:
            return self._backward(loss, **kwargs)
        if self._recorder:
            self._recorder.before_synchronised_backward(self._position.step + 1)
        if self._primer.done:
            return self._backward(loss, **kwargs)
        return self._primer.prime(self._backward, loss, **kwargs)

    def _before_optimizer_step(self, *_: Any) -> None:
        self._optimizer_steps += 1
        if self._recorder:
            self._recorder.before_optimizer_step()


def _recorder(accelerator: Accelerator, state: TrainingState, context: WorkerContext) -> "Recorder":
    # Not needed, and not loaded, outside chaosrun.
    from chaosrun.protocol.recorder import Recorder

    return Recorder(accelerator, state, context)


def _data_facts(accelerator: Accelerator, loader: Any, per_epoch: int | None, cutter: WindowCutter | None) -> dict[str, Any]:
    """What a checkpoint must agree on, seen from inside the script."""
    return {
        "batches per epoch": per_epoch,
        "total batch size": total_batch_size(accelerator, loader),
        "gradient accumulation steps": cutter.steps if cutter else accelerator.gradient_accumulation_steps,
        "split batches": accelerator.split_batches,
        "even batches": accelerator.even_batches,
        "mixed precision": accelerator.mixed_precision,
    }
