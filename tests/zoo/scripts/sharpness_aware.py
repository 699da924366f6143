"""A plain loop with pytorch_optimizer's SAM around Adam; its state dict is the one that is saved and loaded."""

import argparse
import os
from pathlib import Path

import torch
from pytorch_optimizer import SAM
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()

torch.manual_seed(1)
samples = torch.randn(options.steps, 8, 4, generator=torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = SAM(model.parameters(), torch.optim.Adam, lr=1e-2)
checkpoint = options.output / "last.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]


def closure() -> torch.Tensor:
    loss = (model(samples[step]).squeeze(-1) - samples[step].sum(1)).square().mean()
    loss.backward()
    return loss


while step < options.steps:
    closure()
    optimizer.step(closure)
    optimizer.zero_grad()
    step += 1
    if step % 5 == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
