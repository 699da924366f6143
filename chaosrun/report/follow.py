"""Reads a run's files as they grow, and keeps its picture up to date; unreadable parts are not shown."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records import events as recorded
from chaosrun.records.appended import Tail
from chaosrun.records.codec import DamagedRecordError, decode
from chaosrun.records.heartbeat import Heartbeat, read_heartbeat
from chaosrun.records.history import LegHistory, history_of
from chaosrun.records.layout import LEGS, RUN, LegLayout, RunLayout, checkpoint_step
from chaosrun.records.markers import read_marker
from chaosrun.records.run_file import RunInfo, read_run, recorded_leg
from chaosrun.records.supervision import read_supervision
from chaosrun.records.trace_reader import read_ends, read_start
from chaosrun.records.traces import RankTrace
from chaosrun.report.facts import read_facts
from chaosrun.report.landings import landing
from chaosrun.report.picture import FaultSeen, LegPicture, RunPicture, fired, lanes_of
from chaosrun.report.sentences import EventText

POLL_BYTES = 4 << 20
AT_A_LOOK = 50
"""About so many growing traces are read again in one poll."""


class RunFollower:
    """`poll` brings `picture` up to date with the files and returns the new events, in the order in which they happened."""

    def __init__(self, run: RunLayout, *, legs: tuple[str, ...] = LEGS) -> None:
        self.run = run
        self.picture = RunPicture(run_id=run.run_id)
        self._info: RunInfo | None = None
        self._written: tuple[int, ...] = ()
        self._legs: dict[str, _LegFollower] = {}
        for name in legs:
            self.add(name)

    def add(self, leg: str) -> None:
        self._legs[leg] = _LegFollower(leg, self.run.leg(leg))

    def poll_events(self) -> list[EventText]:
        """The new events of the journals and markers: all that line output needs."""
        told: list[EventText] = []
        self._read_files()
        for name, leg in self._legs.items():
            was_there = leg.exists
            events = leg.poll_journal()
            if events and not was_there:
                # run.json records a copied reference before the copy is made.
                self._read_files()
            if events and not was_there and name == LEGS[0] and self.picture.facts.reference_source:
                about = {"whose": self.picture.facts.reference_run, "time_s": events[-1].time_s}
                told.append(EventText.notice({"event": "reference.cached", "leg": name, **about}))
            else:
                told += [EventText.of(name, event) for event in events]
            if leg.exists:
                told += [EventText.of(name, event) for event in leg.poll_markers()]
                told += leg.poll_starts()
        resumed = [entry.record.time_s for entry in told if isinstance(entry.record, recorded.SupervisorResumed)]
        self.picture.resumed_s = resumed[-1] if resumed else self.picture.resumed_s
        return _in_order(told)

    def poll(self) -> list[EventText]:
        """As `poll_events`, and update the picture of each leg."""
        told = self.poll_events()
        for name, leg in self._legs.items():
            if leg.exists:
                self.picture.legs[name] = leg.picture(self.picture.faults, self._kept(name))
            else:
                self.picture.legs.pop(name, None)
        return told

    @property
    def legs(self) -> tuple[str, ...]:
        return tuple(self._legs)

    def _read_files(self) -> None:
        """Read run.json and plan.json, again whenever they were rewritten."""
        written = tuple(_written(path) for path in (self.run.run_json, self.run.plan_json))
        if written == self._written:
            return
        self._written = written
        # Damaged, or of another version: reported to callers that need more than a picture.
        with suppress(UsageError, OSError):
            self._info = read_run(self.run)
            self.picture.facts = read_facts(self.run)
        with suppress(UsageError, OSError):
            self.picture.faults = FaultPlan.read(self.run.plan_json).faults

    def _kept(self, name: str) -> tuple[int, ...]:
        leg = self.run.leg(name) if self._info is None else recorded_leg(self.run, self._info, name)
        try:
            found = os.listdir(leg.checkpoints)
        except OSError:
            return ()
        return tuple(sorted(step for entry in found if (step := checkpoint_step(entry)) is not None))


class _LegFollower:
    def __init__(self, name: str, layout: LegLayout) -> None:
        self._name, self._layout = name, layout
        self._is_copy = False
        """The leg was replaced as a whole by a finished one (a copy): its events are not told again."""
        self._begin()

    def _begin(self) -> None:
        self._journal = Tail(self._layout.journal)
        self._lines = 0
        self._events: list[recorded.JournalEvent] = []
        self._damage: dict[Path, str] = {}
        self._ends: dict[Path, tuple[int, int, RankTrace]] = {}
        """By trace: its size and the newest attempt when it was read, and what its ends said. Once a later attempt has begun,
        it grows no more."""
        self._looks = 0
        self._judged: dict[str, FaultSeen] = {}
        """Faults whose outcome is final."""
        self._starts: set[int] = set()
        """Attempts whose resume step is not known yet: the script chooses it."""
        self._fired: set[str] = set()
        """Faults whose firing has been told, from their marker or from the journal."""
        self._marked: dict[str, recorded.FaultRequested] = {}

    @property
    def exists(self) -> bool:
        return bool(self._events)

    def poll_journal(self) -> list[recorded.JournalEvent]:
        """The new events to report."""
        fresh = list(self._read_journal())
        if self._journal.restarts:
            # The leg was begun again: forget the former one.
            self._begin()
            fresh = list(self._read_journal())
            self._is_copy = any(isinstance(event, recorded.LegFinished) for event in fresh)
        self._events += fresh
        for event in fresh:
            if isinstance(event, recorded.AttemptStarting) and event.by == "script" and event.attempt > 1:
                self._starts.add(event.attempt)
        return [] if self._is_copy else [event for event in fresh if self._is_news(event)]

    def _read_journal(self) -> Iterator[recorded.JournalEvent]:
        with suppress(OSError):
            while lines := self._journal.lines(POLL_BYTES):
                for line in lines:
                    self._lines += 1
                    try:
                        yield decode(line, recorded.EVENTS)
                    except DamagedRecordError as error:
                        self._damage.setdefault(self._layout.journal, f"line {self._lines}: {error.message}")

    def _is_news(self, event: recorded.JournalEvent) -> bool:
        """A request is reported once, from its marker or the journal; and again after it was withdrawn."""
        if isinstance(event, recorded.FaultWithdrawn):
            self._fired.discard(event.fault)
        if not isinstance(event, recorded.FaultRequested):
            return True
        is_new = event.fault not in self._fired
        self._fired.add(event.fault)
        return is_new

    @property
    def _is_over(self) -> bool:
        return isinstance(self._events[-1], recorded.LegFinished)

    def picture(self, planned: Sequence[Fault], kept: tuple[int, ...]) -> LegPicture:
        newest = max((event.attempt for event in self._events if isinstance(event, recorded.AttemptStarting)), default=0)
        workers = max((event.workers for event in self._events if isinstance(event, recorded.LegStarted)), default=0)
        beats = {} if self._is_over else self._beats(newest, workers)
        # With many ranks, some at each poll: their heartbeats show their progress in between. For ended attempts, any rank.
        turns = max(1, workers // AT_A_LOOK)
        struck = {(event.attempt, event.rank) for event in self._events if isinstance(event, recorded.FaultObserved)}
        is_completed = isinstance(end := self._events[-1], recorded.LegFinished) and end.outcome == "completed"
        self._looks += 1

        def read(path: Path, attempt: int, rank: int, _: list[str]) -> RankTrace:
            then, size, found = self._ends.get(path, (0, -1, RankTrace(attempt=attempt, rank=rank)))
            is_untold = attempt == newest and not is_completed and (self._is_over or (size < 0 and rank not in beats))
            is_due = is_untold or (attempt, rank) in struck or rank % turns == self._looks % turns
            if then <= attempt and is_due:
                with suppress(OSError):
                    now = path.stat().st_size
                    if now != size:
                        problems: list[str] = []
                        found = read_ends(path, attempt, rank, problems)
                        if problems:
                            self._damage[path] = problems[0]
                    self._ends[path] = newest, now, found
            return found

        history = history_of(self._layout, self._events, read, [])
        return LegPicture(
            name=self._name,
            history=history,
            lanes=lanes_of(history, beats),
            faults=self._faults(planned, history),
            kept=kept,
            damage=tuple(f"{path}: {why}" for path, why in self._damage.items()),
        )

    def _beats(self, attempt: int, workers: int) -> dict[int, Heartbeat]:
        beats: dict[int, Heartbeat] = {}
        for rank in range(workers):
            with suppress(OSError):
                if beat := read_heartbeat(self._layout.attempt(attempt).heartbeat(rank)):
                    beats[rank] = beat
        return beats

    def _faults(self, planned: Sequence[Fault], history: LegHistory) -> dict[str, FaultSeen]:
        """What the verdict would say about the faults so far; each is judged again until its outcome is final."""
        seen = fired([*self._events, *self._marked.values()])
        observed = {event.fault for event in history.events(recorded.FaultObserved)}
        for fault in planned:
            if fault.id in observed and fault.id not in self._judged:
                found, entry = landing(fault, history), seen.get(fault.id, FaultSeen())
                seen[fault.id] = replace(entry, state="landed" if found.landed else "missed" if found.problem else entry.state)
                if found.is_certain:
                    self._judged[fault.id] = seen[fault.id]
        return seen | self._judged

    def poll_markers(self) -> list[recorded.JournalEvent]:
        """Faults that have fired, from their markers; the journal may record a fault only once it was seen to land."""
        if self._is_over:
            return []
        try:
            found = {entry.removesuffix(".json") for entry in os.listdir(self._layout.faults) if entry.endswith(".json")}
        except (FileNotFoundError, NotADirectoryError):
            found = set()
        self._marked = {fault: request for fault, request in self._marked.items() if fault in found}
        new: list[recorded.JournalEvent] = []
        for fault in sorted(found - self._marked.keys()):
            if marker := read_marker(self._layout, fault):
                about = {"attempt": marker.attempt, "rank": marker.rank, "step": marker.step, "phase": marker.phase}
                request = recorded.FaultRequested(fault=fault, requested_s=marker.time_s, time_s=marker.time_s, **about)
                self._marked[fault] = request
                new.append(request)
        return [request for request in new if self._is_news(request)]

    def poll_starts(self) -> Iterator[EventText]:
        """The steps at which scripts that resume by themselves were observed to resume."""
        for attempt in sorted(self._starts):
            if start := read_start(self._layout.attempt(attempt).trace(0)):
                self._starts.discard(attempt)
                step = start.position.step
                place = f"step {step}" if step else "the beginning"
                if start.found and start.found.step is None:
                    nearest = f", nearest to step {step}" if step else ""
                    never = "was never recorded" if self._name == RUN else "the reference run never had"
                    place = f"a state that {never}{nearest}"
                about = {"leg": self._name, "attempt": attempt, "step": step, "place": place, "time_s": start.time_s}
                yield EventText.notice({"event": "attempt.placed", **about})


def has_come(run: RunLayout, *, attempt: int, step: int) -> Callable[[], bool]:
    """Checks, at each call, whether attempt `attempt` of the chaos leg has begun and a rank has completed `step`."""
    follower = RunFollower(run, legs=(run.main,))

    def has_come() -> bool:
        follower.poll()
        seen, leg = read_supervision(run), follower.picture.legs.get(run.main)
        if seen is None or leg is None or leg.attempt < attempt or leg.reached < step:
            return False
        # Attempts of an earlier supervisor do not count: the present one has not opened the leg yet, and would refuse a fault.
        return any(begun.time_s >= seen.began_s for begun in leg.history.events(recorded.AttemptStarting))

    return has_come


def _in_order(told: list[EventText]) -> list[EventText]:
    """Sort events in the order in which they happened, as far as their times are known."""
    latest_s = 0.0
    dated: list[tuple[float, EventText]] = []
    for entry in told:
        latest_s = latest_s if entry.time_s is None else entry.time_s
        dated.append((latest_s, entry))
    return [entry for _, entry in sorted(dated, key=lambda pair: pair[0])]


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
