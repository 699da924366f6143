"""Figures' common ground: scales, ticks, marks. Positions across are in percent, so that figures fit any width unscaled.

What cannot be placed (NaN, infinite, out of reach) is never drawn: the callers say so in words.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDE = 10_000
"""Units across of the stretched inner drawing that paths live in."""
SHAPES: dict[str, Markup] = {
    "kill": Markup('<path class="kill" d="M-4.5 -4.5L4.5 4.5M-4.5 4.5L4.5 -4.5"/>'),
    "preempt": Markup('<path class="preempt" d="M-6 0H5M0 -5L5 0L0 5"/>'),
    "fault": Markup('<path class="fault" d="M0 -6.5L6 5H-6Z"/>'),
    "unseen": Markup('<circle class="unseen" r="5"/>'),
    "unplanned": Markup('<path class="unplanned" d="M0 -7L7 0L0 7L-7 0Z"/>'),
    "hang": Markup('<rect class="hang" x="-5.5" y="-5.5" width="11" height="11"/>'),
    "save": Markup('<circle class="save" r="4"/>'),
    "aside": Markup('<path class="aside" d="M0 5.5L-5.5 -4.5H5.5Z"/>'),
    "attempt": Markup(""),
}
"""By kind of mark, its shape around the origin: told apart without colour."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to shares of the way, 0 to 1."""

    low: float
    high: float

    def at(self, value: float) -> float:
        if self.high <= self.low:
            return 0.5
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def percent(self, value: float) -> str:
        return f"{100 * self.at(value):.3f}%".replace(".000%", "%")

    def units(self, value: float) -> int:
        return round(WIDE * self.at(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    at: float
    """In the scale's values."""
    y: float
    """In pixels from the top."""
    shape: str
    label: str


def figure_mark(mark: Mark, scale: Scale) -> Markup:
    """A mark that tells its label where it is pointed at."""
    return Markup(
        '<svg class="mark" role="img" x="{}" y="{:g}" width="1" height="1" overflow="visible">'
        '<title>{}</title><circle class="halo" r="11" fill="transparent"/>{}</svg>'
    ).format(scale.percent(mark.at), mark.y, mark.label, SHAPES[mark.shape])


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """A line through points (whole units)."""
    told = [f"{x:.0f} {y:.0f}" for x, y in points]
    return f"M{'L'.join(told)}" if len(told) > 1 else f"M{told[0]}h1" if told else ""


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between the two, at most so many."""
    width = high - low
    if not math.isfinite(width) or width <= 0:
        return [low]
    raw = width / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 0.0
    if power <= 0 or low + power == low:
        return [low, high]
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [
        number * step for number in range(first, first + most + 2) if low <= number * step + 1e-12 and number * step <= high
    ]


def integer_ticks(low: int, high: int, most: int = 6) -> list[int]:
    """Whole ones, the first value included."""
    found = [int(value) for value in ticks(low, high, most) if float(value).is_integer()]
    return sorted({low, *(value for value in found if value - low >= 0.18 * (high - low))})


def rules(heights: Sequence[float]) -> Markup:
    return join(Markup('<line class="rule" x1="0" x2="100%" y1="{0:g}" y2="{0:g}"/>').format(y) for y in heights)


def text(x: str, y: float, words: str, *, anchor: str = "start", dx: float = 0.0, strong: bool = False) -> Markup:
    kind = Markup(' class="strong"') if strong else ""
    aside = Markup(' dx="{:g}"').format(dx) if dx else Markup("")
    return Markup('<text x="{}" y="{:g}" text-anchor="{}"{}{}>{}</text>').format(x, y, anchor, aside, kind, escape(words))


def beneath(values: Sequence[float], words: Sequence[str], scale: Scale, y: float) -> Markup:
    """An axis's labels: the outer ones stay inside the figure."""
    told: list[Markup] = []
    for value, label in zip(values, words, strict=True):
        place = scale.at(value)
        told.append(
            text(scale.percent(value), y, label, anchor="start" if place < 0.02 else "end" if place > 0.98 else "middle")
        )
    return join(told)
