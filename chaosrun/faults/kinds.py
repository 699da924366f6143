"""Every kind of fault there is: a closed set, made of what the families declare. A kind that is not here does not exist."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from chaosrun.faults import control_plane, memory, node, process, rendezvous, stalls, storage, storage_damage
from chaosrun.faults.kind import Kind

FAMILIES = (process, stalls, node, control_plane, memory, storage_damage, storage, rendezvous)
KINDS: Mapping[str, Kind] = {kind.name: kind for family in FAMILIES for kind in family.KINDS}

if TYPE_CHECKING:
    FaultKind = str
else:
    FaultKind = Literal[tuple(KINDS)]
"""The name of a kind, checked where pydantic reads one."""
