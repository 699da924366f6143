"""Decides which checkpoints may be deleted, from what exists and what is valid. Pure."""

from collections.abc import Callable, Iterable

FEWEST_KEPT = 2
"""Valid checkpoints that always stay, whatever `keep` says: one may turn out damaged when it is needed."""


def to_delete(steps: Iterable[int], keep: int, is_valid: Callable[[int], bool]) -> list[int]:
    """Steps whose checkpoints may be deleted, ascending: those older than the `keep` newest valid ones.

    `is_valid` is called newest first, and no more often than needed. A newer invalid checkpoint stays: it must be quarantined,
    not silently deleted.
    """
    newest_first = sorted(set(steps), reverse=True)
    wanted = max(keep, FEWEST_KEPT)
    if len(newest_first) <= wanted:
        return []
    for place, step in enumerate(newest_first):
        wanted -= is_valid(step)
        if wanted == 0:
            return sorted(newest_first[place + 1 :])
    return []
