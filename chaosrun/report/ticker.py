"""Progress of much on stderr, a line for each event. A terminal that goes away ends the display, not what it shows."""

import time
from collections.abc import Callable
from typing import TextIO

from chaosrun.records.events import EventRecord
from chaosrun.report.escapes import on_one_line
from chaosrun.report.output import LeavingStream

_WORDS = {
    "sweep.survey": "sweep {sweep}: looking for points, the job undisturbed and killed once",
    "sweep.tried": "{number}/{of} {point}: {status}{because}",
    "sweep.cancelled": "{point}: cancelled, and left to be resumed",
    "shrink.tried": "drill {number}, {faults} of {of} faults: {found}",
    "suite.started": "suite {suite}: {of} drills{seeded}",
    "suite.drill": "{number}/{of} {name} begins",
    "suite.anew": "{name} starts again: its earlier run was incomplete",
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


class Ticker:
    """Sentences, each with the time since the first."""

    def __init__(self, stream: TextIO, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = LeavingStream(stream)
        self._now_s = now_s
        self._began_s = now_s()

    def on_event(self, record: EventRecord) -> None:
        self.tell(tick(record))

    def tell(self, sentence: str) -> None:
        minutes, seconds = divmod(int(self._now_s() - self._began_s), 60)
        self._stream.write(f"[{minutes}:{seconds:02}] {on_one_line(sentence)}\n")
