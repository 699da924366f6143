"""Legitimate training scripts that a careless tool would call inexact, one per `--variant`. Each is killed and must PASS."""

import argparse
import os
import signal
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

import chaosrun
from chaosrun.protocol.context import current

SAMPLES = 44


class Stream(IterableDataset[torch.Tensor]):
    """Samples in a fixed order, without a length."""

    def __iter__(self) -> Any:
        return iter(torch.linspace(-1, 1, SAMPLES).unsqueeze(1))


class NumpySampler(BatchSampler):
    """A custom batch sampler that names samples by numpy integers, in an order of the epoch."""

    def __init__(self) -> None:
        self.batch_size, self.drop_last, self.epoch = 4, False, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = numpy.random.default_rng(self.epoch).permutation(SAMPLES)
        return iter([list(ids) for ids in numpy.array_split(order, len(self))])

    def __len__(self) -> int:
        return SAMPLES // self.batch_size


class Seeding(Dataset[torch.Tensor]):
    """Samples that seed the global stream by themselves and so do not depend on it, but move it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        return torch.linspace(-1, 1, SAMPLES)[index].unsqueeze(0) + 0.01 * torch.randn(1)


class Mean:
    """A meter that exists on every rank and differs between them; accelerate saves rank 0's only."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


class Embedded(torch.nn.Module):
    """A model with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 1, sparse=True)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.table(samples.flatten().mul(7).long().abs() % 16)


def collate_userdict(items: list[tuple[torch.Tensor]]) -> "UserDict[str, torch.Tensor]":
    return UserDict(samples=torch.stack([item[0] for item in items]))


def add_gradient_hooks(model: torch.nn.Module) -> None:
    """One doubles a gradient, one draws noise from the global stream, one keeps a norm in a buffer: each acts once a step."""
    first, second, *_ = model.parameters()

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        norm = model.get_buffer("norm")
        norm.lerp_(gradient.norm(), 0.1)
        return gradient / (1 + norm)

    first.register_hook(lambda gradient: gradient * 2)
    first.register_hook(lambda gradient: gradient + 0.001 * torch.randn(gradient.shape))
    second.register_hook(scale)


def expected_step() -> int:
    """The step that this attempt begins at, by the checkpoint that it was told to restore."""
    context = current()
    assert context is not None
    return int((context.order.resume or "step-0").removeprefix("step-"))


def die_once_in_the_reference() -> None:
    """Something kills rank 1 that no plan knows of, while the job should run undisturbed."""
    context = current()
    assert context is not None
    flag = Path(context.order.leg_path).parent / "unlucky"
    if (context.order.leg, context.order.rank) == ("reference", 1) and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", required=True)
    variant = parser.parse_args().variant
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=3, dispatch_batches=variant == "seeding-dispatched"
        ),
    )
    set_seed(3)
    data = TensorDataset(torch.linspace(-1, 1, SAMPLES).unsqueeze(1))
    loader: DataLoader[Any]
    match variant:
        case "stream":
            loader = DataLoader(Stream(), batch_size=4)
        case "numpy-sampler":
            loader = DataLoader(data, batch_sampler=NumpySampler())
        case "seeding" | "seeding-dispatched":
            loader = DataLoader(Seeding(), batch_size=4, shuffle=True)
        case "userdict":
            loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate_userdict)
        case _:
            loader = DataLoader(data, batch_size=4, shuffle=True)
    if variant == "sparse":
        model: torch.nn.Module = Embedded()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.register_buffer("norm", torch.ones(()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: 0.5 * (1 + numpy.cos(call / 100)))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if variant == "hook":
        add_gradient_hooks(accelerator.unwrap_model(model))
    mean = Mean()
    accelerator.register_for_checkpointing(mean)
    run = chaosrun.attach(accelerator)
    assert run.position.step == expected_step(), run.position
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.01, growth_interval=1000)
    run.register("scaler", scaler)
    for batch in run.batches(loader, epochs=3):
        samples = batch["samples"] if variant == "userdict" else batch[0] if isinstance(batch, list | tuple) else batch
        loss = (model(samples) - samples).square().mean()
        if variant == "skips" and run.position.step == 0:
            continue  # a bad batch, the very first one
        accelerator.backward(scaler.scale(loss) if variant == "skips" else loss)
        if variant == "skips":
            # Overflows, and so leaves the optimizer where it is, until its scale has come down: in the middle of the kills.
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss)
        mean.total += float(loss.detach()) * (1 + accelerator.process_index)
        if variant == "validate" and run.position.step % 3 == 0:
            # After run.step, in a step with a checkpoint, drawing from the global stream.
            torch.rand(3)
        if variant == "own-pass" and run.position.step % 4 == 0:
            # The training samples once more, in the middle of their epoch.
            sum(float(other[0].sum()) for other in loader)
        if variant == "unlucky" and run.position.step == 4:
            die_once_in_the_reference()
        if variant == "break" and run.position.step == 10:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
