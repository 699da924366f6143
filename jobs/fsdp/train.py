"""A sharded model without accelerate: `fully_shard` (FSDP2), also in groups that are replicas (HSDP), tensor parallelism (TP),
or FSDP and TP together. Runs by itself, too: `torchrun --nproc_per_node 4 train.py --way hsdp`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import chaosrun

WIDTH, BLOCKS = 16, 3


def shard(model: nn.Sequential, way: str) -> tuple[int, int]:
    """Shard it in place. Returns over how many ranks the data are split, and this rank's place among them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = 2 if way == "fsdp+tp" else ranks if way == "tp" else 1
    copies = 2 if way == "hsdp" else 1
    mesh = init_device_mesh("cpu", (copies, ranks // copies // tensors, tensors), mesh_dim_names=("replicate", "shard", "tp"))
    blocks = list(model)[:BLOCKS]
    if tensors > 1:
        for block in blocks:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if way != "tp":
        for part in (*blocks, model):
            fully_shard(part, mesh=mesh["replicate", "shard"] if way == "hsdp" else mesh["shard"])
    return ranks // tensors, rank // tensors


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--way", choices=("fsdp", "hsdp", "tp", "fsdp+tp"), default="fsdp")
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--samples", type=int, default=96)
    given = arguments.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(given.samples, WIDTH), torch.randn(given.samples, 1))
    # A width that the ranks do not divide evenly.
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH), nn.Dropout(0.1), nn.LayerNorm(WIDTH))
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    ranks, place = shard(model, given.way)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=ranks, rank=place, seed=5))
    # Not by many tensors at once: beside tensor parallelism some are sharded and some are not.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=given.epochs * len(loader))

    run = chaosrun.attach(model, optimizer, loader, scheduler)
    for inputs, targets in run.batches(loader, epochs=given.epochs):
        loss = nn.functional.mse_loss(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss)
        if dist.get_rank() == 0 and run.position.batches == len(loader):
            print(f"epoch {run.epoch}: loss of the last batch {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
