"""Which of several nodes are the odd ones out, where anything says so. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaosrun.wording import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Majority:
    value: str
    """What most nodes have; empty where equally many have another."""
    share: str
    """How many, for people."""
    odd: Mapping[str, str]
    """What the others have, by node; of a tie what each has."""
    groups: Mapping[str, Sequence[str]]
    """The nodes by what they have."""

    @property
    def tied(self) -> bool:
        """Whether they differ and nothing says which is right: of two nodes neither is the odd one."""
        return not self.share

    def __str__(self) -> str:
        return "; ".join(f"{value} on {listed(nodes)}" for value, nodes in self.groups.items())


def majority(values: Mapping[str, str]) -> Majority:
    """`values` by node, at least one."""
    groups: dict[str, list[str]] = {}
    for node, value in values.items():
        groups.setdefault(value, []).append(node)
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
