"""The search for a smallest fault plan that fails. Pure: `first` tries the plans of a round, and returns one that fails."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from chaosrun.spec.fragment import Entry

WHEN_AND_WHO = frozenset({"rank", "phase", "at_step", "occurrence", "attempt", "after"})
"""Keys that entries of every kind may have; the others are options."""

T = TypeVar("T")
First = Callable[[Sequence[tuple[T, ...]]], tuple[T, ...] | None]


def ddmin(items: Sequence[T], first: First[T]) -> tuple[T, ...]:
    """A part of `items`, in their order, that fails and would not without any one of them (1-minimal): delta debugging, the
    algorithm ddmin of A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE Transactions on
    Software Engineering 28(2), 2002, section 3.2.

    `items` must fail, and the empty list must not. `first` may be called with a part more than once: it should cache its
    results.
    """
    kept = tuple(items)
    granularity = 2
    while len(kept) >= 2:
        # As many parts, none empty, that differ by at most one in length.
        bounds = [number * len(kept) // granularity for number in range(granularity + 1)]
        parts = [kept[start:end] for start, end in pairwise(bounds)]
        rests = [(*kept[:start], *kept[end:]) for start, end in pairwise(bounds)]
        if found := first(parts):
            # Reduce to a part.
            kept, granularity = found, 2
        elif granularity > 2 and (found := first(rests)):
            # Reduce to a complement; the remaining parts keep their size. (Each of two parts is the other's complement.)
            kept, granularity = found, granularity - 1
        elif granularity < len(kept):
            granularity = min(2 * granularity, len(kept))
        else:
            break
    return kept


def simplify(schedule: tuple[Entry, ...], first: First[Entry]) -> None:
    """Replace the remaining faults by simpler ones, as long as the plan still fails."""
    place = 0
    while place < len(schedule):
        changed = [(*schedule[:place], entry, *schedule[place + 1 :]) for entry in simpler(schedule[place])]
        if (found := first(changed)) is None:
            place += 1
        else:
            schedule = found


def simpler(entry: Entry) -> Iterator[Entry]:
    """Simpler entries of `faults.schedule`, the largest simplification first. Each is strictly simpler, so that the search
    ends."""
    plain = {key: entry[key] for key in ("rank", "at_step") if key in entry}
    found: list[Entry] = [plain] if "at_step" in entry else []
    if "kind" in entry:
        found.append({key: value for key, value in entry.items() if key in WHEN_AND_WHO})
    left_out = [key for key in entry if key not in ("rank", "at_step", "kind")]
    found += [{key: value for key, value in entry.items() if key != without} for without in left_out]
    if entry.get("rank") == "all":
        found.append({**entry, "rank": 0})
    step = entry.get("at_step")
    if isinstance(step, int) and step > 1:
        found.append({**entry, "at_step": step // 2})
    for number, candidate in enumerate(found):
        if candidate != entry and candidate not in found[:number]:
            yield candidate
