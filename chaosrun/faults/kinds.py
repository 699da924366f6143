"""All kinds of faults: a closed set, collected from the families' declarations."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from chaosrun.faults import control_plane, memory, node, process, rendezvous, saves, stalls, storage, storage_damage
from chaosrun.faults.kind import Kind

FAMILIES = (process, stalls, node, control_plane, memory, storage_damage, storage, saves, rendezvous)
KINDS: Mapping[str, Kind] = {kind.name: kind for family in FAMILIES for kind in family.KINDS}

LOSSES: Mapping[str, tuple[str, ...]] = {
    onto: tuple(kind.name for kind in KINDS.values() if kind.loss and kind.family == family)
    for onto, family in (("ranks", "process"), ("nodes", "node"))
}
"""Kinds that `faults.replay` may use for a loss in a recorded trace, by what is lost."""


def kind_at(name: str, phase: str | None) -> Kind:
    """The kind at this phase: inside a script's own save, some kinds strike and are shown differently."""
    return saves.AT_SAVE.get(name, KINDS[name]) if phase == "save" else KINDS[name]


if TYPE_CHECKING:
    FaultKind = str
    LossKind = str
else:
    FaultKind = Literal[tuple(KINDS)]
    LossKind = Literal[LOSSES["ranks"] + LOSSES["nodes"]]
"""The name of a kind, checked where pydantic reads one."""
