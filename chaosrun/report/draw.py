"""A run's picture as lines of a terminal, the most important first. Pure: decides only how it looks.

Steps, faults and checkpoints share one axis, the steps of the leg. Colour never carries information that a sign does not.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.text import Text

from chaosrun.records.events import RESUMABLE, TRAINED, Outcome
from chaosrun.report.escapes import on_one_line
from chaosrun.report.picture import Lane, LegPicture, RunPicture
from chaosrun.wording import count, span

LABEL, VALUE = 12, 26
"""Columns of a row's name, and of what stands before its track."""
LEAST_TRACK = 8
MOST_LANES, MOST_FAULTS = 12, 8
SILENT_S = 10.0
"""Longer than this a rank's silence is shown."""
DONE, LEFT = "━", "┈"
SPINNER, TURNS_A_SECOND = "|/-\\", 5
FAULTS: Mapping[str, tuple[str, str]] = {
    "planned": ("○", ""),
    "missed": ("◇", "magenta"),
    "landed": ("●", "red"),
    "fired": ("◐", "yellow"),
}
"""Sign and style; what comes later is drawn over what comes before."""
_STYLES: Mapping[str, str] = {
    **dict.fromkeys(("starting", "restoring"), "yellow"),
    **dict.fromkeys(("training", "ending"), "green"),
    **dict.fromkeys(("done", "stopped"), "dim"),
    **dict.fromkeys(("killed", "failed", "hung"), "bold red"),
    "left": "magenta",
    "saving": "cyan",
}


@dataclass(frozen=True, slots=True)
class _Axis:
    """The steps of a leg on a given number of columns."""

    last: int
    width: int

    def column(self, step: int) -> int:
        return (min(max(step, 1), self.last) * self.width - 1) // self.last

    def bar(self, step: int) -> Text:
        done = self.column(step) + 1 if step > 0 else 0
        return Text(DONE * done).append(LEFT * (self.width - done), style="dim")

    def marked(self, marks: Iterable[tuple[int, str, str]]) -> Text:
        """Signs at steps, each with its style; a later one covers an earlier one."""
        cells = [(LEFT, "dim")] * self.width
        for step, sign, style in marks:
            cells[self.column(step)] = (sign, style)
        return Text.assemble(*cells)


def draw(run: RunPicture, *, now_s: float, width: int, height: int | None = None, live: bool = False) -> list[Text]:
    """At most `height` lines of at most `width` columns. `live`: it is drawn again and again."""
    lines = [
        _head(run, now_s),
        *(_leg(run, run.leg, now_s, width, live) if run.leg else [_row("last", "waiting for the first leg")]),
    ]
    for line in lines:
        line.no_wrap = True
        line.truncate(max(1, width), overflow="ellipsis")
    return lines[:height]


def _head(run: RunPicture, now_s: float) -> Text:
    parts: list[str] = []
    if run.leg is not None:
        parts.append(run.leg.name + (f", attempt {run.leg.attempt}" if run.leg.attempt else ""))
    if run.began_s is not None:
        minutes, seconds = divmod(int(max(0.0, now_s - run.began_s)), 60)
        parts.append(f"{minutes}:{seconds:02}")
    if (remaining_s := run.remaining_s()) is not None:
        parts.append(f"eta {span(remaining_s)}")
    return Text(on_one_line("  ".join([*parts, run.run_id])), style="bold")


def _leg(run: RunPicture, leg: LegPicture, now_s: float, width: int, live: bool) -> Iterator[Text]:
    # Without a known end a step's share of the way is unknown.
    room = max(LEAST_TRACK, width - LABEL - VALUE - 1)
    axis = _Axis(max(1, leg.reached, run.last_step), room) if run.last_step else None
    yield _legs(run)
    spinner = SPINNER[int(now_s * TURNS_A_SECOND) % len(SPINNER)] if live and not axis and not leg.history.finished else ""
    yield _steps(run, leg, axis).append(f"  {spinner}" if spinner else "")
    yield _row("last", leg.damage[0] if leg.damage else f"{leg.last}, {span(max(0.0, now_s - leg.last_s))} ago")
    seen = [run.seen(fault) for fault in run.faults]
    if seen:
        states = list(FAULTS)
        ordered = sorted(seen, key=lambda fault: states.index(fault.state))
        marks = [(fault.step, *FAULTS[fault.state]) for fault in ordered if fault.step is not None]
        yield _row(
            "faults",
            f"{sum(fault.state == 'landed' for fault in seen)} of {len(seen)} landed",
            axis.marked(marks) if axis else None,
        )
    if leg.kept or leg.quarantined:
        yield _checkpoints(leg, axis)
    if leg.restarts or leg.unplanned:
        deaths = f", {count(len(leg.unplanned), 'unplanned death')}" if leg.unplanned else ""
        yield _row("restarts", f"{leg.restarts}, {count(leg.lost_steps, 'step')} lost{deaths}")
    yield from _lanes(leg)
    yield from _faults(run, width)


def _legs(run: RunPicture) -> Text:
    parts: list[str] = []
    for name, leg in run.legs.items():
        ended = leg.history.outcome
        words = name if ended in (None, "completed") else f"{name} {_word(ended)}"
        if ended in TRAINED and leg.final_step:
            words += f" {count(leg.final_step, 'step')}"
        cached = f", from {run.facts.reference_from}" if name == "reference" and run.facts.reference_source else ""
        parts.append(f"{'▶' if ended is None else '✓' if ended in TRAINED else '◇'} {words}{cached}")
    if "chaos" not in run.legs and "reference" in run.legs:
        parts.append(f"then chaos, {count(len(run.faults), 'fault')}")
    return _row("legs", "   ".join(parts))


def _word(ended: Outcome) -> str:
    """As `status` says it of the run: what can go on is interrupted, for want of resources, too."""
    return "interrupted" if ended in RESUMABLE else ended.replace("_", " ")


def _steps(run: RunPicture, leg: LegPicture, axis: _Axis | None) -> Text:
    value = f"{leg.step}" + (f" of {run.last_step}" if run.last_step else "")
    if leg.step_s and not leg.history.finished:
        rate = 1 / leg.step_s
        value += f"  {rate:.0f}/s" if rate >= 10 else f"  {rate:.2g}/s"
    return _row("steps", value, axis.bar(leg.step) if axis else None)


def _checkpoints(leg: LegPicture, axis: _Axis | None) -> Text:
    value = f"{len(leg.kept)}, last {leg.kept[-1]}" if leg.kept else "0"
    bad = [(step, "x", "bold red") for step in leg.quarantined]
    value += f", {len(bad)} quarantined" if bad else ""
    return _row("checkpoints", value, axis.marked([*((step, "▪", "cyan") for step in leg.kept), *bad]) if axis else None)


def _lanes(leg: LegPicture) -> Iterator[Text]:
    """The ranks' lanes; of many ranks those that are dead or hang, then the first ones, and a line for those left out."""
    lanes = sorted(leg.lanes.values(), key=lambda lane: (lane.state not in ("killed", "failed", "hung"), lane.rank))
    kept, rest = (lanes, []) if len(lanes) <= MOST_LANES else (lanes[: MOST_LANES - 1], lanes[MOST_LANES - 1 :])
    yield from (_lane(lane) for lane in sorted(kept, key=lambda lane: lane.rank))
    if rest:
        states = ", ".join(f"{number} {state}" for state, number in Counter(lane.state for lane in rest).items())
        low, high = min(lane.step for lane in rest), max(lane.step for lane in rest)
        yield _row(f"+{count(len(rest), 'rank')}", f"{f'step {low}' if low == high else f'steps {low} to {high}'}: {states}")


def _lane(lane: Lane) -> Text:
    words, style = f"{lane.state} {lane.note}", _STYLES[lane.state]
    if lane.silent_s >= SILENT_S:
        words, style = f"silent {span(lane.silent_s)}", "bold yellow"
    return _row(f"rank {lane.rank}", f"step {lane.step} ").append(on_one_line(words).rstrip(), style=style)


def _faults(run: RunPicture, width: int) -> Iterator[Text]:
    """The faults; of many the newest that fired and the next ones."""
    done = sum(run.seen(fault).state != "planned" for fault in run.faults)
    first = max(0, min(done - MOST_FAULTS // 2, len(run.faults) - MOST_FAULTS))
    listed = run.faults[first : first + MOST_FAULTS]
    for fault in listed:
        seen = run.seen(fault)
        sign, style = FAULTS[seen.state]
        at = "" if seen.step is None or seen.step == fault.at_step else f", step {seen.step}"
        where = "" if seen.attempt is None else f"attempt {seen.attempt}{at}: "
        line = _row(on_one_line(fault.id), "").append(f"{sign} {seen.state:<7} ", style=style)
        told, room = on_one_line(f"{where}{fault.describe()}"), max(LEAST_TRACK, width - len(line))
        first, *rest = textwrap.wrap(told, room) or [""]
        indent = " " * len(line)
        yield line.append(first)
        yield from (Text(f"{indent}{more}") for more in rest)
    if more := len(run.faults) - len(listed):
        yield _row("", f"… {count(more, 'more fault')}")


def _row(label: str, value: str, track: Text | None = None) -> Text:
    line = Text.assemble((f"{label:<{LABEL}}", "dim"), on_one_line(value))
    if track is not None:
        line.truncate(LABEL + VALUE, pad=True)
        line.append(" ").append_text(track)
    return line
