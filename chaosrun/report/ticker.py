"""Progress of many drills on stderr: on a terminal one line that changes, and lines that stay for what did not pass; elsewhere
a line for each drill. A terminal that goes away ends the display, not the drills."""

import shutil
import time
from collections.abc import Mapping
from typing import Any, TextIO

from chaosrun.report.escapes import on_one_line

__all__ = ["Ticker", "tick"]


def tick(record: Mapping[str, Any]) -> str:
    """What an event of a sweep, a shrink or a suite says."""
    match record["event"]:
        case "sweep.survey":
            return f"sweep {record['sweep']}: looking for points, the job undisturbed and killed once"
        case "sweep.tried":
            cause = "" if record["status"] == "PASS" else f": {record['cause']}"
            return f"{record['number']}/{record['of']} {record['point']}: {record['status']}{cause}"
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
            return f"{record['number']}/{record['of']} {record['name']}: {record['status'] or 'not run'}{surprise}"
    return str(record["event"])


class Ticker:
    def __init__(self, stream: TextIO, *, terminal: bool) -> None:
        self._stream: TextIO | None = stream
        self._terminal = terminal
        self._began_s = time.monotonic()

    def on_event(self, record: Mapping[str, Any]) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began_s), 60)
        line = f"[{minutes}:{seconds:02}] {on_one_line(tick(record))}"
        if not self._terminal:
            self._write(f"{line}\n")
        elif record.get("ok", record.get("status", "PASS") == "PASS"):
            self._write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
        else:
            self._write(f"\r\x1b[2K{line}\n")

    def close(self) -> None:
        if self._terminal:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody is reading any more (closed pipe, terminal gone, closed file): the drills go on.
            self._stream = None
