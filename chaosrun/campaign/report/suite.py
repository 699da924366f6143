"""A suite on a terminal: what would run, and what became of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from chaosrun.campaign.report.view import SuiteView, suite_view
from chaosrun.records.naming import shortest
from chaosrun.report.page import columns, indented, unwrapped
from chaosrun.report.text import STYLES
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.campaign.results import SuiteResult
    from chaosrun.campaign.suite_file import SuitePlan

WIDEST_NAME = 40
WIDTH_BESIDE = 90
"""Columns that a table needs beside the drills' names to have a place for the differences."""
LABELS = {"new": "bold red", "still": "red", "fixed": "green", "flaky": "yellow"}


def render_plan(plan: "SuitePlan") -> RenderableType:
    """What would run."""
    table = columns("drill", "expected", "workers", "faults", "what", "seed", right=("workers", "faults", "seed"))
    for column in table.columns:
        column.no_wrap = column.header not in ("drill", "what")
    for drill in plan.drills:
        expected, kinds = drill.expect.verdict, ", ".join(drill.kinds)
        table.add_row(drill.name, expected, str(drill.workers), str(drill.faults), kinds, str(drill.seed))
    part = "" if plan.shard is None else f", shard {plan.shard}"
    seed = "" if plan.seed is None else f", seed {plan.seed}"
    faults = count(sum(drill.faults for drill in plan.drills), "fault")
    title = Text(f"suite {plan.name}: {count(len(plan.drills), 'drill')}, {faults}{part}{seed}", style="bold")
    return Group(title, "", indented(table), *[Text(note) for note in plan.notes])


def render_suite(result: "SuiteResult") -> RenderableType:
    view = suite_view(result)
    seed = "" if result.seed is None else f", seed {result.seed} (--seed {result.seed} draws the same faults again)"
    parts: list[RenderableType] = [Text(f"suite {result.name}  {result.night}{seed}", style="bold")]
    if view.drills:
        parts += ["", _Drills(view)]
    if view.losses:
        parts += ["", Text(f"Losses beside those of {result.first}", style="bold"), indented(_losses(view))]
    if result.not_compared is not None:
        parts += ["", Text(f"The losses could not be compared: {result.not_compared}")]
    style = "bold" if result.empty else "bold green" if result.as_expected else "bold red"
    parts += ["", Text(f"{view.words.upper()}  {view.headline}", style=style)]
    if not result.empty:
        parts += [Text(f"  {sentence}") for sentence in view.unexpected]
    return Group(*parts, *[Text(f"note: {note}") for note in result.notes], *_commands(view))


@dataclass(frozen=True, slots=True)
class _Drills:
    """One line a drill where the terminal is wide enough for that; else the differences follow."""

    view: SuiteView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max(len(row.name) for row in self.view.drills)
        wide = options.max_width >= min(names, WIDEST_NAME) + WIDTH_BESIDE
        yield indented(self._table(wide=wide))
        for row in self.view.drills:
            if not wide and row.told:
                yield Text(f"  {row.name}: {row.told}", style="dim" if row.ok else "")

    def _table(self, *, wide: bool) -> Table:
        numbers = ("faults", *(["restarts"] if wide else []), "recovery", "time")
        titles = ["drill", "verdict", "expected", *(["first difference or cause"] if wide else []), *numbers]
        table = columns(*titles, right=numbers)
        for column in table.columns:
            column.no_wrap = column.header != ("first difference or cause" if wide else "drill")
        for row in self.view.drills:
            expected = Text(row.expected, style="green" if row.ok else "bold red")
            if row.rerun is not None:
                expected.append(" (again)", style="dim")
            if row.label is not None:
                expected.append(f" ({row.label})", style=LABELS[row.label])
            table.add_row(
                row.name,
                Text(row.status, style=STYLES.get(row.status, "bold red")),
                expected,
                *([row.told or "-"] if wide else []),
                row.faults,
                *([row.restarts] if wide else []),
                row.recovery,
                row.time,
            )
        return table


def _losses(view: SuiteView) -> Table:
    table = columns("drill", "steps", "largest", "mean", "beyond the tolerance", "expected", right=("steps", "largest", "mean"))
    for row in view.losses:
        ok = Text("yes", style="green") if row.ok else Text("no", style="bold red")
        table.add_row(row.name, row.steps, row.largest, row.mean, row.beyond, ok)
    return table


def _commands(view: SuiteView) -> list[RenderableType]:
    """How to look closer: at what is not as expected first, at all if that is little."""
    shown = [(row, row.look) for row in view.drills if row.look is not None]
    width = max((len(row.name) for row, _ in shown), default=0)
    lines: list[RenderableType] = [
        unwrapped(f"  {row.name:<{width}}  {look.line}", style="dim" if row.ok else "bold") for row, look in shown
    ]
    if view.result.path is not None:
        lines.append(unwrapped(f"  page: {shortest(view.result.path / 'index.html')}", style="dim"))
    return lines
