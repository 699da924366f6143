"""Files on their way to the disk while more of them are being written."""

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
    """Have the kernel bring what is written into `folder` to the disk at once: it would wait for seconds, and whoever syncs the
    files for all of it. Promises nothing, and an error is left to the sync to tell."""
    ended = threading.Event()

    def begin() -> None:
        while not ended.wait(WRITE_BACK_EVERY_S):
            # Files come and go while they are written.
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
    """Have the kernel begin to bring a file's bytes to the disk; does not wait for it. Where it cannot, nothing happens.

    Source: sync_file_range(2). It leaves errors of the device to the next fsync, which a second fsync would take from it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None).sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
    finally:
        os.close(descriptor)
