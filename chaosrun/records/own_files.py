"""Opening a file that a run, sweep or suite keeps for itself: a regular file in its own directory, never what a link leads to.

A directory that was unpacked or copied from elsewhere may hold links, pipes or devices under these names.
"""

import errno
import os
import stat
from pathlib import Path

from chaosrun.errors import ResourcesError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def open_own_file(path: Path, flags: int) -> int:
    """A descriptor of `path`, which is made if it is not there; the directory is not. `flags`: how, such as os.O_RDWR.

    Raises UsageError for what is no file and for what this user may not write, ResourcesError when the disk is full.
    """
    try:
        # O_NONBLOCK: a pipe must not keep anybody waiting before it can be seen to be one.
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in _FULL:
            raise ResourcesError(f"{path} cannot be written: {error.strerror}", hint="free some space") from error
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_file(path) from error
        if error.errno == errno.ENOENT:
            raise UsageError(f"{path.parent} is not there any more", hint="it was removed meanwhile") from error
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="see to its permissions, or use a root of your own"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path)
    return descriptor


def _no_file(path: Path) -> UsageError:
    return UsageError(f"{path} is a link, or no file at all, and is not written to", hint="remove it, if you trust the rest")
