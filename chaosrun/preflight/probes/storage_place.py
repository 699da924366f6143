"""Where a storage probe works: a fresh folder below the storage, or below the nearest existing folder; and the kind of its file
system. Only that folder is written to, and it is removed again."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from msgspec import Struct

from chaosrun.cluster.probe_guard import PREFIX, announce
from chaosrun.errors import ChaosrunError

STALE_S = 3600.0
"""A folder of an earlier preflight that nothing has been made in for so long was left when its node went down."""


class StorageFailure(Struct, frozen=True, kw_only=True):
    error: str
    remedy: str

    @classmethod
    def of(cls, error: ChaosrunError) -> "StorageFailure":
        return cls(error=error.message, remedy=error.hint or "see what the node's kernel log says of it (dmesg)")


class Mount(Struct, frozen=True, kw_only=True):
    """The file system of a folder."""

    base: str
    """The folder."""
    type: str = "unknown"
    source: str = ""
    options: str = ""
    free_bytes: int = 0


def nearest_folder(storage: Path) -> Path:
    """The storage or the nearest existing folder above it. Raises OSError for a file in the way or an unreadable folder."""
    for folder in (storage, *storage.parents):
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
            return folder
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(storage))


@contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    announce(folder)
    os.mkdir(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(base: Path, own: Path) -> None:
    """Remove folders that earlier preflights left. `own`, made just now, shows the storage's clock."""
    now_s = own.stat().st_mtime
    for path in base.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink() and now_s - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def mount_of(base: Path) -> Mount:
    path, status = Path(os.path.realpath(base)), os.statvfs(base)
    above = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    free_bytes = status.f_bavail * status.f_frsize
    if not above:
        return Mount(base=str(base), free_bytes=free_bytes)
    # The last mount at a path hides earlier ones.
    found = max(reversed(above), key=lambda mount: len(mount.mountpoint))
    return Mount(base=str(base), type=found.fstype, source=found.device, options=found.opts, free_bytes=free_bytes)
