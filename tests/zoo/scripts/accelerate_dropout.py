"""A plain accelerate loop with dropout: save_state every few steps; a restart loads the newest."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()

set_seed(3)
accelerator = Accelerator(cpu=True)
samples = torch.randn(options.steps, 8, 8, generator=torch.Generator().manual_seed(2))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
step = 0
saved = sorted(options.output.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    step = int(saved[-1].name.split("_")[1])

model.train()
while step < options.steps:
    loss = (model(samples[step]).squeeze(-1) - samples[step].sum(1)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 5 == 0:
        accelerator.save_state(str(options.output / f"step_{step}"))
