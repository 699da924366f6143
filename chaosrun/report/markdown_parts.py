"""What accounts in Markdown are made of: text that stays text whatever it holds, tables, fences, and their length.

GitHub's flavour, which GitLab reads too. Knows nothing of drills.
"""

import re
from collections.abc import Sequence
from typing import Any

from chaosrun.report.escapes import without_escapes

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


def fitting(parts: Sequence[str]) -> str:
    """The parts from the beginning on that fit, and what was left out."""
    whole = "\n\n".join(parts) + "\n"
    kept = list(parts)
    while len(whole.encode()) > MOST_BYTES:
        kept.pop()
        whole = "\n\n".join([*kept, "*Cut off here: the whole is in report\\.html and verdict\\.json of the run\\.*"]) + "\n"
    return whole


def text(value: Any) -> str:
    """One line of text, whatever it holds. Backslashes before punctuation are Markdown's own way to say that it is none."""
    line = " ".join(without_escapes(str(value)).split())
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
    escaped = _MARKUP.sub(r"\\\1", "".join(sign for sign in line if sign.isprintable()))
    return _LIVE.sub(lambda found: f"{found[0]}{_APART}", escaped)


def paragraph(value: Any) -> str:
    return _AT_THE_START.sub(lambda found: f"{found[1]}\\" if found[1].isdigit() else f"\\{found[1]}", text(value))


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    told = list(rows)
    if len(rows) > ROWS:
        half = ROWS // 2
        gap = [f"… {len(rows) - 2 * half} more", *[""] * (len(titles) - 1)]
        told = [*rows[:half], gap, *rows[-half:]]
    lines += [f"| {' | '.join(text(cell) or ' ' for cell in row)} |" for row in told]
    return "\n".join(lines)


def fence(body: str, language: str) -> str:
    longest = max(map(len, re.findall(r"`+", body)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{body}\n{ticks}"
