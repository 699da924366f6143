"""A training loop as people write it, with checkpoints of its own: alone, or under gloo with as many ranks as there are."""

import argparse
import os
import random
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--forget", choices=["optimizer", "rng", "data", "all"])
args = parser.parse_args()
output = Path(os.environ["CHAOSRUN_OUTPUT"])

ranks = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(96, 16)
data = TensorDataset(inputs, (inputs[:, :4] > 0).float())
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=1)
torch.manual_seed(100 + rank)

done = 0
saved = sorted(output.glob("checkpoint-*.pt"))
state = torch.load(saved[-1], weights_only=False) if saved else None
if state and args.forget != "all":
    model.load_state_dict(state["model"])
    scheduler.load_state_dict(state["scheduler"])
    done = state["step"]
    if args.forget != "optimizer":
        optimizer.load_state_dict(state["optimizer"])
if ranks > 1:
    model = DistributedDataParallel(model)
if state and args.forget not in ("rng", "all"):
    streams = torch.load(output / f"streams-{done}-{rank}.pt", weights_only=False)
    torch.set_rng_state(streams["torch"])
    numpy.random.set_state(streams["numpy"])
    random.setstate(streams["python"])

criterion = torch.nn.BCEWithLogitsLoss()
per_epoch = len(sampler) // 8
for epoch in range(done // per_epoch, args.epochs):
    sampler.set_epoch(epoch)
    for number, (batch, targets) in enumerate(DataLoader(data, batch_size=8, sampler=sampler, generator=torch.Generator())):
        if epoch * per_epoch + number < done and args.forget not in ("data", "all"):
            continue
        optimizer.zero_grad()
        loss = criterion(model(batch), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        done += 1
        if done % args.every == 0:
            streams = {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "python": random.getstate()}
            torch.save(streams, output / f"streams-{done}-{rank}.pt")
            if ranks > 1:
                dist.barrier()
            if rank == 0:
                bare = model.module if isinstance(model, DistributedDataParallel) else model
                state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                torch.save({**state, "scheduler": scheduler.state_dict()}, output / f"checkpoint-{done:04}.pt")
    with torch.no_grad():
        model.eval()
        criterion(model(inputs[:8]), data.tensors[1][:8])
        model.train()
if ranks > 1:
    dist.destroy_process_group()
