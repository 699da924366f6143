"""The sample ledger: the samples of each micro-batch in both legs, around the first divergence or else the first restart."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chaosrun.records.spans import StepsByNumber
from chaosrun.records.traces import StepRecord
from chaosrun.report.html.page import Shown
from chaosrun.report.html.source import PageSource
from chaosrun.verify.compare import first_difference
from chaosrun.verify.lineage import Lineage
from chaosrun.wording import listed

BEFORE, AFTER = 2, 4
MOST_ROWS = 40
MOST_IDS = 10


def ledger(source: PageSource) -> Shown | None:
    """`about`: the event at the middle step; `by_ids`: by sample ids, else by digests of batches. None: no step to show."""
    place = _place(source)
    if place is None:
        return None
    step, rank, attempt, about = place
    expected, seen = source.reference.chain, _seen(source, attempt)
    steps: Sequence[int] = range(max(1, step - BEFORE), step + AFTER + 1)
    if source.view.facts.in_production:
        steps = [number for number in steps if expected.at(rank, number)]  # a step done once has nothing to compare with
    pairs = [(number, expected.at(rank, number), seen.at(rank, number)) for number in steps]
    by_ids = all(record.knows_ids for _, *records in pairs for record in records if record is not None)
    origins = _origins(expected, rank, by_ids)
    rows = [
        row for number, *records in pairs for row in _rows(number, records[0], records[1], by_ids, origins, here=number == step)
    ]
    if not rows:
        return None
    alike = all(row["alike"] for row in rows)
    return {"rank": rank, "about": about, "by_ids": by_ids, "rows": rows[:MOST_ROWS], "alike": alike}


def _place(source: PageSource) -> tuple[int, int, int | None, str] | None:
    found = source.view.verdict.divergence
    if found is not None:
        return found.step, found.rank, found.attempt, "the first difference"
    for attempt in source.chaos.history.attempts[1:]:
        ranks = [rank for rank, trace in sorted(attempt.traces.items()) if trace.steps]
        if ranks:
            return attempt.start_of(ranks[0]) + 1, ranks[0], None, f"the restart of attempt {attempt.number}"
    return None


def _seen(source: PageSource, number: int | None) -> Lineage:
    """The chaos leg's lineage up to this attempt: a divergence may be in steps that a later restart cut off."""
    chain = source.chaos.chain
    attempt = next((entry for entry in source.chaos.history.attempts if entry.number == number), None)
    if attempt is None:
        return chain
    steps = {rank: StepsByNumber([*trace.spans, *chain.of(rank).spans]) for rank, trace in attempt.traces.items()}
    return Lineage(steps={**chain.steps, **steps})


def _rows(
    step: int,
    expected: StepRecord | None,
    seen: StepRecord | None,
    by_ids: bool,
    origins: Mapping[Any, Sequence[int]],
    *,
    here: bool,
) -> Iterator[Shown]:
    """`found_at`: the steps of the reference leg to which the batch seen instead belongs."""
    left, right = _batches(expected, by_ids), _batches(seen, by_ids)
    count = max(len(left), len(right))
    for micro in range(count):
        pair = [values[micro] if micro < len(values) else None for values in (left, right)]
        alike = pair[0] == pair[1]
        places = [] if alike or pair[1] is None else [str(place) for place in origins.get(repr(pair[1]), ())]
        yield {
            "step": step,
            "micro_batch": micro if count > 1 else None,
            "attempt": None if seen is None else seen.attempt,
            "expected": _words(pair[0], pair[1]),
            "seen": _words(pair[1], pair[0]),
            "alike": alike,
            "found_at": f"step{'s' * (len(places) > 1)} {listed(places, most=3)}" if places else None,
            "here": here,
        }


def _batches(record: StepRecord | None, by_ids: bool) -> Sequence[Any]:
    if record is None:
        return ()
    return record.ids if by_ids and record.ids is not None else record.batch


def _origins(expected: Lineage, rank: int, by_ids: bool) -> Mapping[Any, list[int]]:
    """Steps of the reference leg by the contents of their micro-batches."""
    found: dict[Any, list[int]] = {}
    for step, record in expected.of(rank).items():
        for batch in _batches(record, by_ids):
            found.setdefault(repr(batch), []).append(step)
    return found


def _words(batch: Any, other: Any) -> str:
    """Sample ids; for a large batch those from the first one that differs from the other batch."""
    if batch is None:
        return "nothing"
    if not isinstance(batch, list | tuple):
        return str(batch)
    start = (first_difference(batch, other) or 0) if isinstance(other, list | tuple) and len(batch) > MOST_IDS else 0
    shown = [str(sample)[:80] for sample in batch[start : start + MOST_IDS]]
    more = f" … ({len(batch)} samples)" if len(batch) > MOST_IDS else ""
    return f"{'… ' if start else ''}{', '.join(shown)}{more}" if shown else "an empty batch"
