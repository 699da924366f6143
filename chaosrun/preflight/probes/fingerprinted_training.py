"""A little training whose every operation leaves a fingerprint of its bits: convolution, layer norm, matrix products, softmax,
a sum, their gradients, and AdamW.

Its numbers are derived from integers, so that they do not depend on random draws elsewhere. The first operation whose
fingerprint differs is the one at fault, as its input was still equal.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SEED = 20011
STEPS = 2
IMAGES, SIDE, WIDTH, CLASSES = 2, 16, 64, 10
WEIGHTS = ("convolution", "layer norm", "matmul", "matmul at the end")
FORWARD = ("convolution", "layer norm", "matmul", "matmul of scores", "softmax", "matmul of values", "sum", "matmul at the end")
OPERATIONS = (*FORWARD, *(f"gradient of {name}" for name in reversed(WEIGHTS)), "AdamW")
"""Of a step, in the order they are computed."""

Say = Callable[[str], None]


class TrainingDifference(Struct, frozen=True, kw_only=True):
    repeat: int
    operation: str


class FingerprintedTraining(Struct, frozen=True, kw_only=True):
    """The repeated training, with one number of threads."""

    threads: int
    repeats: int
    operations: dict[str, str]
    """Fingerprints of the first repeat."""
    differs: TrainingDifference | None
    """The first fingerprint that differed."""
    differing: int


def train(device: "torch.device", say: Say) -> dict[str, str]:
    """Fingerprints of its operations, 16 hex digits each, in the order they are computed: "1 matmul" is of the first step."""
    from chaosrun.observe.fingerprint import fingerprint

    found: dict[str, str] = {}
    results = _computed(device)
    for name in (f"{step} {operation}" for step in range(1, STEPS + 1) for operation in OPERATIONS):
        say(name)
        # Read back at once, so that an asynchronous device is still at this operation.
        found[name] = fingerprint([next(results).detach().cpu()]).value
    return found


def _computed(device: "torch.device") -> "Iterator[Tensor]":
    """The result of each operation, computed on demand."""
    import torch

    # Not the class, which loads the compiler; that takes longer than all the rest.
    from torch.nn import functional
    from torch.optim.adamw import adamw

    images = _numbers(SEED, IMAGES, 3, SIDE, SIDE).to(device)
    targets = _numbers(SEED + 1, IMAGES, CLASSES).to(device)
    starts = (
        _numbers(SEED + 2, WIDTH, 3, 3, 3),
        _numbers(SEED + 3, WIDTH) + 1,
        _numbers(SEED + 4, WIDTH, WIDTH) / 4,
        _numbers(SEED + 5, WIDTH, CLASSES),
    )
    weights = [start.to(device).requires_grad_() for start in starts]
    convolution, norm, query, end = weights
    averages, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    counts = [torch.tensor(0.0) for _ in weights]
    for _ in range(STEPS):
        yield (maps := functional.conv2d(images, convolution, padding=1))
        yield (tokens := functional.layer_norm(maps.flatten(2).transpose(1, 2), (WIDTH,), norm))
        yield (queries := torch.matmul(tokens, query))
        yield (scores := torch.matmul(queries, tokens.transpose(1, 2)) / 8)
        yield (shares := torch.softmax(scores, dim=-1))
        yield (values := torch.matmul(shares, tokens))
        yield (total := scores.square().sum())
        yield (results := torch.matmul(values.mean(dim=1), end))
        gradients = torch.autograd.grad((results - targets).square().sum() + 1e-6 * total, weights)
        yield from reversed(gradients)
        with torch.no_grad():
            adamw(
                *(weights, list(gradients), averages, squares, [], counts),
                **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8},
                **dict.fromkeys(("foreach", "fused", "amsgrad", "maximize"), False),
            )
        yield torch.cat([weight.detach().flatten() for weight in weights])


def repeated(device: "torch.device", *, threads: int, repeats: int, seconds: float, say: Say) -> FingerprintedTraining:
    """`repeats` times and for at least `seconds`, with this many CPU threads."""
    import torch

    torch.set_num_threads(threads)
    # Libraries choose their kernels in the first call, not always the same (pytorch#188792), so it does not count.
    train(device, lambda name: say(f"{name} (first call)"))
    until = time.monotonic() + seconds
    first = train(device, say)
    count, differing, differs = 1, 0, None
    while count < repeats or time.monotonic() < until:
        count += 1
        again = train(device, lambda name, count=count: say(f"{name} (repeat {count})"))
        if operation := first_difference(first, again):
            differing += 1
            differs = differs or TrainingDifference(repeat=count, operation=operation)
    return FingerprintedTraining(threads=threads, repeats=count, operations=first, differs=differs, differing=differing)


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first operation, in the order of `one`, whose fingerprints differ."""
    return next((name for name, value in one.items() if other.get(name) != value), None)


def _numbers(salt: int, *shape: int) -> "Tensor":
    """Numbers in [-0.5, 0.5), from integers divided once, which every processor rounds equally."""
    import torch

    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.int64)
    return ((count * (salt * salt) + count * count * salt) % 10007).float().div(10007).sub(0.5).view(shape)
