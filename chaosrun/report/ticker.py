"""Progress of sweeps, shrinks and suites on stderr, a line for each event. A terminal that closes ends only the display."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.text import Text

from chaosrun.records.events import EventRecord
from chaosrun.report.escapes import on_one_line
from chaosrun.report.live import live_on
from chaosrun.report.output import LeavingStream, size_of
from chaosrun.wording import count, listed, span

_WORDS = {
    "sweep.survey": "sweep {sweep}: looking for points: the job once without faults, once killed",
    "drill.began": "{drill} begins{beside}",
    "sweep.tried": "{number}/{of} {point}: {status}{because}",
    "sweep.cancelled": "{point}: cancelled, and left to be resumed",
    "shrink.tried": "{drill}: {found}",
    "suite.started": "suite {suite}: {of} drills{seeded}",
    "suite.anew": "{name} starts again: its earlier run was incomplete",
    "suite.ended": "{number}/{of} {name}: {ended}{because}",
}


def tick(record: EventRecord, others: Sequence[str] = ()) -> str:
    """The line for an event of a sweep, a shrink or a suite; "" for none. `others`: drills under way."""
    cause, passes = record.get("cause"), record.get("ok", record.get("status", "PASS") == "PASS")
    about = {
        "because": "" if passes else f", not as expected: {cause}" if "ok" in record else f": {cause}",
        "beside": f", beside {listed(others)}" if others else "",
        "found": record.get("symptom") or "does not fail",
        "seeded": "" if record.get("seed") is None else f", seed {record['seed']}",
        "ended": record.get("status") or ("cancelled" if record.get("cancelled") else "not run"),
    }
    return _WORDS.get(str(record["event"]), "").format_map({**record, **about})


class Ticker:
    def __init__(self, stream: TextIO, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = LeavingStream(stream)
        self._now_s = now_s
        self._began_s = now_s()

    def on_event(self, record: EventRecord) -> None:
        self.tell(tick(record))

    def tell(self, sentence: str) -> None:
        self._stream.write(self.line(sentence) + "\n")

    def line(self, sentence: str) -> str:
        minutes, seconds = divmod(int(self._now_s() - self._began_s), 60)
        return f"[{minutes}:{seconds:02}] {on_one_line(sentence)}"


@dataclass(slots=True)
class _UnderWay:
    began_s: float
    at: str = "begins"


class DrillsTicker(Ticker, AbstractContextManager["DrillsTicker"]):
    """Progress of many drills: on a terminal those under way are shown below the sentences; elsewhere a line when each begins
    and ends."""

    def __init__(
        self,
        stream: TextIO,
        *,
        terminal: bool,
        now_s: Callable[[], float] = time.monotonic,
        size: Callable[[TextIO], tuple[int, int]] = size_of,
    ) -> None:
        super().__init__(stream, now_s=now_s)
        self._under_way: dict[str, _UnderWay] = {}
        self._size = lambda: size(stream)
        self.live: Live | None = None
        if terminal:
            self.live = live_on(stream, self._stream, self._drawn)

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self._under_way.clear()
            self.live.stop()

    def on_event(self, record: EventRecord) -> None:
        event, drill = record["event"], str(record.get("drill"))
        others = tuple(self._under_way)
        if event == "drill.began":
            self._under_way[drill] = _UnderWay(self._now_s())
        elif event == "drill.at":
            self._under_way[drill].at = f"{record['of_leg']}, attempt {record['attempt']}"
        elif event == "drill.left":
            del self._under_way[drill]
        if self.live is not None:
            self.live.start()
        if (self.live is None or event != "drill.began") and (sentence := tick(record, others)):
            self.tell(sentence)

    def tell(self, sentence: str) -> None:
        if self.live is None:
            super().tell(sentence)
        else:
            self.live.console.print(self.line(sentence), soft_wrap=True)

    def _drawn(self) -> Group:
        under_way = list(self._under_way.items())
        if self.live is None or not under_way:
            return Group()
        columns, rows = self.live.console.size = self._size()
        most = max(len(name) for name, _ in under_way)
        lines = [Text(f"{count(len(under_way), 'drill')} under way", style="bold")]
        for name, each in under_way:
            line = Text(on_one_line(f"{name:<{most}}  {span(self._now_s() - each.began_s):>6}  {each.at}"), no_wrap=True)
            line.truncate(max(1, columns - 1), overflow="ellipsis")
            lines.append(line)
        return Group(*lines[: max(1, rows - 1)])
