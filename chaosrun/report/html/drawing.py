"""Figures' common ground: scales and ticks. `templates/figures.html` draws them; positions across are in percent, so that they
fit any width. Values that cannot be placed (NaN, infinite) are not drawn: the callers report them in words.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

WIDE = 10_000
"""Units across of the stretched inner drawing that paths live in."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to shares of the axis, 0 to 1."""

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


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """A line through points (whole units)."""
    told = [f"{x:.0f} {y:.0f}" for x, y in points]
    return f"M{'L'.join(told)}" if len(told) > 1 else f"M{told[0]}h1" if told else ""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most this many round values between the two."""
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
    """Integer ticks, including the first value."""
    found = [int(value) for value in ticks(low, high, most) if float(value).is_integer()]
    return sorted({low, *(value for value in found if value - low >= 0.18 * (high - low))})
