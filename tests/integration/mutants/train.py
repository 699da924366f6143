"""A small accelerate training with something wrong in it on purpose, for test_not_fooled: `--mutant NAME`.

What is wrong is so in every attempt, but for `final-bit`. (What goes wrong in a restart is in tests/oracle.)
"""

import argparse
import os
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.protocol import context
from chaosrun.protocol.recorder import Recorder
from chaosrun.records.traces import CheckpointRecord

EPOCHS = 3
SEED = 5
RANDOM_AFTER_STEP = 4


def main() -> None:
    args = parse_arguments()
    under = context.current()
    if args.mutant == "final-bit" and under is not None and under.order.resume is not None:
        flip_final_bit()

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
    )
    set_seed(SEED if args.mutant != "random" else draw())
    with numpy.load(args.data) as arrays:
        data = TensorDataset(*(torch.from_numpy(arrays[name]) for name in ("features", "classes")))
        scale = float(arrays["features"][0, 0])
    if args.mutant == "late-data":
        drawn = torch.Generator().manual_seed(SEED)
        data = TensorDataset(torch.randn(data.tensors[0].shape, generator=drawn), torch.arange(len(data)) % 4)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(data.tensors[0].shape[1], 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    run = chaosrun.attach(accelerator)
    for features, classes in run.batches(loader, epochs=EPOCHS):
        if args.mutant == "random-later" and run.position.step >= RANDOM_AFTER_STEP:
            torch.manual_seed(draw())
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(features), classes)
            if args.mutant == "late-data" and run.position.step >= RANDOM_AFTER_STEP:
                loss = loss * scale
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.step(loss)


def draw() -> int:
    """A seed that is another one in every process."""
    return int.from_bytes(os.urandom(4), "little")


def flip_final_bit() -> None:
    """Flip the lowest bit of one weight on rank 1, between the last checkpoint and the end line."""
    finish, checkpoint = Recorder.finish, Recorder._checkpoint

    def broken(self: Recorder, at: Any) -> None:
        def last(position: Any) -> CheckpointRecord:
            saved = checkpoint(self, position)
            if self.order.rank == 1:
                self.observer.parameters[0].detach().view(torch.int32).view(-1)[7] ^= 1
            return saved

        self._checkpoint = last
        finish(self, at)

    Recorder.finish = broken  # pyright: ignore[reportAttributeAccessIssue]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--mutant", choices=["final-bit", "random", "random-later", "late-data"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
