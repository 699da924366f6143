"""A block of lines at the bottom of a terminal that is drawn over and over, and lines above it that stay.

Each frame is one write that moves up, overwrites and erases what is left: nothing flickers. The cursor is hidden within that
write alone, so that nothing that ends this process leaves it hidden.
"""

import os
import shutil
from collections.abc import Sequence
from typing import TextIO

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
TO_LINE_END, TO_SCREEN_END = "\x1b[K", "\x1b[J"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"


class Screen:
    """Owns the last lines of a terminal. Once nobody reads any more it writes nothing: `is_gone`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._widths: list[int] = []
        self._drawn: list[str] = []
        self.is_gone = False

    def draw(self, lines: Sequence[str], widths: Sequence[int], *, columns: int, above: str = "") -> None:
        """Show these lines (with their colours; `widths` without) in place of the former ones; `above`: whole lines that stay.

        No line may be as wide as the terminal (`columns`), and there must be fewer of them than it has rows.
        """
        if list(lines) == self._drawn and not above and all(width < columns for width in self._widths):
            return
        # A terminal that became narrower has wrapped what was drawn.
        rows = sum(max(1, -(-width // max(1, columns))) for width in self._widths)
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        kept = "".join(f"{line}{TO_LINE_END}\r\n" for line in above.splitlines())
        block = "\r\n".join(f"{line}{TO_LINE_END}" for line in lines)
        self.write(f"{HIDE}\r{up}{kept}{NO_WRAP}{block}{WRAP}{TO_SCREEN_END}{SHOW}")
        self._drawn, self._widths = list(lines), list(widths)

    def fail(self, why: str) -> None:
        """Say why nothing will be shown any more."""
        self.write(f"\r\n{why}\r\n" if self._drawn else f"{why}\n")
        self.is_gone = True

    def write(self, text: str) -> None:
        if self.is_gone:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", errors="replace").decode())
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody is reading any more (closed pipe, terminal gone, closed file): what is shown goes on without it.
            self.is_gone = True


def size_of(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal that this very stream goes to."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        size = shutil.get_terminal_size()
    return (size.columns, size.lines) if size.columns > 0 and size.lines > 0 else (80, 24)
