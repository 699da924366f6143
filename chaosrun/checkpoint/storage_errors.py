"""Errors of the checkpoint directory that the user can fix, with a hint for each: disk full, read-only, not writable, a file in
the way. Every other error passes unchanged."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaosrun.errors import ResourcesError

FULL_BELOW_BYTES = 1 << 20

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
    """Whether the file system of `folder` has almost no space left."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize < FULL_BELOW_BYTES


def hint_of(number: int | None) -> str | None:
    """What the user can do about an error of the storage; None if unknown."""
    return _HINTS.get(number or 0)


@contextmanager
def storage_errors(place: Path) -> Iterator[None]:
    """Turn an OSError that the user can fix into a ResourcesError naming the path (`place` when the error has none)."""
    try:
        yield
    except OSError as error:
        if error.errno not in _HINTS:
            raise
        where = place if error.filename is None else os.fsdecode(error.filename)
        raise ResourcesError(f"checkpoint storage failed at {where}: {error.strerror}", hint=_HINTS[error.errno]) from error
