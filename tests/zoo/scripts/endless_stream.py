"""A loader as torchtitan has it: it goes through a stream of datasets again and again, and its state is the stream's."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=36)
options = parser.parse_args()


class Endless(IterableDataset):
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            for row in iter(self.stream):
                yield torch.tensor(row["inputs"])

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])


torch.manual_seed(1)
samples = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
stream = Dataset.from_dict({"inputs": samples.tolist()}).to_iterable_dataset(num_shards=2)
loader = StatefulDataLoader(Endless(stream), batch_size=4)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
checkpoint = options.output / "last.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    step = saved["step"]

batches = iter(loader)
while step < options.steps:
    inputs = next(batches)
    loss = nn.functional.mse_loss(model(inputs).squeeze(-1), inputs.sum(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save({**state, "step": step}, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
