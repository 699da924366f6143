"""Reports in Markdown, as GitHub and GitLab read it, for a job summary, a merge request, a chat: templates in `templates/`.

A template's values are shown as one line of text, never as markup, unless they are a `Markup` made here.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chaosrun.report.escapes import harmless, without_escapes
from chaosrun.report.next_commands import NextCommand
from chaosrun.report.view import RunView
from chaosrun.wording import count

TEMPLATES = Path(__file__).parent / "templates"
SIGNS = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "⚠️"}
MOST_BYTES = 60_000
"""GitHub takes 1 MiB a step; a summary that is read holds less."""
ROWS = 40
"""Of a table; of more, the first and the last."""
LONGEST = 400
"""Characters of one text from a run."""
_MARKUP = re.compile(r"([\\`*{}\[\]|<>~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_LIVE = re.compile(r"@(?=\S)|[#!](?=\d)|:(?=//)|\bwww(?=\.)", re.IGNORECASE)
"""What a web page makes links and mentions of, after the Markdown is read, so that no backslash helps."""
_APART = "&#8203;"
"""A space of no width."""
_AT_THE_START = re.compile(r"^([#=+-]|\d+(?=[.)](?:\s|$)))")
"""What begins a heading or a list there."""


class Markup(str):
    """Text to be inserted as Markdown."""


def render_markdown(view: RunView) -> str:
    return render("report.md", view=view, sign=SIGNS[view.status])


def render(template: str, *folders: Path, **values: Any) -> str:
    """The template's first blocks that fit, and the names of those left out."""
    found = _environment(*folders).get_template(template)
    context = found.new_context(values)
    kept = [part for block in found.blocks.values() if (part := "".join(block(context)).strip())]
    whole = "\n\n".join(kept) + "\n"
    while len(whole.encode()) > MOST_BYTES:
        kept.pop()
        whole = "\n\n".join([*kept, "*Cut off here: the whole is in the HTML report and in verdict\\.json\\.*"]) + "\n"
    return whole


@cache
def _environment(*folders: Path) -> Environment:
    made = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        finalize=text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"table": table, "fence": fence, "shell_lines": shell_lines, "count": count, "ROWS": ROWS}
    made.filters |= {"paragraph": paragraph, "ending": ending}
    return made


def text(value: Any) -> str:
    """Any text as one line. Backslashes are Markdown's escape for punctuation."""
    if isinstance(value, Markup):
        return value
    line = " ".join(without_escapes(str(value)).split())
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
    escaped = _MARKUP.sub(r"\\\1", "".join(sign for sign in line if sign.isprintable()))
    return Markup(_LIVE.sub(lambda found: f"{found[0]}{_APART}", escaped))


def paragraph(value: Any) -> Markup:
    return Markup(_AT_THE_START.sub(lambda found: f"{found[1]}\\" if found[1].isdigit() else f"\\{found[1]}", text(value)))


def table(titles: Sequence[str], rows: Sequence[Any], *attributes: str) -> Markup:
    """`attributes`: those of a row that are its cells; empty for rows that are tuples of cells."""
    if attributes:
        rows = [tuple(getattr(row, name) for name in attributes) for row in rows]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    told = list(rows)
    if len(rows) > ROWS:
        half = ROWS // 2
        gap = [f"… {len(rows) - 2 * half} more", *[""] * (len(titles) - 1)]
        told = [*rows[:half], gap, *rows[-half:]]
    return Markup(
        "\n".join([*lines, *(f"| {' | '.join('-' if cell is None else text(cell) or ' ' for cell in row)} |" for row in told)])
    )


def fence(lines: Sequence[str], language: str) -> Markup:
    body = "\n".join(harmless(line) for line in lines)
    longest = max(map(len, re.findall(r"`+", body)), default=0)
    ticks = "`" * max(3, longest + 1)
    return Markup(f"{ticks}{language}\n{body}\n{ticks}")


def shell_lines(commands: Iterable[NextCommand]) -> list[str]:
    """The command that repeats the run comes first."""
    ordered = sorted(commands, key=lambda command: command.label != "repeat")
    return [f"{each.line}  # {f'{each.label} ({each.note})' if each.note else each.label}" for each in ordered]


def ending(output: str) -> list[str]:
    return [line[:LONGEST] for line in harmless(output).strip().splitlines()[-ROWS:]]
