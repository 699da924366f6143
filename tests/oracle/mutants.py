"""The mutants: ways in which a restart can go wrong, each breaking one thing. `train` applies one in attempts that restore.

A mutant reaches into chaosrun or accelerate where the mistake would be made, or overrides a hook of `Mutant` that `train` calls
where a script would make it. What each should be caught by is in `test_mutants`.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch import Tensor

from chaosrun.observe.rng import capture_rng, restore_rng
from chaosrun.protocol import context, resume
from chaosrun.protocol.bucket_priming import BucketPrimer
from chaosrun.protocol.checkpointing import Checkpointer, rank_file
from chaosrun.protocol.state import TrainingState
from chaosrun.records.layout import checkpoint_name, checkpoint_step
from chaosrun.records.position import Position

__all__ = ["MUTANTS", "Mutant"]

CPU = torch.device("cpu")
EVERY_STEPS = 3


class Mutant:
    """Hooks at the places where a training script itself could go wrong after a restart. This one does nothing."""

    def order(self, samples: list[int]) -> list[int]:
        """The samples in the order in which the dataset lists them."""
        return samples

    def item(self, features: Tensor) -> Tensor:
        return features

    def before_batch(self, accelerator: Accelerator, position: Position) -> None:
        """Before a batch is computed, at the position that precedes it."""

    def after_batch(self, accelerator: Accelerator, position: Position) -> None: ...


def rank() -> int:
    under = context.current()
    assert under is not None
    return under.order.rank


Take = Callable[[TrainingState], Any]
Spoil = Callable[[TrainingState, Any], None]


def after_load(spoil: Spoil, take: Take = lambda state: None, *, ranks: tuple[int, ...] | None = None) -> Callable[[], Mutant]:
    """Have `TrainingState.load` end with `spoil(state, what take(state) had found before it)`, on these ranks or on all."""

    def apply() -> Mutant:
        load = TrainingState.load

        def broken(self: TrainingState, directory: Path, rank_file: Path) -> None:
            before = take(self)
            load(self, directory, rank_file)
            if ranks is None or rank() in ranks:
                with torch.no_grad():
                    spoil(self, before)

        TrainingState.load = broken
        return Mutant()

    return apply


def files_of(other_rank: Callable[[int], int]) -> Callable[[], Mutant]:
    """Take the random streams from another rank's file."""

    def spoil(state: TrainingState, _: None) -> None:
        assert loaded is not None
        saved = torch.load(loaded / rank_file(other_rank(rank())), weights_only=True)
        restore_rng(saved["rng"], CPU)

    loaded: Path | None = None

    def apply() -> Mutant:
        mutant = after_load(spoil)()
        load = TrainingState.load

        def noting(self: TrainingState, directory: Path, rank_file: Path) -> None:
            nonlocal loaded
            loaded = directory
            load(self, directory, rank_file)

        TrainingState.load = noting
        return mutant

    return apply


# Random streams.


def streams(_: TrainingState) -> dict[str, Any]:
    return capture_rng(CPU)


def forget_stream(name: str) -> Callable[[], Mutant]:
    """Leave one stream where the script had seeded it."""

    def spoil(_: TrainingState, before: dict[str, Any]) -> None:
        restore_rng({**capture_rng(CPU), name: before[name]}, CPU)

    return after_load(spoil, streams)


def forget_all_streams(_: TrainingState, before: dict[str, Any]) -> None:
    restore_rng(before, CPU)


class Evaluation(Mutant):
    """Draws random numbers once after the restart, as a validation pass that the undisturbed run did earlier would."""

    def __init__(self) -> None:
        self._done = False

    def after_batch(self, accelerator: Accelerator, position: Position) -> None:
        if accelerator.sync_gradients and not self._done:
            self._done = True
            numpy.random.permutation(10)


class EarlyDraw(Mutant):
    """Draws before the first batch, between the restore and the training: a model built late, a sample image logged."""

    def __init__(self) -> None:
        begin = resume.open_epoch

        def drawing(*args: Any, **kwargs: Any) -> Any:
            resume.open_epoch = begin
            torch.rand(1)
            return begin(*args, **kwargs)

        resume.open_epoch = drawing


# Data.


def never_set_epoch() -> Mutant:
    resume.set_epoch = lambda loader, epoch: None
    return Mutant()


def wrong_epoch(off: int) -> Callable[[], Mutant]:
    def apply() -> Mutant:
        set_epoch = resume.set_epoch
        resume.set_epoch = lambda loader, epoch: set_epoch(loader, epoch + off)
        return Mutant()

    return apply


def skip(batches: Callable[[int], int]) -> Callable[[], Mutant]:
    """Have the resumed epoch go on after another number of batches."""

    def apply() -> Mutant:
        open_epoch = resume.open_epoch

        def broken(*args: Any, batches_done: int, **kwargs: Any) -> Any:
            return open_epoch(*args, batches_done=batches(batches_done) if batches_done else 0, **kwargs)

        resume.open_epoch = broken
        return Mutant()

    return apply


def another_data_seed() -> Mutant:
    iterate = SeedableRandomSampler.__iter__

    def broken(self: SeedableRandomSampler) -> Any:
        self.initial_seed = (self.initial_seed or 0) + 1000
        return iterate(self)

    SeedableRandomSampler.__iter__ = broken
    return Mutant()


def swap_shares() -> Mutant:
    """Ranks 0 and 1 read each other's share of the data."""
    iterate = BatchSamplerShard.__iter__

    def broken(self: BatchSamplerShard) -> Any:
        self.process_index = {0: 1, 1: 0}.get(rank(), rank())
        return iterate(self)

    BatchSamplerShard.__iter__ = broken
    return Mutant()


def wrong_sample_rng(seed_off: int, epoch_off: int) -> Callable[[], Mutant]:
    """Loader workers augment for another seed or epoch."""

    def apply() -> Mutant:
        enter_epoch = resume.enter_epoch
        resume.enter_epoch = lambda seed, epoch: enter_epoch(seed + seed_off, epoch + epoch_off)
        return Mutant()

    return apply


class OtherContents(Mutant):
    """Something outside of the job's state, such as a fresh cache, changes what a sample looks like."""

    def item(self, features: Tensor) -> Tensor:
        return features + 2.0**-20


class HashOrder(Mutant):
    """The dataset lists its samples in the order of a set, or of a directory: another one in every process."""

    def order(self, samples: list[int]) -> list[int]:
        random.Random(os.getpid()).shuffle(samples)
        return samples


# Optimizer, scheduler, scaler.


def entries(state: TrainingState) -> list[dict[str, Any]]:
    """The optimizer's state by parameter, in order."""
    return [optimizer.state[p] for optimizer in state.optimizers() for group in optimizer.param_groups for p in group["params"]]


def clear_optimizer(state: TrainingState, _: None) -> None:
    for optimizer in state.optimizers():
        optimizer.state.clear()


def zero(name: str) -> Callable[[], Mutant]:
    def spoil(state: TrainingState, _: None) -> None:
        for entry in entries(state):
            entry[name].zero_()

    return after_load(spoil)


def one_step_less(state: TrainingState, _: None) -> None:
    for entry in entries(state):
        entry["step"].sub_(1)


def swap_moments(state: TrainingState, _: None) -> None:
    """Between BatchNorm's weight and bias, which have one shape (a reordered list of parameters, hazard O5)."""
    weight, bias = entries(state)[2:4]
    weight["exp_avg"], bias["exp_avg"] = bias["exp_avg"], weight["exp_avg"]


def overwrite(name: str, value: float) -> Callable[[], Mutant]:
    """Put a setting of the parameter groups back to what the constructor would say (hazard O4)."""

    def spoil(state: TrainingState, _: None) -> None:
        for optimizer in state.optimizers():
            for group in optimizer.param_groups:
                group[name] = value

    return after_load(spoil)


def schedules(state: TrainingState) -> list[dict[str, Any]]:
    return [dict(scheduler.state_dict()) for scheduler in state.accelerator._schedulers]


def forget_schedule(state: TrainingState, before: list[dict[str, Any]]) -> None:
    for scheduler, values in zip(state.accelerator._schedulers, before, strict=True):
        scheduler.load_state_dict(values)


def schedule_ahead(state: TrainingState, _: None) -> None:
    for scheduler in state.accelerator._schedulers:
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": scheduler.state_dict()["last_epoch"] + 1})


def scaler_of(state: TrainingState) -> torch.amp.GradScaler:
    scaler = state.accelerator.scaler
    assert isinstance(scaler, torch.amp.GradScaler)
    return scaler


def forget_scaler(state: TrainingState, before: dict[str, Any]) -> None:
    scaler_of(state).load_state_dict(before)


# Weights, buffers, registered objects.


def forget_tensor(state: TrainingState, before: list[Tensor]) -> None:
    state.parameters()[-1][1].copy_(before[-1])


def flip_bit(state: TrainingState, _: None) -> None:
    state.parameters()[0][1].view(torch.int32).view(-1)[7] ^= 1


def parameters(state: TrainingState) -> list[Tensor]:
    return [parameter.detach().clone() for _, parameter in state.parameters()]


def reset_buffer(name: str) -> Callable[[TrainingState, Any], None]:
    def spoil(state: TrainingState, _: None) -> None:
        state._buffers()[name].zero_()

    return spoil


def registered(name: str) -> Take:
    def take(state: TrainingState) -> Any:
        held = state.registered[name].state_dict()
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}

    return take


def forget_registered(name: str, ranks: tuple[int, ...] | None = None) -> Callable[[], Mutant]:
    return after_load(lambda state, before: state.registered[name].load_state_dict(before), registered(name), ranks=ranks)


class StaleGradient(Mutant):
    """A gradient that the first step after the restore finds already there."""

    def __init__(self) -> None:
        self._done = False

    def before_batch(self, accelerator: Accelerator, position: Position) -> None:
        if not self._done:
            self._done = True
            for parameter in accelerator._models[0].parameters():
                parameter.grad = torch.full_like(parameter, 2.0**-10)


class Late(Mutant):
    """Changes something after it was restored, compared and recorded, and before the first batch: only the steps can tell."""

    def __init__(self, spoil: Spoil, *, ranks: tuple[int, ...] | None = None) -> None:
        self._spoil = spoil
        self._ranks = ranks
        self._state: TrainingState | None = None
        self._done = False
        load = TrainingState.load

        def noting(state: TrainingState, *files: Path) -> None:
            self._state = state
            load(state, *files)

        TrainingState.load = noting  # pyright: ignore[reportAttributeAccessIssue]

    def before_batch(self, accelerator: Accelerator, position: Position) -> None:
        assert self._state is not None
        if not self._done and (self._ranks is None or rank() in self._ranks):
            with torch.no_grad():
                self._spoil(self._state, None)
        self._done = True


def zero_bias(state: TrainingState, _: None) -> None:
    state.parameters()[-1][1].zero_()


def set_rate(state: TrainingState, _: None) -> None:
    for optimizer in state.optimizers():
        for group in optimizer.param_groups:
            group["lr"] = 7e-3


def shrink_clip(state: TrainingState, _: None) -> None:
    state.registered["clip"].load_state_dict({"mean": 2.0**-10})


def reset_average(state: TrainingState, _: None) -> None:
    for value in state.registered["average"].state_dict().values():
        value.zero_()


class EvaluationMode(Mutant):
    """The model is still in evaluation mode."""

    def before_batch(self, accelerator: Accelerator, position: Position) -> None:
        accelerator._models[0].eval()


# Position and checkpoint.


def restored_at(change: Callable[[Position], Position]) -> Callable[[], Mutant]:
    def apply() -> Mutant:
        restore = Checkpointer.restore
        Checkpointer.restore = lambda self, name, job: change(restore(self, name, job))
        return Mutant()

    return apply


def miscounted_batches() -> Mutant:
    """The right batches under a wrong count: the loader follows the position that was saved, the records do not."""
    skip(lambda done: done - 1)()
    return restored_at(lambda at: Position(epoch=at.epoch, batches=at.batches + 1, step=at.step))()


def wrong_micro_step(state: TrainingState, _: None) -> None:
    state.accelerator.step += 1


def older_checkpoint() -> Mutant:
    """Every rank takes the checkpoint before the newest for the newest."""
    restore = Checkpointer.restore
    Checkpointer.restore = lambda self, name, job: restore(self, _older(name), job)
    return Mutant()


def _older(name: str) -> str:
    step = checkpoint_step(name)
    assert step is not None
    return checkpoint_name(step - EVERY_STEPS)


def mixed_checkpoint(state: TrainingState, _: None) -> None:
    """The optimizer's file is that of the checkpoint before (a directory overwritten in place, hazard S8)."""
    under = context.current()
    assert under is not None and under.order.resume is not None
    older = under.leg.checkpoints / _older(under.order.resume) / "optimizer.bin"
    for optimizer in state.optimizers():
        optimizer.load_state_dict(torch.load(older, weights_only=True))


def older_weights() -> Mutant:
    """Everything is loaded from the older checkpoint, and taken for the state of the newest."""
    load = TrainingState.load

    def broken(self: TrainingState, directory: Path, rank_file: Path) -> None:
        older = directory.parent / _older(directory.name)
        load(self, older, older / rank_file.name)

    TrainingState.load = broken
    return Mutant()


def stop_priming() -> Mutant:
    BucketPrimer.done = property(lambda self: True)  # pyright: ignore[reportAttributeAccessIssue]
    return Mutant()


MUTANTS: dict[str, Callable[[], Mutant]] = {
    "rng-python": forget_stream("python"),
    "rng-numpy": forget_stream("numpy"),
    "rng-torch": forget_stream("torch"),
    "rng-all": after_load(forget_all_streams, streams),
    "rng-of-one-rank": after_load(forget_all_streams, streams, ranks=(1,)),
    "rng-swapped": files_of(lambda own: {0: 1, 1: 0}.get(own, own)),
    "rng-of-rank-0": files_of(lambda own: 0),
    "evaluation-draws": Evaluation,
    "early-draw": EarlyDraw,
    "epoch-not-set": never_set_epoch,
    "epoch-ahead": wrong_epoch(1),
    "skip-one-more": skip(lambda done: done + 1),
    "skip-one-less": skip(lambda done: done - 1),
    "skip-nothing": skip(lambda done: 0),
    "data-seed": another_data_seed,
    "shares-swapped": swap_shares,
    "sample-rng-seed": wrong_sample_rng(1, 0),
    "sample-rng-epoch": wrong_sample_rng(0, -1),
    "other-contents": OtherContents,
    "hash-order": HashOrder,
    "optimizer-empty": after_load(clear_optimizer),
    "optimizer-exp-avg": zero("exp_avg"),
    "optimizer-exp-avg-sq": zero("exp_avg_sq"),
    "optimizer-step-reset": zero("step"),
    "optimizer-step-off": after_load(one_step_less),
    "optimizer-swapped": after_load(swap_moments),
    "rate-overwritten": overwrite("lr", 1e-2),
    "decay-overwritten": overwrite("weight_decay", 0.0),
    "scheduler-forgotten": after_load(forget_schedule, schedules),
    "scheduler-ahead": after_load(schedule_ahead),
    "scaler": after_load(forget_scaler, lambda state: dict(scaler_of(state).state_dict())),
    "tensor-forgotten": after_load(forget_tensor, parameters),
    "bit-of-one-rank": after_load(flip_bit, ranks=(1,)),
    "batchnorm-mean-of-one-rank": after_load(reset_buffer("1.running_mean"), ranks=(1,)),
    "batchnorm-count": after_load(reset_buffer("1.num_batches_tracked")),
    "average-forgotten": forget_registered("average"),
    "clip-forgotten": forget_registered("clip"),
    "clip-on-rank-0-alone": forget_registered("clip", ranks=(1, 2)),
    "stale-gradient": StaleGradient,
    "evaluation-mode": EvaluationMode,
    "late-optimizer": lambda: Late(clear_optimizer),
    "late-rate": lambda: Late(set_rate),
    "late-weight": lambda: Late(zero_bias, ranks=(1,)),
    "late-clip": lambda: Late(shrink_clip),
    "late-buffer": lambda: Late(reset_buffer("1.running_mean"), ranks=(1,)),
    "late-average": lambda: Late(reset_average),
    "position-batch-off": restored_at(lambda at: Position(epoch=at.epoch, batches=at.batches + 1, step=at.step)),
    "position-miscounted": miscounted_batches,
    "position-step-off": restored_at(lambda at: Position(epoch=at.epoch, batches=at.batches, step=at.step + 1)),
    "position-epoch-off": restored_at(lambda at: Position(epoch=at.epoch - 1, batches=at.batches, step=at.step)),
    "micro-step-off": after_load(wrong_micro_step),
    "older-checkpoint": older_checkpoint,
    "older-state": older_weights,
    "mixed-checkpoint": after_load(mixed_checkpoint),
    "unprimed": stop_priming,
}
