"""Train a small network that tells points of two rings apart: plain torch, DistributedDataParallel, checkpoints of its own.

`torchrun --nproc_per_node 2 train.py` trains in two processes. Started again, whatever ended it, it goes on from its last
checkpoint; `chaosrun submit job.yaml` kills it and proves that. Nothing in here knows of chaosrun. Put your own data and model
in their place.
"""

import itertools
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SEED = 1
EPOCHS = 4
SAVE_EVERY = 5
CHECKPOINT = Path("checkpoints/last.pt")


def main() -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

    torch.manual_seed(SEED)
    data = two_rings(128)
    sampler = DistributedSampler(data, seed=SEED)
    # A generator of its own: starting the loader then draws nothing from the stream that dropout draws from.
    loader = DataLoader(data, batch_size=8, sampler=sampler, generator=torch.Generator())
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    torch.manual_seed(SEED + rank)  # each rank drops out its own

    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        set_random_state(saved["random"][rank])
        step = saved["step"]

    loss = torch.tensor(0.0)
    done, skipped = divmod(step, len(loader))
    for epoch in range(done, EPOCHS):
        sampler.set_epoch(epoch)
        for points, rings in itertools.islice(loader, skipped, None):
            loss = nn.functional.cross_entropy(model(points.to(device)), rings.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                save(step, model=network, optimizer=optimizer, scheduler=scheduler)
        skipped = 0

    if rank == 0:
        print(f"loss {loss.item():.4f} after {step} steps")
    dist.destroy_process_group()


def save(step: int, **parts: Any) -> None:
    """Rank 0 writes what all ranks share and the random state of each; the old file stays until the new one is complete."""
    random = [None] * dist.get_world_size()
    dist.all_gather_object(random, random_state())
    if dist.get_rank() == 0:
        CHECKPOINT.parent.mkdir(exist_ok=True)
        written = CHECKPOINT.with_suffix(".tmp")
        with written.open("wb") as file:
            torch.save({"step": step, "random": random, **{name: part.state_dict() for name, part in parts.items()}}, file)
            file.flush()
            os.fsync(file.fileno())
        written.replace(CHECKPOINT)


def random_state() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def set_random_state(state: list[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state[1])


def two_rings(count: int) -> TensorDataset:
    """Points on a plane, shape (count, 2), and the ring that each lies on, 0 or 1."""
    rings = torch.arange(count) % 2
    angles = 2 * math.pi * torch.rand(count)
    radii = 1.0 + rings + 0.1 * torch.randn(count)
    return TensorDataset(torch.stack((radii * angles.cos(), radii * angles.sin()), dim=1), rings)


if __name__ == "__main__":
    main()
