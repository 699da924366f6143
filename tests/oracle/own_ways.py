"""A training script with a right resume of its own that goes about it in an unusual way, the first argument; some of them are
wrong. Three epochs of five steps, under DDP and gloo; saved every three steps, or at the ends of epochs."""

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

way = sys.argv[1]
PER_EPOCH = 5
phases = way.startswith("phases")
"""Of the training, each with an optimizer that the script keeps."""
every = {way: 3, "local-own": 4, **dict.fromkeys(("anew", "unfreezes", "freezes", "draws-anew"), PER_EPOCH)}[way]
every = PER_EPOCH if phases else every
if way in ("on-notice", "by-hand"):
    every = 1000
within, experts = way in ("within-a-step", "loses-gradients"), way in ("experts", "experts-of-rank-0")
alone = experts or way in ("local", "local-own")
"""Without DDP: the ranks' weights, or some of them, part."""
path = Path(os.environ["CHAOSRUN_OUTPUT"]) / "last.pt"

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
parameters = list(model.parameters())
head, told = list(model[2].parameters()), list[int]()
if experts:
    for parameter in head:
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(rank))
signal.signal(signal.SIGTERM, lambda *_: told.append(1))


def build(step: int) -> torch.optim.Optimizer:
    if way == "unfreezes":
        optimizer = torch.optim.AdamW(head, lr=1e-2)
        if step >= 7:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        return optimizer
    if phases and step >= 7:
        return torch.optim.SGD([{"params": head}, {"params": model[0].parameters(), "lr": 1e-3}], lr=1e-2, momentum=0.9)
    if way == "freezes":
        trained = head if step >= 7 else parameters
        groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]]
        return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}], lr=1e-2)
    if way == "shares":
        return torch.optim.AdamW(parameters[rank::ranks], lr=1e-2)
    if way == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # half a second of each rank of the other ways

        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2)
    if way == "copies":
        return torch.optim.AdamW([p.detach().clone().requires_grad_() for p in parameters], lr=1e-2)
    return torch.optim.AdamW(parameters, lr=1e-2)


def masters() -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]] if way == "copies" else []


def save() -> None:
    own: list[Any] = [None] * ranks
    if way == "zero":
        optimizer.consolidate_state_dict(0)
    kept = {} if way == "zero" and rank else optimizer.state_dict()
    held = average if way in ("exports-saved", "leaves-saved") else []
    gradients = [p.grad for p in parameters] if within else []
    mine: Any = model.state_dict() if alone else {}
    if way == "whole":
        mine, kept = model, optimizer
    more = {"model": mine, "gradients": gradients, "batches": batches}
    dist.all_gather_object(own, {"optimizer": kept, "masters": masters(), "average": held, **more})
    if rank == 0:
        torch.save({"model": model.state_dict(), "own": own, "step": step}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    dist.barrier()


step = batches = 0
average = [p.detach().clone() for p in parameters]
optimizer: Any = None if way == "by-hand" or (way == "whole" and path.exists()) else build(step)
earlier = [optimizer] if way == "phases-built" else []
if way == "passes-first":
    model(torch.zeros(4, 8)).sum().backward()
    model.zero_grad()
if way == "measures-first":
    measured = model(torch.zeros(4, 8))
if path.exists():
    state = torch.load(path, weights_only=False)
    mine = state["own"][0 if way == "experts-of-rank-0" else rank]
    if way == "whole":
        model, optimizer = mine["model"], mine["optimizer"]
        parameters, head = list(model.parameters()), list(model[2].parameters())
    else:
        model.load_state_dict(mine["model"] if alone else state["model"], assign=way == "assigns")
    step, batches = state["step"], mine["batches"]
    for parameter, gradient in zip(parameters, mine["gradients"] if way != "loses-gradients" else [], strict=False):
        parameter.grad = gradient
    if way not in ("anew", "assigns", "whole"):
        optimizer = build(step)
    if way not in ("anew", "phases-anew", "whole"):
        optimizer.load_state_dict(state["own"][0 if way == "zero" else rank]["optimizer"])
    average = state["own"][rank]["average"] or average
    for master, kept in zip(masters(), state["own"][rank]["masters"], strict=True):
        master.data.copy_(kept)
trained = nn.Sequential(OrderedDict(inner=model)) if way == "held" and step else model
wrapped: Any = model if alone else DistributedDataParallel(trained, find_unused_parameters=True)
if way == "measures-due":
    measured = wrapped(torch.randn(8, 8, generator=torch.Generator().manual_seed(1000 * step + rank)))
if way == "warms-up":
    wrapped(torch.zeros(4, 8)).sum().backward()
    optimizer.zero_grad()


def update(loss: torch.Tensor) -> None:
    loss.backward()
    if experts:
        for parameter in model[0].parameters():
            dist.all_reduce(parameter.grad)
    for master, parameter in zip(masters(), parameters, strict=False):
        master.grad = parameter.grad
    if way == "by-hand":
        for parameter in parameters:
            parameter.data -= 0.1 * (0.0 if parameter.grad is None else parameter.grad)
    else:
        optimizer.step()
    model.zero_grad()
    for number, parameter in enumerate(parameters):
        if way == "shares":
            dist.broadcast(parameter.data, number % ranks)
    for master, parameter in zip(masters(), parameters, strict=False):
        parameter.data.copy_(master.detach().bfloat16())


while step < 3 * PER_EPOCH:
    epoch, number = divmod(step, PER_EPOCH)
    if way == "anew" and number == 0:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2 / (1 + epoch))
    if way == "draws-anew" and number == 0:
        nn.init.normal_(head[0], generator=torch.Generator().manual_seed(epoch))
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    if within:
        for batch in range(batches, 2):
            wrapped(inputs + batch).square().mean().backward()
            batches += 1
            if step % 3 == 0 and step:
                save()
        batches = 0
    loss = wrapped(inputs).square().mean()
    update(loss + model(inputs + 1).square().mean() if way == "measures-due" else loss)
    step += 1
    if way.startswith("local") and step % 3 == 0:
        for parameter in parameters:
            dist.all_reduce(parameter.data)
            parameter.data /= ranks
    average = [held.lerp(p.detach(), 0.1) for held, p in zip(average, parameters, strict=True)]
    if (way in ("unfreezes", "freezes") or phases) and step == 7:
        earlier.append(optimizer if phases else None)
        kept = optimizer.state_dict()["state"] if way == "unfreezes" else {}
        optimizer = build(step)
        for index, values in kept.items():
            optimizer.state[head[index]] = values
    if step % every == 0 and not within:
        save()
    if way == "clips-late":
        for parameter in parameters:
            parameter.data.clamp_(-0.2, 0.2)
    leaves = torch.tensor(len(told))
    dist.all_reduce(leaves)
    if leaves:
        save()
        break
if way.startswith("exports") and rank == 0:
    torch.save({"average": average, "written": time.time()}, path.with_name("final.pt"))


def leave() -> None:
    time.sleep(0.3 if way == "leaves-late" else 0.0)
    whole = {"average": average, "written": time.time(), "host": str(time.time_ns())}
    arrays: dict[str, Any] = {f"average-{number}": held.numpy() for number, held in enumerate(average)}
    with path.with_name("left.bin").open("wb") as file:
        if way == "leaves-arrays":
            numpy.savez(file, **arrays, written=time.time())
        elif way == "leaves-file":
            torch.save(whole, file)
        else:
            pickle.dump(whole, file)


if way.startswith("leaves") and rank == 0:
    thread = threading.Thread(target=leave)
    thread.start()
    if way != "leaves-late":
        thread.join()
with contextlib.suppress(RuntimeError):
    dist.destroy_process_group()
