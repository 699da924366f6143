"""A plain loop over torchdata's StatefulDataLoader; its state is saved with the model, also where an epoch ends."""

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
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = TensorDataset(samples, samples.sum(1))
loader = StatefulDataLoader(data, batch_size=4, generator=torch.Generator().manual_seed(7))
checkpoint = options.output / "last.pt"
first = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    first = saved["epoch"]

for epoch in range(first, options.epochs):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs).squeeze(-1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    options.output.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
        "epoch": epoch + 1,
    }
    torch.save(state, f"{checkpoint}.new")
    os.replace(f"{checkpoint}.new", checkpoint)
