"""Both legs' losses laid over each other, and how far apart they are in ULP: lineages only, each step once.

Long runs are thinned out: of each stretch the extremes stay, and every step at which something begins or ends. The strip under
the differences is never thinned out: it holds every step that differs.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from chaosrun.records.traces import StepRecord
from chaosrun.report.html.drawing import Scale, across, integer_ticks, join, path_of, rules, text, ticks
from chaosrun.report.html.source import Leg, Source
from chaosrun.verify.lineage import Lineage
from chaosrun.verify.trajectory import loss_of
from chaosrun.verify.ulp import float_distances

HEIGHT = 220.0
ULP_HEIGHT = 120.0
STRETCHES = 500
"""Of a curve; each keeps up to four of its points."""
MOST_TAILS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    axis: Markup
    plot: Markup
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    curves: Chart
    distances: Chart | None
    """None where the two legs have no step in common."""
    points: list[list[float | int | str | None]]
    """What is told where it is pointed at: step, loss of the reference, of the chaos leg, ULP, how often it was done."""
    low: int
    high: int
    steps: int
    """That both legs have."""
    differing: tuple[tuple[int, int], ...]
    """Stretches of steps whose losses differ."""
    differing_steps: int
    largest: int | None
    """ULP."""
    largest_at: int | None
    precision: str
    replayed: tuple[tuple[int, int, int], ...]
    """Attempt, first and last step that it did and that were done again."""
    tails: int
    only_reference: int
    only_chaos: int
    not_finite: int
    logarithmic: bool


def losses(source: Source) -> Losses | None:
    """None when neither leg recorded a step on all of its ranks."""
    legs = [_by_step(leg) for leg in (source.reference, source.chaos)]
    if not any(legs):
        return None
    reference, chaos = legs
    every = sorted({*reference, *chaos})
    low, high = every[0], every[-1]
    distance, precision = _distances(source.reference.chain, source.chaos.chain)
    both = [step for step in every if step in reference and step in chaos]
    apart = [step for step in both if distance.get(step, 0) != 0]
    differing = _stretches(apart)
    replayed = tuple(_replayed(source.chaos))
    kept = {low, high, *(step for stretch in differing[:STRETCHES] for step in stretch)}
    kept |= {step for _, first, last in replayed[:STRETCHES] for step in (first, last)}
    scale = Scale(float(low), float(high))
    curves, logarithmic, bad = _curves(source.chaos, reference, chaos, scale, replayed, kept)
    numbers = [value for step in apart if (value := distance[step]) is not None]
    shown = sorted({*thinned(sorted(reference.items()), kept), *thinned(sorted(chaos.items()), kept)})
    done = _times_done(source.chaos)
    largest = max(numbers, default=None)
    return Losses(
        curves=curves,
        distances=_ulp_chart(both, distance, differing, scale, replayed) if both else None,
        points=[
            [step, _told(reference.get(step)), _told(chaos.get(step)), _ulp(distance, step, both), done.get(step, 1)]
            for step in shown
        ],
        low=low,
        high=high,
        steps=len(both),
        differing=differing,
        differing_steps=len(apart),
        largest=largest,
        largest_at=None if largest is None else next(step for step in apart if distance[step] == largest),
        precision=precision,
        replayed=replayed,
        tails=len(source.chaos.chain.tails),
        only_reference=len(reference.keys() - chaos.keys()) if chaos else 0,
        only_chaos=len(chaos.keys() - reference.keys()) if reference else 0,
        not_finite=bad,
        logarithmic=logarithmic,
    )


def _ulp(distance: Mapping[int, int | None], step: int, both: Sequence[int]) -> int | str | None:
    if step not in distance:
        return None if not both else 0
    return "no number" if distance[step] is None else distance[step]


def _told(value: float | None) -> float | str | None:
    """JSON holds neither NaN nor infinities."""
    return value if value is None or math.isfinite(value) else str(value)


def _by_step(leg: Leg) -> dict[int, float]:
    """Loss over all ranks, of the steps that all of them recorded."""
    ranks = [by_step for by_step in leg.chain.steps.values() if by_step]
    if not ranks or len(ranks) < len(leg.chain.steps):
        return {}
    whole = set(ranks[0]).intersection(*ranks[1:])
    return {step: _loss([by_step[step] for by_step in ranks]) for step in sorted(whole)}


def _loss(records: Sequence[StepRecord]) -> float:
    try:
        return loss_of(records)
    except OverflowError:
        return math.inf  # the sum of numbers at the edge of what there is


def _distances(expected: Lineage, seen: Lineage) -> tuple[dict[int, int | None], str]:
    """By step that differs, the largest distance over ranks and micro-batches; None where one of a pair is no number."""
    places: list[int] = []
    pairs: tuple[list[float], list[float]] = ([], [])
    for rank, by_step in seen.steps.items():
        for step, record in by_step.items():
            other = expected.at(rank, step)
            if other is None or other.loss == record.loss:
                continue
            for left, right in zip(other.loss, record.loss, strict=False):
                if left != right:
                    places.append(step)
                    pairs[0].append(float.fromhex(left))
                    pairs[1].append(float.fromhex(right))
            if len(other.loss) != len(record.loss):
                places.append(step)
                pairs[0].append(math.nan)
                pairs[1].append(0.0)
    found, precision = float_distances(*pairs)
    distance: dict[int, int | None] = {}
    for step, ulp in zip(places, found, strict=True):
        worst = distance.get(step, 0)
        distance[step] = None if ulp is None or worst is None else max(worst, ulp)
    return distance, precision


def _stretches(steps: Sequence[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return tuple(found)


def _replayed(leg: Leg) -> Iterator[tuple[int, int, int]]:
    by_attempt: dict[int, set[int]] = {}
    for record in leg.chain.tails:
        by_attempt.setdefault(record.attempt, set()).add(record.step)
    for attempt, steps in sorted(by_attempt.items()):
        yield attempt, min(steps), max(steps)


def _times_done(leg: Leg) -> dict[int, int]:
    times: dict[int, int] = {}
    for _, step in {(record.attempt, record.step) for record in leg.chain.tails}:
        times[step] = times.get(step, 1) + 1
    return times


def thinned(points: Sequence[tuple[int, float]], kept: Iterable[int] = ()) -> list[int]:
    """Steps to draw: of each stretch of equal length the first, the lowest, the highest and the last, and all of `kept`."""
    if len(points) <= 2 * STRETCHES:
        return [step for step, _ in points]
    wanted = set(kept)
    length = -(-len(points) // STRETCHES)
    chosen: set[int] = set()
    for begin in range(0, len(points), length):
        stretch = points[begin : begin + length]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch
        chosen |= {stretch[0][0], stretch[-1][0], min(finite, key=_value)[0], max(finite, key=_value)[0]}
        chosen |= {step for step, _ in stretch if step in wanted}
    return sorted(chosen)


def _value(point: tuple[int, float]) -> float:
    return point[1]


class _Upright:
    """Losses, from bottom to top; logarithmic where they span orders of magnitude."""

    def __init__(self, values: Iterable[float], height: float) -> None:
        known = [value for value in values if math.isfinite(value)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        self.logarithmic = low > 0 and high / low >= 50
        if self.logarithmic:
            self.scale = Scale(math.log10(low), math.log10(high))
        else:
            # Halves first: the distance of the largest numbers there are is none of them.
            room = (high / 2 - low / 2) / 10 or abs(high) * 0.05 or 0.5
            room = room if math.isfinite(high + room) and math.isfinite(low - room) and math.isfinite(high - low) else 0.0
            self.scale = Scale(low - room, high + room)
        self.height = height

    def y(self, value: float) -> float:
        return self.height * (1 - self.scale.at(math.log10(value) if self.logarithmic else value))

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            return ticks(self.scale.low, self.scale.high, 5)
        powers = range(math.floor(self.scale.low), math.ceil(self.scale.high) + 1)
        every = -(-len(powers) // 6)
        factors = (1, 2, 5) if len(powers) <= 3 else (1, 3) if len(powers) <= 4 else (1,)
        found = [factor * 10.0**power for power in powers[::every] for factor in factors]
        return [value for value in found if self.scale.low <= math.log10(value) <= self.scale.high]


def _curves(
    leg: Leg,
    reference: Mapping[int, float],
    chaos: Mapping[int, float],
    scale: Scale,
    replayed: Sequence[tuple[int, int, int]],
    kept: set[int],
) -> tuple[Chart, bool, int]:
    tails = list(_tails(leg))[:MOST_TAILS]
    values = [*reference.values(), *chaos.values(), *(value for tail in tails for _, value in tail)]
    upright = _Upright(values, HEIGHT)
    lines = [
        _line("reference", reference, scale, upright, kept),
        *(_line("tail", dict(tail), scale, upright, set()) for tail in tails),
        _line("chaos", chaos, scale, upright, kept),
    ]
    at = upright.ticks()
    steps = integer_ticks(int(scale.low), int(scale.high), 4)
    drawn = [
        _bands(replayed, scale, HEIGHT),
        rules([upright.y(value) for value in at]),
        Markup(
            '<svg width="100%" height="{0:g}" viewBox="0 0 10000 {1:g}" preserveAspectRatio="none" aria-hidden="true">{2}</svg>'
        ).format(HEIGHT, HEIGHT * 10, join(lines)),
        across(steps, [_stepped(step, steps) for step in steps], scale, HEIGHT + 18),
    ]
    labels = [text("100%", upright.y(value) + 4, f"{value:.4g}", anchor="end") for value in at]
    axis = Markup('<svg x="-10" overflow="visible">{}</svg>').format(join(labels))
    bad = sum(not math.isfinite(value) for value in (*reference.values(), *chaos.values()))
    return Chart(axis=axis, plot=join(drawn), height=HEIGHT + 26), upright.logarithmic, bad


def _stepped(step: int, steps: Sequence[int]) -> str:
    return f"step {step}" if step == steps[0] else str(step)


def _line(kind: str, values: Mapping[int, float], scale: Scale, upright: _Upright, kept: set[int]) -> Markup:
    """In pieces: what is no number leaves a gap, and so do steps that are missing."""
    points = sorted(values.items())
    pieces: list[list[tuple[float, float]]] = [[]]
    numbers = {step: number for number, (step, _) in enumerate(points)}
    before: int | None = None
    for step in thinned(points, kept):
        value = values[step]
        gap = before is not None and step - before != numbers[step] - numbers[before]
        if not math.isfinite(value) or gap:
            pieces.append([])
        if math.isfinite(value):
            pieces[-1].append((scale.units(step), upright.y(value) * 10))
        before = step
    d = "".join(path_of(piece) for piece in pieces)
    return Markup('<path class="{}" d="{}"/>').format(kind, d) if d else Markup("")


def _tails(leg: Leg) -> Iterator[list[tuple[int, float]]]:
    """What each attempt did and the next one did again, over the ranks that recorded it."""
    by_attempt: dict[int, dict[int, list[StepRecord]]] = {}
    for record in leg.chain.tails:
        by_attempt.setdefault(record.attempt, {}).setdefault(record.step, []).append(record)
    ranks = len(leg.chain.steps)
    for _, steps in sorted(by_attempt.items()):
        yield [(step, _loss(records)) for step, records in sorted(steps.items()) if len(records) == ranks]


def _bands(replayed: Sequence[tuple[int, int, int]], scale: Scale, height: float) -> Markup:
    """Steps that were done more than once."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted((first, last) for _, first, last in replayed):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    boxes: list[Markup] = []
    for first, last in merged:
        left, right = scale.at(first - 0.5), scale.at(last + 0.5)
        boxes.append(
            Markup('<rect class="band" x="{:.3f}%" y="0" width="{:.3f}%" height="{:g}"/>').format(
                100 * left, 100 * (right - left), height
            )
        )
    return join(boxes)


def _ulp_chart(
    both: Sequence[int],
    distance: Mapping[int, int | None],
    differing: Sequence[tuple[int, int]],
    scale: Scale,
    replayed: Sequence[tuple[int, int, int]],
) -> Chart:
    """Stems on a scale of powers of two; below them every step that differs."""
    largest = max((math.log2(1 + value) for value in distance.values() if value is not None), default=0.0)
    upright = Scale(0.0, max(largest, 1.0))
    floor = ULP_HEIGHT - 24

    def y(power: float) -> float:
        return 8 + (floor - 8) * (1 - upright.at(power))

    points = [
        (step, math.inf if distance[step] is None else float(distance[step] or 0))
        for step in both
        if distance.get(step, 0) != 0
    ]
    stems = "".join(
        f"M{scale.units(step)} {floor * 10:.0f}V{80 if (d := distance[step]) is None else y(math.log2(1 + d)) * 10:.0f}"
        for step in thinned(points)
    )
    strip = "".join(
        f"M{scale.units(first - 0.4)} {(ULP_HEIGHT - 8) * 10:.0f}H{max(scale.units(last + 0.4), scale.units(first - 0.4) + 12)}"
        for first, last in differing
    )
    powers = [value for value in ticks(0.0, upright.high, 4) if value == int(value)]
    steps = integer_ticks(int(scale.low), int(scale.high), 4)
    drawn = [
        _bands(replayed, scale, ULP_HEIGHT),
        rules([y(power) for power in powers]),
        Markup('<line class="base" x1="0" x2="100%" y1="{0:g}" y2="{0:g}"/>').format(floor),
        Markup(
            '<svg width="100%" height="{0:g}" viewBox="0 0 10000 {1:g}" preserveAspectRatio="none" aria-hidden="true">'
            '<path class="stem" d="{2}"/><path class="strip" d="{3}"/></svg>'
        ).format(ULP_HEIGHT, ULP_HEIGHT * 10, stems, strip),
        across(steps, [_stepped(step, steps) for step in steps], scale, ULP_HEIGHT + 16),
    ]
    if not differing:
        drawn.append(text("50%", floor / 2 + 4, "no difference at any step", anchor="middle", strong=True))
    labels = [
        text(
            "100%", y(power) + 4, "0" if not power else f"2^{power:g}" if power > 9 else str(2 ** int(power) - 1), anchor="end"
        )
        for power in powers
    ]
    axis = Markup('<svg x="-10" overflow="visible">{}</svg>').format(join(labels))
    return Chart(axis=axis, plot=join(drawn), height=ULP_HEIGHT + 24)
