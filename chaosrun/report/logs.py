"""The output of workers and launchers: the logs that `chaosrun logs` shows, and their lines as they come, with any bytes."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.records.appended import Tail
from chaosrun.records.layout import LEGS, AttemptLayout, RunLayout
from chaosrun.records.naming import run_argument

LOG_NAME = re.compile(r"(launcher|rank)-([0-9]+)\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLog:
    leg: str
    attempt: int
    rank: int | None
    """None: the log of the command that started the ranks of a node, and of these until they began to train."""
    path: Path

    @property
    def origin(self) -> str:
        return f"{self.leg}/{self.attempt}/{self.path.stem if self.rank is None else self.rank}"

    @property
    def heading(self) -> str:
        who = f"rank {self.rank}" if self.rank is not None else self.path.stem.replace("-", " of node ")
        return f"{self.leg}, attempt {self.attempt}, {who}"


def select_logs(run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None) -> list[WorkerLog]:
    """The requested logs, else those of the last attempt of the newest leg. Raises UsageError, naming the existing ones."""
    name = leg or (run.main if run.leg(run.main).attempts() else "reference")
    attempts = run.leg(name).attempts()
    if not attempts:
        raise UsageError(f"run {run.run_id} has no logs of a {name} leg yet", hint=f"see `chaosrun status {run_argument(run)}`")
    number = attempts[-1] if attempt is None else attempt
    if number not in attempts:
        raise UsageError(f"the {name} leg has no attempt {number}", hint=f"it has {_listing(attempts)}")
    logs = _logs_of(run.leg(name).attempt(number), name, number)
    if not logs:
        raise UsageError(
            f"attempt {number} of the {name} leg has no logs yet", hint=f"see `chaosrun status {run_argument(run)}`"
        )
    chosen = [log for log in logs if rank in (None, log.rank)]
    if not chosen:
        ranks = _listing([log.rank for log in logs if log.rank is not None])
        hint = f"it has {ranks}" if ranks else "no rank has begun to train: leave --rank out to see what the command printed"
        raise UsageError(f"attempt {number} of the {name} leg has no rank {rank}", hint=hint)
    return chosen


def _logs_of(attempt: AttemptLayout, leg: str, number: int) -> list[WorkerLog]:
    """All logs, those of launchers first."""
    found = [match for path in attempt.path.glob("*.log") if (match := LOG_NAME.fullmatch(path.name))]
    found.sort(key=lambda match: (match[1], int(match[2])))
    return [
        WorkerLog(leg=leg, attempt=number, rank=int(match[2]) if match[1] == "rank" else None, path=attempt.path / match[0])
        for match in found
    ]


def read_log(log: WorkerLog) -> str:
    """Its text, with U+FFFD for bytes that are not UTF-8."""
    return log.path.read_text(encoding="utf-8", errors="replace")


def _listing(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    log: WorkerLog
    text: str


class LogFollower:
    """`poll` returns the new lines; `over` the remaining ones without a final newline."""

    def __init__(self, run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None, whole: bool = False) -> None:
        """From the last attempt of the newest leg on, or only the requested logs; `whole`: from the beginning."""
        self._run = run
        begun = [name for name in LEGS if run.leg(name).attempts()]
        if leg is None and attempt is not None:
            leg = begun[-1] if begun else LEGS[0]
        self._legs = LEGS if leg is None else (leg,)
        self._attempt, self._rank = attempt, rank
        self._logs: list[tuple[WorkerLog, Tail]] = []
        there = [(name, number) for name in self._legs for number in run.leg(name).attempts()]
        self._past = set() if whole or attempt is not None else set(there[:-1])

    @property
    def has_found(self) -> bool:
        return bool(self._logs)

    @property
    def is_complete(self) -> bool:
        """Whether the requested attempt is over, as a later one has begun."""
        if len(self._legs) > 1:
            return False
        (leg,) = self._legs
        if any(self._run.leg(name).attempts() for name in LEGS[LEGS.index(leg) + 1 :]):
            return True
        return self._attempt is not None and max(self._run.leg(leg).attempts(), default=0) > self._attempt

    def poll(self) -> list[LogLine]:
        self._look_for_logs()
        found: list[LogLine] = []
        for log, tail in self._logs:
            with suppress(OSError):
                while lines := tail.lines():
                    found += (LogLine(log=log, text=_text(line)) for line in lines)
        return found

    def over(self) -> list[LogLine]:
        rests = ((log, tail.rest()) for log, tail in self._logs)
        return [LogLine(log=log, text=_text(rest)) for log, rest in rests if rest]

    def _look_for_logs(self) -> None:
        for leg in self._legs:
            for attempt in self._run.leg(leg).attempts():
                if (leg, attempt) in self._past or self._attempt not in (None, attempt):
                    continue
                for log in _logs_of(self._run.leg(leg).attempt(attempt), leg, attempt):
                    if self._rank in (None, log.rank) and log not in (known for known, _ in self._logs):
                        self._logs.append((log, Tail(log.path)))


def _text(line: bytes) -> str:
    return last_written(line.decode("utf-8", errors="replace"))


def last_written(line: str) -> str:
    """As a terminal would show it: only the last of a progress bar's overwritten states."""
    return line.rstrip("\r").rpartition("\r")[2]
