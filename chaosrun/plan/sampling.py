"""Random draws that are the same on every machine: numbers of `random.Random(seed).random()`, only compared, added, multiplied
and truncated, which IEEE 754 fixes to the last bit. Logarithms differ between C libraries."""

import random
from collections.abc import Iterator, Sequence


def distinct(count: int, among: int, chance: random.Random) -> list[int]:
    """`count` different numbers of range(among), ascending, each set equally likely (R. W. Floyd's sampling: `count` draws)."""
    chosen: set[int] = set()
    for limit in range(among - count, among):
        candidate = int(chance.random() * (limit + 1))
        chosen.add(limit if candidate in chosen else candidate)
    return sorted(chosen)


def nth_free(first: int, occupied: Sequence[int], index: int) -> int:
    """The step with index `index` (from 0) among the steps from `first` on that are not in `occupied` (ascending)."""
    step = first + index
    for busy in occupied:
        if busy > step:
            break
        step += 1
    return step


def bernoulli(probability: float, first: int, last: int, chance: random.Random) -> Iterator[int]:
    """Steps of first to last, each chosen with this probability: one draw a step, no logarithms."""
    return (step for step in range(first, last + 1) if chance.random() < probability)


def exponential(chance: random.Random) -> float:
    """An exponential variate of mean 1, by comparisons alone: a run of draws lasts while they decrease; a run of odd length
    yields its first draw, plus one for each run of even length before (J. von Neumann, "Various techniques used in connection
    with random digits", 1951)."""
    units = 0
    while True:
        first = falling = chance.random()
        length = 1
        while (following := chance.random()) < falling:
            falling, length = following, length + 1
        if length % 2:
            return units + first
        units += 1
