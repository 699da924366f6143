"""`attach` and `Session`: the few lines that a training script adds.

Everything that affects the numbers (epoch order, loader seeds, bucket priming) also happens outside chaosrun, so that a script
prints the same losses under `python`, `accelerate launch` and `chaosrun submit`. Recording, checkpoints and faults happen only
under chaosrun.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from chaosrun.errors import MisuseError
from chaosrun.observe.fingerprint import local_part
from chaosrun.observe.hooks import uncompiled, with_hooks
from chaosrun.observe.ledger import SampleLedger
from chaosrun.protocol.adoption import Adopted, adopt
from chaosrun.protocol.bucket_priming import BucketPrimer
from chaosrun.protocol.context import current
from chaosrun.protocol.resume import batches_of, total_batch_size
from chaosrun.protocol.sources import source_state
from chaosrun.protocol.state import TrainingState, is_sharded
from chaosrun.protocol.strategies import check_loader, open_epoch, resumed_position
from chaosrun.protocol.windows import Window, WindowCutter
from chaosrun.records.order import DataResume
from chaosrun.records.position import Position
from chaosrun.records.traces import SourceRecord

if TYPE_CHECKING:
    from chaosrun.protocol.recorder import Recorder

ONCE_A_BATCH = "call run.step once for every batch of run.batches() or window of run.windows(), after optimizer.step()"
UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def attach(training: "Accelerator | torch.nn.Module", *others: Any) -> "Session":
    """Bind chaosrun to a training: call it once, with the accelerator after its last `prepare()`, or, in a script without
    accelerate, with model, optimizer, loader and schedulers, after DistributedDataParallel or `fully_shard`.

    Raises MisuseError when nothing is prepared yet, when called twice, or for an object that it cannot restore. Outside
    chaosrun the session neither writes nor kills anything, and computes the same numbers.
    """
    context = current()
    if context is not None and context.order.by == "script":
        raise MisuseError(
            "chaosrun.attach() in a job that saves and resumes by itself (resume.by: script, or a command)",
            hint="leave attach out, and the script's own checkpoints are drilled; or have chaosrun start the script (script:), "
            "with resume: {by: chaosrun}",
        )
    accelerator = training if isinstance(training, Accelerator) and not others else adopt((training, *others))
    if accelerator.distributed_type in UNSUPPORTED:
        raise MisuseError(
            f"chaosrun cannot yet restore sharded training ({accelerator.distributed_type.value}) exactly",
            hint="use distributed data parallelism (DDP), or FSDP2 (fully_shard)",
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
        self._state = _state(accelerator, context.order.classes if context else ())
        self._prepared = (len(accelerator._models), len(accelerator._optimizers))
        configured = accelerator.dataloader_config.data_seed
        self._seed = torch.initial_seed() if configured is None else configured
        self._ledger = SampleLedger()
        self._primer = BucketPrimer(accelerator._models, primes=context.order.prime_buckets if context else True)
        self._backward = accelerator.backward
        accelerator.backward = self._primed_backward  # type: ignore[method-assign]
        self._accelerator_end_training = accelerator.end_training
        accelerator.end_training = self._end_training  # type: ignore[method-assign]
        self._recorder: Recorder | None = None
        if context:
            # Not needed outside chaosrun, so not loaded there.
            from chaosrun.protocol import recorder

            context.adopt(self)
            self._recorder = recorder.Recorder(accelerator, self._state, context)
        self._max_steps = context.order.max_steps if context else None
        self._protocol: DataResume = context.order.data_resume if context else "seedable"
        self._position = Position()
        self._batch_open = False
        self._cutter: WindowCutter | None = None
        self._window: Window | None = None
        self._begun = False
        self._backwards = 0
        self._optimizer_steps = 0
        # How many of each had been seen when the last batch, or window, was yielded.
        self._seen = (0, 0)
        self._without_update = False
        """The last step is one that the script skipped: its gradients have to be gone before the next backward pass."""
        for optimizer in self._state.optimizers():
            with_hooks(optimizer).register_step_pre_hook(uncompiled(self._before_optimizer_step))
            if self._recorder:
                self._recorder.watch(optimizer)

    @property
    def is_active(self) -> bool:
        """True under chaosrun."""
        return self._recorder is not None

    @property
    def position(self) -> Position:
        """The training's current position; before the loop, where it will begin: in a restarted attempt at its checkpoint."""
        if self._recorder and not self._begun:
            return self._recorder.beginning()
        return self._position

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.position.epoch

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

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`, for a script without accelerate; with accelerate the same as `accelerator.backward`."""
        self._accelerator.backward(loss, **kwargs)

    def batches(self, loader: Any, *, epochs: int) -> Iterator[Any]:
        """Yield the training batches from the job's current position to the end of `epochs` epochs (or `max_steps` steps).

        The first call restores the checkpoint of a restarted attempt. Call `run.step(loss)` once for every batch. Raises
        MisuseError for a loader whose order cannot be restored and for a loop that forgets `run.step`.
        """
        yield from self._epochs(loader, epochs)

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
        yield from self._epochs(loader, epochs)

    def _epochs(self, loader: Any, epochs: int) -> Iterator[Any]:
        if self._begun:
            raise MisuseError(
                "run.batches() or run.windows() was called twice",
                hint="give all epochs to one run.batches(loader, epochs=...) loop",
            )
        if isinstance(self._accelerator, Adopted):
            loader = self._accelerator.loaders.get(id(loader), loader)
        check_loader(self._protocol, self._accelerator, loader)
        if (len(self._accelerator._models), len(self._accelerator._optimizers)) != self._prepared:
            raise MisuseError(
                "a model or optimizer was prepared after chaosrun.attach()", hint="attach after the last accelerator.prepare()"
            )
        self._state.refuse_parted_optimizers()
        self._state.refuse_loose_parameters()
        self._state.refuse_extra_state()
        self._begun = True
        per_epoch, restored = batches_of(loader), 0
        if self._recorder:
            self._position = self._recorder.begin(
                _data_facts(self._accelerator, loader, per_epoch, self._cutter) | self._state.facts()
            )
            restored = self._position.step
            self._recorder.observer.probe(loader)
            per_epoch = self._length_where_it_stands(loader, per_epoch)
        position = resumed_position(self._protocol, self._position.normalised(per_epoch))
        while position.epoch < epochs and not self._reached_max_steps():
            self._position = position
            if self._recorder:
                self._recorder.heart.beat("epoch", self._recorder.done + 1)
            with contextlib.closing(self._rest_of(loader, position)) as rest:
                try:
                    yield from rest
                except GeneratorExit:
                    # Left by `break`: the local variables around the loop still exist.
                    if self._recorder:
                        self._recorder.left(self._position)
                    raise
            position = Position(epoch=position.epoch + 1, step=self._position.step)
        if self._position.batches and not restored and not self._optimizer_steps:
            raise MisuseError(f"the loop ended without one optimizer.step() in {epochs} epochs", hint=ONCE_A_BATCH)
        self.finish()

    def _length_where_it_stands(self, loader: Any, of_first: int | None) -> int | None:
        """Batches in the epoch that was restored: a batch sampler, or a dataset that grows, may have other numbers in each."""
        if of_first is None or not self._position.step or self._protocol != "seedable":
            return of_first
        return batches_of(loader, epoch=self._position.epoch)

    def _rest_of(self, loader: Any, start: Position) -> Generator[Any, None, None]:
        """The batches of an epoch from there on, or its windows."""
        batches, cutter = self._open(loader, start), self._cutter
        for given in cutter.cut(batches, self._hand_out) if cutter else batches:
            self._batch_open, self._seen = True, (self._backwards, self._optimizer_steps)
            self._window = given if cutter else None
            if not cutter:
                self._hand_out(given)
            yield given
            call, what = ("run.step(window.loss)", "the window at batch") if cutter else ("run.step(loss)", "batch")
            self._complete(f"{call} after {what} {self._position.batches} of epoch {start.epoch}", may_leave_out=not cutter)
            if self._reached_max_steps():
                return

    def _open(self, loader: Any, start: Position) -> Iterable[Any]:
        batches = open_epoch(
            self._protocol,
            self._accelerator,
            loader,
            epoch=start.epoch,
            batches_done=start.batches,
            seed=self._seed,
            ledger=self._ledger,
        )
        if self._recorder:
            own, held = source_state(loader)
            self._recorder.observer.write(SourceRecord(epoch=start.epoch, own=own, held=held))
        return batches

    def _hand_out(self, batch: Any) -> None:
        ids = self._ledger.next_ids()
        if self._recorder:
            self._recorder.open_window()
            self._recorder.heart.beat("forward", self._recorder.done + 1)
            self._recorder.observer.batch(batch, ids)

    def _complete(self, expected: str, *, may_leave_out: bool) -> None:
        """Complete the last batch when the script asks for the next. Raises MisuseError if the `expected` call is missing.

        `may_leave_out`: a batch that the script skipped (a bad one, by `continue`) also counts as done. Without accumulation it
        is a step that has no loss and changes nothing.
        """
        if self._recorder:
            self._recorder.complete()
        if not self._batch_open:
            return
        if not may_leave_out or self._seen != (self._backwards, self._optimizer_steps):
            raise MisuseError(f"the loop went on without {expected}", hint=ONCE_A_BATCH)
        self._batch_open = False
        at = self._position
        whole = self._accelerator.gradient_accumulation_steps == 1
        self._position = Position(epoch=at.epoch, batches=at.batches + 1, step=at.step + whole)
        if self._recorder and whole:
            self._recorder.record_step(self._position, None)
            self._recorder.complete()

    def step(self, loss: torch.Tensor) -> None:
        """Tell chaosrun that a batch is done. On the batch that completed an optimizer step this records it; the checkpoint, if
        one is due, is taken and step faults strike when the loop asks for the next batch, so all that the loop does after
        `step` (a validation pass, a moving average) belongs to the step. `loss` is this batch's scalar, before any division.

        A step without `optimizer.step()` (skipped by the script's own gradient scaler on an overflow) also counts: it changes
        nothing, and its gradients must be dropped before the next backward pass.

        Raises MisuseError outside the loop, for a loss that is not a scalar tensor, and when DDP's gradients bypassed
        `accelerator.backward`.
        """
        if not self._batch_open:
            raise MisuseError(
                "run.step() was called without a batch",
                hint="call it once for every batch of run.batches(), or window of run.windows()",
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"loss of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise MisuseError(f"run.step() got a {got}", hint="pass the scalar tensor you called backward on, not loss.item()")
        window = self._window
        shares = [loss] if window is None else window.shares_of(loss)
        self._batch_open = False
        at = self._position
        batches_done = at.batches + len(shares)
        self._position = Position(epoch=at.epoch, batches=batches_done, step=at.step)
        if self._recorder:
            self._recorder.observer.losses(shares)
        if not self._accelerator.sync_gradients:
            return
        skipped = any(optimizer.step_was_skipped for optimizer in self._accelerator._optimizers)
        self._without_update = self._optimizer_steps == self._seen[1] and not skipped
        if not (self._backwards or self._primer.done):
            raise MisuseError(
                "the gradients came from loss.backward(): past run.backward(loss), DDP's buckets cannot be primed, and "
                "no restart at three or more ranks would be exact",
                hint="call run.backward(loss), or accelerator.backward(loss) after chaosrun.attach; in windows window.backward",
            )
        self._position = Position(epoch=at.epoch, batches=batches_done, step=at.step + 1)
        if self._recorder:
            self._recorder.record_step(self._position, self._primer, items=window.items if window else None)

    def finish(self) -> None:
        """End the training here, after leaving the loop by `break`. A collective; called by itself when the loop runs to its
        end, when the script returns, and by `accelerator.end_training()` and `destroy_process_group()`."""
        if self._recorder and self._begun:
            self._recorder.finish(self._position)

    def _end_training(self) -> None:
        # The last checkpoint needs the process group that this destroys.
        self.finish()
        self._accelerator_end_training()

    def _reached_max_steps(self) -> bool:
        return self._max_steps is not None and self._position.step >= self._max_steps

    def _primed_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._backwards += 1
        self._refuse_kept_gradients()
        if not self._accelerator.sync_gradients:
            return self._backward(loss, **kwargs)
        if self._recorder:
            self._recorder.before_synchronised_backward(loss)
        if not self._primer.is_due:
            return self._backward(loss, **kwargs)
        return self._primer.prime(self._backward, loss, **kwargs)

    def _refuse_kept_gradients(self) -> None:
        """Raise MisuseError when the gradients of a step without `optimizer.step()` are still there: a loop that accumulates by
        hand, whose gradients no checkpoint holds (hazard G1)."""
        without_update, self._without_update = self._without_update, False
        if without_update and any(
            bool(_own_values(gradient).count_nonzero())
            for model in self._accelerator._models
            for gradient in (parameter.grad for parameter in model.parameters())
            if gradient is not None
        ):
            raise MisuseError(
                f"run.step(loss) of step {self._position.step} came without optimizer.step(), and its gradients were kept",
                hint="accumulate gradients with accelerator.accumulate(model); drop those of a skipped step by "
                "optimizer.zero_grad()",
            )

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._without_update and not self._batch_open:
            raise MisuseError(
                f"run.step(loss) came before optimizer.step() (step {self._position.step})",
                hint="the order is backward, optimizer.step, scheduler.step, optimizer.zero_grad, run.step; "
                "accumulate gradients with accelerator.accumulate(model)",
            )
        self._optimizer_steps += 1


def _state(accelerator: Accelerator, classes: Sequence[str]) -> TrainingState:
    if not any([is_sharded(model) for model in accelerator._models]):
        return TrainingState(accelerator, classes)
    # It imports torch.distributed.checkpoint, which would delay a restart of replicas.
    from chaosrun.protocol.sharded import ShardedState

    return ShardedState(accelerator, classes)


def _own_values(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else local_part(gradient)


def _data_facts(accelerator: Accelerator, loader: Any, per_epoch: int | None, cutter: WindowCutter | None) -> dict[str, object]:
    """Facts known inside the script on which a checkpoint must agree."""
    return {
        "batches per epoch": per_epoch,
        "total batch size": total_batch_size(accelerator, loader),
        "gradient accumulation steps": cutter.steps if cutter else accelerator.gradient_accumulation_steps,
        "split batches": accelerator.split_batches,
        "even batches": accelerator.even_batches,
        "mixed precision": accelerator.mixed_precision,
    }
