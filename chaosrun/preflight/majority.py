"""Finds nodes that differ from the majority, if there is one; and nodes to blame when pairs of nodes fail. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaosrun.records.grouping import grouped
from chaosrun.wording import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Majority:
    value: str
    """The value of most nodes; empty in a tie."""
    share: str
    """How many nodes have it, for people."""
    odd: Mapping[str, str]
    """The value of each node that differs; in a tie, of every node."""
    groups: Mapping[str, Sequence[str]]
    """The nodes by value."""

    @property
    def tied(self) -> bool:
        """Whether they differ without a majority (of two differing nodes neither is the odd one)."""
        return not self.share

    def __str__(self) -> str:
        return "; ".join(f"{value} on {listed(nodes)}" for value, nodes in self.groups.items())


def majority(values: Mapping[str, str]) -> Majority:
    """`values` by node, at least one."""
    groups = grouped(values, lambda node: values[node])
    most = max(len(nodes) for nodes in groups.values())
    largest = [value for value, nodes in groups.items() if len(nodes) == most]
    if len(largest) > 1:
        return Majority(value="", share="", odd=values, groups=groups)
    (value,) = largest
    return Majority(
        value=value,
        share=f"{most} of {len(values)} nodes",
        odd={node: other for node, other in values.items() if other != value},
        groups=groups,
    )


def fewest_to_blame(names: Sequence[str], failed: Iterable[tuple[str, str]], head: str | None = None) -> list[str]:
    """Names without which none of the failed (from, to) pairs is left, as few as a greedy choice finds.

    First a node that fails with itself, then the one that fails with most others; of two that fail only with each other, the
    unreachable one, then the one that is not Ray's head, then the later one.
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
