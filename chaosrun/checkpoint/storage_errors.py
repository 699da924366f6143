"""Errors of the checkpoint directory that the user can fix, with a hint for each: disk full, read-only, not writable, a file in
the way. Every other error passes unchanged."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chaosrun.errors import ResourcesError

FULL_BELOW_BYTES = 1 << 20
FULL_BELOW_INODES = 64

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


def refusal(folder: Path) -> OSError | None:
    """The kernel's error for a write to `folder` where its file system is read-only, or has almost no space, or almost no
    inodes, left; None where it takes writes."""
    status = os.statvfs(folder)
    if status.f_flag & os.ST_RDONLY:
        return OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
    if status.f_bavail * status.f_frsize < FULL_BELOW_BYTES or _lacks_inodes(status):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    return None


def _lacks_inodes(status: os.statvfs_result) -> bool:
    """Whether files are what a file system has no room for: the kernel calls that "no space", too. Those that count none
    (btrfs, CephFS) say 0 files, or -1 that are free."""
    return status.f_files > 0 and 0 <= status.f_favail < FULL_BELOW_INODES


def before_again(error: OSError, otherwise: Path) -> str:
    """What to do after a failed write before it is tried again."""
    if error.errno == errno.EROFS:
        return "make it writable again (dmesg says why a disk has become read-only)"
    if error.errno == errno.EIO:
        return "have the disk looked at (dmesg says what it answered)"
    with suppress(OSError):  # the place may be gone
        if _lacks_inodes(os.statvfs(Path(place_of(error, otherwise)).parent)):
            return "free some inodes there (`df -i`: remove files)"
    return "free some space there"


def place_of(error: OSError, otherwise: Path) -> str:
    """What could not be written; of a link the new name, not what it leads to."""
    named = error.filename2 or error.filename
    return str(otherwise) if named is None else os.fsdecode(named)


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
        where = place_of(error, place)
        raise ResourcesError(f"checkpoint storage failed at {where}: {error.strerror}", hint=_HINTS[error.errno]) from error
