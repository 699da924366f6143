"""The two durable files of a fault: the marker, written before it strikes, and the note, written by whoever saw what it did.

Written by the rank that a fault strikes, or by the supervisor and the agents when it comes from outside. Exclusive creation of
the marker is the lock, so no restart, supervisor death or second rank can fire the same fault id again (hazard P10). The
supervisor copies both into the journal, as `fault.requested` and `fault.observed`.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaosrun.records.journal import fsync_directory, write_durably
from chaosrun.records.layout import LegLayout
from chaosrun.records.run_file import read_json

_NUMBER = (int, float)
_MARKER = {
    "attempt": int,
    "rank": int,
    "pid": int,
    "phase": (str, type(None)),
    "step": (int, type(None)),
    "time_s": _NUMBER,
}
_NOTE = {"final": bool}
"""What whoever reads them relies on."""


def write_marker(
    leg: LegLayout, fault: str, *, rank: int, attempt: int, pid: int, phase: str | None, step: int | None, **more: Any
) -> bool:
    """Claim a fault, durably. False when it has been claimed before: a fault id strikes once.

    `more` may give the `start_ticks` of a process on another machine.
    """
    record = {
        "v": 1,
        "fault": fault,
        "rank": rank,
        "attempt": attempt,
        "pid": pid,
        "start_ticks": more.pop("start_ticks", None) or start_ticks(pid),
        "phase": phase,
        "step": step,
        "time_s": time.time(),
        **more,
    }
    leg.faults.mkdir(parents=True, exist_ok=True)
    path = leg.faults / f"{fault}.json"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, json.dumps(record).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_directory(leg.faults)
    return True


def write_note(leg: LegLayout, fault: str, **found: Any) -> None:
    """What a fault did, as JSON values, durably; a later note of the same fault replaces it.

    Of a fault whose evidence is a note, the supervisor takes it into the journal as soon as it looks. For a note that is not
    final yet, give `final=False`: it is left where it is until it is, or until the leg ends.
    """
    path: Path = leg.notes / f"{fault}.json"
    record = {"v": 1, "fault": fault, "time_s": time.time(), "final": True, **found}
    write_durably(path, json.dumps(record).encode())


def read_marker(leg: LegLayout, fault: str) -> dict[str, Any] | None:
    """None when there is none, or not all of it yet, or what lies there is none."""
    return _read(leg.faults / f"{fault}.json", _MARKER)


def read_note(leg: LegLayout, fault: str) -> dict[str, Any] | None:
    return _read(leg.notes / f"{fault}.json", _NOTE)


def _read(path: Path, keys: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any] | None:
    try:
        value = read_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    whole = isinstance(value, dict) and all(key in value and isinstance(value[key], kind) for key, kind in keys.items())
    return value if whole else None


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot: with its pid it names the process for good. None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(line[line.rindex(b")") + 2 :].split()[19])
