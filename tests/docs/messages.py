"""docs/messages.md: every message that chaosrun gives a person, found in its source, to be read at a stretch.

`python -m tests.docs.messages` writes it anew. A message is text of at least two words that is handed to an error, to whatever
takes a `hint`, to a logger or to a print; what a command and its options say stands in `chaosrun COMMAND --help`.
"""

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "messages.md"
HEAD = """\
# Every message

What chaosrun says when something is wrong, worth a warning or to be done, by the file that says it; `…` is filled in.
The page is made from the source, so that its English is kept by reading it from end to end.
The causes of a verdict have [a table of their own](causes.md).
"""
TELLING = frozenset(
    {"Disproof", "Problem", "Row", "error", "failed", "passed", "print", "skipped", "warn", "warned", "warning"}
)
"""What is made, or called, of a text that a person reads; by its last name."""


def messages(source: str) -> Iterator[tuple[str, str]]:
    """(message, hint) of one module, in its order; either may be empty."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        hints = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
        if hints or name in TELLING or name.endswith("Error"):
            others = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg not in ("hint", "code"))]
            said = [text for each in others for text in _texts(each)]
            advised = [text for each in hints for text in _texts(each)]
            if said or advised:
                yield " / ".join(said), " / ".join(advised)


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts that an expression may come to, where it is written as text."""
    match node:
        case ast.Constant(value=str() as text) if " " in text.strip():
            yield text
        case ast.JoinedStr(values=parts):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
            if any(letter.isalpha() for letter in text):
                yield text
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
            yield from _texts(one)
            yield from _texts(other)
        case ast.BoolOp(values=each):
            for one in each:
                yield from _texts(one)


def page() -> str:
    rows = [
        (path.relative_to(ROOT).as_posix(), message, hint)
        for path in sorted((ROOT / "chaosrun").rglob("*.py"))
        if "templates" not in path.parts
        for message, hint in dict.fromkeys(messages(path.read_text()))
    ]
    lines = [HEAD]
    for path, own in groupby(rows, key=lambda row: row[0]):
        lines += [f"## {path}\n", "| message | hint |", "| --- | --- |"]
        lines += [f"| {_cell(message)} | {_cell(hint)} |" for _, message, hint in own]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
