"""Starts writing files to the disk while more of them are being written."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITE_BACK_EVERY_S = 0.02
_SYNC_FILE_RANGE_WRITE = 2


@contextmanager
def written_back(folder: Path) -> Iterator[None]:
    """Make the kernel write files in `folder` to the disk at once. By default it waits for seconds, and a later sync would wait
    for all of it. Guarantees nothing, and leaves reporting errors to the sync."""
    ended = threading.Event()

    def begin() -> None:
        while not ended.wait(WRITE_BACK_EVERY_S):
            # Files appear and vanish meanwhile.
            with suppress(OSError):
                for name in os.listdir(folder):
                    with suppress(OSError):
                        begin_writing(folder / name)

    thread = threading.Thread(target=begin, name="chaosrun-write-back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def begin_writing(path: Path) -> None:
    """Make the kernel begin to write a file's bytes to the disk, without waiting. If it cannot, nothing happens.

    Source: sync_file_range(2). It leaves device errors to the next fsync; an fsync here would consume them.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None).sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
    finally:
        os.close(descriptor)
