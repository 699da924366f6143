"""A small accelerate training whose samples are augmented, for test_randomness: `--augment` says what draws."""

import argparse
import random

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset

import chaosrun

SAMPLES = 39
SEED = 5


class Augmented(Dataset[torch.Tensor]):
    """Two numbers a sample; `augment` names the stream that moves them."""

    def __init__(self, augment: str) -> None:
        self.augment = augment
        self.values = torch.linspace(-1, 1, 2 * SAMPLES).reshape(SAMPLES, 2)
        self.own = numpy.random.default_rng(SEED)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index] + 0.1 * torch.tensor(self.draw(index))

    def draw(self, index: int) -> float:
        match self.augment:
            case "sample_rng":
                return chaosrun.sample_rng(index).standard_normal()
            case "own":
                return self.own.standard_normal()
            case _:
                return random.gauss() + numpy.random.standard_normal() + float(torch.randn(()))


def alike(worker_id: int) -> None:
    """The classic mistake: every loader worker draws the same numbers, in every epoch."""
    numpy.random.seed(0)


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED))
    set_seed(SEED)
    data: Dataset[torch.Tensor] = Augmented("global" if args.augment == "reproducible" else args.augment)
    if args.augment == "reproducible":
        data = chaosrun.reproducible(data)
    loader = DataLoader(
        data,
        batch_size=4,
        shuffle=True,
        num_workers=args.loader_workers,
        persistent_workers=args.persistent,
        prefetch_factor=args.prefetch,
        worker_init_fn=alike if args.alike else None,
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = chaosrun.attach(accelerator)
    for samples in run.batches(loader, epochs=3):
        if args.scatter:
            samples.put_(torch.arange(2), torch.zeros(2))
        loss = (model(samples) - samples).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--augment", choices=["sample_rng", "reproducible", "global", "own"], default="sample_rng")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--prefetch", type=int)
    parser.add_argument("--alike", action="store_true", help="seed numpy alike in every loader worker")
    parser.add_argument("--scatter", action="store_true", help="use an operation without a deterministic implementation")
    return parser.parse_args()


if __name__ == "__main__":
    main()
