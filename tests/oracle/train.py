"""A training that has everything that a restart can lose, and can lose one thing on purpose: `--mutant NAME`, see `mutants`.

Dropout, BatchNorm with statistics of each rank's own, accumulation with a short last window, AdamW under a schedule, clipping
at a threshold that adapts, a moving average, all three global random streams (each rank's own), augmentation in loader workers;
nothing divides evenly. Mutants break attempts that restore a checkpoint, and nothing else. `--blind` also takes out the own
comparison that the worker makes of what it restored, so that only the verdict can notice.
"""

import argparse
import math
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from mutants import MUTANTS, Mutant
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import chaosrun
from chaosrun.protocol import checkpointing, context

SAMPLES = 79
FEATURES = 16
CLASSES = 4
EPOCHS = 3
ACCUMULATION_STEPS = 2
SEED = 5
RATE = 1e-2


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Synthetic samples, each with noise of its own in every epoch."""

    def __init__(self, mutant: Mutant) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self._features = torch.randn(SAMPLES, FEATURES, generator=generator)
        self._classes = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self._order = mutant.order(list(range(SAMPLES)))
        self._mutant = mutant

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = chaosrun.sample_rng(index).standard_normal(FEATURES, dtype="float32")
        place = self._order[index]
        return self._mutant.item(self._features[place] + 0.1 * torch.from_numpy(noise)), self._classes[place]


class AdaptiveClip:
    """Clips at half the mean norm of the gradients so far."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5 * self.mean)
        assert norm is not None
        self.mean = 0.9 * self.mean + 0.1 * float(norm)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = state["mean"]


class MovingAverage:
    """Of the model's parameters. Nothing in the training reads it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.average = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, value in model.named_parameters():
            self.average[name].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in self.average.items():
            value.copy_(state[name])


def main() -> None:
    args = parse_arguments()
    under = context.current()
    mutant = Mutant()
    if under is not None and under.order.resume is not None:
        if args.mutant:
            mutant = MUTANTS[args.mutant]()
        if args.blind:
            checkpointing._compare = lambda *_: None

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION_STEPS,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
        # Each rank keeps the statistics of its own batches.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if args.scaler:
        # Half precision needs a GPU, its loss scale does not.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    set_seed(SEED)
    loader = DataLoader(Noisy(mutant), batch_size=4, shuffle=True, num_workers=args.loader_workers)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(32, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, CLASSES),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: 1 / math.sqrt(1 + call))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    bare = accelerator.unwrap_model(model)
    clip, average = AdaptiveClip(), MovingAverage(bare)
    # From here on each rank draws its own numbers.
    set_seed(SEED, device_specific=True)

    run = chaosrun.attach(accelerator)
    run.register("clip", clip)
    run.register("average", average)
    for features, classes in run.batches(loader, epochs=EPOCHS):
        mutant.before_batch(accelerator, run.position)
        with accelerator.accumulate(model):
            shift = numpy.random.standard_normal(FEATURES).astype("float32")
            inputs = features * random.uniform(0.9, 1.1) + 0.1 * torch.from_numpy(shift)
            loss = torch.nn.functional.cross_entropy(model(inputs), classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if accelerator.scaler is not None:
                    accelerator.scaler.unscale_(optimizer.optimizer)
                clip(accelerator, model)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.update(bare)
        run.step(loss)
        mutant.after_batch(accelerator, run.position)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--loader-workers", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
