"""End records of ranks, and two durable files of each fault: the marker, written before it strikes, and the note of its effect.

Exclusive creation of the marker is the lock: no fault id strikes twice (hazard P10). The supervisor copies both into the
journal, as `fault.requested` and `fault.observed`.
"""

import os
import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from chaosrun.processes import start_ticks
from chaosrun.records.codec import DamagedRecordError, Record, decode, decoder_of, encode
from chaosrun.records.events import RaisedError
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import AttemptLayout, LegLayout

_Note = TypeVar("_Note", bound="Note")
_R = TypeVar("_R")


class Marker(Record, frozen=True, kw_only=True):
    rank: int
    attempt: int
    pid: int
    start_ticks: int | None = None
    """With the pid, it identifies the process uniquely; None if the process was gone."""
    phase: str | None = None
    step: int | None = None
    time_s: float
    group: str | None = None
    notice: bool = False
    """Whether the fault only notifies the rank to leave."""


class Note(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The effect of a fault; each kind has its own fields."""

    final: bool = True
    """False: a later note will replace it. It is not copied to the journal until it is final, or the leg ends."""
    problem: str | None = None
    """Why the fault did not strike, or had no effect."""
    problem_code: str = "said"
    """The problem as a code, `fault_not_shown.CODE` in `verify.codes`; "said": the table has no row for it."""


class WorkerEnd(Record, frozen=True, kw_only=True, omit_defaults=False):
    """How a rank ended, recorded by itself: an exit code alone proves nothing (hazard P8)."""

    status: str
    """returned, raised, exited, preempted; settled, differed."""
    exit_code: int
    completed: bool = False
    pid: int = 0
    step: int = 0
    time_s: float = 0.0
    error: RaisedError | None = None
    told: int | None = None
    """For status preempted: the rank that got the notice. The rank itself if it got one, else the first that did."""
    handled: str | None = None
    """The signal of the notice, if the script handled it itself."""
    began_with: str | None = None
    """A checkpoint in the job's directory that the script read, perhaps of an earlier run."""
    results: tuple[str, ...] = ()
    """Absolute paths of files that it wrote when its training was complete."""
    saves: Mapping[str, tuple[tuple[int, float], ...]] = msgspec.field(default_factory=dict)
    """By absolute path, files that an attached script wrote during the training: after which steps, and when."""
    own_sigterm: bool = False
    """Whether the script's own SIGTERM handler had replaced chaosrun's, which makes a rank leave on notice."""


_MARKER = msgspec.json.Decoder(Marker)
_END = msgspec.json.Decoder(WorkerEnd)


def write_marker(leg: LegLayout, fault: str, *, pid: int, ticks: int | None = None, **claim: object) -> Marker | None:
    """Claim a fault, durably; None: it was claimed before. `ticks`: start time of the process, needed if on another machine."""
    marker = Marker(pid=pid, start_ticks=ticks or start_ticks(pid), time_s=time.time(), **claim)  # type: ignore[arg-type]
    leg.faults.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(leg.faults / f"{fault}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return None
    try:
        os.write(descriptor, encode(marker))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    Filesystem().sync_directory(leg.faults)
    return marker


def write_note(leg: LegLayout, fault: str, note: Note) -> None:
    """Write a note, durably; a later note of the same fault replaces it."""
    write_durably(leg.notes / f"{fault}.json", encode(note))


def read_marker(leg: LegLayout, fault: str) -> Marker | None:
    """The marker of a fault; None if there is none, it is incomplete, or the file is no marker."""
    return _read(leg.faults / f"{fault}.json", _MARKER)


def read_markers(leg: LegLayout) -> dict[str, Marker | None]:
    """Markers of the faults that have fired, by id. None for one that a crash cut off: the id is spent, the effect unknown."""
    try:
        names = os.listdir(leg.faults)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {name: read_marker(leg, name) for name in sorted(each[:-5] for each in names if each.endswith(".json"))}


def withdraw_marker(leg: LegLayout, fault: str) -> None:
    """Let a fault fire again; the marker stays under another name."""
    marker = leg.faults / f"{fault}.json"
    number = 1
    while (withdrawn := leg.faults / f"{fault}.json.unseen-{number}").exists():
        number += 1
    marker.rename(withdrawn)


def read_note(leg: LegLayout, fault: str, of: type[_Note]) -> _Note | None:
    """The note of a fault; None if there is none, or the file is no note `of` the fault's kind."""
    return _read(leg.notes / f"{fault}.json", decoder_of(of))


def read_end(attempt: AttemptLayout, rank: int) -> WorkerEnd | None:
    """A rank's end record; None if it left none (killed, os._exit) or it cannot be read."""
    return _read(attempt.end(rank), _END)


def _read(path: "os.PathLike[str]", decoder: msgspec.json.Decoder[_R]) -> _R | None:
    try:
        with open(path, "rb") as file:
            return decode(file.read(), decoder)
    except (FileNotFoundError, DamagedRecordError):
        return None
