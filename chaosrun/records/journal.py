"""The journal of a leg: what the supervisor decided and saw, one durable JSON line each; one writer.

Every record has v, seq (1, 2, …), time_s (wall clock) and event. Events:

- leg.started         leg, workers, supervisor_pid, plan (digest of the plan, its injected faults left out)
- supervisor.resumed  supervisor_pid                          (`chaosrun resume` took over)
- placement.acquired  nodes {node id: {address, ranks, gpus}}, ray, oversubscribed (bool)
- staging.cleared     names                                   (what killed attempts left half-written, or half-deleted)
- checkpoint.quarantined  name, step, reason, moved_to
- attempt.starting    attempt, resume (checkpoint name or null), resume_step (0 when null), armed [fault ids],
                      distributed_debug (with TORCH_DISTRIBUTED_DEBUG=DETAIL, after an error of DDP's reducer)
- attempt.started     attempt, pids {rank: pid}, address
- worker.exited       attempt, rank, pid, exit_code, signal, time_s of the death as its agent saw it (died_s)
- fault.injected      fault, kind, rank, what, plan (digest)  (`chaosrun inject` has put it into plan.json; it is to strike now)
- fault.requested     fault, attempt, rank, step, phase       (copied from the durable marker the worker wrote before firing)
- fault.withdrawn     fault, reason                           (the request before it came to nothing; it may strike again)
- fault.observed      fault, attempt, rank, pid, how (faults.kind.Evidence), exit_code, signal, died_s (of a death, else null),
                      found (of a note or hang: what was seen, else null)
- hang.declared       attempt, first (the rank that stopped first), silent_s, patience_s, message, ranks [{rank, pid, step and
                      stage (records.heartbeat), silent_s, state (letter in /proc), wchan, stack}], before anything is killed
- death.unplanned     attempt, rank, code (EndCode or null), reason, step, error {type, message, traceback} or null
- attempt.stopped     attempt, reason, killed [ranks]         (every process of the attempt is gone)
- leg.finished        outcome, code (EndCode or null), message, hint, final_step

`outcome` is one of OUTCOMES.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from chaosrun.records.filesystem import Filesystem
from chaosrun.records.trace import TornRecordError, read_lines

JOURNAL_VERSION = 1

Outcome = Literal[
    "completed", "user_error", "recovery_failed", "inexact_restore", "fault_missed", "resources", "timeout", "interrupted"
]
OUTCOMES: tuple[str, ...] = get_args(Outcome)
EndCode = Literal[
    "failed_inside_chaosrun",
    "out_of_memory",
    "killed",
    "told_to_leave",
    "left_apart",
    "node_lost",
    "unkillable",
    "hung",
    "unsafe_checkpoint",
    "checkpoint_damaged",
    "registered_state_changed_on_load",
]
"""What is known of an end beside its outcome; what each means and whose fault it is says `verify.code_ends`."""
CONCLUSIVE: tuple[Outcome, ...] = ("completed", "inexact_restore")
"""How a leg ended that says whether the job came back; with any other outcome its drill is INCONCLUSIVE."""


class Journal:
    """Append-only and fsynced: a durable record that `append` returned from survives a power cut.

    Opening an existing journal cuts a torn tail off and goes on with the next `seq`.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, disk: Filesystem | None = None) -> None:
        """`disk`: the layer that all changes go through, for those who listen to it."""
        self._clock = clock
        self._disk = disk or Filesystem()
        self._path = path
        self._seq = 0
        self._size = 0
        self._disk.make_directories_durably(path.parent, above=1)
        if path.exists():
            whole = path.read_bytes()
            self._size = _sound_bytes(whole)
            if self._size != len(whole):
                self._disk.truncate(path, self._size)
            for record in read_lines(path):
                if not isinstance(record.get("seq"), int):
                    raise TornRecordError(f"{path}: a record after number {self._seq} has no number of its own")
                self._seq = record["seq"]
        self._file = self._disk.open(path)
        self._disk.sync_directory(path.parent)

    def append(self, event: str, *, durable: bool = True, **fields: Any) -> dict[str, Any]:
        """Write one record. With `durable=False` it reaches the disk with the next durable one."""
        record = {"v": JOURNAL_VERSION, "seq": self._seq + 1, "time_s": self._clock(), "event": event, **fields}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            self._disk.write(self._path, self._file, line)
        except BaseException:
            # A disk that fills up takes the beginning of a line, and the next record would go on in the middle of it.
            os.ftruncate(self._file, self._size)
            raise
        self._seq, self._size = self._seq + 1, self._size + len(line)
        if durable:
            self._disk.sync(self._path, self._file)
        return record

    def close(self) -> None:
        os.close(self._file)


def _sound_bytes(whole: bytes) -> int:
    """How much of a journal may be gone on from: whole lines, none of them after a hole. A power cut may leave zeros where a
    page that was never synced should be, with a later page behind it."""
    return whole.partition(b"\0")[0].rfind(b"\n") + 1


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file so that a reader, or a power cut, sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Filesystem().write_durably(path, data)


def fsync_directory(path: Path) -> None:
    Filesystem().sync_directory(path)
