"""Progress of much on stderr: on a terminal one line that changes, and lines that stay for what did not pass; elsewhere a line
for each. A terminal that goes away ends the display, not what it shows."""

import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from chaosrun.report.escapes import on_one_line
from chaosrun.report.output import LeavingStream

ERASE = "\r\x1b[2K"


def tick(record: Mapping[str, Any]) -> str:
    """What an event of a sweep, a shrink or a suite says."""
    match record["event"]:
        case "sweep.survey":
            return f"sweep {record['sweep']}: looking for points, the job undisturbed and killed once"
        case "sweep.tried":
            cause = "" if record["status"] == "PASS" else f": {record['cause']}"
            return f"{record['number']}/{record['of']} {record['point']}: {record['status']}{cause}"
        case "sweep.cancelled":
            return f"{record['point']}: cancelled, and left to be gone on with"
        case "shrink.tried":
            faults = f"{record['faults']} of {record['of']} faults"
            return f"drill {record['number']}, {faults}: {record['symptom'] or 'does not fail'}"
        case "suite.started":
            seed = "" if record["seed"] is None else f", seed {record['seed']}"
            return f"suite {record['suite']}: {record['of']} drills{seed}"
        case "suite.drill":
            return f"{record['number']}/{record['of']} {record['name']} begins"
        case "suite.anew":
            return f"{record['name']} begins anew: its run of before was not whole"
        case "suite.ended":
            surprise = "" if record["ok"] else f", not as expected: {record['cause']}"
            status = record["status"] or ("cancelled" if record.get("cancelled") else "not run")
            return f"{record['number']}/{record['of']} {record['name']}: {status}{surprise}"
    return str(record["event"])


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
    def __init__(self, stream: TextIO, *, terminal: bool) -> None:
        self._line = TickingLine(stream, terminal=terminal)

    def on_event(self, record: Mapping[str, Any]) -> None:
        passes = record.get("ok", record.get("status", "PASS") == "PASS")
        (self._line.change if passes and self._line.terminal else self._line.stay)(tick(record))

    def close(self) -> None:
        self._line.close()
