"""Files that a rank read and that another leg, or an earlier attempt of the same leg, had left: when each leg trained, and the
files that its ranks recorded opening.

A file belongs to the leg that ran at its `st_ctime`. A file written before the first batch of the first attempt (a download, a
cache of the data) holds nothing of a training, so another leg may read it.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from chaosrun.records.codec import DamagedRecordError, Record, decoder_of, read_records, sound_records
from chaosrun.records.events import EVENTS
from chaosrun.records.layout import LegLayout
from chaosrun.records.trace_reader import read_start

RUNS_LOOKED_AT = 50
"""Number of newest runs of a root that are examined; files of older runs count as part of the job's environment."""


class TrainingTime(Record, frozen=True, kw_only=True):
    """When a leg trained, and how messages of another leg name it."""

    leg: str
    begun_s: float
    since_s: float
    """When it fetched its first batch."""
    until_s: float


class OpenedFile(Record, frozen=True, kw_only=True):
    """A file that a rank read although another leg, or an earlier attempt of its own leg, had left it."""

    path: str
    left_by: str
    """As messages name the leg; "": an earlier attempt of the same leg."""
    changed_s: float
    attempt: int
    rank: int
    before_training: bool = False
    """Whether it was written before the other leg's first batch."""


_OPENED = msgspec.json.Decoder(OpenedFile)


class _Script(msgspec.Struct):
    script: str


def training_time(leg: LegLayout, name: str) -> TrainingTime | None:
    """When a leg trained; None if it never fetched a batch."""
    for attempt in leg.attempts():
        begun = [start.time_s for path in leg.attempt(attempt).path.glob("rank-*.trace") if (start := read_start(path))]
        if begun:
            times = [*_event_times(leg), *begun]
            return TrainingTime(leg=name, begun_s=min(times), since_s=min(begun), until_s=max(times))
    return None


def earlier_legs(root: Path, run: Path, script: str, own: Path) -> list[TrainingTime]:
    """The other legs of `run`, and those of other runs of this script that trained since its reference was made."""
    legs = {leg.path.name: training_time(leg, f"{leg.path.name} leg") for leg in _legs(run) if leg.path != own}
    found = [time for time in legs.values() if time]
    reference = legs.get("reference")
    if reference is None:
        return found
    others = sorted((path for path in (root / "runs").glob("*/") if path != run), key=_age)[:RUNS_LOOKED_AT]
    for other in others:
        if _script_of(other / "run.json") == script:
            times = [training_time(leg, f"{leg.path.name} leg of run {other.name}") for leg in _legs(other)]
            found += [time for time in times if time and time.until_s > reference.begun_s]
    return found


def opened_files(leg: LegLayout, problems: list[str]) -> tuple[OpenedFile, ...]:
    """Files of other legs that the ranks of a leg read, each once. Raises OSError."""
    return of_other_legs(opened_records(leg, problems))


def opened_records(leg: LegLayout, problems: list[str]) -> list[OpenedFile]:
    """All files that the ranks of a leg recorded. Raises OSError."""
    paths = sorted((leg.path / "attempts").glob("*/rank-*.opened.jsonl"))
    return [record for path in paths for _, record in sound_records(path, _OPENED, problems)]


def of_other_legs(records: Iterable[OpenedFile]) -> tuple[OpenedFile, ...]:
    """Files that other legs left, each once."""
    found = [record for record in records if record.left_by]
    return tuple({record.path: record for record in reversed(found)}.values())[::-1]


def of_a_training(opened: Iterable[OpenedFile]) -> tuple[OpenedFile, ...]:
    """The files that may hold results of another leg's training."""
    return tuple(record for record in opened if not record.before_training)


def _legs(run: Path) -> Iterable[LegLayout]:
    return [LegLayout(journal.parent) for pattern in ("*", "diagnosis/*") for journal in run.glob(f"{pattern}/journal.jsonl")]


def _age(run: Path) -> float:
    try:
        return -run.stat().st_mtime
    except FileNotFoundError:  # removed meanwhile
        return 0.0


def _script_of(run_json: Path) -> str | None:
    try:
        return decoder_of(_Script).decode(run_json.read_bytes()).script
    except (OSError, ValueError):
        return None


def _event_times(leg: LegLayout) -> Iterator[float]:
    """Times of the leg's events, as far as they are known."""
    with suppress(OSError, DamagedRecordError):
        yield from (event.time_s for event in read_records(leg.journal, EVENTS))
