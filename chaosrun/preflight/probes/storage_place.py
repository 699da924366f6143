"""Where a storage probe works: a fresh folder below the storage, or below the nearest folder that is there already; and what
kind of file system that is. Nothing but that folder is ever written to, and it is removed again."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from chaosrun.cluster.guard import PREFIX, announce

STALE_S = 3600.0
"""A folder of an earlier preflight that nothing has been made in for so long was left when its node went down."""
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


class Mount(Struct, frozen=True, kw_only=True):
    """The file system that a folder lies on."""

    base: str
    """The folder."""
    type: str = "unknown"
    source: str = ""
    options: str = ""
    free_bytes: int = 0
    preload: list[str] = []
    """Libraries in this process that make fsync do nothing."""


def nearest_folder(storage: Path) -> Path:
    """The storage or the folder above it that is there. Raises OSError for a file in the way, and what cannot be read."""
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
    """Remove folders that earlier preflights left. `own`, made just now, tells the storage's time."""
    now_s = own.stat().st_mtime
    stale: list[str] = []
    with os.scandir(base) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                old = entry.name.startswith(PREFIX) and now_s - entry.stat(follow_symlinks=False).st_mtime > STALE_S
                if old and entry.is_dir(follow_symlinks=False):
                    stale.append(entry.name)
    for name in stale:
        shutil.rmtree(base / name, ignore_errors=True)


def mount_of(base: Path) -> Mount:
    """The last mount of a place hides those below it."""
    status, path = os.statvfs(base), os.path.realpath(base)
    best, found = -1, ("unknown", "", "")
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.rstrip("\n").partition(" - ")
            fields, behind = before.split(" "), after.split(" ")
            point = _unescaped(fields[4])
            if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= best:
                options = ",".join(dict.fromkeys(f"{fields[5]},{behind[2] if len(behind) > 2 else ''}".split(",")))
                best, found = len(point), (behind[0], _unescaped(behind[1]), options)
    with open("/proc/self/maps") as file:
        preload = sorted({line.split(maxsplit=5)[-1].strip() for line in file if "eatmydata" in line})
    kind, source, options = found
    free = status.f_bavail * status.f_frsize
    return Mount(base=str(base), type=kind, source=source, options=options, free_bytes=free, preload=preload)


def _unescaped(text: str) -> str:
    for escape, character in _ESCAPES:
        text = text.replace(escape, character)
    return text
