"""The journal of a leg: what the supervisor decided and saw, one durable JSON line each; one writer.

Every record has v, seq (1, 2, …), time_s (wall clock) and event. Events:

- leg.started         leg, workers, supervisor_pid
- supervisor.resumed  supervisor_pid                          (`chaosrun resume` took over)
- placement.acquired  nodes {node id: {address, ranks, gpus}}, ray, oversubscribed (bool)
- checkpoint.quarantined  name, step, reason, moved_to
- attempt.starting    attempt, resume (checkpoint name or null), resume_step (0 when null), armed [fault ids],
                      distributed_debug (with TORCH_DISTRIBUTED_DEBUG=DETAIL, after an error of DDP's reducer)
- attempt.started     attempt, pids {rank: pid}, address
- worker.exited       attempt, rank, pid, exit_code, signal, time_s of the death as its agent saw it (died_s)
- fault.requested     fault, attempt, rank, step, phase       (copied from the durable marker the worker wrote before firing)
- fault.observed      fault, attempt, rank, pid, how (plan.kinds.Evidence), exit_code, signal, died_s (of a death, else null),
                      found (of a note or hang: what was seen, else null)
- death.unplanned     attempt, rank, reason, step, error {type, message, traceback} or null
- attempt.stopped     attempt, reason, killed [ranks]         (every process of the attempt is gone)
- leg.finished        outcome, message, hint, final_step

`outcome` is one of OUTCOMES.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from chaosrun.records.trace import read_lines

__all__ = ["JOURNAL_VERSION", "OUTCOMES", "Journal", "Outcome", "fsync_directory", "write_durably"]

JOURNAL_VERSION = 1

Outcome = Literal["completed", "user_error", "recovery_failed", "inexact_restore", "resources", "timeout", "interrupted"]
OUTCOMES: tuple[str, ...] = get_args(Outcome)


class Journal:
    """Append-only and fsynced: a durable record that `append` returned from survives a power cut.

    Opening an existing journal cuts a torn last line off and goes on with the next `seq`.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._seq = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole = path.read_bytes()
            intact = whole[: whole.rfind(b"\n") + 1]
            if len(intact) != len(whole):
                os.truncate(path, len(intact))
            for record in read_lines(path):
                self._seq = int(record["seq"])
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fsync_directory(path.parent)

    def append(self, event: str, *, durable: bool = True, **fields: Any) -> dict[str, Any]:
        """Write one record. With `durable=False` it reaches the disk with the next durable one."""
        self._seq += 1
        record = {"v": JOURNAL_VERSION, "seq": self._seq, "time_s": self._clock(), "event": event, **fields}
        os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")
        if durable:
            os.fsync(self._file)
        return record

    def close(self) -> None:
        os.close(self._file)


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file so that a reader, or a power cut, sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
