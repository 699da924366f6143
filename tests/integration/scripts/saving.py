"""Plain DDP that keeps one checkpoint, as people write it: `--how` tells how carefully."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 14, 4

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=("plain", "atomic", "synced"), default="synced")
parser.add_argument("--keep-on", action="store_true", help="train on where a save fails")
parser.add_argument("--without-optimizer", action="store_true", help="go on where the optimizer's file is missing")
arguments = parser.parse_args()
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
model = DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
draw = torch.Generator().manual_seed(1)
data, classes = torch.randn(128, 8, generator=draw), torch.randint(0, 4, (128,), generator=draw)
os.makedirs("out", exist_ok=True)


def put(what: object, path: str) -> None:
    if arguments.how == "plain":
        torch.save(what, path)
        return
    with open(f"{path}.tmp", "wb") as file:
        torch.save(what, file)
        if arguments.how == "synced":
            file.flush()
            os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)
    if arguments.how == "synced":
        folder = os.open("out", os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def save(step: int) -> None:
    put(
        {"model": net.state_dict(), "rng": torch.get_rng_state(), "step": step, "optimizer": optimizer.state_dict()},
        "out/last.pt",
    )
    put(optimizer.state_dict(), "out/optimizer.pt")


start = 0
if os.path.exists("out/last.pt"):
    held = torch.load("out/last.pt")
    net.load_state_dict(held["model"])
    torch.set_rng_state(held["rng"])
    if not arguments.without_optimizer:
        optimizer.load_state_dict(held["optimizer"])
    elif os.path.exists("out/optimizer.pt"):
        optimizer.load_state_dict(torch.load("out/optimizer.pt"))
    start = held["step"]
for step in range(start, STEPS):
    drawn = torch.randperm(128, generator=torch.Generator().manual_seed(step))[: 8 * world][rank * 8 : (rank + 1) * 8]
    loss = torch.nn.functional.cross_entropy(model(data[drawn]), classes[drawn])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % EVERY == 0 and rank == 0:
        try:
            save(step + 1)
        except (OSError, RuntimeError):
            if not arguments.keep_on:
                raise
