"""Train a small network that tells points of two rings apart, by accelerate, with accelerate's own checkpoints.

`accelerate launch --multi_gpu --num_processes 2 train.py` trains in two processes, also without GPUs. Started again, whatever
ended it, it resumes from its last checkpoint; `chaosrun submit job.yaml` kills it and proves that. Nothing in here knows of
chaosrun. Put your own data and model in their place.
"""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 1
EPOCHS = 4
SAVE_EVERY = 5
CHECKPOINTS = Path("checkpoints")


def main() -> None:
    # The shuffle follows from this seed and the epoch alone: a restart finds its place in it.
    data_order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=data_order)
    set_seed(SEED)
    # A generator of its own: starting the loader then draws nothing from the stream that dropout draws from.
    loader = DataLoader(two_rings(128), batch_size=8, shuffle=True, generator=torch.Generator())
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    step = 0
    saved = sorted(CHECKPOINTS.glob("step-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.removeprefix("step-"))

    loss = torch.tensor(0.0)
    done, skipped = divmod(step, len(loader))
    for epoch in range(done, EPOCHS):
        loader.set_epoch(epoch)
        rest: Any = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        rest.set_epoch(epoch)  # accelerate before 1.15 loses it when it skips
        for points, rings in rest:
            loss = nn.functional.cross_entropy(model(points), rings)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                save(accelerator, step)
        skipped = 0

    accelerator.print(f"loss {loss.item():.4f} after {step} steps")
    accelerator.end_training()


def save(accelerator: Accelerator, step: int) -> None:
    """A directory for each checkpoint, under its name only once it is complete; the last two are kept."""
    written = CHECKPOINTS / f"writing-{step:06}"
    accelerator.save_state(str(written))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for path in (*written.rglob("*"), written):
            opened = os.open(path, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)
        written.replace(CHECKPOINTS / f"step-{step:06}")
        for old in sorted(CHECKPOINTS.glob("step-*"))[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def two_rings(count: int) -> TensorDataset:
    """Points on a plane, shape (count, 2), and the ring that each lies on, 0 or 1."""
    rings = torch.arange(count) % 2
    angles = 2 * math.pi * torch.rand(count)
    radii = 1.0 + rings + 0.1 * torch.randn(count)
    return TensorDataset(torch.stack((radii * angles.cos(), radii * angles.sin()), dim=1), rings)


if __name__ == "__main__":
    main()
