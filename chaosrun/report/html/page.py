"""Shared by all pages of chaosrun: the jinja environment and the format of numbers.

A page extends `shell.html` (blocks: title, favicon, content), which inlines `page.css` and `page.js`.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chaosrun.wording import count, span

TEMPLATES = Path(__file__).parent / "templates"
Shown = Mapping[str, object]
"""What a template is given under one name; it says how it is read."""


@cache
def environment(*folders: Path) -> Environment:
    """With the templates here and those in `folders`, which take precedence."""
    made = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"span": _span, "moment": moment, "number": number, "share": share}
    made.filters["sentence"] = lambda words: f"{words[:1].upper()}{words[1:]}"
    made.globals["count"] = count
    return made


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
