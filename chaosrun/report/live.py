"""Progress of a running drill on stderr: a picture that changes on a terminal, one line an event elsewhere.

Both come from the run's files. It must never disturb the run: what it cannot read it does not show, and a terminal that goes
away ends the display, not the drill.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from chaosrun.records.layout import RunLayout
from chaosrun.report.draw import ASCII, UNICODE, draw
from chaosrun.report.escapes import on_one_line
from chaosrun.report.follow import RunFollower, Told
from chaosrun.report.output import has_colour
from chaosrun.report.picture import RunPicture
from chaosrun.report.progress import sentence
from chaosrun.report.screen import Screen, size_of

REDRAW_S = 0.2
"""At most this often: five times a second."""
POLL_S = 0.1
"""How often files are looked at where nothing is drawn."""
LASTING_EVENTS = frozenset(
    {
        "death.unplanned",
        "checkpoint.quarantined",
        "control.failed",
        "reference.replaced",
        "reference.uncached",
        "supervisor.ended",
    }
)
"""What nobody asked for, and what no file holds, keeps a line of its own, also on a terminal."""


def is_live_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"


def happened_s(record: Mapping[str, Any]) -> float | None:
    """When it happened, not when it was written down, as far as the record tells."""
    own = {"fault.requested": "requested_s", "worker.exited": "died_s"}.get(str(record.get("event")))
    for key in (own, "time_s"):
        value = record.get(key) if key else None
        if isinstance(value, int | float):
            return value
    return None


def plain_line(record: Mapping[str, Any], *, elapsed_s: float) -> str:
    minutes, seconds = divmod(int(max(0.0, elapsed_s)), 60)
    return on_one_line(f"[{minutes}:{seconds:02}] {record.get('leg') or 'run'}: {sentence(dict(record))}")


class Pace:
    """When it is time to show something again."""

    def __init__(self, pause_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._due_s = clock()

    def left_s(self) -> float:
        return max(0.0, self._due_s - self._clock())

    def shown(self) -> None:
        """However long it took: the pause begins now."""
        self._due_s = self._clock() + self._pause_s


class Teller:
    """Says each event once: a fault that fired is told of by its marker, and again by the journal."""

    def __init__(self) -> None:
        self._fired: set[tuple[str, str]] = set()

    def new(self, told: list[Told]) -> list[dict[str, Any]]:
        """The records to tell, with the key `leg`, in the order in which they happened as far as they say."""
        fresh: list[dict[str, Any]] = []
        latest_s = 0.0
        dated: list[tuple[float, Told]] = []
        for leg, record in told:
            at_s = happened_s(record)
            latest_s = latest_s if at_s is None else at_s
            dated.append((latest_s, (leg, record)))
        for _, (leg, record) in sorted(dated, key=lambda entry: entry[0]):
            which = (leg, str(record.get("fault")))
            match record.get("event"):
                case "fault.requested" if which in self._fired:
                    continue
                case "fault.requested":
                    self._fired.add(which)
                case "fault.withdrawn":
                    self._fired.discard(which)
                case "leg.started":
                    self._fired = {entry for entry in self._fired if entry[0] != leg}
            fresh.append({**record, "leg": leg})
        return fresh


class Display:
    """Lines or frames on a stream. Has no thread of its own; `refresh` whenever it is time."""

    def __init__(
        self,
        stream: TextIO,
        *,
        terminal: bool,
        began_s: float | None = None,
        clock: Callable[[], float] = time.time,
        size: Callable[[TextIO], tuple[int, int]] = size_of,
    ) -> None:
        """`began_s`: what lines count their time from; None: when the run was created."""
        self._stream = stream
        self._screen = Screen(stream)
        self._terminal = terminal
        self._began_s = began_s
        self._clock = clock
        self._size = size
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
        self._signs = UNICODE if encoding.startswith("utf") else ASCII
        self._console = Console(file=stream, force_terminal=True, width=80)
        self._system = ColorSystem.STANDARD if has_colour(stream, os.environ) else None
        self._teller = Teller()
        self._follower: RunFollower | None = None
        self._above = ""

    @property
    def is_gone(self) -> bool:
        return self._screen.is_gone

    @property
    def follower(self) -> RunFollower | None:
        return self._follower

    def follow(self, follower: RunFollower, *, past: bool) -> None:
        """Show this run from now on; with `past=False` nothing is said of what its files told so far."""
        self._follower, self._teller = follower, Teller()
        if not past:
            self._teller.new(follower.poll_events())

    def say(self, record: Mapping[str, Any]) -> None:
        """An event, on a line of its own; on a terminal only of what has to last."""
        if not self._terminal:
            self._screen.write(self._line(record) + "\n")
        elif record.get("event") in LASTING_EVENTS:
            self._above += self._line(record) + "\n"

    def refresh(self) -> None:
        """Take in what is new, and show it."""
        self._safely(self._show)

    def close(self) -> None:
        """Take in what is left; a terminal is as it was, but for the lines that last."""
        self._safely(self._show_the_end)

    def _safely(self, show: Callable[[], None]) -> None:
        """A bug of ours in what only looks ends the looking, and nothing else."""
        if self.is_gone:
            return
        try:
            show()
        except Exception as error:
            why = on_one_line(f"{type(error).__name__}: {error}")
            self._screen.fail(f"warning: this is a bug in chaosrun: the live view ended ({why}); the run goes on")

    def _show(self) -> None:
        self._take_in(whole=self._terminal)
        if self._terminal:
            self._frame()

    def _show_the_end(self) -> None:
        self._take_in(whole=False)
        if self._terminal:
            columns, _ = self._size(self._stream)
            self._screen.draw([], [], columns=columns, above=self._take_above())

    def _take_in(self, *, whole: bool) -> None:
        if self._follower is not None:
            told = self._follower.poll() if whole else self._follower.poll_events()
            for record in self._teller.new(told):
                self.say(record)

    def _frame(self) -> None:
        columns, rows = self._size(self._stream)
        picture = self._follower.picture if self._follower else RunPicture(run_id="chaosrun", began_s=self._began_s)
        # One column and one row less: a full last column, or row, makes some terminals scroll.
        lines = draw(picture, now_s=self._clock(), width=columns - 1, height=rows - 1, signs=self._signs)
        widths = [line.cell_len for line in lines]
        self._screen.draw([self._coloured(line) for line in lines], widths, columns=columns, above=self._take_above())

    def _coloured(self, line: Text) -> str:
        if self._system is None:
            return line.plain
        segments = line.render(self._console)
        return "".join(
            part.style.render(part.text, color_system=self._system) if part.style else part.text for part in segments
        )

    def _take_above(self) -> str:
        above, self._above = self._above, ""
        return above

    def _line(self, record: Mapping[str, Any]) -> str:
        began_s = self._began_s
        if began_s is None and self._follower is not None:
            began_s = self._follower.picture.created_s
        at_s = happened_s(record)
        at_s = self._clock() if at_s is None else at_s
        return plain_line(record, elapsed_s=at_s - (at_s if began_s is None else began_s))


class LiveProgress:
    """The display of a run that this process carries out. Use as a context manager and feed `on_event`.

    Journal records need not be shown from what `on_event` is told: they are in the files. It says which run it is
    (`run.created`), and what is in no file. One thread reads and writes; `on_event` only hands over, so that a slow terminal or
    disk never holds a recovery up.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        terminal: bool,
        run: RunLayout | None = None,
        clock: Callable[[], float] = time.time,
        size: Callable[[TextIO], tuple[int, int]] = size_of,
    ) -> None:
        self._display = Display(stream, terminal=terminal, began_s=clock(), clock=clock, size=size)
        self._pause_s = REDRAW_S if terminal else POLL_S
        if run is not None:
            self._display.follow(RunFollower(run), past=False)
        self._records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._show, name="chaosrun-live", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._records.put(None)
        self._thread.join()

    def on_event(self, record: dict[str, Any]) -> None:
        self._records.put(record)

    def _show(self) -> None:
        pace = Pace(self._pause_s)
        while True:
            try:
                record = self._records.get(timeout=pace.left_s())
            except queue.Empty:
                self._display.refresh()
                pace.shown()
                continue
            if record is None:
                break
            self._take_in(record)
            if pace.left_s() <= 0:
                self._display.refresh()
                pace.shown()
        self._display.close()

    def _take_in(self, record: dict[str, Any]) -> None:
        event, leg, follower = record.get("event"), record.get("leg"), self._display.follower
        if event == "run.created":
            run = RunLayout(Path(record["path"]))
            if follower is None or follower.run != run:
                # What there is left to tell of the one before.
                self._display.refresh()
                self._display.follow(RunFollower(run), past=True)
        elif leg and follower is not None and leg not in follower.legs:
            # The replays of a diagnosis: legs beside the run's own.
            others = tuple(name for name in follower.legs if "/" in name)
            self._display.follow(RunFollower(follower.run, legs=(*others, leg)), past=True)
        if follower is None or ("seq" not in record and event != "reference.cached"):
            self._display.say(record)
