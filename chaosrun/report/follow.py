"""Reads a run's files as they grow, and keeps its picture up to date. Never asks a worker or the supervisor.

What cannot be read is not shown: whether it is sound, the verdict says.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.codec import DamagedRecordError, decode
from chaosrun.records.events import (
    EVENTS,
    AttemptStarting,
    FaultObserved,
    FaultRequested,
    FaultWithdrawn,
    JournalEvent,
    LegFinished,
    SupervisorResumed,
)
from chaosrun.records.heartbeat import read_heartbeat
from chaosrun.records.history import history_of
from chaosrun.records.layout import LEGS, LegLayout, RunLayout, checkpoint_step
from chaosrun.records.markers import read_marker
from chaosrun.records.run_file import read_run, recorded_leg
from chaosrun.records.tail import Tail
from chaosrun.records.traces import StartRecord
from chaosrun.report.facts import read_facts
from chaosrun.report.landings import landing
from chaosrun.report.picture import FaultSeen, LegPicture, RunPicture, TraceLine
from chaosrun.report.sentences import Told

POLL_BYTES = 4 << 20
"""Of traces, at a time: who joins a long run late catches up while it draws."""
GLIMPSE_BYTES = 1 << 16
"""Of the end of a trace, where its steps before need not be known."""
_LINES = msgspec.json.Decoder(TraceLine)
_STARTS = msgspec.json.Decoder(StartRecord)


class RunFollower:
    """`poll` brings `picture` up to date with the files and returns what there is to tell, in the order of its happening."""

    def __init__(self, run: RunLayout, *, legs: tuple[str, ...] = LEGS, whole: bool = True) -> None:
        """`whole=False`: look at the end of each trace only. No losses then, and checkpoints are what lies on the disk."""
        self.run = run
        self.picture = RunPicture(run_id=run.run_id)
        self._whole = whole
        self._written: tuple[int, ...] = ()
        self._legs = {name: _LegFollower(name, run.leg(name), whole=whole) for name in legs}

    def poll_events(self) -> list[Told]:
        """What the journals and markers say that is new: all that lines need."""
        told: list[Told] = []
        self._read_files()
        for name, leg in self._legs.items():
            was_there = leg.exists
            events = leg.poll_journal()
            if events and not was_there:
                # Before a reference is copied, run.json says so.
                self._read_files()
            if events and not was_there and name == LEGS[0] and self.picture.facts.reference_source:
                told.append(Told.notice({"event": "reference.cached", "leg": name, "time_s": events[-1].time_s}))
            else:
                told += [Told.of(name, event) for event in events]
            if leg.exists:
                self.picture.legs[name] = leg.picture
                leg.judge(self.picture)
                told += [Told.of(name, event) for event in leg.poll_markers()]
                told += leg.poll_starts()
            else:
                self.picture.legs.pop(name, None)
        resumed = [entry.record.time_s for entry in told if isinstance(entry.record, SupervisorResumed)]
        self.picture.resumed_s = resumed[-1] if resumed else self.picture.resumed_s
        return _in_order(told)

    def poll(self) -> list[Told]:
        """The same, and all else that the picture shows."""
        told = self.poll_events()
        budget = POLL_BYTES
        for name in self.picture.legs:
            budget = self._legs[name].poll_traces(budget if self._whole else POLL_BYTES)
            self._legs[name].poll_beats()
        if not self._whole:
            self._look_for_checkpoints()
        return told

    @property
    def legs(self) -> tuple[str, ...]:
        return tuple(self._legs)

    @property
    def is_behind(self) -> bool:
        """There is more to read than one poll takes."""
        return any(leg.is_behind for leg in self._legs.values())

    def _read_files(self) -> None:
        """run.json and plan.json: again when they were written anew."""
        written = tuple(_written(path) for path in (self.run.run_json, self.run.plan_json))
        if written == self._written:
            return
        self._written = written
        # Damaged, or of another version: who asks for more than a picture is told.
        with suppress(UsageError, OSError):
            self.picture.facts = read_facts(self.run)
        with suppress(UsageError, OSError):
            self.picture.faults = FaultPlan.read(self.run.plan_json).faults

    def _look_for_checkpoints(self) -> None:
        for name, leg in self.picture.legs.items():
            try:
                found = os.listdir(recorded_leg(self.run, read_run(self.run), name).checkpoints)
            except (OSError, UsageError):
                continue
            bad = {step: False for step, sound in leg.checkpoints.items() if not sound}
            leg.checkpoints = {**bad, **{step: True for entry in found if (step := checkpoint_step(entry)) is not None}}


class _LegFollower:
    def __init__(self, name: str, layout: LegLayout, *, whole: bool) -> None:
        self._name, self._layout, self._whole = name, layout, whole
        self._is_copy = False
        """Put in the place of another leg, as a whole: that it ran, has been told already."""
        self._begin()

    def _begin(self) -> None:
        self.picture = LegPicture(self._name, self._layout)
        self.is_behind = False
        self._journal = Tail(self._layout.journal)
        self._lines = 0
        self._events: list[JournalEvent] = []
        self._is_judged = True
        self._traces: dict[tuple[int, int], Tail] = {}
        self._starts: dict[int, Tail] = {}
        """The traces of attempts of which nobody knows yet what the script went on from."""
        self._fired: set[str] = set()
        """Faults of which that has been told: by their marker, or by the journal."""
        self._marked: set[str] = set()

    @property
    def exists(self) -> bool:
        return bool(self._events)

    def poll_journal(self) -> list[JournalEvent]:
        """The new events that are to be told."""
        fresh = list(self._read_journal())
        if self._journal.restarts:
            # The leg was begun again: nothing of the former one holds.
            self._begin()
            fresh = list(self._read_journal())
            self._is_copy = any(isinstance(event, LegFinished) for event in fresh)
        if fresh:
            self._events += fresh
            self._is_judged = False
            self.picture.take_history(history_of(self._layout, self._events, None, []))
        for event in fresh:
            if isinstance(event, AttemptStarting):
                self._open_traces(event.attempt)
                if event.by == "script" and event.attempt > 1:
                    self._starts[event.attempt] = Tail(self._layout.attempt(event.attempt).trace(0))
        return [] if self._is_copy else [event for event in fresh if self._is_news(event)]

    def _read_journal(self) -> Iterator[JournalEvent]:
        while lines := _lines(self._journal, POLL_BYTES):
            for line in lines:
                self._lines += 1
                try:
                    yield decode(line, EVENTS)
                except DamagedRecordError as error:
                    self.picture.damage.setdefault(self._layout.journal, f"line {self._lines}: {error.message}")

    def _is_news(self, event: JournalEvent) -> bool:
        """A request is told once, by its marker or by the journal; after it was withdrawn, again."""
        if isinstance(event, FaultWithdrawn):
            self._fired.discard(event.fault)
        if not isinstance(event, FaultRequested):
            return True
        is_new = event.fault not in self._fired
        self._fired.add(event.fault)
        return is_new

    def judge(self, run: RunPicture) -> None:
        """What has become of the faults that were seen, where the journal has more to say since."""
        if not self._is_judged:
            self._is_judged = True
            seen = {event.fault for event in self._events if isinstance(event, FaultObserved)}
            for fault in (fault for fault in run.faults if fault.id in seen):
                entry = self.picture.faults.setdefault(fault.id, FaultSeen())
                if entry.state in ("landed", "missed"):
                    continue
                found = landing(fault, self._layout, self._events)
                entry.state = "landed" if found.landed else "missed" if found.problem else entry.state

    def _open_traces(self, attempt: int) -> None:
        # Of a leg that was over before anybody looked, the end of each trace tells enough.
        last_bytes = None if self._whole else GLIMPSE_BYTES
        for rank in range(self.picture.workers or 0):
            self._traces.setdefault((attempt, rank), Tail(self._layout.attempt(attempt).trace(rank), last_bytes=last_bytes))

    def poll_traces(self, budget: int) -> int:
        """Attempt by attempt, so that a step done again counts as its last. Returns what is left of the budget."""
        self.is_behind = False
        for (attempt, rank), tail in list(self._traces.items()):
            while budget > 0 and (lines := self._newest_lines(attempt, rank, tail, budget)):
                for line in lines:
                    budget -= len(line)
                    self._take_line(attempt, rank, line)
            if budget <= 0:
                self.is_behind = True
                break
            if attempt != self.picture.attempt or self.picture.is_over:
                del self._traces[attempt, rank]
        return budget

    def _newest_lines(self, attempt: int, rank: int, tail: Tail, budget: int) -> list[bytes]:
        lines, last_bytes = _lines(tail, budget), GLIMPSE_BYTES
        while not self._whole and lines and last_bytes < POLL_BYTES and not any(b'"kind":"step"' in line for line in lines):
            # What ends a trace of a large model is longer than a glimpse: its last steps lie before it.
            last_bytes *= 8
            tail = self._traces[attempt, rank] = Tail(self._layout.attempt(attempt).trace(rank), last_bytes=last_bytes)
            lines = _lines(tail, POLL_BYTES)
        return lines

    def _take_line(self, attempt: int, rank: int, line: bytes) -> None:
        try:
            self.picture.take_trace(attempt, rank, decode(line, _LINES))
        except ValueError as error:
            self.picture.damage.setdefault(self._layout.attempt(attempt).trace(rank), str(error))

    def poll_markers(self) -> list[JournalEvent]:
        """What has fired, as the journal will say it: there a fault is told of when it has been seen to land."""
        if self.picture.is_over:
            return []
        try:
            found = {entry.removesuffix(".json") for entry in os.listdir(self._layout.faults) if entry.endswith(".json")}
        except (FileNotFoundError, NotADirectoryError):
            found = set()
        for fault in self._marked - found:
            self.picture.withdraw(fault)
        self._marked &= found
        fired: list[JournalEvent] = []
        for fault in sorted(found - self._marked):
            if marker := read_marker(self._layout, fault):
                self._marked.add(fault)
                about = {"attempt": marker.attempt, "rank": marker.rank, "step": marker.step, "phase": marker.phase}
                request = FaultRequested(fault=fault, requested_s=marker.time_s, time_s=marker.time_s, **about)
                self.picture.take_request(request)
                fired.append(request)
        return [request for request in fired if self._is_news(request)]

    def poll_starts(self) -> Iterator[Told]:
        """What scripts that resume by themselves were seen to go on from."""
        for attempt, tail in list(self._starts.items()):
            for line in _lines(tail, GLIMPSE_BYTES)[:1]:
                del self._starts[attempt]
                with suppress(ValueError):
                    start = decode(line, _STARTS)
                    step = start.position.step
                    place = f"step {step}" if step else "the beginning"
                    if start.found and start.found.step is None:
                        nearest = f", nearest to step {step}" if step else ""
                        place = f"a state that the undisturbed run never had{nearest}"
                    about = {"leg": self._name, "attempt": attempt, "step": step, "place": place, "time_s": start.time_s}
                    yield Told.notice({"event": "attempt.placed", **about})

    def poll_beats(self) -> None:
        if self.picture.is_over or not self.picture.attempt:
            return
        attempt = self._layout.attempt(self.picture.attempt)
        for rank, lane in self.picture.lanes.items():
            if not lane.ended:
                with suppress(OSError):
                    if beat := read_heartbeat(attempt.heartbeat(rank)):
                        self.picture.take_beat(rank, beat)


def _in_order(told: list[Told]) -> list[Told]:
    """As it happened, as far as that is said."""
    latest_s = 0.0
    dated: list[tuple[float, Told]] = []
    for entry in told:
        latest_s = latest_s if entry.time_s is None else entry.time_s
        dated.append((latest_s, entry))
    return [entry for _, entry in sorted(dated, key=lambda pair: pair[0])]


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _lines(tail: Tail, limit: int) -> list[bytes]:
    try:
        return tail.lines(limit)
    except OSError:
        return []
