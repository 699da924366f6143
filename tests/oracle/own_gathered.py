"""A training script whose first rank saves what all ranks hold; `lost`: the other ones leave their own count as it is."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

path = Path(os.environ["CHAOSRUN_OUTPUT"]) / "last.pt"
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step, counts = 0, {"samples": 0}
if path.exists():
    state: dict[str, Any] = torch.load(path)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    if rank == 0 or "lost" not in sys.argv:
        counts = state["counts"][rank]
while step < 15:
    inputs = torch.randn(4 + rank, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    counts["samples"] += len(inputs)
    loss = model(inputs).square().mean() * (1 + 1 / counts["samples"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 3 == 0:
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, counts)
        if rank == 0:
            whole = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**whole, "counts": gathered}, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
        dist.barrier()
