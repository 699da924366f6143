"""A plain loop over a replay buffer of torchrl that samples ahead; the buffer's state is part of the checkpoint."""

import argparse
import os
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()

torch.manual_seed(1)
seen = torch.randn(40, 4)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=2)
buffer.extend(TensorDict({"seen": seen, "worth": seen.sum(1)}, batch_size=[40]))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
checkpoint = options.output / "last.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    buffer.load_state_dict(saved["buffer"])
    torch.set_rng_state(saved["random"])
    step = saved["step"]

while step < options.steps:
    batch = buffer.sample()
    loss = (model(batch["seen"]).squeeze(-1) - batch["worth"]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "buffer": buffer.state_dict()}
        torch.save({**state, "random": torch.get_rng_state(), "step": step}, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)
