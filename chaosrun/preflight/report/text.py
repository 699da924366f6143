"""The account of a preflight on a terminal: the verdict, what is wrong, warnings, nodes × checks, what does not apply, numbers,
cost, and what to type next. 512 nodes take no more room than three, as long as they are alike.
"""

from collections.abc import Iterator, Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from chaosrun.preflight.model import Status
from chaosrun.preflight.report.account import (
    WHOLE,
    Problem,
    about,
    cluster_statuses,
    commands,
    counted,
    groups,
    groups_named,
    headline,
    problems,
    short,
    skips_by_reason,
    titled,
    wheres,
)
from chaosrun.preflight.report.names import brief
from chaosrun.preflight.report.numbers import MeasureRow, WholeValue, measures, whole_values
from chaosrun.preflight.result import Result
from chaosrun.report.output import rendered
from chaosrun.report.page import columns, indented, section, unwrapped
from chaosrun.wording import clock, count

STYLES = {
    Status.FAIL: "bold red",
    Status.ERROR: "bold magenta",
    Status.WARN: "bold yellow",
    Status.PASS: "green",
    Status.SKIP: "dim",
}
MOST_PROBLEMS, MOST_GROUPS, MOST_MEASURES, MOST_VALUES = 12, 12, 10, 10
"""What is told of each before "and so many more"."""
NARROWEST_NODES = 24
"""Columns for the names of nodes, beside those of the checks."""


def render_text(result: Result, *, width: int, colour: bool, good_file: str | None = None, quiet: bool = False) -> str:
    """`good_file`: where the names of the good nodes were written. `quiet`: nothing on what to type next."""
    nodes = len(result.nodes)
    parts: list[RenderableType] = [*_verdict(result, good_file, width)]
    wrong = problems(result, Status.FAIL, Status.ERROR)
    if wrong:
        parts += section("What is wrong", None)
        parts += _some(
            [_problem(problem, nodes, width) for problem in wrong],
            MOST_PROBLEMS,
            "thing that is wrong",
            "things that are wrong",
        )
    doubts = problems(result, Status.WARN)
    if doubts:
        parts += section("Warnings", None)
        parts += _some([_problem(problem, nodes, width) for problem in doubts], MOST_PROBLEMS, "warning", "warnings")
    parts += ["", *_nodes(result, width)]
    skipped = skips_by_reason(result)
    if skipped:
        parts += section("Not looked at", _skipped(skipped, nodes, width))
    rows, values = measures(result), whole_values(result)
    if rows or values:
        parts += section("Measured", None)
        parts += [indented(_measures(rows))] if rows else []
        parts += [indented(_values(values, width))] if values else []
    parts += ["", *_flow("cost", [f"{run.name} {clock(run.seconds)}" for run in result.checks], width)]
    following = () if quiet else commands(result, good_file)
    if following:
        parts += section("Next", None)
        parts += [unwrapped(f"  {label:<10}  {command}") for label, command in following]
    return rendered(Lines(*parts), width=width, colour=colour)


def _verdict(result: Result, good_file: str | None, width: int) -> Iterator[RenderableType]:
    words, style = ("FIT", "bold green") if result.fit else ("NOT FIT", "bold red")
    yield Text.assemble((f"{words}  ", style), (headline(result), "bold"))
    yield Text(f"preflight, {result.level}: {about(result)}")
    if result.findings:
        yield Text(f"{counted(result)}, in {clock(result.seconds)}")
    bad = result.bad()
    if bad:
        yield Text(f"left out: {brief(tuple(bad), 2 * width)}")
    if result.unchecked:
        yield Text(f"not checked, with nothing to look at: {brief(result.unchecked, 2 * width)}")
    if good_file is not None:
        yield unwrapped(f"good nodes: {good_file}")


def _some(found: Sequence[RenderableType], most: int, one: str, several: str) -> list[RenderableType]:
    left = len(found) - most
    told = [indented(each) for each in found[:most]]
    return (
        told
        if left <= 0
        else [*told, Text(f"  and {left} more {one if left == 1 else several} (-o json has all)", style="dim")]
    )


def _problem(problem: Problem, nodes: int, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=5)
    table.add_column(overflow="fold")
    table.add_row(Text(problem.status, style=STYLES[problem.status]), Text(problem.title, style="bold"))
    fields = [
        ("found", "\n".join(wheres(problem, nodes, width - 18))),
        ("must be", problem.threshold),
        ("why", problem.reason),
        ("do", problem.remedy),
    ]
    inner = Table.grid(padding=(0, 2, 0, 0))
    inner.add_column(no_wrap=True, min_width=8, style="dim")
    inner.add_column(overflow="fold")
    for label, text in fields:
        if text:
            inner.add_row(label, text)
    table.add_row("", inner)
    return table


def _skipped(found: Sequence[tuple[str, Sequence[Problem]]], nodes: int, width: int) -> RenderableType:
    table = _pairs(width // 2)
    for reason, alike in found[:MOST_PROBLEMS]:
        told: dict[str, dict[str, tuple[str, ...]]] = {}
        for problem in alike:
            # Where it is, if that is not everywhere.
            places = [place for place in problem.where[:3] if 0 < len(place.nodes) < nodes]
            where = f" ({'; '.join(short(place, nodes, width // 2) for place in places)})" if places else ""
            checks = told.setdefault(where, {})
            for check, names in problem.titles:
                checks[check] = (*checks.get(check, ()), *names)
        table.add_row(reason, "; ".join(f"{titled(checks.items())}{where}" for where, checks in told.items()))
    left = len(found) - MOST_PROBLEMS
    return table if left <= 0 else Lines(table, Text(f"and {count(left, 'other reason')} (-o html has all)", style="dim"))


def _values(found: Sequence[WholeValue], width: int) -> RenderableType:
    table = _pairs(width // 2)
    for value in found[:MOST_VALUES]:
        table.add_row(value.title, Text.assemble(value.value, (f"\n{value.reason}" if value.reason else "", "dim")))
    left = len(found) - MOST_VALUES
    return table if left <= 0 else Lines(table, Text(f"and {count(left, 'other value')} (-o html has all)", style="dim"))


def _pairs(widest: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=widest, overflow="fold", style="dim")
    table.add_column(overflow="fold")
    return table


def _nodes(result: Result, width: int) -> Iterator[RenderableType]:
    found = groups(result)
    names = [run.name for run in result.checks]
    titles = groups_named(found, len(result.nodes), 60)
    rows = [(title, group.statuses) for title, group in list(zip(titles, found, strict=True))[:MOST_GROUPS]]
    whole = cluster_statuses(result)
    if whole is not None:
        rows.append((WHOLE, whole))
    yield Text("Nodes", style="bold")
    # A column for every check, two blanks after each, and what is left for the nodes: too little of it is not readable.
    room = width - 4 - sum(_wide(name) + 2 for name in names)
    wide = room >= min(NARROWEST_NODES, max((len(name) for name, _ in rows), default=0))
    yield indented(_table(names, rows) if wide else _list(names, rows))
    left = found[MOST_GROUPS:]
    if left:
        others = sum(len(group.nodes) for group in left)
        yield Text(f"  and {count(others, 'node')} that came out in {len(left)} other ways (-o html has all)", style="dim")


def _wide(name: str) -> int:
    """The columns that a check takes; a name of two words stands on two lines."""
    return max(5, *map(len, name.split()))


def _table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[Status | None]]]) -> RenderableType:
    table = columns("", *names)
    for column, name in zip(table.columns[1:], names, strict=True):
        column.min_width = _wide(name)
    for title, statuses in rows:
        table.add_row(title, *[Text("-", style="dim") if each is None else Text(each, style=STYLES[each]) for each in statuses])
    return table


def _list(names: Sequence[str], rows: Sequence[tuple[str, Sequence[Status | None]]]) -> RenderableType:
    """Where there is no room for columns: under the nodes, the checks that came out in each way."""
    lines: list[RenderableType] = []
    own = [statuses for title, statuses in rows if title != WHOLE]
    asked = {name for name, *each in zip(names, *own, strict=True) if set(each) - {None, Status.SKIP}}
    for title, statuses in rows:
        lines.append(Text(title, style="bold"))
        ways = Text()
        for status in (*reversed(Status), None):
            if status is None and title == WHOLE:
                continue
            these = [name for name, each in zip(names, statuses, strict=True) if each is status and (each or name in asked)]
            if these:
                ways.append("; " if ways else "")
                ways.append(status or "not asked:", style=STYLES[status] if status else "dim")
                ways.append(f" {', '.join(these)}")
        lines.append(indented(ways))
    return Lines(*lines)


def _measures(rows: Sequence[MeasureRow]) -> RenderableType:
    table = columns("", "values", "median", "worst", "where", right=("values", "median", "worst"))
    for row in rows[:MOST_MEASURES]:
        worst = (row.worst, row.worst_at) if row.number > 1 else ("", row.worst_at)
        table.add_row(row.title, str(row.number), row.median, *worst)
    left = len(rows) - MOST_MEASURES
    return table if left <= 0 else Lines(table, Text(f"and {count(left, 'other number')} (-o json has all)", style="dim"))


def _flow(label: str, items: Sequence[str], width: int) -> Iterator[RenderableType]:
    """Items that no line breaks apart."""
    line = label + " " * max(1, 6 - len(label))
    for number, item in enumerate(items):
        item += "," if number < len(items) - 1 else ""
        if len(line) + 1 + len(item) > width and line.strip():
            yield Text(line)
            line = " " * 6
        line += f" {item}"
    yield Text(line)
