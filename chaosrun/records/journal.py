"""The journal of a leg or a suite, with a single writer: one durable line per event, intent before the act, outcome after."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from chaosrun.records.codec import changed, encode, read_records
from chaosrun.records.events import Event
from chaosrun.records.filesystem import Filesystem

_Event = TypeVar("_Event", bound=Event)


class _Numbered(msgspec.Struct):
    seq: int


_NUMBERS = msgspec.json.Decoder(_Numbered)


class Journal:
    """An append-only, fsynced journal: events whose durable `append` has returned survive a power cut. Opening cuts off a torn
    tail."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, disk: Filesystem | None = None) -> None:
        """`disk`: the layer that all changes go through; it may have listeners."""
        self._clock = clock
        self._disk = disk or Filesystem()
        self._path = path
        self._seq = 0
        self._size = 0
        self._disk.make_directories_durably(path.parent, above=1)
        if path.exists():
            whole = path.read_bytes()
            # Whole lines before any hole: a power cut may leave zeros for a page that was not synced, before a later page.
            self._size = whole.partition(b"\0")[0].rfind(b"\n") + 1
            if self._size != len(whole):
                self._disk.truncate(path, self._size)
            for record in read_records(path, _NUMBERS):
                self._seq = record.seq
        self._file = self._disk.open(path)
        self._disk.sync_directory(path.parent)

    def append(self, event: _Event, *, durable: bool = True) -> _Event:
        """Write one event; return it with number and time. If not `durable`, it reaches the disk with the next durable one."""
        event = changed(event, seq=self._seq + 1, time_s=self._clock())
        line = encode(event) + b"\n"
        try:
            self._disk.write(self._path, self._file, line)
        except BaseException:
            # A full disk may take only the beginning of the line, and the next record would be appended to it.
            os.ftruncate(self._file, self._size)
            raise
        self._seq, self._size = self._seq + 1, self._size + len(line)
        if durable:
            self._disk.sync(self._path, self._file)
        return event

    def close(self) -> None:
        os.close(self._file)


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file so that a reader, or a power cut, sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Filesystem().write_durably(path, data)
