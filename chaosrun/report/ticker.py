"""Progress of much on stderr: on a terminal one line that changes, and lines that stay for what did not pass; elsewhere a line
for each. A terminal that goes away ends the display, not what it shows."""

import shutil
import time
from collections.abc import Callable
from typing import TextIO

from chaosrun.records.events import EventRecord
from chaosrun.report.escapes import on_one_line
from chaosrun.report.output import LeavingStream

ERASE = "\r\x1b[2K"


_WORDS = {
    "sweep.survey": "sweep {sweep}: looking for points, the job undisturbed and killed once",
    "sweep.tried": "{number}/{of} {point}: {status}{because}",
    "sweep.cancelled": "{point}: cancelled, and left to be gone on with",
    "shrink.tried": "drill {number}, {faults} of {of} faults: {found}",
    "suite.started": "suite {suite}: {of} drills{seeded}",
    "suite.drill": "{number}/{of} {name} begins",
    "suite.anew": "{name} begins anew: its run of before was not whole",
    "suite.ended": "{number}/{of} {name}: {ended}{because}",
}


def tick(record: EventRecord) -> str:
    """What an event of a sweep, a shrink or a suite says."""
    cause = record.get("cause")
    about = {
        "because": "" if _passes(record) else f", not as expected: {cause}" if "ok" in record else f": {cause}",
        "found": record.get("symptom") or "does not fail",
        "seeded": "" if record.get("seed") is None else f", seed {record['seed']}",
        "ended": record.get("status") or ("cancelled" if record.get("cancelled") else "not run"),
    }
    name = str(record["event"])
    return _WORDS.get(name, name).format_map({**record, **about})


def _passes(record: EventRecord) -> bool:
    return record.get("ok", record.get("status", "PASS") == "PASS")


class TickingLine:
    """Sentences, each with the time since the first."""

    def __init__(self, stream: TextIO, *, terminal: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = LeavingStream(stream)
        self.terminal = terminal
        self._now_s = now_s
        self._began_s = now_s()

    def change(self, sentence: str) -> None:
        """Until the next; nothing where lines cannot change."""
        if self.terminal:
            self._stream.write(f"{ERASE}{self._dated(sentence)[: shutil.get_terminal_size().columns - 1]}")

    def stay(self, sentence: str) -> None:
        self._stream.write(f"{ERASE if self.terminal else ''}{self._dated(sentence)}\n")

    def close(self) -> None:
        if self.terminal:
            self._stream.write(ERASE)

    def _dated(self, sentence: str) -> str:
        minutes, seconds = divmod(int(self._now_s() - self._began_s), 60)
        return f"[{minutes}:{seconds:02}] {on_one_line(sentence)}"


class Ticker:
    def __init__(self, stream: TextIO, *, terminal: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        self._line = TickingLine(stream, terminal=terminal, now_s=now_s)
        self._running: dict[str, str] = {}
        """What goes on at the same time, in words."""

    def on_event(self, record: EventRecord) -> None:
        (self._line.change if _passes(record) and self._line.terminal else self._line.stay)(tick(record))

    def close(self) -> None:
        self._line.close()
