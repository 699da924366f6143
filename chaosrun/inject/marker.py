"""The two durable files of a fault: the marker, written before it strikes, and the note, written by whoever saw what it did.

Exclusive creation of the marker is the lock, so no restart, supervisor death or second rank can fire the same fault id again
(hazard P10). The supervisor copies both into the journal, as `fault.requested` and `fault.observed`.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from chaosrun.records.journal import fsync_directory, write_durably
from chaosrun.records.layout import LegLayout

__all__ = ["start_ticks", "write_marker", "write_note"]


def write_marker(
    leg: LegLayout, fault: str, *, rank: int, attempt: int, pid: int, phase: str | None, step: int | None, **more: Any
) -> bool:
    """Claim a fault, durably. False when it has been claimed before: a fault id strikes once."""
    record = {
        "v": 1,
        "fault": fault,
        "rank": rank,
        "attempt": attempt,
        "pid": pid,
        "start_ticks": start_ticks(pid),
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


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot: with its pid it names the process for good. None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(line[line.rindex(b")") + 2 :].split()[19])
