"""A plain loop whose optimizer comes from a library; it is saved as that is evaluated, and all of its state is loaded."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("library", choices=["prodigyplus", "pytorch_optimizer"])
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()

torch.manual_seed(1)
samples = torch.randn(options.steps, 8, 4, generator=torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
if options.library == "prodigyplus":
    from prodigyplus import ProdigyPlusScheduleFree

    optimizer = ProdigyPlusScheduleFree(model.parameters(), lr=1.0)
else:
    from pytorch_optimizer import AdamW, ScheduleFreeWrapper

    optimizer = ScheduleFreeWrapper(AdamW(model.parameters(), lr=1e-2), momentum=0.9)
checkpoint = options.output / "last.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]

optimizer.train()
while step < options.steps:
    inputs = samples[step]
    loss = (model(inputs).squeeze(-1) - inputs.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        optimizer.eval()
        options.output.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step}, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
        optimizer.train()
