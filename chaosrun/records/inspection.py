"""The files of an inspected step: its quantities, in the order of diagnosis, with their bytes. Used by `diagnose` only.

A moment is one JSON file for each rank and attempt, `rank-R.inspection/step-NNNNNNNN.json`, or `end.json`.
"""

from typing import Literal, get_args

from msgspec import field

from chaosrun.records.codec import Count, Record

Quantity = Literal[
    "sample ids",
    "batch",
    "rng",
    "parameters before",
    "buffers",
    "optimizer state",
    "scheduler state",
    "registered state",
    "loss",
    "local gradients",
    "reduced gradients",
    "learning rate",
    "parameters after",
]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
"""In the order of diagnosis: an earlier one that differs makes the later ones differ."""


class InspectedValue(Record, frozen=True, kw_only=True):
    """One value of a quantity: its raw bytes, or a text for a value without bits (sample ids, names, None)."""

    quantity: Quantity
    micro_batch: Count
    """From 0 within the step; 0 for values of the whole step."""
    name: str
    text: str | None = None
    bytes: str | None = None
    """Digest of the bytes, which are in the leg's `tensors/<digest>`, little-endian and contiguous."""
    dtype: str | None = None
    shape: list[int] | None = None


class InspectedMoment(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[1] = 1
    step: Count
    entries: list[InspectedValue]
    script: dict[str, str] = field(default_factory=dict)
    """The script's other state when the step began, by path: a readable value or a digest."""
