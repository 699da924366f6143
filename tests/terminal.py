"""A terminal for tests: a pty that a command runs in, and what its screen then shows."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from pathlib import Path
from typing import Any

_PART = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b(.)|([\r\n])|([^\x1b\r\n]+)", re.DOTALL)


class Grid:
    """Enough of a terminal's screen: cursor up, carriage return, line feed with scrolling, erasing, the cursor's visibility.

    Raises AssertionError for a sequence that it does not know: nothing else may be written.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[str] = [""]
        """Scrolled-off lines included."""
        self.row = self.column = 0
        self.is_cursor_hidden = False

    def feed(self, text: str) -> "Grid":
        consumed = 0
        for match in _PART.finditer(text):
            assert match.start() == consumed, repr(text[consumed : consumed + 20])
            consumed = match.end()
            arguments, command, other, control, printed = match.groups()
            if printed is not None:
                self._print(printed)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self._down()
            else:
                assert other is None, repr(match[0])
                self._obey(arguments, command)
        return self

    def _print(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                self.column = 0
                self._down()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _obey(self, arguments: str, command: str) -> None:
        match command, arguments:
            case "A", number:
                top = max(0, len(self.lines) - self.rows)
                self.row = max(top, self.row - int(number or 1))
            case "K", "2":
                self.lines[self.row] = ""
            case (("l" | "h"), "?25"):
                self.is_cursor_hidden = command == "l"
            case "m", _:
                pass
            case _:
                raise AssertionError(f"not known: ESC[{arguments}{command}")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


class Terminal:
    """A command in a terminal of its own; `stdout` may go elsewhere."""

    def __init__(
        self,
        *arguments: str | Path,
        columns: int = 100,
        rows: int = 30,
        environment: dict[str, str] | None = None,
        stdout: int | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        self._columns, self._rows = columns, rows
        self.resize(columns, rows)
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            env={**inherited, "TERM": "xterm-256color", **(environment or {})},
            cwd=cwd,
            preexec_fn=_own_session,
        )
        os.close(slave)
        self._bytes = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                block = os.read(self._master, 1 << 16)
            except OSError:
                return
            if not block:
                return
            self._bytes += block

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def modes(self) -> list[Any]:
        """What the line discipline does with what is typed."""
        return termios.tcgetattr(self._master)

    def wait(self, timeout_s: float = 300.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(60)
        return code

    def hang_up(self) -> None:
        """Take the terminal away from the command."""
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self._master >= 0:
            os.close(self._master)

    @property
    def output(self) -> str:
        return bytes(self._bytes).decode(errors="replace")

    @property
    def grid(self) -> Grid:
        return Grid(self._columns, self._rows).feed(self.output)


def _own_session() -> None:
    # As a login begins one, whatever this process was told to ignore.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
