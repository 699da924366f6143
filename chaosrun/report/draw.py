"""A run's picture as lines of a terminal, of any width and height. Pure: decides how it looks, not what is so.

All tracks (steps, losses, faults, checkpoints, ranks) share one axis, the steps of the leg, so that what lies below each other
happened at the same step. Colour says nothing that a word or a sign does not say as well.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    "starting": "yellow",
    "restoring": "yellow",
    "training": "green",
    "saving": "cyan",
    "ending": "green",
    "done": "dim",
    "stopped": "dim",
    "killed": "bold red",
    "left": "magenta",
    "failed": "bold red",
    "hung": "bold red",
    "planned": "",
    "fired": "yellow",
    "landed": "red",
    "missed": "magenta",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What tracks are made of."""

    done: str
    left: str
    heights: str
    planned: str
    fired: str
    landed: str
    missed: str
    committed: str
    quarantined: str
    more: str
    passed: str
    runs: str
    not_a_number: str = "!"

    def of(self, fault: FaultSeen) -> str:
        return getattr(self, fault.state)


UNICODE = Signs(
    done="━",
    left="┈",
    heights="▁▂▃▄▅▆▇█",
    planned="○",
    fired="◐",
    landed="●",
    missed="◇",
    committed="▪",
    quarantined="x",
    more="…",
    passed="✓",
    runs="▶",
)
ASCII = Signs(
    done="=",
    left=".",
    heights="_.-:=+*#",
    planned="o",
    fired="/",
    landed="@",
    missed="?",
    committed="|",
    quarantined="x",
    more="...",
    passed="ok",
    runs=">",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """Lines that belong together. `need`: the smaller, the longer it is kept on a short terminal."""

    need: int
    lines: Sequence[Text]
    shrunk: Callable[[int], Sequence[Text]] | None = None
    """The same in so many lines, at least one; None: the first ones."""

    def within(self, lines: int) -> Sequence[Text]:
        if lines >= len(self.lines) or lines == 0:
            return self.lines[:lines]
        return self.shrunk(lines) if self.shrunk else self.lines[:lines]


def draw(run: RunPicture, *, now_s: float, width: int, height: int, signs: Signs = UNICODE) -> list[Text]:
    """At most `height` lines of at most `width` columns."""
    leg = run.leg
    page = _Page(run, width=max(20, width), signs=signs, now_s=now_s)
    if leg is None:
        sections = [
            _Section(need=0, lines=[page.head()]),
            _Section(need=1, lines=[page.said("waiting for Ray and its workers")]),
        ]
    else:
        sections = [
            _Section(need=0, lines=[page.head()]),
            _Section(need=6, lines=page.legs()),
            _Section(need=1, lines=[page.steps(leg)]),
            _Section(need=5, lines=page.losses(leg)),
            _Section(need=4, lines=page.faults()),
            _Section(need=7, lines=page.checkpoints(leg)),
            _Section(need=3, lines=page.lanes(leg), shrunk=lambda lines: page.some_lanes(leg, lines)),
            _Section(need=8, lines=page.listed_faults(), shrunk=page.some_faults),
            _Section(need=9, lines=page.restarts(leg)),
            _Section(need=2, lines=[page.newest(leg)]),
        ]
    lines = [
        line for section, room in zip(sections, _rooms(sections, max(1, height)), strict=True) for line in section.within(room)
    ]
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
        self._run = run
        self._signs = signs
        self._now_s = now_s
        self._width = width
        self._narrow = width < NARROW
        leg = run.leg
        reached, planned = leg.reached if leg else 0, max((fault.at_step or 0 for fault in run.faults), default=0)
        self._last: int = max(1, reached, run.last_step or _round(max(reached + 1, planned)))
        self._digits = len(str(self._last))
        self._value = self._digits + (19 if self._narrow else 26)
        self._track = max(LEAST_TRACK, width - LABEL - self._value - 1)

    def head(self) -> Text:
        run, leg = self._run, self._run.leg
        parts = [on_one_line(run.run_id)]
        if leg is not None:
            attempt = f", attempt {leg.progress.attempt}" if leg.progress.attempt else ""
            parts.append(on_one_line(leg.name) + attempt)
        if run.began_s is not None:
            minutes, seconds = divmod(int(max(0.0, self._now_s - run.began_s)), 60)
            parts.append(f"{minutes}:{seconds:02}")
        remaining_s = run.remaining_s()
        if remaining_s is not None:
            parts.append(f"eta {span(remaining_s)}")
        # What changes is what is looked at: the name gives way.
        room = self._width - sum(len(part) + 2 for part in parts[1:])
        if len(parts[0]) > room:
            parts[0] = parts[0][: max(LEAST_NAME, room) - len(self._signs.more)] + self._signs.more
        line = Text("  ".join(parts))
        line.stylize("bold", 0, len(parts[0]))
        return line

    def legs(self) -> list[Text]:
        """The way so far, leg by leg."""
        parts: list[str] = []
        for name, leg in self._run.legs.items():
            ended = leg.progress.outcome
            sign = self._signs.runs if ended is None else self._signs.passed if ended == "completed" else self._signs.missed
            words = on_one_line(name)
            if ended == "completed" and leg.progress.final_step:
                words += f" {count(leg.progress.final_step, 'step')}"
            elif ended is not None:
                words += f" {ended.replace('_', ' ')}"
            if name == "reference" and self._run.facts.reference_source:
                words += ", from the cache"
            parts.append(f"{sign} {words}")
        if "chaos" not in self._run.legs and "reference" in self._run.legs:
            parts.append(f"then chaos, {count(len(self._run.faults), 'fault')}")
        return [self._row("legs", Text("   ".join(parts)))]

    def steps(self, leg: LegPicture) -> Text:
        last = self._run.last_step
        value = f"{leg.step}" + (f" of {last}" if last else "")
        if leg.step_s and not leg.is_over:
            value += f"  {_rate(1 / leg.step_s)}"
        return self._row("steps", Text(value), self._bar(leg.step, ""))

    def losses(self, leg: LegPicture) -> list[Text]:
        if not leg.losses:
            return []
        newest = leg.losses[max(leg.losses)]
        return [
            self._row(
                "loss", Text(f"{newest:.5g}"), Text(sparkline(leg.losses, self._last, self._track, self._signs), style="cyan")
            )
        ]

    def faults(self) -> list[Text]:
        faults = self._run.faults
        if not faults:
            return []
        seen = [self._run.seen(fault) for fault in faults]
        landed = sum(fault.state == "landed" for fault in seen)
        # What matters more is drawn over what matters less.
        seen.sort(key=lambda fault: ("planned", "missed", "landed", "fired").index(fault.state))
        marks = [(fault.step, self._signs.of(fault), _STYLES[fault.state]) for fault in seen if fault.step is not None]
        return [self._row("faults", Text(f"{landed} of {len(faults)} landed"), self._marked(marks))]

    def checkpoints(self, leg: LegPicture) -> list[Text]:
        if not leg.checkpoints:
            return []
        committed = [step for step, sound in leg.checkpoints.items() if sound]
        bad = len(leg.checkpoints) - len(committed)
        value = f"{len(committed)}, last {max(committed)}" if committed else "0"
        if bad:
            value += f", {bad} {'bad' if self._narrow else 'quarantined'}"
        marks = [
            (step, *((self._signs.committed, "cyan") if sound else (self._signs.quarantined, "bold red")))
            for step, sound in sorted(leg.checkpoints.items(), key=lambda entry: not entry[1])
        ]
        return [self._row("checkpoints", Text(value), self._marked(marks))]

    def lanes(self, leg: LegPicture) -> list[Text]:
        return [self._lane(leg, lane) for lane in leg.lanes.values()]

    def some_lanes(self, leg: LegPicture, lines: int) -> list[Text]:
        """Those that are not simply training, then the first ones; what is left out in a line."""
        lanes = list(leg.lanes.values())
        kept = sorted(lanes, key=lambda lane: (lane.state not in ("killed", "failed", "hung"), lane.rank))[: lines - 1]
        rest = [lane for lane in lanes if lane not in kept]
        states = ", ".join(f"{number} {state}" for state, number in Counter(lane.state for lane in rest).items())
        low, high = min(lane.step for lane in rest), max(lane.step for lane in rest)
        steps = f"step {low}" if low == high else f"steps {low} to {high}"
        total = self._row(f"{'+' if kept else ''}{count(len(rest), 'rank')}", Text(f"{steps}: {states}"))
        return [*(self._lane(leg, lane) for lane in sorted(kept, key=lambda lane: lane.rank)), total]

    def _lane(self, leg: LegPicture, lane: Lane) -> Text:
        attempt = f"#{leg.progress.attempt}" if self._narrow else f"attempt {leg.progress.attempt}"
        words, style = f"{lane.state} {on_one_line(lane.note)}", _STYLES[lane.state]
        if lane.silent_s >= SILENT_S:
            words, style = f"silent {span(lane.silent_s)}", "bold yellow"
        value = Text(f"{attempt} {lane.step:>{self._digits}} ")
        value.append(words, style=style)
        return self._row(f"rank {lane.rank}", value, self._bar(lane.step, style))

    def listed_faults(self) -> list[Text]:
        return [self._fault(fault) for fault in self._run.faults]

    def some_faults(self, lines: int) -> list[Text]:
        """The newest that fired and those that come next; how many more in the last line."""
        faults = self._run.faults
        done = sum(self._run.seen(fault).state != "planned" for fault in faults)
        shown = max(1, lines - 1)
        first = max(0, min(done - shown // 2, len(faults) - shown))
        listed = [self._fault(fault) for fault in faults[first : first + shown]]
        more = self._row("", Text(f"{self._signs.more} {count(len(faults) - shown, 'more fault')}"))
        return [*listed, more][:lines]

    def _fault(self, fault: Fault) -> Text:
        seen = self._run.seen(fault)
        line = Text().append(f"{on_one_line(fault.id):<{LABEL}}", style="dim")
        line.append(f"{self._signs.of(seen)} {seen.state:<7} ", style=_STYLES[seen.state])
        if seen.attempt is not None:
            at = "" if seen.step is None or seen.step == fault.at_step else f", step {seen.step}"
            line.append(f"attempt {seen.attempt}{at}: ")
        return line.append(on_one_line(fault.describe()))

    def restarts(self, leg: LegPicture) -> list[Text]:
        if not leg.restarts and not leg.progress.unplanned:
            return []
        parts = [f"{leg.restarts}, {count(leg.lost_steps, 'step')} lost"]
        if recoveries := leg.recoveries_s:
            parts.append(
                f"recovery {span(min(recoveries))} to {span(max(recoveries))}"
                if len(recoveries) > 1
                else f"recovery {span(recoveries[0])}"
            )
        if leg.progress.unplanned:
            parts.append(count(len(leg.progress.unplanned), "unplanned death"))
        return [self._row("restarts", Text(", ".join(parts)))]

    def newest(self, leg: LegPicture) -> Text:
        """What happened last."""
        if leg.damage or leg.progress.damage:
            return self.said(f"{leg.name}: {leg.damage or leg.progress.damage}")
        if leg.is_over:
            return self.said(leg.progress.last if leg.progress.outcome == "interrupted" else f"{leg.progress.last}; judging")
        return self.said(f"{leg.progress.last}, {span(max(0.0, self._now_s - leg.progress.last_s))} ago")

    def said(self, text: str) -> Text:
        return self._row("last", Text(on_one_line(text)))

    def _row(self, label: str, value: Text, track: Text | None = None) -> Text:
        line = Text().append(f"{label:<{LABEL}}", style="dim")
        if track is None:
            return line.append_text(value)
        value.truncate(self._value, pad=True)
        return line.append_text(value).append(" ").append_text(track)

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
    if last >= width:
        for step, loss in losses.items():
            columns[(step * width - 1) // last].append(loss)
    else:
        # A step is as wide as several columns.
        for step, loss in losses.items():
            for place in range(_column(step - 1, last, width) + 1, _column(step, last, width) + 1):
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


def _round(step: int) -> int:
    """Where an axis may end of which nobody knows the end: it changes seldom, and does not look as if it were there."""
    scale = 10 ** (len(str(step)) - 1)
    return next(end for factor in (1, 1.5, 2, 3, 5, 7, 10) if (end := int(factor * scale)) >= step)


def _rate(steps_a_s: float) -> str:
    return f"{steps_a_s:.0f}/s" if steps_a_s >= 10 else f"{steps_a_s:.2g}/s"
