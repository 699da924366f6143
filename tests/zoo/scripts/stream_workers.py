"""A stream of datasets behind a StatefulDataLoader with lasting workers; the loader's state is saved with the model."""

import argparse
import os
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

torch.manual_seed(1)
samples = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
stream = Dataset.from_dict({"inputs": samples.tolist()}).to_iterable_dataset(num_shards=4).with_format("torch")
loader = StatefulDataLoader(stream, batch_size=4, num_workers=2, persistent_workers=True)
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
    stream.set_epoch(epoch)
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch["inputs"]).squeeze(-1), batch["inputs"].sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save({**state, "epoch": epoch, "step": step}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
