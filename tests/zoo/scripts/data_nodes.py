"""A plain loop over a torchdata.nodes pipeline, whose place is printed before and after it is loaded."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torchdata import nodes

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
options = parser.parse_args()

torch.manual_seed(1)
samples = torch.randn(80, 4, generator=torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def gathered(indices: Sequence[int]) -> torch.Tensor:
    return samples[list(indices)]


loader = nodes.Loader(nodes.Mapper(nodes.Batcher(nodes.IterableWrapper(range(80)), batch_size=4), gathered))
print("the pipeline begins at", loader.state_dict())
checkpoint = options.output / "last.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    step = saved["step"]
    print("the pipeline goes on at", saved["loader"])

for inputs in loader:
    loss = (model(inputs).squeeze(-1) - inputs.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict(), "step": step}
        torch.save(state, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
