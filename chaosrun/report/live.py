"""Progress of a drill on stderr, from its files: a changing picture on a terminal, one line per event elsewhere.

It must never affect the run: a terminal that closes ends the display, not the drill.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live

from chaosrun.records.events import EventRecord, WorkerExited
from chaosrun.records.layout import RunLayout
from chaosrun.report.draw import draw
from chaosrun.report.escapes import on_one_line
from chaosrun.report.follow import RunFollower
from chaosrun.report.output import LeavingStream, has_colour, size_of
from chaosrun.report.sentences import EventText, folded

REDRAW_S = 0.2
"""At most this often: five times a second."""
SPARING = 4.0
"""After a look, the next one waits for so many times as long as it took."""
POLL_S = 0.1
"""How often files are looked at where nothing is drawn."""
LASTING_EVENTS = frozenset(
    {
        "death.unplanned",
        "checkpoint.quarantined",
        "control.failed",
        "plan.made",
        "chaos.begins",
        "reference.replaced",
        "reference.uncached",
        "supervisor.ended",
    }
)
"""Events that keep a line of their own on a terminal, too: unplanned ones, and those that no file holds."""


def is_live_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"


class _Screen(Console):
    """A console that never hides the cursor: however this process ends, the cursor is visible."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def live_on(stream: TextIO, leaving: LeavingStream, drawn: Callable[[], RenderableType] | None = None) -> Live:
    """The part of the terminal `stream` that changes in place. `drawn`: redrawn regularly by a separate thread."""
    system = "standard" if has_colour(stream, os.environ) else None
    screen = _Screen(file=cast("TextIO", leaving), force_terminal=True, color_system=system, width=80, height=24,
                     highlight=False, markup=False, emoji=False, _environ={"TERM": "xterm"})  # fmt: skip
    return Live(console=screen, auto_refresh=drawn is not None, get_renderable=drawn, transient=True, redirect_stdout=False,
                redirect_stderr=False)  # fmt: skip


class Display:
    """Lines or frames on a stream. Has no thread; call `refresh` when it is due."""

    def __init__(
        self,
        stream: TextIO,
        *,
        terminal: bool,
        began_s: float | None = None,
        clock: Callable[[], float] = time.time,
        size: Callable[[TextIO], tuple[int, int]] = size_of,
    ) -> None:
        """`began_s`: start of the lines' clock; None: when the run was created."""
        self._stream = LeavingStream(stream)
        self._began_s, self._clock = began_s, clock
        self._pause_s = REDRAW_S if terminal else POLL_S
        self._size = lambda: size(stream)
        self.follower: RunFollower | None = None
        self._live: Live | None = None
        if terminal:
            self._live = live_on(stream, self._stream)

    def follow(self, follower: RunFollower, *, past: bool) -> None:
        """Show this run from now on; with `past=False` without its earlier events."""
        self.follower = follower
        if not past:
            follower.poll_events()

    def say(self, told: EventText) -> None:
        """Print an event on its own line, except ranks that were stopped with their attempt; on a terminal only
        LASTING_EVENTS."""
        if self._live is None:
            if isinstance(told.record, WorkerExited) and told.record.stopped:
                return
            self._stream.write(self._line(told) + "\n")
        elif told.event in LASTING_EVENTS:
            self._live.console.print(self._line(told), soft_wrap=True)

    def refresh(self) -> float:
        """Read and show what is new. Returns when to call again (monotonic clock), as polling takes CPU time from the
        training."""
        began_s = time.monotonic()
        self._safely(self._show)
        now_s = time.monotonic()
        return now_s + SPARING * (now_s - began_s) + self._pause_s

    def close(self) -> None:
        """Read the rest; restores the terminal, except for lasting lines."""
        self._safely(lambda: self._take_in(whole=False))
        self._erase()

    def _erase(self) -> None:
        if self._live is not None:
            self._live.update("")
            self._live.stop()

    def _safely(self, show: Callable[[], None]) -> None:
        """Call `show`; an error in it ends the display, not the run."""
        if self._stream.is_gone:
            return
        try:
            show()
        except Exception as error:
            self._erase()
            why = on_one_line(f"{type(error).__name__}: {error}")
            self._stream.write(f"warning: this is a bug in chaosrun: the live view ended ({why}); the run continues\n")
            self._stream.is_gone = True

    def _show(self) -> None:
        self._take_in(whole=self._live is not None)
        if self._live is not None and self.follower is not None:
            columns, rows = self._live.console.size = self._size()
            # The last column and row stay free: writing to them would scroll the terminal.
            lines = draw(self.follower.picture, now_s=self._clock(), width=columns - 1, height=max(1, rows - 1), live=True)
            self._live.start()
            self._live.update(Group(*lines), refresh=True)

    def _take_in(self, *, whole: bool) -> None:
        if self.follower is not None:
            for told in folded(self.follower.poll() if whole else self.follower.poll_events()):
                self.say(told)

    def _line(self, told: EventText) -> str:
        began_s = self._began_s
        if began_s is None and self.follower is not None:
            began_s = self.follower.picture.facts.created_s
        at_s = self._clock() if told.time_s is None else told.time_s
        return told.line(at_s - (at_s if began_s is None else began_s))


class LiveProgress:
    """The display of a run that this process carries out: a context manager, fed by `on_event`, which gets the run's id and
    events that are in no file. One thread reads and writes, so that a slow terminal or disk never delays a recovery."""

    def __init__(self, display: Display, run: RunLayout | None = None) -> None:
        self._display = display
        if run is not None:
            display.follow(RunFollower(run), past=False)
        self._records: queue.SimpleQueue[EventRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._show, name="chaosrun-live", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._records.put(None)
        self._thread.join()

    def on_event(self, record: EventRecord) -> None:
        self._records.put(record)

    def _show(self) -> None:
        due_s = time.monotonic()
        while True:
            with suppress(queue.Empty):
                record = self._records.get(timeout=max(0.0, due_s - time.monotonic()))
                if record is None:
                    break
                self._take_in(record)
            if time.monotonic() >= due_s:
                due_s = self._display.refresh()
        self._display.close()

    def _take_in(self, record: EventRecord) -> None:
        event, leg, follower = record.get("event"), record.get("leg"), self._display.follower
        if event == "run.created":
            run = RunLayout(Path(record["path"]))
            if follower is None or follower.run != run:
                # The remaining events of the previous run.
                self._display.refresh()
                self._display.follow(RunFollower(run), past=True)
        elif leg and follower is not None and leg not in follower.legs:
            # The replays of a diagnosis, in place of the run's own legs.
            if not any("/" in name for name in follower.legs):
                self._display.follow(follower := RunFollower(follower.run, legs=()), past=True)
            follower.add(leg)
        if "seq" not in record and (follower is None or event != "reference.cached"):
            self._display.say(EventText.notice(record))


@contextmanager
def progress(*, quiet: bool, run: RunLayout | None = None) -> Iterator[Callable[[EventRecord], None] | None]:
    """Show progress within this context; yields the receiver of events. Libraries' output meanwhile goes to stderr."""
    with redirect_stdout(sys.stderr):
        if quiet:
            yield None
            return
        terminal = is_live_terminal(sys.stderr, os.environ)
        with LiveProgress(Display(sys.stderr, terminal=terminal, began_s=time.time()), run) as live:
            yield live.on_event


def watch(run: RunLayout, *, stream: TextIO, terminal: bool, ended: Callable[[], bool]) -> None:
    """Show a run from its files until `ended()`, then the rest. Restores the terminal on KeyboardInterrupt, which passes
    through. `terminal`: draw the picture; else one line per event from the first on. If the stream is closed, only waits."""
    display = Display(stream, terminal=terminal)
    display.follow(RunFollower(run), past=not terminal)
    try:
        over = False
        while not over:
            # Checked first: everything written before the end can then be read.
            over = ended()
            due_s = display.refresh()
            if not over:
                time.sleep(max(0.0, due_s - time.monotonic()))
    finally:
        display.close()
