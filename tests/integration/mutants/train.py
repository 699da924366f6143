"""A small accelerate training that can break one thing on purpose, for test_not_fooled: `--mutant NAME`.

MUTANTS break the resume protocol, and only in attempts that restore a checkpoint; the others are on in every attempt.
`--blind` also takes out the comparison of digests after a restore, so that only the verdict can notice.
"""

import argparse
import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.train import checkpointing, context, resume, session
from chaosrun.train.buckets import BucketPrimer
from chaosrun.train.recorder import Recorder
from chaosrun.train.rng import capture_rng, restore_rng
from chaosrun.train.state import TrainingState

EPOCHS = 3
SEED = 5
RANDOM_FROM_STEP = 4
CPU = torch.device("cpu")


def main() -> None:
    args = parse_arguments()
    under = context.current()
    if under is not None and under.order.resume is not None:
        if args.mutant in MUTANTS:
            MUTANTS[args.mutant]()
        if args.blind:
            checkpointing._compare = lambda *_: None
    if args.mutant == "never-primed":
        stop_priming()

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
    )
    set_seed(SEED if args.mutant != "random" else draw())
    with numpy.load(args.data) as arrays:
        data = TensorDataset(*(torch.from_numpy(arrays[name]) for name in ("features", "classes")))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(data.tensors[0].shape[1], 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    run = chaosrun.attach(accelerator)
    for features, classes in run.batches(loader, epochs=EPOCHS):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(features), classes)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.step(loss)
        if args.mutant == "random-later" and run.position.step >= RANDOM_FROM_STEP:
            torch.manual_seed(draw())


def draw() -> int:
    """A seed that is another one in every process."""
    return int.from_bytes(os.urandom(4), "little")


def forget(take: Callable[[TrainingState], Any], put: Callable[[TrainingState, Any], None]) -> None:
    """Have a restore end with putting back what was there before it."""
    load = TrainingState.load

    def broken(self: TrainingState, directory: Path, rank_file: Path) -> None:
        before = take(self)
        load(self, directory, rank_file)
        put(self, before)

    TrainingState.load = broken


def forget_rng() -> None:
    forget(lambda state: capture_rng(CPU), lambda state, before: restore_rng(before, CPU))


def forget_optimizer() -> None:
    def drop(state: TrainingState, _: None) -> None:
        for optimizer in state.optimizers():
            optimizer.state.clear()

    forget(lambda state: None, drop)


def forget_scheduler() -> None:
    def take(state: TrainingState) -> list[dict[str, Any]]:
        return [copy.deepcopy(scheduler.state_dict()) for scheduler in state._accelerator._schedulers]

    def put(state: TrainingState, before: list[dict[str, Any]]) -> None:
        for scheduler, values in zip(state._accelerator._schedulers, before, strict=True):
            scheduler.load_state_dict(values)

    forget(take, put)


def forget_epoch() -> None:
    resume.DataLoaderShard.set_epoch = lambda self, epoch: None


def skip(batches: int) -> None:
    """Have the resumed epoch go on this many batches too late."""
    open_epoch = session.open_epoch

    def broken(*args: Any, batches_done: int, **kwargs: Any) -> Any:
        return open_epoch(*args, batches_done=batches_done + batches if batches_done else 0, **kwargs)

    session.open_epoch = broken


def stop_priming() -> None:
    BucketPrimer.done = property(lambda self: True)  # pyright: ignore[reportAttributeAccessIssue]


def flip_final_bit() -> None:
    """Flip the lowest bit of one weight on rank 1, after the last step was recorded and before the end line is."""
    finish = Recorder.finish

    def broken(self: Recorder, position: Any) -> None:
        if self._order.rank == 1 and not self.ended:
            self._parameters[0].detach().view(torch.int32).view(-1)[7] ^= 1
        finish(self, position)

    Recorder.finish = broken


MUTANTS: dict[str, Callable[[], None]] = {
    "rng": forget_rng,
    "optimizer": forget_optimizer,
    "scheduler": forget_scheduler,
    "epoch": forget_epoch,
    "skip": lambda: skip(1),
    "repeat": lambda: skip(-1),
    "unprimed": stop_priming,
    "final-bit": flip_final_bit,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--mutant", choices=[*MUTANTS, "never-primed", "random", "random-later"])
    parser.add_argument("--blind", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
