"""A run's picture as lines of a terminal, of any width and height. Pure: decides how it looks, not what is so.

All tracks (steps, losses, faults, checkpoints, ranks) share one axis, the steps of the leg, so that what lies below each other
happened at the same step. Colour says nothing that a word or a sign does not say as well.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text

from chaosrun.faults.fault import Fault
from chaosrun.report.escapes import on_one_line
from chaosrun.report.picture import FaultSeen, Lane, LegPicture, RunPicture
from chaosrun.wording import count, span

LABEL = 12
NARROW = 80
LEAST_TRACK = 8
LEAST_NAME = 8
"""Of a run, where it has to be shortened."""
SILENT_S = 10.0
"""Longer than this a rank's silence is shown."""
_STYLES: Mapping[str, str] = {
    **dict.fromkeys(("starting", "restoring", "fired"), "yellow"),
    **dict.fromkeys(("training", "ending"), "green"),
    **dict.fromkeys(("done", "stopped"), "dim"),
    **dict.fromkeys(("killed", "failed", "hung"), "bold red"),
    **dict.fromkeys(("left", "missed"), "magenta"),
    "saving": "cyan",
    "planned": "",
    "landed": "red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What tracks are made of."""

    done: str = "━"
    left: str = "┈"
    heights: str = "▁▂▃▄▅▆▇█"
    faults: Mapping[str, str] = field(default_factory=lambda: dict(planned="○", fired="◐", landed="●", missed="◇"))
    committed: str = "▪"
    more: str = "…"
    passed: str = "✓"
    runs: str = "▶"
    turning: str = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    quarantined: str = "x"
    not_a_number: str = "!"


UNICODE = Signs()
ASCII = Signs(
    done="=",
    left=".",
    heights="_.-:=+*#",
    faults={"planned": "o", "fired": "/", "landed": "@", "missed": "?"},
    committed="|",
    more="...",
    passed="ok",
    runs=">",
    turning="|/-\\",
)


@dataclass(frozen=True, slots=True)
class _Section:
    """Lines that belong together. `need`: the smaller, the longer it is kept on a short terminal."""

    need: int
    lines: Sequence[Text]
    shrunk: Callable[[int], Sequence[Text]] | None = None
    """The same in so many lines, at least one; None: the first ones."""


def draw(run: RunPicture, *, now_s: float, width: int, height: int, signs: Signs = UNICODE) -> list[Text]:
    """At most `height` lines of at most `width` columns."""
    leg = run.leg
    page = _Page(run, width=max(20, width), signs=signs, now_s=now_s)
    sections = [_Section(0, [page.head()])]
    if leg is None:
        sections.append(_Section(1, [page.row("last", Text("waiting for Ray and its workers"))]))
    else:
        faults = [page.fault(fault) for fault in run.faults]
        sections += [
            _Section(6, [page.legs()]),
            _Section(1, [page.steps(leg)]),
            _Section(5, page.losses(leg)),
            _Section(4, page.faults()),
            _Section(7, page.checkpoints(leg)),
            _Section(3, [page.lane(leg, lane) for lane in leg.lanes.values()], lambda lines: page.some_lanes(leg, lines)),
            _Section(8, [line for lines in faults for line in lines], lambda lines: page.some_faults(faults, lines)),
            _Section(9, page.restarts(leg)),
            _Section(2, [page.newest(leg)]),
        ]
    lines: list[Text] = []
    for section, room in zip(sections, _rooms(sections, max(1, height)), strict=True):
        short = room < len(section.lines) and room and section.shrunk
        lines += short(room) if short else section.lines[:room]
    for line in lines:
        line.no_wrap = True
        line.truncate(max(1, width), overflow="ellipsis" if signs.more == UNICODE.more else "crop")
    return lines


def _rooms(sections: Sequence[_Section], height: int) -> list[int]:
    """Lines for each section: one each as far as they go, then all that each wants, the most needed first."""
    rooms = [0] * len(sections)
    order = sorted(range(len(sections)), key=lambda place: sections[place].need)
    for most in (1, height):
        for place in order:
            more = min(most, len(sections[place].lines)) - rooms[place]
            given = min(max(0, more), height)
            rooms[place] += given
            height -= given
    return rooms


class _Page:
    """Makes the lines of one picture."""

    def __init__(self, run: RunPicture, *, width: int, signs: Signs, now_s: float) -> None:
        self._run, self._signs, self._now_s = run, signs, now_s
        self._width, self._narrow = width, width < NARROW
        reached, planned = run.leg.reached if run.leg else 0, max((fault.at_step or 0 for fault in run.faults), default=0)
        self._last: int = max(1, reached, run.last_step or planned)
        """Where the axis ends; of a leg whose end nobody knows yet, where it has come."""
        self._digits = len(str(self._last))
        self._value = self._digits + (19 if self._narrow else 26)
        self._track = max(LEAST_TRACK, width - LABEL - self._value - 1)

    def head(self) -> Text:
        run, leg = self._run, self._run.leg
        parts = [on_one_line(run.run_id)]
        if leg is not None:
            parts.append(on_one_line(leg.name) + (f", attempt {leg.attempt}" if leg.attempt else ""))
        if run.began_s is not None:
            minutes, seconds = divmod(int(max(0.0, self._now_s - run.began_s)), 60)
            parts.append(f"{minutes}:{seconds:02}")
        if (remaining_s := run.remaining_s()) is not None:
            parts.append(f"eta {span(remaining_s)}")
        # What changes is what is looked at: the name gives way.
        room = self._width - sum(len(part) + 2 for part in parts[1:])
        if len(parts[0]) > room:
            parts[0] = parts[0][: max(LEAST_NAME, room) - len(self._signs.more)] + self._signs.more
        line = Text("  ".join(parts))
        line.stylize("bold", 0, len(parts[0]))
        return line

    def legs(self) -> Text:
        """The way so far, leg by leg."""
        parts: list[str] = []
        for name, leg in self._run.legs.items():
            ended = leg.outcome
            sign = {None: self._signs.runs, "completed": self._signs.passed}.get(ended, self._signs.faults["missed"])
            words = on_one_line(name)
            if ended == "completed" and leg.final_step:
                words += f" {count(leg.final_step, 'step')}"
            elif ended is not None:
                words += f" {ended.replace('_', ' ')}"
            cached = name == "reference" and self._run.facts.reference_source
            parts.append(f"{sign} {words}{', from the cache' if cached else ''}")
        if "chaos" not in self._run.legs and "reference" in self._run.legs:
            parts.append(f"then chaos, {count(len(self._run.faults), 'fault')}")
        return self.row("legs", Text("   ".join(parts)))

    def steps(self, leg: LegPicture) -> Text:
        last = self._run.last_step
        value = f"{leg.step}" + (f" of {last}" if last else "")
        if leg.step_s and not leg.is_over:
            rate = 1 / leg.step_s
            value += f"  {rate:.0f}/s" if rate >= 10 else f"  {rate:.2g}/s"
        if not last and not leg.is_over:
            # How far it is nobody knows: that it goes on is all there is to show.
            turning = self._signs.turning
            return self.row("steps", Text(f"{turning[int(self._now_s * 5) % len(turning)]} {value}"))
        return self.row("steps", Text(value), self._bar(leg.step, ""))

    def losses(self, leg: LegPicture) -> list[Text]:
        if not leg.losses:
            return []
        line = Text(sparkline(leg.losses, self._last, self._track, self._signs), style="cyan")
        return [self.row("loss", Text(f"{leg.losses[max(leg.losses)]:.5g}"), line)]

    def faults(self) -> list[Text]:
        # What matters more is drawn over what matters less.
        order = ("planned", "missed", "landed", "fired")
        seen = sorted((self._run.seen(fault) for fault in self._run.faults), key=lambda fault: order.index(fault.state))
        landed = sum(fault.state == "landed" for fault in seen)
        marks = [(fault.step, self._sign(fault), _STYLES[fault.state]) for fault in seen if fault.step is not None]
        return [self.row("faults", Text(f"{landed} of {len(seen)} landed"), self._marked(marks))] if seen else []

    def checkpoints(self, leg: LegPicture) -> list[Text]:
        if not leg.checkpoints:
            return []
        committed = [step for step, sound in leg.checkpoints.items() if sound]
        bad = len(leg.checkpoints) - len(committed)
        value = f"{len(committed)}, last {max(committed)}" if committed else "0"
        value += f", {bad} {'bad' if self._narrow else 'quarantined'}" if bad else ""
        marks = [
            (step, *((self._signs.committed, "cyan") if sound else (self._signs.quarantined, "bold red")))
            for step, sound in sorted(leg.checkpoints.items(), key=lambda entry: not entry[1])
        ]
        return [self.row("checkpoints", Text(value), self._marked(marks))]

    def lane(self, leg: LegPicture, lane: Lane) -> Text:
        attempt = f"#{leg.attempt}" if self._narrow else f"attempt {leg.attempt}"
        words, style = f"{lane.state} {on_one_line(lane.note)}", _STYLES[lane.state]
        if lane.silent_s >= SILENT_S:
            words, style = f"silent {span(lane.silent_s)}", "bold yellow"
        value = Text(f"{attempt} {lane.step:>{self._digits}} ")
        value.append(words, style=style)
        return self.row(f"rank {lane.rank}", value, self._bar(lane.step, style) if self._run.last_step else None)

    def some_lanes(self, leg: LegPicture, lines: int) -> list[Text]:
        """Those that are not simply training, then the first ones; what is left out in a line."""
        lanes = sorted(leg.lanes.values(), key=lambda lane: (lane.state not in ("killed", "failed", "hung"), lane.rank))
        kept, rest = lanes[: lines - 1], lanes[lines - 1 :]
        states = ", ".join(f"{number} {state}" for state, number in Counter(lane.state for lane in rest).items())
        low, high = min(lane.step for lane in rest), max(lane.step for lane in rest)
        steps = f"step {low}" if low == high else f"steps {low} to {high}"
        total = self.row(f"{'+' if kept else ''}{count(len(rest), 'rank')}", Text(f"{steps}: {states}"))
        return [*(self.lane(leg, lane) for lane in sorted(kept, key=lambda lane: lane.rank)), total]

    def fault(self, fault: Fault) -> list[Text]:
        seen = self._run.seen(fault)
        line = Text().append(f"{on_one_line(fault.id):<{LABEL}}", style="dim")
        line.append(f"{self._sign(seen)} {seen.state:<7} ", style=_STYLES[seen.state])
        indent = line.cell_len
        at = "" if seen.step is None or seen.step == fault.at_step else f", step {seen.step}"
        words = ("" if seen.attempt is None else f"attempt {seen.attempt}{at}: ") + on_one_line(fault.describe())
        first, *more = textwrap.wrap(words, max(LEAST_TRACK, self._width - indent)) or [""]
        return [line.append(first), *(Text(" " * indent + part) for part in more)]

    def some_faults(self, faults: Sequence[Sequence[Text]], lines: int) -> list[Text]:
        """The newest that fired and those that come next, a line each; how many more in the last line."""
        done = sum(self._run.seen(fault).state != "planned" for fault in self._run.faults)
        shown = lines if lines >= len(faults) else max(1, lines - 1)
        first = max(0, min(done - shown // 2, len(faults) - shown))
        listed = [each[0] for each in faults[first : first + shown]]
        more = self.row("", Text(f"{self._signs.more} {count(len(faults) - shown, 'more fault')}"))
        return [*listed, more][:lines]

    def restarts(self, leg: LegPicture) -> list[Text]:
        if not leg.restarts and not leg.unplanned:
            return []
        parts = [f"{leg.restarts}, {count(leg.lost_steps, 'step')} lost"]
        if times_s := leg.recoveries_s:
            parts.append(f"recovery {' to '.join(dict.fromkeys((span(min(times_s)), span(max(times_s)))))}")
        if leg.unplanned:
            parts.append(count(len(leg.unplanned), "unplanned death"))
        return [self.row("restarts", Text(", ".join(parts)))]

    def newest(self, leg: LegPicture) -> Text:
        """What happened last."""
        if leg.damage:
            path, why = next(iter(leg.damage.items()))
            said = f"{leg.name}: {path.name}: {why}"
        elif leg.is_over:
            said = leg.last + ("" if leg.outcome == "interrupted" else "; judging")
        else:
            said = f"{leg.last}, {span(max(0.0, self._now_s - leg.last_s))} ago"
        return self.row("last", Text(on_one_line(said)))

    def row(self, label: str, value: Text, track: Text | None = None) -> Text:
        line = Text().append(f"{label:<{LABEL}}", style="dim")
        if track is None:
            return line.append_text(value)
        value.truncate(self._value, pad=True)
        return line.append_text(value).append(" ").append_text(track)

    def _sign(self, fault: FaultSeen) -> str:
        return self._signs.faults[fault.state]

    def _column(self, step: int) -> int:
        return _column(min(max(step, 1), self._last), self._last, self._track)

    def _bar(self, step: int, style: str) -> Text:
        done = self._column(step) + 1 if step > 0 else 0
        bar = Text(self._signs.done * done, style=style)
        return bar.append(self._signs.left * (self._track - done), style="dim")

    def _marked(self, marks: Iterable[tuple[int, str, str]]) -> Text:
        """A track with signs at steps, each with its style; a later one lies over an earlier one."""
        cells = [(self._signs.left, "dim")] * self._track
        for step, sign, style in marks:
            cells[self._column(step)] = (sign, style)
        track = Text()
        for style, alike in groupby(cells, key=lambda cell: cell[1]):
            track.append("".join(sign for sign, _ in alike), style=style)
        return track


def _column(step: int, last: int, width: int) -> int:
    """Where a step ends on an axis of so many columns; -1 for the beginning."""
    return (step * width - 1) // last


def sparkline(losses: Mapping[int, float], last: int, width: int, signs: Signs = UNICODE) -> str:
    """The mean of each stretch of steps up to `last`, as high as it is; a blank where there is none, a mark where it is no
    number."""
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, loss in losses.items():
        # A step may be as wide as several columns.
        first, end = _column(step - 1, last, width) + 1, _column(step, last, width)
        for place in range(min(first, end), end + 1):
            columns[place].append(loss)
    means = [sum(column) / len(column) if column else None for column in columns]
    finite = [mean for mean in means if mean is not None and math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def height(mean: float | None) -> str:
        if mean is None:
            return " "
        if not math.isfinite(mean):
            return signs.not_a_number
        top = len(signs.heights) - 1
        return signs.heights[round((mean - low) / (high - low) * top) if high > low else 0]

    return "".join(map(height, means)).rstrip()
