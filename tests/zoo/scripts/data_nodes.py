"""A plain loop over a torchdata.nodes pipeline: one pass whose place is printed before and after it is loaded, or two shuffled
ones."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torchdata import nodes
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--shuffled", action="store_true")
options = parser.parse_args()

torch.manual_seed(1)
samples = torch.randn(80, 4, generator=torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def gathered(indices: Sequence[int]) -> torch.Tensor:
    return samples[list(indices)]


sampler = StatefulDistributedSampler(range(80), num_replicas=1, rank=0, shuffle=True, seed=7)
source = nodes.SamplerWrapper(sampler) if options.shuffled else nodes.IterableWrapper(range(80))
loader = nodes.Loader(nodes.Mapper(nodes.Batcher(source, batch_size=4), gathered))
if not options.shuffled:
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

while step < (40 if options.shuffled else 20):
    for inputs in loader:
        loss = (model(inputs).squeeze(-1) - inputs.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            trained = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**trained, "loader": loader.state_dict(), "step": step}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
