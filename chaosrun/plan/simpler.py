"""Simpler faults in the place of one: what a shrink tries when no fault can be left out any more. Pure."""

from collections.abc import Iterator

from chaosrun.spec.fragment import Entry

WHEN_AND_WHO = frozenset({"rank", "phase", "at_step", "occurrence", "attempt", "after"})
"""Keys that entries of every kind may have; the others are options."""


def simpler(entry: Entry) -> Iterator[Entry]:
    """Entries of `faults.schedule` that ask for less, the boldest first: a plain kill after the step; a kill; each key left
    out; one rank instead of all; half the step. Not all of them can be planned. Each is smaller: the search for one ends.
    """
    plain = {key: entry[key] for key in ("rank", "at_step") if key in entry}
    found: list[Entry] = [plain] if "at_step" in entry else []
    if "kind" in entry:
        found.append({key: value for key, value in entry.items() if key in WHEN_AND_WHO})
    found += [_without(entry, key) for key in entry if key not in ("rank", "at_step", "kind")]
    if entry.get("rank") == "all":
        found.append({**entry, "rank": 0})
    step = entry.get("at_step")
    if isinstance(step, int) and step > 1:
        found.append({**entry, "at_step": step // 2})
    for number, candidate in enumerate(found):
        if candidate != entry and candidate not in found[:number]:
            yield candidate


def _without(entry: Entry, key: str) -> Entry:
    return {other: value for other, value in entry.items() if other != key}
