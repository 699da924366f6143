"""Delta debugging: from a list that fails to one of which nothing can be left out.

The algorithm ddmin of A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE Transactions on
Software Engineering 28(2), 2002, section 3.2. Pure but for what `fails` does.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def ddmin(items: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A part of `items`, in their order, that fails and would not if any one of them were left out (1-minimal).

    `items` must fail, and nothing at all must not: neither is tried. `fails` is asked about the same part more than once, so
    it had better remember. Asks on the order of log n times where one item is to blame, n² at worst.
    """
    kept = tuple(items)
    granularity = 2
    while len(kept) >= 2:
        parts = _split(kept, granularity)
        if found := next((part for part in parts if fails(part)), None):
            # Reduce to a part.
            kept, granularity = found, 2
        elif granularity > 2 and (found := next((rest for rest in _complements(parts) if fails(rest)), None)):
            # Reduce to a complement: what is left of the parts stays as fine as it was. (Of two parts each is the other's.)
            kept, granularity = found, granularity - 1
        elif granularity < len(kept):
            granularity = min(2 * granularity, len(kept))
        else:
            break
    return kept


def _split(items: tuple[T, ...], parts: int) -> list[tuple[T, ...]]:
    """As many parts, none empty, that differ by at most one in length."""
    bounds = [number * len(items) // parts for number in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


def _complements(parts: Sequence[tuple[T, ...]]) -> list[tuple[T, ...]]:
    return [tuple(item for other, part in enumerate(parts) if other != number for item in part) for number in range(len(parts))]
