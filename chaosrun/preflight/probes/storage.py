"""A node's storage: does it keep what chaosrun relies on, and how fast is it? Everything is done in a folder of its own."""

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

from msgspec import Struct

from chaosrun.cluster.guard import new_name
from chaosrun.preflight.probes.forked import Report, Watched, watched
from chaosrun.preflight.probes.storage_kills import Saves, kill_writers
from chaosrun.preflight.probes.storage_place import Mount, mount_of, nearest_folder, own_folder, remove_stale

BLOCK = 1 << 20
GROWTH = 4
ROUNDS = 3
"""Of one size: the best counts, since one fsync may have to wait for what others wrote."""
SHARE_OF_FREE = 0.05
_CACHESTAT = 451
"""The system call's number, on every architecture; Linux 6.5."""


class Speed(Struct, frozen=True, kw_only=True):
    bytes: int
    write_s: float
    """Until they were synced."""
    fsync_s: float
    """Of these."""
    dirty_before: int | None
    """Pages that the kernel had yet to write before the fsync; None: it does not tell."""
    dirty_after: int | None
    read_bytes: int = 0
    """Past the kernel's cache; none where the file system does not let one."""
    read_s: float = 0.0
    changed: int = 0
    """Bytes of those blocks that were not what had been written."""


class StorageFacts(Watched, frozen=True, kw_only=True):
    mount: Mount | None = None
    saves: Saves | None = None
    twice: int | None = None
    """How many names could be made exclusively though they were there."""
    speed: Speed | None = None


def probe(
    *, storage: str, kills: int, kills_s: float, names: int, speed_s: float, speed_bytes: int, patience_s: float, limit_s: float
) -> StorageFacts:
    """The numbers say how much is tried, and for how long."""

    def steps(report: Report) -> None:
        with ExitStack() as stack:
            if (mount := report("mount", lambda: mount_of(nearest_folder(Path(storage))))) is None:
                return
            base = Path(mount.base)
            folder = base / new_name()

            def save() -> Saves:
                stack.enter_context(own_folder(folder))
                remove_stale(base, folder)
                return kill_writers(folder, kills=kills, budget_s=kills_s, random=Random(), goes_on=report.goes_on)

            if report("saves", save) is not None:
                report("twice", lambda: create_twice(folder, names, report.goes_on))
                report("speed", lambda: measure_speed(folder / "speed.bin", speed_s, speed_bytes, report.goes_on))

    return watched(steps, StorageFacts, patience_s=patience_s, limit_s=limit_s)


def create_twice(folder: Path, names: int, goes_on: Callable[[], None]) -> int:
    twice = 0
    for path in (folder / f"name-{number}" for number in range(names)):
        if not created(path):
            raise FileExistsError(errno.EEXIST, "a new name is there already", str(path))
        twice += created(path)
        goes_on()
    return twice


def created(path: Path) -> bool:
    """Make a file; False when it is there already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    return True


# Speed

Round = tuple[float, float, int | None, int | None]
"""Seconds until all is synced, those of the fsync, dirty pages before it and after."""


def measure_speed(path: Path, budget_s: float, most_bytes: int, goes_on: Callable[[], None]) -> Speed:
    """Files grow until a round takes its share of the time, so that a slow disk is not kept busy for long."""
    blocks = [os.urandom(BLOCK) for _ in range(4)]
    status = os.statvfs(path.parent)
    most = min(most_bytes, int(status.f_bavail * status.f_frsize * SHARE_OF_FREE))
    size = BLOCK
    rounds = [_write(path, blocks, size, goes_on)]
    while (grows := size * GROWTH <= most and ROUNDS * GROWTH * min(rounds)[0] <= budget_s) or len(rounds) < ROUNDS:
        if grows:
            size, rounds = size * GROWTH, []
        rounds.append(_write(path, blocks, size, goes_on))
    read_bytes, read_s, changed = 0, 0.0, 0
    try:
        read_bytes, read_s, changed = _read(path, blocks, size, budget_s, goes_on)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    os.unlink(path)
    write_s, fsync_s, before, after = min(rounds)
    written = {"bytes": size, "write_s": write_s, "fsync_s": fsync_s, "dirty_before": before, "dirty_after": after}
    return Speed(**written, read_bytes=read_bytes, read_s=read_s, changed=changed)


def _write(path: Path, blocks: list[bytes], size: int, goes_on: Callable[[], None]) -> Round:
    with suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        began = time.perf_counter()
        for number in range(size // BLOCK):
            rest = memoryview(blocks[number % len(blocks)])
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            goes_on()
        writing_s = time.perf_counter() - began
        dirty_before = _dirty_pages(descriptor)
        began = time.perf_counter()
        os.fsync(descriptor)
        fsync_s = time.perf_counter() - began
        dirty_after = _dirty_pages(descriptor)
    finally:
        os.close(descriptor)
    return writing_s + fsync_s, fsync_s, dirty_before, dirty_after


def _dirty_pages(descriptor: int) -> int | None:
    """Pages of a file that the kernel has yet to write; None where it does not tell."""
    # cachestat(fd, {offset, length: 0 is to the end}, {cached, dirty, writeback, evicted, recently evicted}, flags)
    reach, cached = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if ctypes.CDLL(None, use_errno=True).syscall(_CACHESTAT, descriptor, reach, cached, 0) != 0:
        return None
    return cached[1] + cached[2]


def _read(path: Path, blocks: list[bytes], size: int, budget_s: float, goes_on: Callable[[], None]) -> tuple[int, float, int]:
    """(bytes, seconds, bytes of the blocks that are not what was written)"""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    # Aligned, as reading past the cache needs it.
    buffer = mmap.mmap(-1, BLOCK)
    changed = done = 0
    taken_s = 0.0
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for number in range(size // BLOCK):
            began = time.perf_counter()
            got = os.preadv(descriptor, [buffer], number * BLOCK)
            taken_s += time.perf_counter() - began
            done += got
            if got == 0 or buffer[:got] != blocks[number % len(blocks)][:got]:
                changed += BLOCK
            goes_on()
            if taken_s > budget_s:
                break
    finally:
        os.close(descriptor)
        buffer.close()
    return done, taken_s, changed
