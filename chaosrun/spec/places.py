"""Places in a text and problems found there, and how they are shown: `file:line:col: message`, the line, a caret, a hint.

Must not know YAML or the spec.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from chaosrun.errors import SpecError

LINE_BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")  # YAML's line breaks
SHOWN_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """A text with places in it: a job file, or one override of the command line."""

    label: str
    text: str
    is_file: bool = True
    order: int = 0
    """Problems of a lower order are shown first."""

    def line(self, number: int) -> str:
        lines = LINE_BREAK.split(self.text)
        return lines[number] if number < len(lines) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A stretch of one line; line and columns are counted from 0, `end` is the column after the last."""

    source: SourceText
    line: int
    column: int
    end: int

    def heading(self) -> str:
        if not self.source.is_file:
            return self.source.label
        return f"{self.source.label}:{self.line + 1}:{self.column + 1}"

    def excerpt(self) -> list[str]:
        """The source line and a caret line under it; no lines when there is nothing to show."""
        line, start, end = self.source.line(self.line), self.column, max(self.end, self.column + 1)
        if not line.strip():
            return []
        if len(line) > SHOWN_WIDTH:
            cut = max(0, min(start - SHOWN_WIDTH // 2, len(line) - SHOWN_WIDTH))
            line, start, end = line[cut : cut + SHOWN_WIDTH], start - cut, min(end - cut, SHOWN_WIDTH)
        shown = "".join(char if char.isprintable() else " " if char == "\t" else "\N{REPLACEMENT CHARACTER}" for char in line)
        number = str(self.line + 1) if self.source.is_file else ""
        carets = " " * _cells(shown[:start]) + "^" * max(1, _cells(shown[start:end]))
        return [f"  {number:>4} | {shown}", f"       | {carets}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    place: Place
    message: str
    hint: str | None = None

    def show(self) -> str:
        return "\n".join([f"{self.place.heading()}: {self.message}", *self.place.excerpt()])


@dataclass(frozen=True, slots=True)
class Objection:
    """Why an entry cannot be carried out, found when the whole is read."""

    entry: str
    """Its path in the job file: "faults.schedule[0]"."""
    why: str

    def __str__(self) -> str:
        return f"{self.entry}: {self.why}"


def spec_error(problems: Sequence[Problem]) -> SpecError:
    """All problems as one error, sorted by place. A single problem's hint is the error's; several show each its own."""
    in_order = sorted(problems, key=lambda each: (each.place.source.order, each.place.line, each.place.column))
    unique = list(dict.fromkeys(in_order))
    if len(unique) == 1:
        return SpecError(unique[0].show(), hint=unique[0].hint)
    return SpecError("\n".join(p.show() + (f"\n  hint: {p.hint}" if p.hint else "") for p in unique))


def refusal(place: Place, message: str, hint: str | None) -> SpecError:
    """A single problem as an error."""
    return spec_error([Problem(place=place, message=message, hint=hint)])


def _cells(text: str) -> int:
    """Terminal columns that a text takes: wide characters two, combining ones none."""
    return sum(0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
