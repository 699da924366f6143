"""Writing a trace: one writer per file; each record reaches the kernel before anything else happens."""

import os
import threading
from pathlib import Path

from chaosrun.records.filesystem import Filesystem, write_all
from chaosrun.records.layout import LegLayout
from chaosrun.records.trace_blocks import Names, Scribe, framed, packed_footer, packed_record, summed
from chaosrun.records.traces import BLOCK_STEPS, CheckpointRecord, EndRecord, Line, SaveRecord, StepRecord


class TraceWriter:
    """Appends records to one trace; each reaches the kernel before `write` returns (a SIGKILL loses nothing)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._names: Names = {}
        self._at, self._running = 0, b""
        self._one = threading.RLock()
        """A lock, because threads of the script that save write here, too."""
        self._ended = False
        self._begin()

    def empty(self) -> None:
        """Remove the records that another writer of this process has written."""
        os.ftruncate(self._file, 0)

    def _begin(self) -> None:
        self._scribe, self._others, self._region = Scribe(), list[int](), bytearray()

    def write(self, record: Line) -> None:
        with self._one:
            # A thread of the script may still save after the training has ended.
            if not (self._ended and isinstance(record, SaveRecord)):
                self._write(record)

    def _write(self, record: Line) -> None:
        if isinstance(record, StepRecord):
            if self._scribe.first and record.step != self._scribe.last + 1:
                self._end_block()
            self._append(self._scribe.packed(record))
            if record.step % BLOCK_STEPS == 0:
                self._end_block()
        else:
            self._ended = isinstance(record, EndRecord)
            if self._ended and self._scribe.first:
                self._end_block()
            self._others.append(len(self._region))
            self._append(packed_record(record, self._names))
            if isinstance(record, CheckpointRecord) and self._scribe.first:
                self._end_block()

    def _append(self, content: bytes) -> None:
        frame = framed(content)
        self._region += frame
        write_all(self._file, frame)

    def _end_block(self) -> None:
        block = summed(self._scribe.block(self._at, len(self._region), self._others), self._running, self._region)
        frame = framed(packed_footer(block))
        self._running = block.running
        write_all(self._file, frame)
        self._at += block.size + len(frame)
        self._begin()

    def close(self) -> None:
        os.close(self._file)


def sync_traces(leg: LegLayout, ranks: int) -> None:
    """Have the traces of all attempts survive a power cut, before the journal says that the leg was trained to its end. Raises
    OSError."""
    disk = Filesystem()
    traces = (leg.attempt(number).trace(rank) for number in leg.attempts() for rank in range(ranks))
    for trace in filter(Path.exists, traces):
        with trace.open("rb") as file:
            disk.sync(trace, file.fileno())
