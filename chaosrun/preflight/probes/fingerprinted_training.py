"""A little training whose every operation leaves a fingerprint of its bits: convolution, layer norm, matrix products, softmax,
a sum, their gradients, and AdamW.

Its numbers are made of integers, so that they are the same whatever draws random numbers elsewhere. The first operation whose
fingerprint differs is the one that computes something else: its input was still the same.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SEED = 20011
STEPS = 2
IMAGES, SIDE, WIDTH, CLASSES = 2, 16, 64, 10

Say = Callable[[str], None]
Operation = Callable[[str, "Callable[[], Tensor]"], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    repeat: int
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training again and again, with one number of threads."""

    threads: int
    repeats: int
    operations: dict[str, str]
    """Fingerprints of the first."""
    differs: Difference | None
    """The first that differed."""
    differing: int
    """How many did."""


def train(device: "torch.device", say: Say) -> dict[str, str]:
    """Fingerprints of its operations, 16 hex digits each, in the order they are computed: "1 matmul" is of the first step."""
    import torch

    from chaosrun.observe.fingerprint import fingerprint

    found: dict[str, str] = {}
    images = _numbers(torch, SEED, (IMAGES, 3, SIDE, SIDE)).to(device)
    targets = _numbers(torch, SEED + 1, (IMAGES, CLASSES)).to(device)
    weights = {name: weight.to(device).requires_grad_() for name, weight in _weights(torch).items()}
    leaves = list(weights.values())
    update = _adamw(torch, leaves)

    for step in range(1, STEPS + 1):

        def operation(name: str, compute: "Callable[[], Tensor]", step: int = step) -> "Tensor":
            say(f"{step} {name}")
            result = compute()
            # Read back at once, so that a device that computes behind the program's back is still at this operation.
            found[f"{step} {name}"] = fingerprint([result.detach().cpu()]).value
            return result

        loss = _loss(torch, images, targets, leaves, operation)
        say(f"{step} gradients")
        gradients = torch.autograd.grad(loss, leaves)
        for name, gradient in reversed(list(zip(weights, gradients, strict=True))):
            operation(f"gradient of {name}", lambda gradient=gradient: gradient)
        say(f"{step} AdamW")
        update(gradients)
        found[f"{step} AdamW"] = fingerprint([leaf.detach().cpu() for leaf in leaves]).value
    return found


def _weights(torch: Any) -> "dict[str, Tensor]":
    return {
        "convolution": _numbers(torch, SEED + 2, (WIDTH, 3, 3, 3)),
        "layer norm": _numbers(torch, SEED + 3, (WIDTH,)) + 1,
        "matmul": _numbers(torch, SEED + 4, (WIDTH, WIDTH)) / 4,
        "matmul at the end": _numbers(torch, SEED + 5, (WIDTH, CLASSES)),
    }


def _loss(torch: Any, images: "Tensor", targets: "Tensor", weights: "Sequence[Tensor]", operation: "Operation") -> "Tensor":
    functional = torch.nn.functional
    convolution, norm, query, end = weights
    maps = operation("convolution", lambda: functional.conv2d(images, convolution, padding=1))
    rows = maps.flatten(2).transpose(1, 2)
    tokens = operation("layer norm", lambda: functional.layer_norm(rows, (WIDTH,), norm))
    queries = operation("matmul", lambda: torch.matmul(tokens, query))
    scores = operation("matmul of scores", lambda: torch.matmul(queries, tokens.transpose(1, 2)) / 8)
    shares = operation("softmax", lambda: torch.softmax(scores, dim=-1))
    values = operation("matmul of values", lambda: torch.matmul(shares, tokens))
    total = operation("sum", lambda: scores.square().sum())
    results = operation("matmul at the end", lambda: torch.matmul(values.mean(dim=1), end))
    return (results - targets).square().sum() + 1e-6 * total


def _adamw(torch: Any, leaves: "list[Tensor]") -> "Callable[[Sequence[Tensor]], None]":
    # Not the class: it loads the compiler, which takes longer than all the rest.
    from torch.optim.adamw import adamw

    averages, squares = ([torch.zeros_like(leaf) for leaf in leaves] for _ in range(2))
    counts = [torch.tensor(0.0) for _ in leaves]
    plain: dict[str, Any] = {"foreach": False, "fused": False, "amsgrad": False, "maximize": False}
    rates: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}

    def update(gradients: "Sequence[Tensor]") -> None:
        with torch.no_grad():
            adamw(leaves, list(gradients), averages, squares, [], counts, **plain, **rates)

    return update


def repeated(device: "torch.device", *, threads: int, repeats: int, seconds: float, say: Say) -> Training:
    """`repeats` times and for at least `seconds`, with so many threads of the CPU."""
    import torch

    torch.set_num_threads(threads)
    # Libraries choose their kernels in the first call, and not always the same (pytorch#188792): it does not count.
    train(device, lambda name: say(f"{name} (first call)"))
    until = time.monotonic() + seconds
    first = train(device, say)
    count, differing, differs = 1, 0, None
    while count < repeats or time.monotonic() < until:
        count += 1
        again = train(device, lambda name, count=count: say(f"{name} (repeat {count})"))
        if operation := first_difference(first, again):
            differing += 1
            differs = differs or Difference(repeat=count, operation=operation)
    return Training(threads=threads, repeats=count, operations=first, differs=differs, differing=differing)


def other_cores(operations: dict[str, str], cores: Sequence[int], say: Say) -> dict[str, str]:
    """The training on each core of the CPU alone: by core, the first operation that differs there from `operations`."""
    import torch

    torch.set_num_threads(1)
    allowed = os.sched_getaffinity(0)
    differing = {}
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            again = train(torch.device("cpu"), lambda name, core=core: say(f"{name} on core {core}"))
            if operation := first_difference(operations, again):
                differing[str(core)] = operation
    finally:
        os.sched_setaffinity(0, allowed)
    return differing


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first operation, in the order of `one`, whose fingerprints differ."""
    return next((name for name, value in one.items() if other.get(name) != value), None)


def _numbers(torch: Any, salt: int, shape: tuple[int, ...]) -> "Tensor":
    """In [-0.5, 0.5), from integers divided once: every processor rounds that alike."""
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.int64)
    return ((count * (salt * salt) + count * count * salt) % 10007).float().div(10007).sub(0.5).view(shape)
