"""A training script with a right resume of its own, alike on all ranks, whose gradients come about in an unusual way, or that
makes passes which lead to no step: the first argument. Three epochs of five steps, saved at their ends."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import spectral_norm

way = sys.argv[1]
in_phases = way.startswith("in-phases")
"""The head alone, from the ninth step on all; a restart brings back the optimizer alone that is in use."""
PER_EPOCH = 5
dist.init_process_group("gloo")
acts = way.startswith("acts")
"""It saves between two passes of a step, as an agent that acts; each rank for itself."""
acted = 0
path = Path(os.environ["CHAOSRUN_OUTPUT"]) / (f"last-{dist.get_rank()}.pt" if acts else "last.pt")
torch.manual_seed(7)
model = nn.Sequential(
    nn.Linear(8, 16),
    nn.Tanh(),
    nn.Dropout(0.2 if way in ("samples", "measures", "measures-wrongly") else 0.0),
    nn.Linear(16, 4),
)
if way == "built-late":  # lazily, and with a parametrization, while another optimizer is there
    beside = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    model[0] = nn.LazyLinear(16)
    spectral_norm(model[3])
    model(torch.zeros(1, 8))
    del beside
parameters = dict(model.named_parameters())
optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
if way in ("full-batch", "then-closures"):
    optimizer = torch.optim.LBFGS(parameters.values(), lr=0.1, max_iter=4)
turns: list[Any] = [optimizer]
if way == "then-closures":
    turns = [torch.optim.AdamW(parameters.values(), lr=1e-2), optimizer]
if way == "by-turns":
    turns = [torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[3].parameters(), lr=1e-2, momentum=0.9)]
if in_phases:
    turns = [torch.optim.AdamW(model[3].parameters(), lr=1e-2), optimizer]


def turn_of(step: int) -> int:
    """Which of them makes a step."""
    if way == "then-closures":
        return 0 if step < 8 else 1
    if in_phases:
        return 0 if step < 8 or (way == "in-phases-and-back" and step >= 12) else 1
    return step % len(turns)


step = began = 0
late: list[Any] = []
"""What the optimizer gets once the first forward pass is made."""
if path.exists():
    state = torch.load(path)
    model.load_state_dict(state["model"])
    step = state["step"]
    used = turns if not in_phases else [turns[turn_of(step - 1)]]
    for each, kept in zip(used, state["optimizer"][-len(used) :], strict=True):
        if way == "loads-late":
            late.append(kept)
        else:
            each.load_state_dict(kept)
    began = step if way == "counts-anew" else 0
    if way != "measures-wrongly":
        torch.set_rng_state(state["rng"])
    acted = 0 if way == "acts-wrongly" else state["acted"]


def loss_of(values: Any, inputs: torch.Tensor) -> torch.Tensor:
    return functional_call(model, values, (inputs,)).square().mean()


def update(inputs: torch.Tensor) -> None:
    if way == "given" or (way == "given-by-turns" and step % 2):
        for parameter, each in zip(
            parameters.values(), torch.autograd.grad(loss_of(parameters, inputs), [*parameters.values()]), strict=True
        ):
            parameter.grad = each
    elif way == "per-sample":
        plain = {name: parameter.detach() for name, parameter in parameters.items()}
        for name, each in vmap(grad(loss_of), in_dims=(None, 0))(plain, inputs).items():
            parameters[name].grad = each.clamp(-1, 1).mean(0)
    else:
        noisy = {name: parameter + 0.01 * torch.randn_like(parameter) for name, parameter in parameters.items()}
        loss = loss_of(noisy, inputs) if way == "perturbs" else model(inputs).square().mean() * (1 + acted)
        for each in turns:
            each.zero_grad()
        if late:
            optimizer.load_state_dict(late.pop())
        loss.backward()
    if way in ("warms-by-hand", "counts-anew"):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (step - began + 1) / 4)
    turns[turn_of(step)].step()
    if way == "by-turns":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


def act() -> None:
    global acted
    acted += 1
    model(torch.randn(4, 8))


def evaluate() -> None:
    inputs = torch.ones(4, 8, requires_grad=True)
    if way == "samples":
        print(torch.stack([model(inputs) for _ in range(3)]).std().item())
    if way in ("measures", "measures-wrongly"):
        model(inputs).square().mean().backward()  # how sharp it is: dropped by the next step
    if acts:
        act()
    if way == "attacks":
        model.eval()
        model(inputs).square().mean().backward()
        model.zero_grad()
        model.train()


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(torch.ones(4, 8)) - torch.arange(4.0)).square().mean()
    loss.backward()
    return loss


while step < 3 * PER_EPOCH:
    if acts:
        act()
    if way == "full-batch" or (way == "then-closures" and turn_of(step)):
        optimizer.step(closure)
    else:
        update(torch.randn(8, 8, generator=torch.Generator().manual_seed(step)))
    step += 1
    dist.barrier()
    if step % PER_EPOCH == 0:
        evaluate()
        if acts or dist.get_rank() == 0:
            kept = turns if not in_phases or way == "in-phases-saved" else [turns[turn_of(step - 1)]]
            whole = {"model": model.state_dict(), "optimizer": [each.state_dict() for each in kept]}
            torch.save({**whole, "step": step, "rng": torch.get_rng_state(), "acted": acted}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
dist.destroy_process_group()
