"""A suite's results over the nights: a file with one line for each drill and night, and how tonight compares with them. The
file may be copied, merged from several, or cut off: a line that cannot be read is reported, the others count.
"""

import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from chaosrun.campaign.files import SuitePlan, decode, encode
from chaosrun.campaign.results import DrillResult
from chaosrun.errors import UsageError
from chaosrun.records.destination import is_stream
from chaosrun.records.grouping import grouped

SHOWN_NIGHTS = 30
FLAKY_WITHIN = 10
"""A drill that failed, was as expected, and failed again within so many nights is flaky."""

Label = Literal["new", "still", "fixed", "flaky"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NightResult:
    """One drill in one night."""

    suite: str
    """Id of the suite's run; a night may have several."""
    night: str
    time_s: float
    drill: str
    ok: bool
    status: str | None
    expected: str
    cause: str | None
    run: str | None
    seed: int | None
    faults: int
    landed: int
    restarts: int
    recovery_s: float | None
    took_s: float
    rerun: str | None = None
    by_hand: bool = False
    """The run had only some drills, chosen by name, so it does not count as a night."""

    @classmethod
    def of(cls, result: DrillResult, plan: SuitePlan) -> "NightResult":
        same = ("ok", "status", "expected", "faults", "landed", "restarts", "recovery_s", "took_s", "rerun")
        return cls(
            suite=plan.suite_id,
            night=plan.night,
            time_s=round(plan.created_s, 3),
            seed=plan.seed,
            by_hand=plan.by_hand,
            drill=result.name,
            cause=result.cause if result.error is None else result.error,
            run=result.run.run_id if result.run else None,
            **{name: getattr(result, name) for name in same},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    entries: tuple[NightResult, ...] = ()
    """In the order of writing; for each drill and run of a suite only the last."""
    damaged: tuple[int, ...] = ()
    """Numbers of lines that could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One date, in UTC, and each drill's latest result on it."""

    suite: str
    """Id of the latest run of the suite."""
    night: str
    drills: Mapping[str, NightResult] = field(default_factory=dict)

    @property
    def passed(self) -> int:
        return sum(entry.ok for entry in self.drills.values())

    @property
    def odd(self) -> list[str]:
        return [entry.drill for entry in self.drills.values() if not entry.ok]

    @property
    def seed(self) -> int | None:
        return next((entry.seed for entry in self.drills.values()), None)

    @property
    def recoveries(self) -> list[float]:
        return sorted(entry.recovery_s for entry in self.drills.values() if entry.recovery_s is not None)


def read_history(path: Path) -> History:
    """A missing file is a history without nights. Raises UsageError for one that cannot be read at all."""
    if is_stream(path):
        raise UsageError(f"cannot read the history {path}: it is not a file", hint="name another file with --history")
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UsageError(
            f"cannot read the history {path}: {error.strerror}", hint="name another file with --history"
        ) from error
    entries: dict[tuple[str, str], NightResult] = {}
    damaged: list[int] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = decode(NightResult, line)
        except ValueError:
            damaged.append(number)
            continue
        entries[entry.suite, entry.drill] = entry
    return History(entries=tuple(entries.values()), damaged=tuple(damaged))


def expect_writable(path: Path) -> None:
    """Raises UsageError when the history cannot be read or written: now, not after hours of drills."""
    read_history(path)
    _write(path, b"")


def append(path: Path, entry: NightResult) -> None:
    """Append a line durably; if the last line was cut off, begin a new one. Raises UsageError when it cannot be written."""
    _write(path, encode(entry) + b"\n")


def _write(path: Path, line: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            if line and end:
                file.seek(end - 1)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        hint = "name a file that can be written with --history"
        raise UsageError(f"cannot write the history {path}: {error.strerror}", hint=hint) from error


def nights(entries: Iterable[NightResult], last: int = SHOWN_NIGHTS, *, by_hand: bool = False) -> list[Night]:
    """The newest `last` nights, oldest first; dates with only runs by hand count if `by_hand`, or if there are no others."""
    dates = grouped(sorted(entries, key=lambda entry: entry.time_s), lambda entry: entry.night)
    whole = {night: found for night, found in dates.items() if not all(entry.by_hand for entry in found)}
    shown = dates if by_hand or not whole else whole
    found: list[Night] = []
    for night in sorted(shown)[-last:]:
        latest = max(shown[night], key=lambda entry: (not entry.by_hand, entry.time_s))
        drills = {entry.drill: entry for entry in shown[night]}
        found.append(Night(suite=latest.suite, night=night, drills=drills))
    return found


def trend(drill: str, known: Sequence[Night]) -> list[NightResult]:
    """The drill's results, oldest night first; nights without it are left out."""
    return [night.drills[drill] for night in known if drill in night.drills]


def label(before: Sequence[bool], ok: bool) -> Label | None:
    """How tonight compares with the nights before (oldest first): new, still, fixed or flaky (fails now and then). None: as
    expected, now and before that."""
    recent = [*before, ok][-FLAKY_WITHIN:]
    falls = sum(well and not now for well, now in pairwise(recent)) + (not recent[0])
    if falls > 1:
        return "flaky"
    if not ok:
        return "still" if before and not before[-1] else "new"
    return "fixed" if before and not before[-1] else None
