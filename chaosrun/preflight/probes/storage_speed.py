"""How fast the storage takes and gives back bytes, and what the kernel says of an fsync.

Files grow until a round takes its share of the time, so that a slow disk is not kept busy for long. What is read again is read
past the kernel's cache where the file system allows that.
"""

import ctypes
import errno
import mmap
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaosrun.preflight.model import Facts

BLOCK = 1 << 20
GROWTH = 4
ROUNDS = 3
"""Of one size: the best counts, since one fsync may have to wait for what others wrote."""
SMALL_WRITES = 8
SHARE_OF_FREE = 0.05
_CACHESTAT = 451
"""The system call's number, on every architecture; Linux 6.5."""


def measure_speed(folder: Path, *, budget_s: float, most_bytes: int, goes_on: Callable[[], None]) -> Facts:
    """{bytes, write_s (until they are synced), fsync_s of it, dirty_before and dirty_after the fsync (pages, None where the
    kernel does not tell), small_s (median of 4 KiB and an fsync), read_bytes, read_s, past_cache, changed (bytes of those)}."""
    path = folder / "speed.bin"
    blocks = [os.urandom(BLOCK) for _ in range(4)]
    status = os.statvfs(folder)
    most = min(most_bytes, int(status.f_bavail * status.f_frsize * SHARE_OF_FREE))
    small_s = _small_writes(folder / "small.bin", goes_on)
    size = BLOCK
    rounds = [_write(path, blocks, size, goes_on)]
    while True:
        best = min(rounds, key=lambda found: found["write_s"])
        if size * GROWTH <= most and ROUNDS * GROWTH * best["write_s"] <= budget_s:
            size *= GROWTH
            rounds = [_write(path, blocks, size, goes_on)]
        elif len(rounds) < ROUNDS:
            rounds.append(_write(path, blocks, size, goes_on))
        else:
            break
    read = _read(path, blocks, size, budget_s, goes_on)
    os.unlink(path)
    return {"bytes": size, "small_s": small_s, **best, **read}


def _small_writes(path: Path, goes_on: Callable[[], None]) -> float:
    taken: list[float] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(SMALL_WRITES):
            began = time.perf_counter()
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
            taken.append(time.perf_counter() - began)
            goes_on()
    finally:
        os.close(descriptor)
    return statistics.median(taken)


def _write(path: Path, blocks: list[bytes], size: int, goes_on: Callable[[], None]) -> dict[str, Any]:
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
        written = time.perf_counter()
        dirty_before = _dirty_pages(descriptor)
        began_fsync = time.perf_counter()
        os.fsync(descriptor)
        synced = time.perf_counter()
        dirty_after = _dirty_pages(descriptor)
    finally:
        os.close(descriptor)
    fsync_s = synced - began_fsync
    return {
        "write_s": written - began + fsync_s,
        "fsync_s": fsync_s,
        "dirty_before": dirty_before,
        "dirty_after": dirty_after,
    }


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cached(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


def _dirty_pages(descriptor: int) -> int | None:
    """Pages of a file that the kernel has yet to write; None where it does not tell."""
    cached = _Cached()
    libc = ctypes.CDLL(None, use_errno=True)
    # A length of 0 is to the file's end.
    if libc.syscall(_CACHESTAT, descriptor, ctypes.byref(_Range(0, 0)), ctypes.byref(cached), 0) != 0:
        return None
    return int(cached.dirty + cached.writeback)


def _read(path: Path, blocks: list[bytes], size: int, budget_s: float, goes_on: Callable[[], None]) -> Facts:
    try:
        return {**_read_with(os.O_DIRECT, path, blocks, size, budget_s, goes_on), "past_cache": True}
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return {**_read_with(0, path, blocks, size, budget_s, goes_on), "past_cache": False}


def _read_with(flag: int, path: Path, blocks: list[bytes], size: int, budget_s: float, goes_on: Callable[[], None]) -> Facts:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
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
    return {"read_s": taken_s, "read_bytes": done, "changed": changed}
