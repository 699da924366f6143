"""A node's storage: does it give the guarantees that chaosrun relies on, and how fast is it? Works only in its own folder.

Prints each phase on stderr, so that the parent knows where a storage hangs.
"""

import errno
import mmap
import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

from msgspec import Struct, structs

from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.checkpoint.storage_errors import storage_errors
from chaosrun.cluster.probe_guard import new_name
from chaosrun.errors import ChaosrunError, ResourcesError
from chaosrun.preflight.probes.storage_kills import Saves, kill_writers
from chaosrun.preflight.probes.storage_place import Failed, Mount, mount_of, nearest_folder, own_folder, remove_stale
from chaosrun.records.filesystem import write_all
from chaosrun.records.object_urls import ObjectPlace

BLOCK = 1 << 20
GROWTH = 4
ROUNDS = 3
"""Of one size: the best counts, since one fsync may have to wait for what others wrote."""
SHARE_OF_FREE = 0.05


class Speed(Struct, frozen=True, kw_only=True):
    bytes: int
    write_s: float
    """Until they were synced."""
    fsync_s: float
    """The shortest fsync of as many."""
    read_bytes: int = 0
    """Bypassing the kernel's cache; none where the file system does not allow that."""
    read_s: float = 0.0
    changed: int = 0
    """Bytes of those blocks that differed from the written ones."""


class ObjectFacts(Struct, frozen=True, kw_only=True):
    took_s: float = 0.0
    """For all requests, the first of which connects."""
    late: bool = False
    """A listing did not show an uploaded object."""
    failed: Failed | None = None


class StorageFacts(Struct, frozen=True, kw_only=True):
    """The findings, in the order of the tests; None: the test was not reached."""

    mount: Mount | None = None
    saves: Saves | None = None
    speed: Speed | None = None
    failed: Failed | None = None
    """What ended it."""
    objects: ObjectFacts | None = None
    """Results of the job's object store, if it has one."""


def probe(*, storage: str, kills: int, kills_s: float, speed_s: float, speed_bytes: int, objects: str = "") -> StorageFacts:
    """The numbers set how much to test, and for how long. `objects`: a URL."""
    _at("the object store")
    facts = StorageFacts(objects=try_objects(objects) if objects else None)
    try:
        with storage_errors(Path(storage)), ExitStack() as stack:
            _at("looking for its mount")
            mount = mount_of(nearest_folder(Path(storage)))
            facts, base = structs.replace(facts, mount=mount), Path(mount.base)
            _at("saves")
            folder = stack.enter_context(own_folder(base / new_name()))
            remove_stale(base, folder)
            facts = structs.replace(facts, saves=kill_writers(folder, kills=kills, budget_s=kills_s, random=Random()))
            _at("its speed")
            facts = structs.replace(facts, speed=measure_speed(folder / "speed.bin", speed_s, speed_bytes))
            _at("removal")
    except ResourcesError as error:
        return structs.replace(facts, failed=Failed.of(error))
    return facts


def try_objects(url: str) -> ObjectFacts:
    """Put, conditional put, read, list, delete; leaves nothing. Uses the settings of this process's environment."""
    storage, began_s = ObjectStorage(ObjectPlace(url)), time.monotonic()
    key = f"{new_name()}/object"
    try:
        storage.try_out()
        storage.put_new(key, b"listed")
        try:
            late = key not in storage.listed(key.partition("/")[0])
        finally:
            storage.delete(key)
    except ChaosrunError as error:
        return ObjectFacts(failed=Failed.of(error))
    return ObjectFacts(took_s=time.monotonic() - began_s, late=late)


def _at(step: str) -> None:
    print(f"it was at: {step}", file=sys.stderr, flush=True)


Round = tuple[float, float]
"""Seconds until all is synced, and those of the fsync."""


def measure_speed(path: Path, budget_s: float, most_bytes: int) -> Speed:
    """Files grow until a round takes its share of the time, so that a slow disk is not kept busy for long."""
    blocks = [os.urandom(BLOCK) for _ in range(4)]
    status = os.statvfs(path.parent)
    most = min(most_bytes, int(status.f_bavail * status.f_frsize * SHARE_OF_FREE))
    size = BLOCK
    rounds = [_write(path, blocks, size)]
    while (grows := size * GROWTH <= most and ROUNDS * GROWTH * min(rounds)[0] <= budget_s) or len(rounds) < ROUNDS:
        if grows:
            size, rounds = size * GROWTH, []
        rounds.append(_write(path, blocks, size))
    read_bytes, read_s, changed = 0, 0.0, 0
    try:
        read_bytes, read_s, changed = _read(path, blocks, size, budget_s)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    write_s, fsync_s = min(rounds)[0], min(fsync_s for _, fsync_s in rounds)
    return Speed(bytes=size, write_s=write_s, fsync_s=fsync_s, read_bytes=read_bytes, read_s=read_s, changed=changed)


def _write(path: Path, blocks: list[bytes], size: int) -> Round:
    with suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        began = time.perf_counter()
        for number in range(size // BLOCK):
            write_all(descriptor, blocks[number % len(blocks)])
        written = time.perf_counter()
        os.fsync(descriptor)
        ended = time.perf_counter()
    finally:
        os.close(descriptor)
    return ended - began, ended - written


def _read(path: Path, blocks: list[bytes], size: int, budget_s: float) -> tuple[int, float, int]:
    """(bytes, seconds, bytes of the blocks that are not what was written)"""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    # Aligned, as direct I/O requires it.
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
            if taken_s > budget_s:
                break
    finally:
        os.close(descriptor)
        buffer.close()
    return done, taken_s, changed
