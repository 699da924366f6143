"""Parts of pages for people: sections, tables, labelled sentences, values. Knows their look, not their contents."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from chaosrun.report.escapes import harmless

LONGEST_VALUE = 240
"""Characters of an expected or seen value; verdict.json holds the whole."""


def section(title: str, body: RenderableType | None) -> list[RenderableType]:
    return ["", Text(title, style="bold"), *([] if body is None else [indented(body)])]


def labelled(label: str, text: str, *, style: str = "", wrap: bool = True) -> RenderableType:
    if not wrap:
        return unwrapped(f"{label:<8}  {text}")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=8)
    table.add_column(overflow="fold")
    table.add_row(Text(label, style=style), Text(harmless(text)))
    return table


def columns(*titles: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    return table


def pairs(rows: Iterable[tuple[str, str]], *, bold: str = "") -> Table:
    """Names and values; `bold`: the most important one."""
    table = columns("", "")
    table.show_header = False
    for name, what in rows:
        table.add_row(name, Text(what, style="bold" if name == bold else ""))
    return table


def indented(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2))


def unwrapped(text: str, *, style: str = "") -> Text:
    """For text to copy: paths and commands are not wrapped, however narrow the terminal."""
    return Text(harmless(text), style=style, no_wrap=True, overflow="ignore")


def shown(value: Any) -> str:
    text = plain(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


def plain(value: Any) -> str:
    """Floats are recorded as float.hex(): exact, but unreadable alone."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    number = as_float(value)
    return str(value) if number is None else f"{number:.9g} ({value})"


def as_float(value: Any) -> float | None:
    """The value of a recorded float.hex(); None for anything else, even for a sample's name that looks like one."""
    if not isinstance(value, str) or not value.lstrip("-").startswith("0x") or "p" not in value:
        return None
    try:
        return float.fromhex(value)
    except (ValueError, OverflowError):
        return None
