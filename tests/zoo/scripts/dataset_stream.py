"""A model trained on a stream of Hugging Face datasets; the stream's state is saved with the model and loaded at a restart."""

import argparse
import os
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from torch import nn


def stream(kind: str) -> IterableDataset:
    rows = Dataset.from_dict({"id": list(range(3000))})
    match kind:
        case "plain":
            return rows.to_iterable_dataset(num_shards=1)
        case "map":
            return rows.to_iterable_dataset(num_shards=1).map(lambda row: {**row, "scaled": row["id"] / 1000})
        case "filter":
            return rows.with_format("torch").to_iterable_dataset(num_shards=1).filter(lambda row: int(row["id"]) % 2 == 0)
        case "shuffle":
            return rows.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=100)
    raise SystemExit(f"unknown kind of stream: {kind}")


parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["plain", "map", "filter", "shuffle"])
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch", type=int, default=20)
options = parser.parse_args()

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = stream(options.kind)
step = 0

checkpoint = options.output / "last.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    data.load_state_dict(saved["data"])
    torch.set_rng_state(saved["rng"])
    step = saved["step"]

for batch in data.iter(batch_size=options.batch):
    ids = torch.as_tensor(batch["id"], dtype=torch.float32).unsqueeze(1) / 1000
    loss = (model(ids) - ids.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
        torch.save({**state, "rng": torch.get_rng_state(), "step": step}, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
    if step == options.steps:
        break
print(f"finished after {step} steps")
