"""Lock files: one process holds a run, sweep, suite, cache or root, by flock(2); the kernel frees it when the holder ends.

Lock files and logs are opened only as regular files: a directory that was copied from elsewhere may hold links or pipes.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chaosrun.errors import DISK_FAILS, DISK_FULL, ResourcesError, UsageError

TRIES = 5
"""Attempts to take a lock: a process that only checks it holds it for a moment."""


@contextmanager
def locked(path: Path, taken: str, *, hint: str | None = None) -> Iterator[int]:
    """Hold the lock for this process and all that inherit the descriptor. Raises UsageError, "`taken` by process N", while
    another process holds it, and if its directory was removed meanwhile."""
    descriptor = open_own_file(path, os.O_RDWR)
    try:
        for attempt in range(TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt + 1 == TRIES:
                    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                    raise UsageError(f"{taken} by process {holder if holder.isdecimal() else '?'}", hint=hint) from error
                time.sleep(0.02)
        if not _leads_to(path, descriptor):
            raise UsageError(f"{path.parent} no longer exists", hint="it was removed meanwhile")
        with suppress(OSError):  # a full disk: the lock holds without the name of its holder
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def awaited(path: Path) -> Iterator[None]:
    """Hold the lock; waits for it without a limit."""
    descriptor = open_own_file(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock. False if that is unknown: no file, or one that this user may not read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _leads_to(path: Path, descriptor: int) -> bool:
    """Whether the file has been neither renamed nor removed since it was opened."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def open_own_file(path: Path, flags: int) -> int:
    """A descriptor of the file `path`, which is made if missing; `flags` such as os.O_RDWR. Raises UsageError if it is no
    regular file or may not be written, ResourcesError if the disk is full."""
    try:
        # O_NONBLOCK: opening a pipe must not block before it is recognised.
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in DISK_FAILS:
            hint = "free some space" if error.errno in DISK_FULL else "have the disk looked at (dmesg says what it answered)"
            raise ResourcesError(f"{path} cannot be written: {error.strerror}", hint=hint) from error
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_file(path) from error
        if error.errno == errno.ENOENT:
            raise UsageError(f"{path.parent} no longer exists", hint="it was removed meanwhile") from error
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="check its permissions, or use a root of your own"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path)
    return descriptor


def _no_file(path: Path) -> UsageError:
    return UsageError(f"{path} is a link or no regular file, and is not written to", hint="remove it if the folder is yours")
