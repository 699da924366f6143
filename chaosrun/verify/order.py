"""The order in which the script's optimizers hold their parameters: their state is saved and restored by number (hazard O5)."""

from collections.abc import Iterable

from chaosrun.records.history import Attempt
from chaosrun.records.traces import StartRecord


def starts_of(attempt: Attempt) -> list[StartRecord]:
    return [trace.start for _, trace in sorted(attempt.traces.items()) if trace.start]


def unlike_orders(starts: Iterable[StartRecord]) -> str | None:
    """How the first of these differs that holds the first one's parameters in another order; None where all are alike."""
    first: StartRecord | None = None
    for start in starts:
        first = first or start
        if start.tensors != first.tensors and sorted(start.tensors) == sorted(first.tensors):
            pairs = enumerate(zip(first.tensors, start.tensors, strict=True))
            number, (expected, seen) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
            return f"parameter {number} is {seen} on rank {start.rank} of attempt {start.attempt}, {expected} elsewhere"
    return None
