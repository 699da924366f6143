"""Plain training with checkpoints of its own, as people write it; what it leaves out on request is what a drill is to find."""

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--leave-out", choices=["nothing", "step", "save", "optimizer"], default="nothing")
    parser.add_argument("--on-notice", action="store_true", help="leave at the end of an epoch in which SIGTERM came")
    options = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    net = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data: Dataset[Any] = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    told: list[int] = []
    if options.on_notice:
        signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
        # By another word than import: who imports it is taken to attach to it.
        data = importlib.import_module("chaosrun").reproducible(data)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())

    last, first = options.out / "last.pt", 0
    if last.exists():
        state = torch.load(last)
        model.load_state_dict(state["model"])
        if options.leave_out != "optimizer":
            optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
        torch.set_rng_state(state["rng"][rank])
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = ((net(inputs) - targets) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            if options.leave_out != "step":
                optimizer.step()
        rng = [torch.get_rng_state()] * world
        if world > 1:
            dist.all_gather_object(rng, torch.get_rng_state())
        if rank == 0 and options.leave_out != "save":
            options.out.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1, "rng": rng}
            torch.save(state, options.out / "next.pt")
            os.replace(options.out / "next.pt", last)
        if told:
            time.sleep(0.5 * rank)
            sys.exit(0)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
