"""Whose fault it is when something fails between pairs of nodes. Pure."""

from collections.abc import Iterable, Sequence


def fewest_to_blame(names: Sequence[str], failed: Iterable[tuple[str, str]], head: str | None = None) -> list[str]:
    """Names without which none of the failed (from, to) is left, as few as a greedy choice finds.

    First whoever fails with itself, then whoever fails with most others; of two that only fail with each other, whoever is not
    reached, then who is not Ray's head, then the later one.
    """
    order = {name: index for index, name in enumerate(names)}
    partners: dict[str, set[str]] = {name: set() for name in order}
    arrivals: dict[str, set[str]] = {name: set() for name in order}
    blamed: list[str] = []

    def blame(name: str) -> None:
        blamed.append(name)
        for partner in partners[name]:
            partners[partner].discard(name)
            arrivals[partner].discard(name)
        partners[name] = set()

    pairs = list(failed)
    for one, other in pairs:
        if one != other:
            partners[one].add(other)
            partners[other].add(one)
            arrivals[other].add(one)
    for name in sorted({one for one, other in pairs if one == other}, key=order.__getitem__):
        blame(name)
    while True:
        worst = max(order, key=lambda name: (len(partners[name]), len(arrivals[name]), name != head, order[name]))
        if not partners[worst]:
            return blamed
        blame(worst)
