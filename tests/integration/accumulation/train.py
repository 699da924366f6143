"""A small network trained through `run.windows`, for test_accumulation: dropout, clipping, samples with one to nine items each.

`--hold-back last` holds DDP's synchronisation back on the last micro-batch instead of on all the others, as a published listing
does; `--uneven` has rank 1's loader come one batch short in every window.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.protocol.bucket_priming import BucketPrimer
from chaosrun.protocol.windows import WindowCutter

SEED = 3
LONGEST = 9


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED))
    set_seed(SEED)
    loader = DataLoader(make_data(args.samples), batch_size=args.batch_size, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Dropout(args.dropout), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # accelerate steps a prepared scheduler once for each process: two workers must not decay twice as fast as one.
    workers = accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: 0.99 ** (call / workers))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    run = chaosrun.attach(accelerator)
    if args.uneven and accelerator.process_index == 1:
        fetch = WindowCutter._fetch
        WindowCutter._fetch = lambda self, source: fetch(self, source)[:-1]
    if args.hold_back == "last":
        # It could not be primed: the pass that it waits for never reduces anything.
        BucketPrimer.done = property(lambda self: True)  # pyright: ignore[reportAttributeAccessIssue]
    for window in run.windows(
        loader, model, epochs=args.epochs, accumulation_steps=args.accumulation, count=lambda batch: batch[2].sum()
    ):
        for number, (features, targets, real) in enumerate(window, start=1):
            if args.hold_back == "last":
                model.require_backward_grad_sync = number < len(window)
            errors = (model(features).squeeze(-1) - targets).square() * real
            window.backward(errors.sum())
        if args.hold_back == "last":
            model.require_backward_grad_sync = True
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(window.loss)


def make_data(samples: int) -> TensorDataset:
    """(features, targets, real) of LONGEST places a sample: the first one to LONGEST of them are real."""
    generator = torch.Generator().manual_seed(SEED)
    features = torch.randn(samples, LONGEST, 8, generator=generator)
    lengths = torch.randint(1, LONGEST + 1, (samples, 1), generator=generator)
    # The longer the sample, the larger its targets: to weigh samples wrongly shows.
    targets = features.sum(dim=-1).sin() + lengths / LONGEST
    real: Tensor = torch.arange(LONGEST).unsqueeze(0) < lengths
    return TensorDataset(features, targets, real)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--hold-back", choices=["others", "last"], default="others")
    return parser.parse_args()


if __name__ == "__main__":
    main()
