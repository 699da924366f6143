"""Reads a run's files as they grow, and keeps its picture up to date. Never asks a worker or the supervisor.

What cannot be read is not shown: whether it is sound, the verdict says.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.heartbeat import read_heartbeat
from chaosrun.records.layout import LEGS, LegLayout, RunLayout, checkpoint_step
from chaosrun.records.markers import read_marker
from chaosrun.records.run_file import recorded_leg
from chaosrun.records.tail import Tail
from chaosrun.report.facts import read_facts, read_object
from chaosrun.report.picture import LegPicture, RunPicture

POLL_BYTES = 4 << 20
"""Of traces, at a time: who joins a long run late catches up while it draws."""
GLIMPSE_BYTES = 1 << 16
"""Of the end of a trace, where its steps before need not be known."""
Told = tuple[str, dict[str, Any]]
"""A leg's name and a record of its journal. A `fault.requested` may come twice: of the marker, and then of the journal."""


class RunFollower:
    """`poll` brings `picture` up to date with the files and returns what there is to tell."""

    def __init__(self, run: RunLayout, *, legs: tuple[str, ...] = LEGS, whole: bool = True) -> None:
        """`whole=False`: look at the end of each trace only. No losses then, and checkpoints are what lies on the disk."""
        self.run = run
        self.picture = RunPicture(run_id=run.run_id)
        self._whole = whole
        self._files = _RunFiles(run)
        self._legs = {name: _LegFollower(name, run.leg(name), whole=whole) for name in legs}

    def poll_events(self) -> list[Told]:
        """What the journals and markers say that is new: all that lines need."""
        told: list[Told] = []
        self._files.read_into(self.picture)
        for name, leg in self._legs.items():
            was_there = leg.exists
            records = leg.poll_journal()
            if records and not was_there:
                # Before a reference is copied, run.json says so.
                self._files.read_into(self.picture)
                if name == LEGS[0] and (source := self.picture.facts.reference_source):
                    records = [{"event": "reference.cached", "source": source}]
            told += [(name, record) for record in records]
            if leg.exists:
                self.picture.legs[name] = leg.picture
                told += [(name, record) for record in leg.poll_markers()]
            else:
                self.picture.legs.pop(name, None)
        for _, record in told:
            if record.get("event") == "supervisor.resumed" and isinstance(record.get("time_s"), float):
                self.picture.began_s = record["time_s"]
        return told

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

    def _look_for_checkpoints(self) -> None:
        for name, leg in self.picture.legs.items():
            try:
                found = os.listdir(recorded_leg(self.run, read_object(self.run.run_json) or {}, name).checkpoints)
            except (OSError, UsageError):
                continue
            bad = {step: False for step, sound in leg.checkpoints.items() if not sound}
            leg.checkpoints = {**bad, **{step: True for entry in found if (step := checkpoint_step(entry)) is not None}}


class _RunFiles:
    """run.json and plan.json: read again when they were written anew."""

    def __init__(self, run: RunLayout) -> None:
        self._run = run
        self._seen: tuple[int, ...] = ()

    def read_into(self, picture: RunPicture) -> None:
        seen = (_written(self._run.run_json), _written(self._run.plan_json))
        if seen == self._seen:
            return
        self._seen = seen
        # Damaged, or of another version: who asks for more than a picture is told.
        with suppress(UsageError, OSError):
            picture.facts = read_facts(self._run)
        with suppress(UsageError, OSError):
            self._take_info(picture, read_object(self._run.run_json) or {})
        with suppress(UsageError, OSError):
            plan = read_object(self._run.plan_json)
            picture.faults = () if plan is None else FaultPlan.from_json(plan).faults

    def _take_info(self, picture: RunPicture, info: dict[str, Any]) -> None:
        created_s = info.get("created_s")
        if picture.created_s is None and isinstance(created_s, int | float):
            picture.created_s = picture.began_s = created_s
        spec = info.get("spec")
        checkpoint = spec.get("checkpoint") if isinstance(spec, dict) else None
        every = checkpoint.get("every_steps") if isinstance(checkpoint, dict) else None
        picture.every_steps = every if isinstance(every, int) and every > 0 else None


class _LegFollower:
    def __init__(self, name: str, layout: LegLayout, *, whole: bool) -> None:
        self.picture = LegPicture(name)
        self._name = name
        self._layout = layout
        self._whole = whole
        self._is_copy = False
        """Put in the place of another leg, as a whole: that it ran, has been told already."""
        self._begin()

    def _begin(self) -> None:
        self._journal = Tail(self._layout.journal)
        self._traces: dict[tuple[int, int], Tail] = {}
        self._marked: set[str] = set()
        self._attempts: list[int] = []
        self.is_behind = False

    @property
    def exists(self) -> bool:
        return bool(self.picture.progress.last)

    def poll_journal(self) -> list[dict[str, Any]]:
        records = list(_objects(self._journal, None))
        if self._journal.restarts:
            # The leg was begun again: nothing of the former one holds.
            self.picture = LegPicture(self._name)
            self._begin()
            records = list(_objects(self._journal, None))
            self._is_copy = any(record.get("event") == "leg.finished" for record in records)
        records = [record for record in records if self.picture.take_record(record)]
        for record in records:
            if record.get("event") == "attempt.starting":
                self._add_attempt(record["attempt"])
        return [] if self._is_copy else records

    def _add_attempt(self, attempt: int) -> None:
        if attempt in self._attempts:
            return
        self._attempts.append(attempt)
        # Of a leg that was over before anybody looked, the end of each trace tells enough.
        for rank in range(self.picture.progress.workers or 0):
            self._traces[attempt, rank] = Tail(
                self._layout.attempt(attempt).trace(rank), last_bytes=None if self._whole else GLIMPSE_BYTES
            )

    def poll_traces(self, budget: int) -> int:
        """Attempt by attempt, so that a step done again counts as its last. Returns what is left of the budget."""
        self.is_behind = False
        for (attempt, rank), tail in list(self._traces.items()):
            while budget > 0 and (lines := _lines(tail, budget)):
                for line in lines:
                    budget -= len(line)
                    if (record := _object(line)) is not None:
                        self.picture.take_trace(attempt, rank, record)
            if budget <= 0:
                self.is_behind = True
                break
            if attempt != self.picture.progress.attempt or self.picture.is_over:
                del self._traces[attempt, rank]
        return budget

    def poll_markers(self) -> list[dict[str, Any]]:
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
        fired: list[dict[str, Any]] = []
        for fault in sorted(found - self._marked):
            marker = read_marker(self._layout, fault)
            if marker is not None:
                self._marked.add(fault)
                self.picture.take_marker(fault, marker)
                fired.append({**marker, "event": "fault.requested", "fault": fault, "requested_s": marker["time_s"]})
        return fired

    def poll_beats(self) -> None:
        if self.picture.is_over or not self.picture.progress.attempt:
            return
        attempt = self._layout.attempt(self.picture.progress.attempt)
        for rank, lane in self.picture.lanes.items():
            if not lane.ended:
                try:
                    self.picture.take_beat(rank, read_heartbeat(attempt.heartbeat(rank)))
                except OSError:
                    continue


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _lines(tail: Tail, limit: int | None) -> list[bytes]:
    try:
        return tail.lines() if limit is None else tail.lines(limit)
    except OSError:
        return []


def _objects(tail: Tail, limit: int | None) -> Iterator[dict[str, Any]]:
    while lines := _lines(tail, limit):
        for line in lines:
            record = _object(line)
            if record is not None:
                yield record


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
