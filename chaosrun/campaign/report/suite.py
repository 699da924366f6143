"""The account of a suite: one table of its drills, one of their losses beside each other, and whether all is as expected."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from chaosrun.records.naming import root_arguments, shortest
from chaosrun.report.page import columns, indented, unwrapped
from chaosrun.report.text import STYLES
from chaosrun.wording import clock, count

if TYPE_CHECKING:
    from chaosrun.campaign.folder import Agenda
    from chaosrun.campaign.results import DrillResult, SuiteResult

WIDEST_NAME = 40
WIDTH_BESIDE = 90
"""Columns that a table needs beside the drills' names to have a place for the differences."""
LABELS = {"new": "bold red", "still": "red", "fixed": "green", "flaky": "yellow"}


def headline(result: "SuiteResult") -> str:
    """All of it in a line."""
    if result.empty:
        return f"no drill belongs to {'this part' if result.shard is None else f'shard {result.shard}'} of the suite"
    odd = [drill for drill in result.drills if not drill.ok]
    parts = [count(len(result.drills), "drill")]
    if odd:
        parts.append(f"{len(odd)} not as expected")
    if cancelled := sum(drill.cancelled for drill in odd):
        parts.append(f"{cancelled} cancelled")
    if apart := sum(not entry.as_expected for entry in result.compared):
        parts.append(f"{apart} with losses not as expected")
    if result.not_compared is not None:
        parts.append("losses not compared")
    labels = [drill.label for drill in result.drills]
    parts += [f"{labels.count(label)} {label}" for label in ("new", "fixed", "flaky") if label in labels]
    if again := sum(drill.rerun is not None for drill in result.drills):
        parts.append(f"{again} that failed before")
    if result.left:
        parts.append(f"{len(result.left)} {not_done(result)}")
    cached, made = result.cached
    parts.append(f"{cached} of {count(cached + made, 'reference')} from the cache")
    parts.append(clock(result.took_s))
    return ", ".join(parts)


def render_agenda(agenda: "Agenda") -> RenderableType:
    """What would run."""
    table = columns("drill", "expected", "workers", "faults", "what", "seed", right=("workers", "faults", "seed"))
    for column in table.columns:
        column.no_wrap = column.header not in ("drill", "what")
    for drill in agenda.drills:
        expected, kinds = drill.expectation.verdict, ", ".join(drill.kinds)
        table.add_row(drill.name, expected, str(drill.workers), str(drill.faults), kinds, str(drill.seed))
    part = "" if agenda.shard is None else f", shard {agenda.shard}"
    seed = "" if agenda.seed is None else f", seed {agenda.seed}"
    faults = count(sum(drill.faults for drill in agenda.drills), "fault")
    title = Text(f"suite {agenda.name}: {count(len(agenda.drills), 'drill')}, {faults}{part}{seed}", style="bold")
    return Group(title, "", indented(table), *[Text(note) for note in agenda.notes])


def render_suite(result: "SuiteResult") -> RenderableType:
    seed = "" if result.seed is None else f", seed {result.seed} (--seed {result.seed} draws the same faults again)"
    parts: list[RenderableType] = [Text(f"suite {result.name}  {result.night}{seed}", style="bold")]
    if result.drills:
        parts += ["", _Drills(result.drills)]
    if result.compared:
        parts += ["", Text(f"Losses beside those of {result.first}", style="bold"), _compared(result)]
    if result.not_compared is not None:
        parts += ["", Text(f"The losses could not be compared: {result.not_compared}")]
    parts += ["", *_verdict(result), *[Text(f"note: {note}") for note in result.notes]]
    parts += _commands(result)
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _Drills:
    """One line a drill where the terminal is wide enough for that; else the differences follow."""

    drills: "Sequence[DrillResult]"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max(len(drill.name) for drill in self.drills)
        wide = options.max_width >= min(names, WIDEST_NAME) + WIDTH_BESIDE
        yield indented(self._table(wide=wide))
        for drill in self.drills:
            if not wide and told(drill) != "-":
                yield Text(f"  {drill.name}: {told(drill)}", style="dim" if drill.ok else "")

    def _table(self, *, wide: bool) -> RenderableType:
        numbers = ("faults", *(["restarts"] if wide else []), "recovery", "time")
        titles = ["drill", "verdict", "expected", *(["first difference or cause"] if wide else []), *numbers]
        table = columns(*titles, right=numbers)
        for column in table.columns:
            column.no_wrap = column.header != ("first difference or cause" if wide else "drill")
        for drill in self.drills:
            expected = Text("yes", style="green") if drill.ok else Text(f"no, {drill.expected}", style="bold red")
            if drill.rerun is not None:
                expected.append(" (again)", style="dim")
            if drill.label is not None:
                expected.append(f" ({drill.label})", style=LABELS[drill.label])
            table.add_row(
                drill.name,
                Text(drill.word, style=STYLES.get(drill.word, "bold red")),
                expected,
                *([told(drill)] if wide else []),
                f"{drill.landed}/{drill.faults}",
                *([str(drill.restarts)] if wide else []),
                "-" if drill.recovery_s is None else clock(drill.recovery_s),
                clock(drill.took_s),
            )
        return table


def told(drill: "DrillResult") -> str:
    """The first difference, else why it did not pass."""
    if drill.status is None:
        return drill.error or "-"
    if drill.difference is not None:
        return drill.difference
    return "-" if drill.status == "PASS" else drill.cause or "-"


def _compared(result: "SuiteResult") -> RenderableType:
    table = columns("drill", "steps", "largest", "mean", "beyond the tolerance", "expected", right=("steps", "largest", "mean"))
    for entry in result.compared:
        found = entry.difference
        beyond = "no" if found.first_beyond is None else f"from step {found.first_beyond} on"
        table.add_row(
            f"{entry.name} (control)" if entry.control else entry.name,
            str(found.steps),
            f"{found.largest:.3g}",
            f"{found.mean:.3g}",
            beyond,
            Text("yes", style="green") if entry.as_expected else Text("no", style="bold red"),
        )
    return indented(table)


def _verdict(result: "SuiteResult") -> list[RenderableType]:
    said = f"{in_words(result).upper()}  {headline(result)}"
    if result.empty or result.as_expected:
        return [Text(said, style="bold" if result.empty else "bold green")]
    lines: list[RenderableType] = [Text(said, style="bold red")]
    lines += [Text(f"  {sentence}") for sentence in unexpected(result)]
    return lines


def unexpected(result: "SuiteResult") -> list[str]:
    """One sentence for everything that is not as expected."""
    lines = [f"{drill.name}: {surprise}" for drill in result.drills for surprise in drill.surprises]
    for entry in result.compared:
        if not entry.as_expected:
            what = "within the tolerance, a control must not be" if entry.control else "beyond the tolerance"
            lines.append(f"{entry.name}: losses {what}")
    if result.not_compared is not None:
        lines.append(f"the losses could not be compared: {result.not_compared}")
    if result.cut_short is not None:
        lines.append(f"cut short: {result.cut_short}")
    if result.left:
        lines.append(f"{not_done(result)}: {', '.join(result.left)}")
    return lines


def in_words(result: "SuiteResult") -> str:
    """What it came to."""
    if result.empty:
        return "nothing to do"
    if result.as_expected:
        return "as expected"
    # What is not as expected matters more than that there might have been more of it.
    return "not as expected" if result.cut_short is None or any(not drill.ok for drill in result.drills) else "cut short"


def not_done(result: "SuiteResult") -> str:
    """What became of the drills that were not carried out."""
    return "not begun" if result.cut_short is None else "not ended"


def _commands(result: "SuiteResult") -> list[RenderableType]:
    """How to look closer: at what is not as expected first, at all if that is little."""
    looked_at = [drill for drill in result.drills if drill.run is not None and (not drill.ok or len(result.drills) <= 8)]
    width = max((len(drill.name) for drill in looked_at), default=0)
    lines: list[RenderableType] = []
    for drill in looked_at:
        assert drill.run is not None
        where = root_arguments(drill.run.path.parent.parent)
        command = shlex.join(["chaosrun", "verify", drill.run.run_id, *where])
        lines.append(unwrapped(f"  {drill.name:<{width}}  {command}", style="dim" if drill.ok else "bold"))
    if result.path is not None:
        lines.append(unwrapped(f"  page: {shortest(result.path / 'index.html')}", style="dim"))
    return lines
