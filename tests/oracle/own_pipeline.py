"""A training script with a right resume of its own whose model is cut into stages of torch's pipelines, two on each rank."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

path = Path(os.environ["CHAOSRUN_OUTPUT"])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2 * ranks)]
model = nn.ModuleList([layers[rank], layers[rank + ranks]])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
stages: list[Any] = [
    PipelineStage(each, rank + number * ranks, 2 * ranks, torch.device("cpu")) for number, each in enumerate(model)
]
schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
step, own = 0, path / f"{rank}.pt"
if own.exists():
    state = torch.load(own)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 15:
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=inputs.cos())
    optimizer.step()
    step += 1
    if step % 3 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, own.with_suffix(".new"))
        dist.barrier()
        own.with_suffix(".new").replace(own)
        dist.barrier()
dist.destroy_process_group()
