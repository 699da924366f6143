"""Shared by all pages of chaosrun: the jinja environment, the format of numbers, and the scales and ticks of figures.

A page extends `shell.html` (blocks: title, favicon, content), which inlines `page.css` and `page.js`. `figures.html` draws
figures: positions across are in percent, so that they fit any width.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chaosrun.report.escapes import harmless_on_a_page
from chaosrun.wording import count, span

TEMPLATES = Path(__file__).parent / "templates"
Shown = Mapping[str, object]
"""The values that a template reads under one name."""
WIDE = 10_000
"""Units across of the stretched inner drawing that paths live in."""


@cache
def environment(*folders: Path) -> Environment:
    """Jinja's environment, with the templates here and those in `folders`, which take precedence."""
    made = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Not of markup, which is a type of its own.
        finalize=lambda value: harmless_on_a_page(value) if type(value) is str else value,
    )
    made.filters |= {"span": _span, "moment": moment, "number": number, "share": share, "sentence": sentence}
    made.globals["count"] = count
    return made


def sentence(words: str) -> str:
    """With a capital, unless it begins with a name: of a file, a function, a check."""
    first = words.split(" ", 1)[0].rstrip(",:;")
    return words if set(first) & set("./_`(") else f"{words[:1].upper()}{words[1:]}"


def _span(seconds: float | None) -> str:
    return "–" if seconds is None else span(seconds)


def moment(time_s: float | None) -> str:
    """A wall-clock time, in UTC."""
    if time_s is None:
        return "–"
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "–"  # of a year that no calendar has


def since(seconds: float) -> str:
    """A moment on a figure's own clock: "+1.25 s"."""
    if seconds < 60:
        return f"+{seconds:.2f} s"
    return f"+{span(seconds)}"


def number(value: float | None, digits: int = 6) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ") if abs(value) < 10**15 else f"{float(min(value, 10**300)):.3g}"
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)


def share(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.1f} %"


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
