"""The figures of a suite's page: how many drills were as expected each night, how long recovery took, what one drill did."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from chaosrun.report.html.drawing import WIDE, Scale, beneath, join, path_of, rules, text, ticks
from chaosrun.wording import clock, count

if TYPE_CHECKING:
    from chaosrun.campaign.history import Night

HEIGHT, TOP, BOTTOM = 150, 12, 24
"""Of a figure, in pixels: all of it, above and below what is drawn."""
LEAST_NIGHTS = 12
"""Places for so many: a bar of one night is not as wide as the figure."""
CELL, GAP, TALL = 6, 2, 18
"""Of a drill's strip: a night's width, the gap after it, its height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    height: int
    axis: Markup
    plot: Markup
    told: str
    """The same in words."""


def rates(known: "Sequence[Night]") -> Figure | None:
    """A bar a night: all of its drills, and how many were as expected. None for nights without drills."""
    if not known:
        return None
    most = max(len(night.drills) for night in known)
    scale = Scale(0, most)
    floor, room = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    bars: list[Markup] = []
    share = 100 / max(len(known), LEAST_NIGHTS)
    for place, night in enumerate(known):
        all_high, high = room * scale.at(len(night.drills)), room * scale.at(night.passed)
        x, width = f"{share * (place + 0.15):.3f}%", f"{share * 0.7:.3f}%"
        odd = len(night.drills) - night.passed
        said = f"{night.night}: {night.passed} of {len(night.drills)} as expected"
        bar = Markup('<rect class="{}" x="{}" y="{:.2f}" width="{}" height="{:.2f}"/>')
        parts = [bar.format("well", x, floor - high, width, max(0.0, high))]
        if odd:
            parts.append(bar.format("odd", x, floor - all_high, width, all_high - high))
        bars.append(_target(said, x, width, floor, join(parts)))
    latest = known[-1]
    told = f"Drills as expected over {count(len(known), 'night')}, last {latest.passed} of {len(latest.drills)}"
    return _figure(known, scale, {value: str(value) for value in sorted({0, most})}, join(bars), told)


def recoveries(known: "Sequence[Night]") -> Figure | None:
    """The median of each night's drills, and from the shortest to the longest. None when no night had a restart."""
    found = [(place, night, night.recoveries) for place, night in enumerate(known) if night.recoveries]
    if not found:
        return None
    # One hang, found after its patience, must not make a line of all the others.
    scale = Scale(0.0, min(max(times[-1] for *_, times in found), 4 * max(statistics.median(times) for *_, times in found)))
    share = 100 / max(len(known), LEAST_NIGHTS)
    marks: list[Markup] = []
    line: list[tuple[float, float]] = []
    for place, night, times in found:
        middle = statistics.median(times)
        x, width = f"{share * (place + 0.5):.3f}%", f"{share:.3f}%"
        low, high, y = (_y(scale, value) - 4 for value in (times[0], times[-1], middle))
        over = count(len(times), "drill")
        said = f"{night.night}: median {clock(middle)}, {clock(times[0])} to {clock(times[-1])} over {over}"
        drawn = Markup(
            '<line class="span" x1="{0}" x2="{0}" y1="{1:.2f}" y2="{2:.2f}"/>'
            '<circle class="dot-reference" cx="{0}" cy="{3:.2f}" r="4"/>'
        ).format(x, low, high, y)
        marks.append(_target(said, f"{share * place:.3f}%", width, HEIGHT - BOTTOM, drawn))
        line.append((WIDE * share * (place + 0.5) / 100, y))
    drawn_line = Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" width="100%" height="{}"><path class="trend" d="{}"/></svg>'
    ).format(WIDE, HEIGHT, HEIGHT, path_of(line) if len(line) > 1 else "")
    told = f"Recovery over {count(len(found), 'night')} with restarts, last median {clock(statistics.median(found[-1][2]))}"
    values = {value: f"{value:g} s" for value in ticks(0.0, scale.high, 3)}
    return _figure(known, scale, values, drawn_line + join(marks), told)


def strip(drill: str, known: "Sequence[Night]") -> Markup:
    """A drill's nights, oldest first, as cells: low where it was as expected, high where not, a dash where it did not run."""
    cells: list[Markup] = []
    bar = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>')
    nights = [(night.night, night.drills.get(drill)) for night in known]
    for place, (_, entry) in enumerate(nights):
        x = place * (CELL + GAP)
        if entry is None:
            cells.append(Markup('<path class="none" d="M{} {}h{}"/>').format(x, TALL - 1, CELL))
        else:
            cells.append(bar.format("well", x, TALL - 8, CELL, 8) if entry.ok else bar.format("odd", x, 0, CELL, TALL))
    oks = [entry.ok for _, entry in nights if entry is not None]
    odd = [night for night, entry in nights if entry is not None and not entry.ok]
    said = f"{sum(oks)} of {len(oks)} nights as expected" + (f", not on {', '.join(odd[-3:])}" if odd else "")
    width = max(1, len(nights) * (CELL + GAP) - GAP)
    return Markup('<svg class="cells" role="img" aria-label="{}" width="{}" height="{}">{}</svg>').format(
        said, width, TALL, join(cells)
    )


def _target(said: str, x: str, width: str, floor: float, drawn: Markup) -> Markup:
    """What is pointed at tells what it says."""
    return Markup(
        '<g class="mark night" role="img"><title>{}</title>'
        '<rect class="halo" x="{}" y="2" width="{}" height="{:g}" fill="transparent"/>{}</g>'
    ).format(said, x, width, floor, drawn)


def _figure(known: "Sequence[Night]", scale: Scale, values: Mapping[float, str], drawn: Markup, told: str) -> Figure:
    """With its values beside it, and the first night and the last beneath."""
    axis = join(text("100%", _y(scale, value), words, anchor="end") for value, words in values.items())
    ends = list(dict.fromkeys((known[0].night, known[-1].night)))
    if len(known) < LEAST_NIGHTS:
        ends = [" to ".join(ends)]  # side by side they would lie over each other
    dates = beneath([0, 1][: len(ends)], ends, Scale(0, 1), HEIGHT - 6)
    return Figure(height=HEIGHT, axis=axis, plot=rules([_y(scale, value) - 4 for value in values]) + drawn + dates, told=told)


def _y(scale: Scale, value: float) -> float:
    """Where the words stand that name a value; a rule is 4 pixels above."""
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * scale.at(value) + 4
