"""Output of text: width, colour, and readers that stop reading."""

import io
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO
from weakref import WeakSet

from chaosrun.errors import ResourcesError
from chaosrun.report.escapes import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDEST = 120
"""Wider than this a table is hard to read across."""
ASCII = str.maketrans("━┈○◇●◐▪✓▶…", "=.o?@/#v>.")
"""Signs of the live view for an encoding that lacks them."""
_refused: "WeakSet[TextIO]" = WeakSet()
"""Streams that did not take all that was written: from then on they lead nowhere."""


class LeavingStream(io.TextIOBase):
    """A stream whose reader may go away (a closed pipe or terminal) without ending the program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_gone = False

    def write(self, text: str, /) -> int:
        if not self.is_gone:
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    self._stream.write(text.translate(ASCII).encode("ascii", errors="replace").decode())
                self._stream.flush()
            except (OSError, ValueError):
                self.is_gone = True
        return len(text)


def size_of(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal of this stream."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        size = shutil.get_terminal_size()
    return (size.columns, size.lines) if size.columns > 0 and size.lines > 0 else (80, 24)


def page_width() -> int:
    return min(WIDEST, max(40, shutil.get_terminal_size().columns))


def has_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether it is a terminal that is not dumb, and NO_COLOR is not set (https://no-color.org)."""
    return not stream.closed and stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def rendered(renderable: "RenderableType", *, width: int, colour: bool) -> str:
    """The renderable as text of at most `width` columns, except for parts that do not wrap; no control sequences but those of
    styles."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    page = io.StringIO()
    system = "standard" if colour else None
    console = Console(
        file=page, width=width, force_terminal=colour, color_system=system, highlight=False, emoji=False, markup=False
    )
    safe = [Segment(harmless(text), style) for text, style, _ in console.render(renderable)]
    console.print(Segments(safe), crop=False, end="")
    # Rich pads cells to their column's width; logs should have no trailing blanks.
    return page.getvalue() if colour else "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def write_out(text: str) -> bool:
    """Write to stdout; False if it was not written. A closed reader is not an error, and a full disk is reported once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # The buffered rest, and all later output, would fail again when the interpreter flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _refused.add(sys.stdout)
            write_error(f"stdout cannot be written: {error.strerror}", None, colour=False)
        return False
    return True


def write_product(text: str) -> int:
    """Write a command's result to stdout. Returns the exit code of `printed`."""
    write_out(text)
    return printed()


def printed() -> int:
    """The exit code of a command that does nothing but print: that of full storage when not all could be written to stdout."""
    return ResourcesError.exit_code if sys.stdout in _refused else 0


class _Lossy(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def lose_what_stderr_refuses() -> None:
    """Neither a disk that is full below the log of stderr nor a reader who left may end a drill, or change its exit code."""
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        raw = io.BufferedWriter(_Lossy(sys.stderr.fileno(), "wb", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)


def report_error(tokens: Sequence[str], kind: str, message: str, hint: str | None, exit_code: int) -> int:
    """Write the error that ends a command, on stdout as well if its line asks for JSON. Returns the exit code."""
    write_error(message, hint, colour=has_colour(sys.stderr, os.environ))
    if _asks_for_json(tokens):
        write_json({"v": 1, "error": {"kind": kind, "message": message, "hint": hint, "exit_code": exit_code}})
    return exit_code


def _asks_for_json(tokens: Sequence[str]) -> bool:
    """Whether the command line asks for JSON, even if it cannot be parsed."""
    own = tokens[: tokens.index("--")] if "--" in tokens else tokens
    pairs = zip(own, [*own[1:], ""], strict=False)
    return any(
        (option in ("-o", "--output") and value == "json") or option in ("-ojson", "-o=json", "--output=json")
        for option, value in pairs
    )


def write_json(value: Mapping[str, object]) -> None:
    write_out(as_json(value))


def as_json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2, sort_keys=False) + "\n"


def write_error(message: str, hint: str | None, *, colour: bool) -> None:
    """`error: …` and `hint: …` on stderr; the message's own lines (a source line, a caret) are kept as they are."""
    red, cyan, plain = ("\x1b[1;31m", "\x1b[36m", "\x1b[0m") if colour else ("", "", "")
    lines = f"{red}error:{plain} {harmless(message)}\n"
    if hint:
        lines += f"{cyan}hint:{plain} {harmless(hint)}\n"
    sys.stderr.write(lines)
    sys.stderr.flush()


def warn(sentences: Sequence[str]) -> None:
    """Print a warning on stderr, even with --quiet."""
    for sentence in sentences:
        print(f"warning: {harmless(sentence)}", file=sys.stderr)


def tell(guesses: Sequence[str]) -> None:
    """Print on stderr a decision made for the user, who may want another one."""
    for guess in guesses:
        print(f"guessed   {harmless(guess)}", file=sys.stderr)
