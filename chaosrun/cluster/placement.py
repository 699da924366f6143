"""Which ranks are on which nodes, and how many workers fit where. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from chaosrun.records.events import NodePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    nodes: dict[str, NodePlace]
    """By node id, in the order of ranks: the first hosts rank 0."""
    stood_by: tuple[str, ...] = ()
    """Nodes whose agents had been standing by."""
    node_of: Mapping[int, tuple[int, str]] = field(init=False)
    """By rank, the number and the id of its node."""

    def __post_init__(self) -> None:
        by_rank = {rank: (number, node) for number, (node, place) in enumerate(self.nodes.items()) for rank in place.ranks}
        object.__setattr__(self, "node_of", by_rank)

    @property
    def master_addr(self) -> str:
        return "127.0.0.1" if len(self.nodes) == 1 else next(iter(self.nodes.values())).address


def places_for(
    workers: int, bundle: Mapping[str, float], free: Mapping[str, Mapping[str, float]], *, spread: bool = False
) -> dict[str, int] | None:
    """By node, how many workers with one bundle each it gets: on as few nodes as possible, none larger than needed. None: they
    do not fit. `free`: free resources by node; `spread`: one worker a node."""
    fits = rooms_for(workers, bundle, free, spread=spread)
    places: dict[str, int] = {}
    while left := workers - sum(places.values()):
        if not fits:
            return None
        # The smallest node with room for all remaining workers, else the one with the most room.
        node = min(fits, key=lambda node: (fits[node] < left, fits[node] if fits[node] >= left else -fits[node]))
        places[node] = min(left, fits.pop(node))
    return places


def rooms_for(
    workers: int, bundle: Mapping[str, float], free: Mapping[str, Mapping[str, float]], *, spread: bool = False
) -> dict[str, int]:
    """By node, how many of the workers fit; nodes without room are left out."""
    fits: dict[str, int] = {}
    for node, amounts in free.items():
        rooms = [int((amounts.get(name, 0.0) + 1e-6) / amount) for name, amount in bundle.items() if amount]
        if (room := min(rooms, default=workers)) > 0:
            fits[node] = 1 if spread else room
    return fits
