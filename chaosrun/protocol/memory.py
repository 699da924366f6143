"""Restores from the copies of a checkpoint that a node keeps in memory, which outlive the ranks: no file is read.

Only where every rank finds its copy, sealed when that very checkpoint was committed. What came back is compared with the
manifest's digests, like any other restore; where it is not what was saved, on any rank, all of them read the files.
"""

from typing import Any, NamedTuple

import torch

from chaosrun.protocol.snapshot import Arena, read
from chaosrun.records.manifest import Manifest
from chaosrun.records.order import WorkerOrder


class Copies(NamedTuple):
    """As `TrainingState.parts` gave them."""

    own: Any
    shared: Any
    """Of the rank of this node that holds what ranks share."""


def keeps_shared(order: WorkerOrder) -> bool:
    """Whether this rank's copy holds what ranks share: rank 0 writes it down, and each node needs it to restore from."""
    return order.rank == 0 or (bool(order.memory) and order.local_rank == 0)


def copies_of(order: WorkerOrder, manifest: Manifest, device: torch.device) -> Copies | None:
    """Those that this node has of a checkpoint; None: not both. What lay on a GPU is on this device, the rest in the copies."""
    found: list[Any] = []
    # The rank that keeps what ranks share has one copy of all.
    for descriptor in order.memory[:1] if keeps_shared(order) else order.memory:
        arena = Arena(descriptor)
        sealed = arena.sealed()
        if sealed is None or (sealed.step, sealed.attempt) != (manifest.step, manifest.attempt):
            return None
        found.append(read(arena, sealed.layout, device).state)
    return Copies(found[0], found[-1]) if found else None
