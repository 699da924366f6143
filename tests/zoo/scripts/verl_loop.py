"""The loop of verl's trainers: the epoch follows from the step, and the loader's state is loaded before its first pass."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--epochs", type=int, default=4)
options = parser.parse_args()

torch.manual_seed(1)
samples = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(samples, samples.sum(1))
loader = StatefulDataLoader(data, batch_size=4, drop_last=True, generator=torch.Generator().manual_seed(7))
checkpoint = options.output / "last.pt"
global_steps = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    global_steps = saved["global_steps"]

for _ in range(global_steps // len(loader), options.epochs):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs).squeeze(-1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        global_steps += 1
        if global_steps % 3 == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save({**state, "global_steps": global_steps}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
