"""Matrix products on a device whose every entry is known without another product, and how fast they are.

The factors repeat 31 numbers, so that an entry depends on its row and column modulo 31 only, and 31 × 31 sums of integers tell
all of them. Every factor and every partial sum is an integer that the type holds exactly: whatever the order of summation, the
product has one right answer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PERIOD = 31
INNER = 8 * PERIOD
"""Length of every sum: below 256, up to which bfloat16 holds all integers."""
BLOCK_BYTES = 1 << 30
PATTERN = 0x5AA5C33C_0FF01E87


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
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
    dtypes = [torch.float32, torch.float64, torch.bfloat16, *([torch.float16] if gpu else [])]
    results = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        say(f"{name} product")
        largest = 8 if dtype in (torch.float32, torch.float64) else 1
        left, right, expected = _factors(torch, side, largest)
        product = torch.matmul(left.to(device, dtype), right.to(device, dtype)).cpu().double()
        wrong = (product != expected).nonzero()
        first = ""
        if len(wrong):
            row, column = wrong[0].tolist()
            first = f"{product[row, column].item()!r} instead of {int(expected[row, column])} in row {row}, column {column}"
        results.append(Product(dtype=name, entries=product.numel(), wrong=len(wrong), first=first))
    return results


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


def _factors(torch: Any, side: int, largest: int) -> tuple[Any, Any, Any]:
    """Two factors, side × INNER and INNER × side, with integers up to `largest`, and their product."""
    span = 2 * largest + 1
    numbers = [[(step * step * at + at * at) % PERIOD % span - largest for at in range(PERIOD)] for step in (3, 5)]
    left = [[numbers[0][(7 * row + 3 * k) % PERIOD] for k in range(PERIOD)] for row in range(PERIOD)]
    right = [[numbers[1][(5 * k + 11 * column) % PERIOD] for column in range(PERIOD)] for k in range(PERIOD)]
    table = [
        [INNER // PERIOD * sum(left[row][k] * right[k][column] for k in range(PERIOD)) for column in range(PERIOD)]
        for row in range(PERIOD)
    ]
    at = torch.arange(side) % PERIOD
    k = torch.arange(INNER) % PERIOD
    pick = lambda rows, rows_at, columns_at: torch.tensor(rows, dtype=torch.float64)[rows_at][:, columns_at]  # noqa: E731
    return pick(left, at, k), pick(right, k, at), pick(table, at, at)
