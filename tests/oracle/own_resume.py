"""A training script with checkpoints and a resume of its own, under DDP and gloo; `--wrong` breaks one thing of them."""

import argparse
import copy
import io
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--wrong", default="")
args = parser.parse_args()
wrong: str = args.wrong
output = Path(os.environ["CHAOSRUN_OUTPUT"])

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
inputs = torch.randn(40 * ranks, 16)
data = TensorDataset(inputs, (inputs[:, :4] > 0).float())
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=1)
torch.manual_seed(100 + rank)

saved = [] if wrong in ("again", "again-bytes", "again-aside") else sorted(output.glob("checkpoint-*.pt"))
if saved and wrong == "older":
    saved.pop()
done = 0
state: dict[str, Any] | None = torch.load(saved[-1], weights_only=False) if saved else None
if state:
    older = torch.load(saved[-2], weights_only=False) if wrong in ("mixed", "mixed-on-one-rank") else state
    if wrong == "raises":
        raise FileNotFoundError(f"{saved[-1]} has no part 2")
    if wrong != "weights":
        model.load_state_dict(state["model"])
    if wrong not in ("optimizer", "weights-alone"):
        optimizer.load_state_dict((older if wrong == "mixed" or rank == 1 else state)["optimizer"])
    if wrong not in ("scheduler", "weights-alone"):
        scheduler.load_state_dict(state["scheduler"])
    if wrong != "weights-alone":
        done = state["step"]
model = DistributedDataParallel(model)
if state and wrong not in ("rng", "weights-alone"):
    torch.set_rng_state(torch.load(output / f"stream-{state['step']:04}-{rank}.pt"))
if state and wrong == "seeds":
    torch.manual_seed(100 + rank)
if state and wrong == "draws":
    torch.rand(1)

criterion = torch.nn.BCEWithLogitsLoss()
per_epoch = len(sampler) // 8
late: list[dict[str, Any]] = []


def put(what: Any, path: Path) -> None:
    if wrong in ("again-bytes", "again-aside"):
        held = io.BytesIO()
        torch.save(what, held)
        if wrong == "again-bytes":
            path.write_bytes(held.getvalue())
        else:
            threading.Thread(target=path.write_bytes, args=[held.getvalue()]).start()
    else:
        torch.save(what, path)


def save(step: int) -> None:
    put(torch.get_rng_state(), output / f"stream-{step:04}-{rank}.pt")
    dist.barrier()
    if rank == 0:
        bare: Any = model.module
        whole = {
            "model": bare.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": step,
        }
        if wrong == "late":
            # All else is copied; the weights are those that the background thread comes upon.
            late.append({**copy.deepcopy(whole), "model": whole["model"]})
        else:
            put(whole, output / f"checkpoint-{step:04}.pt")


first = done // per_epoch
for epoch in range(first, args.epochs):
    if not (state and wrong == "epoch" and epoch == first):
        sampler.set_epoch(epoch)
    passed = done - epoch * per_epoch if epoch == first else 0
    if state and epoch == first and wrong in ("skips", "repeats"):
        passed += 1 if wrong == "skips" else -1
    loader = DataLoader(data, batch_size=8, sampler=sampler, generator=torch.Generator())
    for number, (batch, targets) in enumerate(loader):
        if number < passed:
            continue
        optimizer.zero_grad()
        criterion(model(batch), targets).backward()
        optimizer.step()
        scheduler.step()
        done += 1
        while late:
            whole = late.pop()
            torch.save(whole, output / f"checkpoint-{whole['step']:04}.pt")
        if done % 3 == 0 and wrong != "never":
            save(done)
dist.destroy_process_group()
