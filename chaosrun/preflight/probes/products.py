"""Matrix products on a device whose every entry is known without another product, and how fast they are.

Both factors are made of two lists of integers, a[i] u[k] and v[k] b[j], so that every entry of the product is a[i] b[j] times
one sum. Every factor and every partial sum is an integer that the type holds exactly: whatever the order of summation, the
product has one right answer.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INNER = 248
"""Length of every sum: below 256, up to which bfloat16 holds all integers."""
BLOCK_BYTES = 1 << 30
PATTERN = 0x5AA5C33C_0FF01E87


class Product(Struct, frozen=True, kw_only=True):
    dtype: str
    entries: int
    wrong: int
    first: str
    """Where and what the first wrong one is."""


def check_memory(device: "torch.device", size_bytes: int) -> int:
    """Allocate, write and read back; returns how many of the bytes that were read are wrong."""
    import torch

    words = max(1, size_bytes // 8)
    block = BLOCK_BYTES // 8
    blocks = [
        torch.full((min(block, words - start),), PATTERN, dtype=torch.int64, device=device) for start in range(0, words, block)
    ]
    return sum(8 * int((block != PATTERN).sum()) for block in blocks)


def check_products(device: "torch.device", say: Callable[[str], None]) -> list[Product]:
    """One a type."""
    import torch

    gpu = device.type == "cuda"
    side = 2048 if gpu else INNER
    results = []
    for dtype in [torch.float32, torch.float64, torch.bfloat16, *([torch.float16] if gpu else [])]:
        name = str(dtype).removeprefix("torch.")
        say(f"{name} product")
        largest = 8 if dtype in (torch.float32, torch.float64) else 1
        (a, b), (u, v) = ((_integers(length, salt, largest) for salt in (3, 5)) for length in (side, INNER))
        # A plain sum of products, exact in int64: no kernel of a matrix product is asked what is right.
        expected = torch.outer(a, b).double() * int((u * v).sum())
        product = torch.matmul(torch.outer(a, u).to(device, dtype), torch.outer(v, b).to(device, dtype)).cpu().double()
        wrong = (product != expected).nonzero()
        first = ""
        if len(wrong):
            row, column = wrong[0].tolist()
            first = f"{product[row, column].item()!r} instead of {int(expected[row, column])} in row {row}, column {column}"
        results.append(Product(dtype=name, entries=product.numel(), wrong=len(wrong), first=first))
    return results


def _integers(count: int, salt: int, largest: int) -> "Tensor":
    """Irregular ones from 1 to `largest`, with either sign."""
    import torch

    at = torch.arange(1, count + 1)
    mixed = (at * at * 7919 + at * salt * 104729) >> 3
    return (mixed % largest + 1) * (1 - 2 * ((mixed >> 5) % 2))


def product_gflops(device: "torch.device") -> float:
    """The fastest of a few float32 products, in 10^9 floating point operations a second."""
    import torch

    side = 8192 if device.type == "cuda" else 768
    square = torch.ones(side, side, device=device)
    fastest = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        torch.matmul(square, square)
        if device.type == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * side**3 / fastest / 1e9
