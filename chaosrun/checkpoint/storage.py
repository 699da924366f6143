"""A storage that is a directory. Which of its failures are the user's to mend (disk full, read-only, not writable, a file in
the way; everything else passes through unchanged), and how it is kept writing."""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chaosrun.errors import ResourcesError

FULL_BELOW_BYTES = 1 << 20
WRITE_BACK_EVERY_S = 0.02
_SYNC_FILE_RANGE_WRITE = 2

_FULL = "free some space there, or put checkpoints elsewhere with checkpoint.storage"
_NOT_WRITABLE = "make the directory writable for this user, or point checkpoint.storage to one that is"
_IN_THE_WAY = "checkpoints need a directory there: move the file away, or change checkpoint.storage"
_DEVICE = "the storage itself is failing: see the kernel log of the node (dmesg)"

_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the file size limit (ulimit -f) or use another file system",
    errno.EROFS: _NOT_WRITABLE,
    errno.EACCES: _NOT_WRITABLE,
    errno.EPERM: _NOT_WRITABLE,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
    errno.ELOOP: _IN_THE_WAY,
    errno.ENAMETOOLONG: "shorten the path of the run or of checkpoint.storage",
    errno.EIO: _DEVICE,
    errno.ESTALE: _DEVICE,
    errno.EXDEV: "checkpoints, staging and quarantine must lie on one file system: do not mount or link them elsewhere",
}


def is_full(folder: Path) -> bool:
    """Nothing worth writing fits any more into the file system of `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize < FULL_BELOW_BYTES


def hint_of(number: int | None) -> str | None:
    """What the user can do about an error of the storage; None where nothing is known."""
    return _HINTS.get(number or 0)


@contextmanager
def storage_errors(place: Path) -> Iterator[None]:
    """Turn an OSError that the user can mend into a ResourcesError naming the path (`place` when the error has none)."""
    try:
        yield
    except OSError as error:
        if error.errno not in _HINTS:
            raise
        where = place if error.filename is None else os.fsdecode(error.filename)
        raise ResourcesError(f"checkpoint storage failed at {where}: {error.strerror}", hint=_HINTS[error.errno]) from error


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
