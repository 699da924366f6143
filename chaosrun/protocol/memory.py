"""Restores a checkpoint from the copies in a node's memory, which outlive the ranks, without reading files.

Used only if every rank finds its copy of that same checkpoint: `copies_of` finds this rank's, `checkpointing` asks the others.
A copy is sealed right before the commit, so a checkpoint that is in the storage has the copies of all its ranks. Each rank has
room for two copies, written in turns, so that the newest checkpoint's copy lasts until the next is committed, however long the
storage takes. The restored state is compared with the manifest's digests, as in any restore; if it differs on any rank, all
ranks read the files.
"""

from typing import Any, NamedTuple

import torch

from chaosrun.protocol.snapshot import Arena, read
from chaosrun.records.layout import checkpoint_name
from chaosrun.records.manifest import Manifest
from chaosrun.records.order import COPIES, WorkerOrder


class Copies(NamedTuple):
    """The restored state, in the form that `TrainingState.parts` gives."""

    own: Any
    shared: Any
    """The state that ranks share, from the copy of the rank on this node that holds it."""


def keeps_shared(order: WorkerOrder) -> bool:
    """Whether this rank's copy holds the state that ranks share: rank 0 writes it to files, and each node restores from it."""
    return order.rank == 0 or (bool(order.memory) and order.local_rank == 0)


def copies_of(order: WorkerOrder, manifest: Manifest, device: torch.device) -> Copies | None:
    """The copies of a checkpoint in this node's memory, None unless both are there. Tensors of a GPU are loaded to `device`,
    the others stay in the copies."""
    own, shared = order.memory[:COPIES], order.memory[COPIES:]
    found: list[Any] = []
    # This rank's own copy also holds the state that ranks share.
    for descriptors in (own,) if keeps_shared(order) else (own, shared):
        for arena in map(Arena, descriptors):
            sealed = arena.sealed()
            if sealed is not None and (sealed.step, sealed.attempt) == (manifest.step, manifest.attempt):
                found.append(read(arena, sealed.layout, device).state)
                break
        else:
            return None
    return Copies(found[0], found[-1])


def arenas_of(order: WorkerOrder) -> list[Arena]:
    """This rank's arenas in the order in which to write them: the one with the checkpoint to be restored comes last."""
    arenas = [Arena(descriptor) for descriptor in order.memory[:COPIES]] or [Arena()]
    if not order.from_memory:
        return arenas[:1]

    def worth(arena: Arena) -> tuple[bool, int]:
        sealed = arena.sealed()
        return (checkpoint_name(sealed.step) == order.resume, sealed.attempt) if sealed else (False, 0)

    return sorted(arenas, key=worth)
