"""A sharded model trained by `run.windows`: `windows.py --way fsdp`. The gradients of its first window are held against those
of the whole model, summed over the data by hand.
"""

import argparse
import copy
import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import chaosrun

JOB = runpy.run_path(str(Path(__file__).parents[3] / "jobs" / "fsdp" / "train.py"), run_name="job")
WIDTH, BLOCKS = JOB["WIDTH"], JOB["BLOCKS"]


def loss_sum(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def expect_gradients(model: nn.Module, whole: nn.Module, batches: list[list[torch.Tensor]], items: int) -> None:
    """Every rank's data count, those of ranks that share them as often: so do their items."""
    for batch in batches:
        (loss_sum(whole, batch) / items).backward()
    for own, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert own.grad is not None and expected.grad is not None
        dist.all_reduce(expected.grad)
        seen = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        torch.testing.assert_close(seen, expected.grad)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--way", default="fsdp")
    given = arguments.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(88, WIDTH), torch.randn(88, 1))
    blocks = [nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    whole = copy.deepcopy(model)
    ranks, place = JOB["shard"](model, given.way)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=ranks, rank=place, seed=5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    run = chaosrun.attach(model, optimizer, loader)
    for window in run.windows(loader, model, epochs=3, accumulation_steps=2, count=lambda batch: len(batch[0])):
        done = []
        for batch in window:
            window.backward(loss_sum(model, batch))
            done.append(batch)
        if run.position.step == 0:
            expect_gradients(model, whole, done, window.items)
        optimizer.step()
        optimizer.zero_grad()
        run.step(window.loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
