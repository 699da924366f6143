"""A plain loop over litdata's StreamingDataLoader; its state is saved with the model and loaded at a restart."""

import argparse
import os
from pathlib import Path

import torch
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming import Cache
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

torch.manual_seed(1)
samples = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
chunks = options.output / "chunks"
if not (chunks / "index.json").exists():
    cache = Cache(str(chunks), chunk_size=8)
    for index in range(len(samples)):
        cache[index] = index
    cache.done()
    cache.merge()
loader = StreamingDataLoader(StreamingDataset(str(chunks), shuffle=True), batch_size=4, num_workers=1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
checkpoint = options.output / "last.pt"
step = first = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    first, step = saved["epoch"], saved["step"]

for epoch in range(first, options.epochs):
    for indices in loader:
        inputs = samples[indices]
        loss = nn.functional.mse_loss(model(inputs).squeeze(-1), inputs.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 4:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save({**state, "epoch": epoch, "step": step}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
