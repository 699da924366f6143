"""How text reaches people: width, colour, and a reader that stops reading."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any, TextIO

from chaosrun.report.escapes import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["has_colour", "page_width", "rendered", "write_error", "write_json", "write_out"]

WIDEST = 120
"""Wider than this a table is hard to read across."""


def page_width() -> int:
    return min(WIDEST, max(40, shutil.get_terminal_size().columns))


def has_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """A terminal that is not dumb, and nobody has set NO_COLOR (https://no-color.org)."""
    return not stream.closed and stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def rendered(renderable: "RenderableType", *, width: int, colour: bool) -> str:
    """The renderable as text of at most `width` columns (but for what says that it does not wrap).

    Whatever its texts hold, a terminal is sent no control sequences but those of its styles.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments

    page = StringIO()
    system = "standard" if colour else None
    console = Console(
        file=page, width=width, force_terminal=colour, color_system=system, highlight=False, emoji=False, markup=False
    )
    safe = [Segment(harmless(text), style) for text, style, _ in console.render(renderable)]
    console.print(Segments(safe), crop=False, end="")
    # Rich pads cells to their column's width; nobody wants trailing blanks in a log.
    return page.getvalue() if colour else "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def write_out(text: str) -> bool:
    """To stdout. A reader that went away (`| head`) is no error, and a full disk is told once: the exit code still tells the
    outcome. False then."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would fail again when the interpreter flushes it at its end, and so would what follows.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            write_error(f"stdout cannot be written: {error.strerror}", None, colour=False)
        return False
    return True


def write_json(value: Mapping[str, Any]) -> None:
    write_out(json.dumps(value, indent=2, sort_keys=False) + "\n")


def write_error(message: str, hint: str | None, *, colour: bool) -> None:
    """`error: …` and `hint: …` on stderr; the message's own lines (a source line, a caret) are kept as they are."""
    red, cyan, plain = ("\x1b[1;31m", "\x1b[36m", "\x1b[0m") if colour else ("", "", "")
    print(f"{red}error:{plain} {harmless(message)}", file=sys.stderr)
    if hint:
        print(f"{cyan}hint:{plain} {harmless(hint)}", file=sys.stderr, flush=True)
