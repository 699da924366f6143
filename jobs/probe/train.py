"""Train a tiny network with dropout on synthetic data: a job that starts fast and steps fast, for timing and tests.

An ordinary accelerate script: `python train.py`, `torchrun --nproc_per_node 2 train.py`, `chaosrun submit job.yaml`.
"""

import argparse
import math
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import chaosrun

FEATURES = 64
CLASSES = 10


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(
        cpu=args.cpu or not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)
    set_seed(args.seed)

    data = TensorDataset(torch.randn(args.samples, FEATURES), torch.randint(CLASSES, (args.samples,)))
    loader = DataLoader(
        data, batch_size=args.batch_size, shuffle=True, num_workers=args.loader_workers, persistent_workers=args.persistent
    )
    steps_an_epoch = math.ceil(math.ceil(len(loader) / accelerator.num_processes) / args.accumulation)
    epochs = math.ceil(args.steps / steps_an_epoch) if args.steps else args.epochs

    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, args.width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(args.width, CLASSES)
    )
    if args.frozen_megabytes:
        frozen = torch.ones(args.frozen_megabytes * 250_000)
        model.register_parameter("frozen", torch.nn.Parameter(frozen, requires_grad=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # accelerate steps a prepared scheduler once for each process at every optimizer step.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10 * accelerator.num_processes, gamma=0.9)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    run = chaosrun.attach(accelerator)
    for features, classes in run.batches(loader, epochs=epochs):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(features), classes)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.step(loss)
        if accelerator.sync_gradients:
            if args.print_losses:
                accelerator.print(f"step {run.position.step} loss {float(loss.detach()).hex()}")
            if args.step_seconds:
                time.sleep(args.step_seconds)

    accelerator.wait_for_everyone()
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny network on synthetic data, for timing and tests.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="as many whole epochs as these optimizer steps take, instead of --epochs")
    parser.add_argument("--samples", type=int, default=340)
    parser.add_argument("--batch-size", type=int, default=8, help="samples in a micro-batch, on each worker")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in an optimizer step")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load data, for each worker")
    parser.add_argument("--persistent", action="store_true", help="keep the loader's processes from epoch to epoch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--frozen-megabytes", type=int, default=0, help="add so much state that is saved and never trained")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep this long at every optimizer step")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--print-losses", action="store_true", help="print the exact training losses of worker 0 at every step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
