"""Progress of a running drill on stderr: one updating line on a terminal, one line an event elsewhere.

It is told of journal records and looks the newest step up in trace files. It must never disturb the run: what it cannot read it
does not show, and a terminal that goes away ends the display, not the drill.
"""

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from chaosrun.records.layout import RunLayout
from chaosrun.records.trace import TornRecordError
from chaosrun.report.facts import read_facts
from chaosrun.report.progress import LegProgress, StepSeen, advance, last_step, read_progress, sentence, span

__all__ = ["Display", "LiveProgress", "is_live_terminal", "live_line", "plain_line"]

REDRAW_S = 0.2
"""At most this often: five redraws a second."""
LASTING_EVENTS = frozenset({"death.unplanned", "checkpoint.quarantined"})
"""What nobody asked for keeps a line of its own, also on a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """What the live line shows."""

    leg: LegProgress | None = None
    faults: int | None = None
    """Planned for the chaos leg; None when not known."""
    steps: int | None = None
    """Where the leg will end; None when not known."""
    first: StepSeen | None = None
    """The first step seen of this attempt, for the rate."""
    newest: StepSeen | None = None


def live_line(display: Display, *, elapsed_s: float, width: int) -> str:
    """The one line of a terminal, cut to `width` columns."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    parts = [f"[{minutes}:{seconds:02}]"]
    leg = display.leg
    if leg is None:
        parts.append("starting")
    else:
        parts.append(leg.leg)
        if leg.attempt:
            parts.append(f"attempt {leg.attempt}")
        if display.newest is not None:
            parts.append(f"step {display.newest.step}" + (f"/{display.steps}" if display.steps else ""))
            left_s = remaining_s(display)
            if left_s is not None and leg.outcome is None:
                parts.append(f"eta {span(left_s)}")
        if leg.leg == "chaos" and display.faults is not None:
            parts.append(f"faults {len(leg.landed)}/{display.faults}")
        if leg.last:
            parts.append(leg.last)
    return _cut("  ".join(parts), width)


def remaining_s(display: Display) -> float | None:
    """Seconds to the last step at the rate of this attempt so far; None before a rate or the end is known.

    Planned kills still to come are not in it.
    """
    if display.steps is None or display.first is None or display.newest is None:
        return None
    done, took_s = display.newest.step - display.first.step, display.newest.time_s - display.first.time_s
    if done <= 0 or took_s <= 0:
        return None
    return max(0, display.steps - display.newest.step) * took_s / done


def plain_line(record: Mapping[str, Any], *, elapsed_s: float) -> str:
    minutes, seconds = divmod(int(elapsed_s), 60)
    return f"[{minutes}:{seconds:02}] {_subject(record)}: {sentence(dict(record))}"


def _subject(record: Mapping[str, Any]) -> str:
    return record.get("leg") or ("suite" if record.get("event") == "drill.starting" else "run")


def is_live_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"


class LiveProgress:
    """Feed `on_event` with journal records (plus key `leg`); use as a context manager.

    A `run.created` record {run, path} tells which run it is; `run` does the same for one that exists already. Without either,
    steps are not shown. One thread reads and writes; `on_event` only hands over, so that a slow terminal or disk never holds
    a recovery up.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        terminal: bool,
        run: RunLayout | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._stream: TextIO | None = stream
        self._terminal = terminal
        self._clock = clock
        self._width = width
        self._began_s = clock()
        self._run = run
        self._display = Display() if run is None else _known_from(run, Display())
        self._drawn = ""
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
        if self._terminal:
            self._show_live()
        else:
            while (record := self._records.get()) is not None:
                self._write(plain_line(record, elapsed_s=self._elapsed_s()) + "\n")

    def _show_live(self) -> None:
        ended = False
        while not ended:
            redraw_s = time.monotonic() + REDRAW_S
            while not ended and (left_s := redraw_s - time.monotonic()) > 0:
                try:
                    record = self._records.get(timeout=left_s)
                except queue.Empty:
                    break
                if record is None:
                    ended = True
                else:
                    self._take_in(record)
            if not ended:
                self._look_at_trace()
                self._draw(live_line(self._display, elapsed_s=self._elapsed_s(), width=self._width() - 1))
        self._draw("")

    def _take_in(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event == "drill.starting":
            self._run, self._display = None, Display()
            self._draw("")
            self._write(plain_line(record, elapsed_s=self._elapsed_s()) + "\n")
            return
        if event == "run.created":
            self._run = RunLayout(Path(record["path"]))
            self._display = _known_from(self._run, self._display)
            return
        name = str(record.get("leg") or "chaos")
        before = self._display.leg
        leg = advance(before if before is not None and before.leg == name else LegProgress(leg=name), record)
        self._display = replace(self._display, leg=leg)
        if before is None or (leg.leg, leg.attempt) != (before.leg, before.attempt):
            self._display = replace(self._display, first=None, newest=None)
        if event == "reference.cached" and self._run is not None:
            leg = read_progress(name, self._run.leg(name))
        if leg.outcome == "completed" and leg.final_step:
            # The undisturbed run tells where the disturbed one will end.
            self._display = replace(self._display, steps=leg.final_step)
        if event in LASTING_EVENTS:
            self._draw("")
            self._write(plain_line(record, elapsed_s=self._elapsed_s()) + "\n")

    def _look_at_trace(self) -> None:
        leg = self._display.leg
        if self._run is None or leg is None or not leg.attempt:
            return
        try:
            newest = last_step(self._run.leg(leg.leg).attempt(leg.attempt).trace(0))
        except (OSError, TornRecordError):
            # The verifier reports a damaged trace; here it only means that there is no step to show.
            newest = None
        if newest is not None:
            self._display = replace(self._display, newest=newest, first=self._display.first or newest)

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def _draw(self, line: str) -> None:
        if line != self._drawn:
            self._write(f"\r\x1b[2K{line}")
            self._drawn = line

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody is reading any more (closed pipe, terminal gone, closed file): the drill goes on.
            self._stream = None


def _known_from(run: RunLayout, display: Display) -> Display:
    facts = read_facts(run)
    faults = display.faults if facts.faults is None else facts.faults
    return replace(display, faults=faults, steps=facts.max_steps or display.steps)


def _cut(line: str, width: int) -> str:
    flat = "".join(character if character.isprintable() else " " for character in line)
    return flat if len(flat) <= width else flat[: max(0, width - 3)] + "..."
