"""The report of a preflight on a terminal: the verdict, what is wrong, warnings, nodes and checks, what does not apply,
numbers, cost, and what to type next. 512 nodes take no more space than three, as long as they are alike.
"""

from collections.abc import Iterator, Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from chaosrun.preflight.model import Status
from chaosrun.preflight.report.rows import WHOLE, Group, PreflightReport, ProblemRow, in_order, report_of
from chaosrun.preflight.result import Result
from chaosrun.report.output import rendered
from chaosrun.report.page import columns, indented, section, unwrapped
from chaosrun.wording import count, listed, span

STYLES = {
    Status.FAIL: "bold red",
    Status.ERROR: "bold magenta",
    Status.WARN: "bold yellow",
    Status.PASS: "green",
    Status.SKIP: "dim",
}
MOST = 12
"""Of each kind of row, before "and so many more"."""


def render_text(result: Result, *, width: int, colour: bool, good_file: str | None = None, quiet: bool = False) -> str:
    """`good_file`: where the names of the good nodes were written. `quiet`: the verdict alone, on one line."""
    report = report_of(result, good_file)
    if quiet:
        return rendered(unwrapped(f"{report.words}  {report.headline}"), width=width, colour=colour)
    parts: list[RenderableType] = [*_verdict(report)]
    for title, found, one in (("What is wrong", report.wrong, "problem"), ("Warnings", report.warnings, "warning")):
        if found:
            parts += section(title, _cut([_problem(each) for each in found], one))
    parts += section("Nodes", _cut([*_groups(report)], "group"))
    if report.skips:
        parts += section("Not looked at", _cut([_pair(*pair) for pair in report.skips], "reason"))
    if report.measures or report.values:
        parts += section("Measured", None)
        parts += [indented(_measures(report))] if report.measures else []
        values = [_pair(title, value, reason) for title, value, reason in report.values]
        parts += [indented(_cut(values, "value"))] if values else []
    parts += ["", Text(f"cost   {report.costs}")]
    if report.commands:
        parts += section("Next", None)
        parts += [unwrapped(f"  {label:<10}  {command}") for label, command in report.commands]
    return rendered(Lines(*parts), width=width, colour=colour)


def _verdict(report: PreflightReport) -> Iterator[RenderableType]:
    result = report.result
    yield Text.assemble((f"{report.words}  ", "bold green" if result.fit else "bold red"), (report.headline, "bold"))
    yield Text(f"preflight, {result.level}: {report.about}")
    if report.counted:
        yield Text(f"{report.counted}, in {span(result.seconds)}")
    if bad := result.bad():
        yield Text(f"left out: {listed(in_order(bad), MOST)}")
    if result.unchecked:
        yield Text(f"not checked, with nothing to look at: {listed(in_order(result.unchecked), MOST)}")
    if report.good_file is not None:
        yield unwrapped(f"good nodes: {report.good_file}")


def _cut(found: Sequence[RenderableType], one: str) -> RenderableType:
    left = len(found) - MOST
    more = [Text(f"and {count(left, f'more {one}')} (-o html has all)", style="dim")] if left > 0 else []
    return Lines(*found[:MOST], *more)


def _problem(problem: ProblemRow) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=5)
    table.add_column(overflow="fold")
    table.add_row(Text(problem.status, style=STYLES[problem.status]), Text(problem.title, style="bold"))
    inner = Table.grid(padding=(0, 2, 0, 0))
    inner.add_column(no_wrap=True, min_width=8, style="dim")
    inner.add_column(overflow="fold")
    fields = [
        ("found", "\n".join(problem.found)),
        ("must be", problem.threshold),
        ("why", problem.reason),
        ("do", problem.remedy),
    ]
    for label, text in fields:
        if text:
            inner.add_row(label, text)
    table.add_row("", inner)
    return table


def _groups(report: PreflightReport) -> Iterator[RenderableType]:
    """Under the nodes, the checks that came out in each way."""
    names = [check.name for check in report.result.checks]
    own = [group.statuses for group in report.groups if group.title != WHOLE]
    asked = {name for name, *each in zip(names, *own, strict=True) if {*each} - {None, Status.SKIP}}
    for group in report.groups:
        yield Lines(Text(group.title, style="bold"), indented(_ways(group, names, asked)))


def _ways(group: Group, names: Sequence[str], asked: set[str]) -> Text:
    ways = Text()
    for status in (*reversed(Status), *([] if group.title == WHOLE else [None])):
        these = [name for name, each in zip(names, group.statuses, strict=True) if each is status and (each or name in asked)]
        if these:
            ways.append("; " if ways else "")
            ways.append(status or "not asked:", style=STYLES[status] if status else "dim")
            ways.append(f" {', '.join(these)}")
    return ways


def _pair(title: str, value: str, reason: str = "") -> RenderableType:
    return Text.assemble((title, "dim"), f": {value}", (f" ({reason})" if reason else "", "dim"))


def _measures(report: PreflightReport) -> RenderableType:
    table = columns("", "values", "median", "worst", "where", right=("values", "median", "worst"))
    for row in report.measures[:MOST]:
        table.add_row(row.title, str(row.number), row.median, row.worst, row.where)
    left = len(report.measures) - MOST
    return Lines(table, Text(f"and {count(left, 'more number')} (-o html has all)", style="dim")) if left > 0 else table
