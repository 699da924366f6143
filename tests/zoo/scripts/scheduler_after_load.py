"""A plain loop that loads model and optimizer, then makes its scheduler and loads that, as many scripts do."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()

torch.manual_seed(1)
samples = torch.randn(options.steps, 8, 4, generator=torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpoint = options.output / "last.pt"
saved = torch.load(checkpoint) if checkpoint.exists() else None
step = 0
if saved is not None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
warmup, decay = LinearLR(optimizer, 0.1, total_iters=6), CosineAnnealingLR(optimizer, T_max=options.steps - 6)
scheduler = SequentialLR(optimizer, [warmup, decay], milestones=[6])
if saved is not None:
    scheduler.load_state_dict(saved["scheduler"])

while step < options.steps:
    inputs = samples[step]
    loss = (model(inputs).squeeze(-1) - inputs.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    if step % 5 == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "step": step}, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
