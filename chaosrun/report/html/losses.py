"""Both legs' losses in one chart, and their distance in ULP: lineages only, each step once.

Long runs are thinned out to the extremes of each stretch, except for the strip of differing steps.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from chaosrun.records.grouping import grouped
from chaosrun.records.traces import StepRecord
from chaosrun.report.html.page import Scale, Shown, integer_ticks, path_of, ticks
from chaosrun.report.html.source import Leg, PageSource
from chaosrun.verify.lineage import Lineage
from chaosrun.verify.trajectory import loss_of
from chaosrun.verify.ulp import float_distances

HEIGHT = 220.0
ULP_HEIGHT = 120.0
STRETCHES = 500
"""Of a curve; each keeps up to four of its points."""
MOST_TAILS = 60
MOST_POINTS = 200

Stretch = tuple[int, int]
"""First and last step."""


def losses(source: PageSource) -> Shown | None:
    """None when neither leg recorded a step on all ranks. `points`: step, both losses, ULP, how often it was done; `untold`:
    how many steps these leave out; `steps`: in both legs; `differing`, `replayed`: stretches that differ, or were done
    again."""
    expected, seen = source.reference.chain, source.chaos.chain
    reference = _by_step(expected, {})
    unlike = {record.step for record, _ in _unlike(expected, seen)}
    known = reference if expected.steps.keys() == seen.steps.keys() else {}
    chaos = _by_step(seen, {step: loss for step, loss in known.items() if step not in unlike})
    if not reference and not chaos:
        return None
    every = sorted({*reference, *chaos})
    low, high = every[0], every[-1]
    distance, precision = _distances(expected, seen)
    both = reference.keys() & chaos.keys()
    apart = [step for step in every if step in both and distance.get(step, 0) != 0]
    ulp = {step: "no number" if (found := distance.get(step, 0)) is None else found for step in both}
    differing = _stretches((step, step) for step in apart)
    tails = _tails(source.chaos)
    replayed = tuple((attempt, min(steps), max(steps)) for attempt, steps in tails.items())
    bands = _stretches((first, last) for _, first, last in replayed)
    done = Counter(step for steps in tails.values() for step in steps)
    shown = every[:: -(-len(every) // MOST_POINTS)]
    largest_at = max((step for step in apart if distance[step] is not None), key=lambda step: distance[step] or 0, default=None)
    return {
        "curves": _curves(reference, chaos, tails, len(source.chaos.chain.steps), bands),
        "distances": _ulp_chart(apart, distance, differing, Scale(low, high), bands) if apart else None,
        "points": [(step, reference.get(step), chaos.get(step), ulp.get(step), 1 + done[step]) for step in shown],
        "untold": len(every) - len(shown),
        "steps": len(both),
        "differing": differing,
        "differing_steps": len(apart),
        "largest": None if largest_at is None else distance[largest_at],
        "largest_at": largest_at,
        "precision": precision,
        "replayed": replayed,
        "tails": sum(len(span.steps) for span in source.chaos.chain.cut_off),
        "only_reference": len(reference.keys() - chaos.keys()) if chaos else 0,
        "only_chaos": len(chaos.keys() - reference.keys()) if reference else 0,
        "not_finite": sum(not math.isfinite(value) for value in (*reference.values(), *chaos.values())),
    }


def _by_step(lineage: Lineage, known: Mapping[int, float]) -> dict[int, float]:
    """Loss over all ranks, for the steps that all of them recorded; `known`: losses whose records need not be read."""
    ranks = [by_step for by_step in lineage.steps.values() if by_step]
    if not ranks or len(ranks) < len(lineage.steps):
        return {}
    whole = set(ranks[0]).intersection(*ranks[1:])
    return {step: known[step] if step in known else _loss([by_step[step] for by_step in ranks]) for step in sorted(whole)}


def _unlike(expected: Lineage, seen: Lineage) -> Iterator[tuple[StepRecord, StepRecord]]:
    return (pair for steps in seen.steps.values() for span in steps.spans for pair in expected.unlike(span))


def _loss(records: Sequence[StepRecord]) -> float:
    try:
        return loss_of(records)
    except OverflowError:
        return math.inf  # the sum of losses near the largest float


def _tails(leg: Leg) -> dict[int, dict[int, list[StepRecord]]]:
    """The steps of each attempt that the next one repeated: records by attempt and step."""
    records = sorted(leg.chain.tails, key=lambda record: (record.attempt, record.step))
    by_attempt = grouped(records, lambda record: record.attempt)
    return {attempt: grouped(own, lambda record: record.step) for attempt, own in by_attempt.items()}


def _distances(expected: Lineage, seen: Lineage) -> tuple[dict[int, int | None], str]:
    """By differing step, the largest distance over ranks and micro-batches; None where either value is not a number."""
    apart: list[tuple[int, float, float]] = []
    for other, record in _unlike(expected, seen):
        pairs = zip(other.loss, record.loss, strict=False)
        apart += [(record.step, float.fromhex(left), float.fromhex(right)) for left, right in pairs if left != right]
        apart += [(record.step, math.nan, 0.0)] if len(other.loss) != len(record.loss) else []
    found, precision = float_distances([left for _, left, _ in apart], [right for *_, right in apart])
    distance: dict[int, int | None] = {}
    for (step, *_), ulp in zip(apart, found, strict=True):
        worst = distance.get(step, 0)
        distance[step] = None if ulp is None or worst is None else max(worst, ulp)
    return distance, precision


def _stretches(parts: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Merge stretches that overlap or adjoin."""
    found: list[Stretch] = []
    for first, last in sorted(parts):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def thinned(points: Sequence[tuple[int, float]]) -> list[int]:
    """Steps to draw: the first, lowest, highest and last of each stretch of equal length."""
    if len(points) <= 2 * STRETCHES:
        return [step for step, _ in points]
    length = -(-len(points) // STRETCHES)
    chosen: set[int] = set()
    for begin in range(0, len(points), length):
        stretch = points[begin : begin + length]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch
        chosen |= {stretch[0][0], stretch[-1][0], min(finite, key=itemgetter(1))[0], max(finite, key=itemgetter(1))[0]}
    return sorted(chosen)


def _upright(values: Iterable[float]) -> Scale:
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    # Halves first: the difference of the largest floats would overflow.
    room = (high / 2 - low / 2) / 10 or abs(high) * 0.05 or 0.5
    room = room if math.isfinite(high + room) and math.isfinite(low - room) and math.isfinite(high - low) else 0.0
    return Scale(low - room, high + room)


def _y(upright: Scale, value: float) -> float:
    return HEIGHT * (1 - upright.at(value))


def _line(values: Mapping[int, float], scale: Scale, upright: Scale) -> str:
    """A line in pieces: values that are not numbers and missing steps leave gaps."""
    points = sorted(values.items())
    pieces: list[list[tuple[float, float]]] = [[]]
    numbers = {step: number for number, (step, _) in enumerate(points)}
    before: int | None = None
    for step in thinned(points):
        value = values[step]
        gap = before is not None and step - before != numbers[step] - numbers[before]
        if not math.isfinite(value) or gap:
            pieces.append([])
        if math.isfinite(value):
            pieces[-1].append((scale.units(step), _y(upright, value) * 10))
        before = step
    return "".join(path_of(piece) for piece in pieces)


def _curves(
    reference: Mapping[int, float],
    chaos: Mapping[int, float],
    tails: Mapping[int, Mapping[int, list[StepRecord]]],
    ranks: int,
    bands: Sequence[Stretch],
) -> Shown:
    attempts = list(tails.values())[:MOST_TAILS]
    cut_off = [{step: _loss(records) for step, records in steps.items() if len(records) == ranks} for steps in attempts]
    upright = _upright(chain.from_iterable(values.values() for values in (reference, chaos, *cut_off)))
    across = Scale(min((*reference, *chaos)), max((*reference, *chaos)))
    lines = (("reference", reference), *(("tail", values) for values in cut_off), ("chaos", chaos))
    paths = [(kind, _line(values, across, upright)) for kind, values in lines]
    labels = [(_y(upright, value), f"{value:.4g}") for value in ticks(upright.low, upright.high, 5)]
    return _chart(HEIGHT, across, bands, labels, paths)


def _chart(
    height: float,
    across: Scale,
    bands: Sequence[Stretch],
    labels: Sequence[tuple[float, str]],
    paths: Sequence[tuple[str, str]],
    floor: float | None = None,
) -> Shown:
    """Steps from left to right, `bands` where they were done again; `labels` name values at their heights; `paths` by kind, in
    units, ten to a pixel high."""
    edges = [(across.at(first - 0.5), across.at(last + 0.5)) for first, last in bands]
    steps = integer_ticks(int(across.low), int(across.high), 4)
    return {
        "height": height,
        "scale": across,
        "bands": [(100 * left, 100 * (right - left)) for left, right in edges],
        "labels": labels,
        "steps": [(step, f"step {step}" if step == steps[0] else step) for step in steps],
        "paths": [path for path in paths if path[1]],
        "floor": floor,
    }


def _ulp_chart(
    apart: Sequence[int],
    distance: Mapping[int, int | None],
    differing: Sequence[Stretch],
    across: Scale,
    bands: Sequence[Stretch],
) -> Shown:
    """Stems on a scale of powers of two; below them every differing step."""
    upright = Scale(0.0, max([1.0, *(math.log2(1 + value) for value in distance.values() if value is not None)]))
    floor = ULP_HEIGHT - 24

    def y(power: float) -> float:
        return 8 + (floor - 8) * (1 - upright.at(power))

    points = [(step, math.inf if (far := distance[step]) is None else float(far)) for step in apart]
    stems = "".join(
        f"M{across.units(step)} {floor * 10:.0f}V{80 if (d := distance[step]) is None else y(math.log2(1 + d)) * 10:.0f}"
        for step in thinned(points)
    )
    edges = [(across.units(first - 0.4), across.units(last + 0.4)) for first, last in differing]
    strip = "".join(f"M{left} {(ULP_HEIGHT - 8) * 10:.0f}H{max(right, left + 12)}" for left, right in edges)
    powers = [int(power) for power in ticks(0.0, upright.high, 4) if power == int(power)]
    labels = [(y(power), f"2^{power}" if power > 9 else str(2**power - 1)) for power in powers]
    return _chart(ULP_HEIGHT, across, bands, labels, [("stem", stems), ("strip", strip)], floor)
