"""Following what workers print: lines as they come, across attempts and legs. Reads the logs, whatever bytes they hold."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaosrun.records.layout import LEGS, RunLayout
from chaosrun.report.logs import WorkerLog, ranks_of

READ_BYTES = 1 << 18
LONGEST_LINE_BYTES = 1 << 14
"""What is longer is shown in pieces: a program that never ends its line would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    log: WorkerLog
    text: str

    @property
    def origin(self) -> str:
        return f"{self.log.leg}/{self.log.attempt}/{self.log.rank}"


class LogFollower:
    """`poll` returns the lines that have come since; `over` what was left of the last ones, which no newline ended."""

    def __init__(self, run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None, whole: bool = False) -> None:
        """From the last attempt of the newest leg on, or only what is asked for; of an attempt without a leg, that of the
        newest. `whole`: from the beginning."""
        self._run = run
        begun = [name for name in LEGS if run.leg(name).attempts()]
        if leg is None and attempt is not None:
            leg = begun[-1] if begun else LEGS[0]
        self._legs = LEGS if leg is None else (leg,)
        self._attempt, self._rank = attempt, rank
        self._logs: dict[Path, _Growing] = {}
        there = [(name, number) for name in self._legs for number in run.leg(name).attempts()]
        self._past = set() if whole or attempt is not None else set(there[:-1])

    @property
    def has_found(self) -> bool:
        return bool(self._logs)

    @property
    def is_complete(self) -> bool:
        """What is asked for is over: something later has begun."""
        if len(self._legs) > 1:
            return False
        (leg,) = self._legs
        if any(self._run.leg(name).attempts() for name in LEGS[LEGS.index(leg) + 1 :]):
            return True
        return self._attempt is not None and max(self._run.leg(leg).attempts(), default=0) > self._attempt

    def poll(self) -> list[LogLine]:
        self._look_for_logs()
        return [LogLine(log=growing.log, text=text) for growing in self._logs.values() for text in growing.lines()]

    def over(self) -> list[LogLine]:
        return [LogLine(log=growing.log, text=text) for growing in self._logs.values() for text in growing.rest()]

    def _look_for_logs(self) -> None:
        for leg in self._legs:
            for attempt in self._run.leg(leg).attempts():
                if (leg, attempt) in self._past or self._attempt not in (None, attempt):
                    continue
                layout = self._run.leg(leg).attempt(attempt)
                for rank in ranks_of(layout):
                    path = layout.log(rank)
                    if self._rank in (None, rank) and path not in self._logs:
                        self._logs[path] = _Growing(WorkerLog(leg=leg, attempt=attempt, rank=rank, path=path))


@dataclass(slots=True)
class _Growing:
    log: WorkerLog
    _offset: int = 0
    _inode: int | None = None
    _begun: bytes = b""

    def lines(self) -> Iterator[str]:
        while block := self._read():
            *whole, self._begun = (self._begun + block).split(b"\n")
            for line in whole:
                yield from _pieces(line)
            while len(self._begun) > LONGEST_LINE_BYTES:
                yield _text(self._begun[:LONGEST_LINE_BYTES])
                self._begun = self._begun[LONGEST_LINE_BYTES:]

    def rest(self) -> Iterator[str]:
        begun, self._begun = self._begun, b""
        if begun:
            yield from _pieces(begun)

    def _read(self) -> bytes:
        try:
            with self.log.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._offset, self._inode, self._begun = 0, found.st_ino, b""
                block = os.pread(file.fileno(), READ_BYTES, self._offset)
        except OSError:
            return b""
        self._offset += len(block)
        return block


def _pieces(line: bytes) -> Iterator[str]:
    for start in range(0, max(1, len(line)), LONGEST_LINE_BYTES):
        yield _text(line[start : start + LONGEST_LINE_BYTES])


def _text(line: bytes) -> str:
    return last_written(line.decode("utf-8", errors="replace"))


def last_written(line: str) -> str:
    """As a terminal would leave it: of what a progress bar wrote over itself, the last."""
    return line.rstrip("\r").rpartition("\r")[2]
