"""A plain loop whose scheduler, or the optimizer that its scheduler sets, comes from a library."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

parser = argparse.ArgumentParser()
parser.add_argument("library", choices=["warmup_scheduler", "pytorch_optimizer"])
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--mix", type=int, default=1000, help="steps after which Lookahead mixes in its slow weights")
options = parser.parse_args()


def built() -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    if options.library == "pytorch_optimizer":
        from pytorch_optimizer import Lookahead

        ahead = Lookahead(optimizer, k=options.mix)
        return ahead, CosineAnnealingLR(ahead, T_max=options.steps)
    from warmup_scheduler import GradualWarmupScheduler

    decay = CosineAnnealingLR(optimizer, T_max=options.steps - 6)
    return optimizer, GradualWarmupScheduler(optimizer, multiplier=1, total_epoch=6, after_scheduler=decay)


torch.manual_seed(1)
samples = torch.randn(options.steps, 8, 4, generator=torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer, scheduler = built()
checkpoint = options.output / "last.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    step = saved["step"]

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
