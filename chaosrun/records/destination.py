"""Writing files that the user names: links are followed, devices and pipes are written to, and no directory is made."""

import errno
import os
from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.records.filesystem import Filesystem


def is_stream(path: Path) -> bool:
    """Whether it is, or links to, a device, pipe or socket: such a file is written into and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def expect_folder(path: Path) -> None:
    """Raises OSError if the parent directory of `path` is missing, so that a typing error in it shows at once."""
    if not path.parent.is_dir():
        code = errno.ENOTDIR if path.parent.exists() else errno.ENOENT
        raise OSError(code, "there is no such directory", str(path.parent))


def expect_writable(option: str, path: Path) -> None:
    """Raises UsageError, naming the option, if nothing could be written there. Leaves no file behind."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}", hint="make it, or name another file")
    if is_stream(path):
        return
    new = not path.exists()
    try:
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}", hint="name another file") from error


def write_to(path: Path, data: bytes) -> None:
    """Write the whole file, replacing an older one; if `path` is a link, its target is replaced. Raises OSError."""
    if is_stream(path):
        with open(os.open(path, os.O_WRONLY), "wb") as file:
            file.write(data)
        return
    try:
        target = path.resolve()
    except RuntimeError as error:  # links in a circle, before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    expect_folder(target)
    Filesystem().write_durably(target, data)
