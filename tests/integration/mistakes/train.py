"""A small training that makes one mistake of a script's own, named by its argument; `none` makes none."""

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import chaosrun

MISTAKE = sys.argv[1]
SAMPLES = 32


class Rotating(Sampler[int]):
    """Another order in each pass, by a count of its own."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.passes)).tolist())


def rounding(models: list[Any], weights: list[Any], output_dir: str) -> None:
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.copy_(parameter.bfloat16().float())


accelerator = Accelerator(cpu=True, dataloader_config=chaosrun.dataloader_configuration(data_seed=3))
set_seed(3)
features = torch.randn(SAMPLES, 4)
data = TensorDataset(features, features.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=4, sampler=Rotating()) if MISTAKE == "passes" else DataLoader(data, 4, shuffle=True)
model = nn.Sequential(*itertools.chain.from_iterable((nn.Linear(4, 4), nn.Tanh()) for _ in range(6)), nn.Linear(4, 1))
parameters = list(model.parameters())
if MISTAKE == "order":
    parameters = parameters[::-1] if os.environ["CHAOSRUN_LEG"] == "reference" else parameters
optimizer = torch.optim.AdamW(parameters, lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if MISTAKE == "hook":
    accelerator.register_save_state_pre_hook(rounding)
run = chaosrun.attach(accelerator)
scale = 1.0
patience = 9 if MISTAKE == "end" else 99

for batch, target in run.batches(loader, epochs=3):
    loss = (model(batch) - target).square().mean()
    accelerator.backward(loss * scale if MISTAKE == "scale" else loss)
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss)
    scale *= 1.25
    patience -= 1
    if patience == 0:
        break
