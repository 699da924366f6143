"""Scripts that do something of their own about what befalls them, one per `--variant`."""

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.protocol.context import current

SAMPLES = 48


def take_forever(number: int, frame: object) -> None:
    print("SIGTERM: this script takes its time", flush=True)
    time.sleep(600)


def wait_for_the_notice(step: int) -> None:
    """In the first attempt that is disturbed, until somebody has sent it: the test makes the file then."""
    context = current()
    assert context is not None
    order = context.order
    sent = Path(order.leg_path) / "notice-sent"
    while (order.leg, order.attempt, step) == ("chaos", 1, 3) and not sent.exists():
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=["swallow", "own-handler", "own-exit", "cleanup", "linger"], required=True)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3))
    set_seed(3)
    if args.variant == "own-handler":
        signal.signal(signal.SIGTERM, take_forever)
    if args.variant == "own-exit":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    loader: Any = DataLoader(TensorDataset(torch.linspace(-1, 1, SAMPLES).unsqueeze(1)), batch_size=2, shuffle=True)
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = chaosrun.attach(accelerator)
    try:
        for (samples,) in run.batches(loader, epochs=2):
            loss = (model(samples) - samples).square().mean()
            try:
                accelerator.backward(loss)
            except Exception as error:
                if args.variant != "swallow":
                    raise
                print(f"swallowed: {error}", flush=True)
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            if args.variant == "cleanup":
                wait_for_the_notice(run.position.step)
    finally:
        print("cleaned up", flush=True)
        if args.variant == "linger" and accelerator.process_index == 0 and not run.finished:
            time.sleep(600)
    accelerator.end_training()


if __name__ == "__main__":
    main()
