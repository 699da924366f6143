"""A node's storage: does it give the guarantees that chaosrun relies on, and how fast is it? Works only in its own folder.

Prints each phase on stderr, so that the parent knows where a storage hangs.
"""

import errno
import json
import mmap
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from msgspec import Struct, structs

from chaosrun.checkpoint.audit import audit_directory
from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.checkpoint.storage_errors import storage_errors
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.cluster.probe_guard import new_name
from chaosrun.errors import ChaosrunError, InvalidCheckpointError, ResourcesError
from chaosrun.preflight.probes.forked import Say, forked
from chaosrun.preflight.probes.storage_place import Mount, StorageFailure, mount_of, nearest_folder, own_folder, remove_stale
from chaosrun.records.codec import convert
from chaosrun.records.filesystem import Filesystem, write_all
from chaosrun.records.layout import LegLayout, checkpoint_name, checkpoint_step
from chaosrun.records.manifest import Manifest, ManifestPosition
from chaosrun.records.object_urls import ObjectPlace

BLOCK = 1 << 20
GROWTH = 4
ROUNDS = 3
"""Of one size: the best counts, since one fsync may have to wait for what others wrote."""
SHARE_OF_FREE = 0.05
KEPT = 2
SIZES = (5_000, 60_000, 250_000)
"""Bytes of the files: of one page and of many."""
FEWEST_KILLS = 3
MOST_SAVES = 2
"""Saves that a writer completes at most before it is killed in the next one."""
LATER_S = 0.02
"""A layer below may lose the dead writer's data a moment later."""
LOOK_S = 0.0002
"""Between two looks: a reader that never rests would take the writer's processor."""
LONGEST_RUN = "J" + "o-b_." * 12 + "nam" + "-20991231-235959-99"
"""The longest name that a run can have, with every kind of character that a name may hold."""
MEMBER = "pytorch_model_fsdp_0/__0_0.distcp"


class KilledSaves(Struct, frozen=True, kw_only=True):
    kills: int
    saves: int
    wrong: list[str]
    """The violation that was seen."""


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
    failed: StorageFailure | None = None


class StorageFacts(Struct, frozen=True, kw_only=True):
    """The findings, in the order of the tests; None: the test was not reached."""

    mount: Mount | None = None
    saves: KilledSaves | None = None
    speed: Speed | None = None
    failed: StorageFailure | None = None
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
        return structs.replace(facts, failed=StorageFailure.of(error))
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
        return ObjectFacts(failed=StorageFailure.of(error))
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


# A writer that saves checkpoints in chaosrun's own store and is repeatedly killed at random, while a reader checks them. The
# reader must see only complete checkpoints. After a kill, every save whose commit the writer had reported must exist. A SIGKILL
# does not affect the kernel's cache: this shows the order in which processes see changes, not the effect of a power cut.


@dataclass(slots=True)
class _Reader:
    leg: LegLayout
    promised: int = 0
    """The newest save that the writer reported."""
    wrong: list[str] = field(default_factory=list)

    def look(self) -> None:
        """At the newest."""
        for step in self.steps()[-1:]:
            self._look_at(step)

    def expect_promised(self) -> None:
        """Check that every save reported as committed exists and is complete."""
        steps = self.steps()
        if max(steps, default=0) < self.promised:
            self.wrong.append(f"checkpoints: {checkpoint_name(self.promised)} had been committed and is not there")
        for step in steps:
            self._look_at(step)

    def steps(self) -> list[int]:
        names = os.listdir(self.leg.checkpoints)
        return sorted(step for name in names if (step := checkpoint_step(name)) is not None)

    def _look_at(self, step: int) -> None:
        path = self.leg.checkpoints / checkpoint_name(step)
        why = _why_torn(path, step)
        # Retention may have removed it in the meantime.
        if why and path.exists() and (why := _why_torn(path, step)) and path.exists():
            self.wrong.append(f"torn: {why}")


def _why_torn(path: Path, step: int) -> str:
    try:
        audit_directory(path, step)
    except (InvalidCheckpointError, FileNotFoundError) as error:
        return str(error)
    return ""


def kill_writers(folder: Path, *, kills: int, budget_s: float, random: Random) -> KilledSaves:
    """Raises OSError, and the ResourcesError that ended the writer."""
    reader = _Reader(LegLayout(folder / LONGEST_RUN / "reference"))
    disk = Filesystem()
    for path in (reader.leg.staging, reader.leg.checkpoints):
        disk.make_directories_durably(path, above=2)
    end_s = time.monotonic() + budget_s
    first, saves, done = 1, 0, 0
    while done < kills and (done < FEWEST_KILLS or time.monotonic() < end_s) and not reader.wrong:
        started_s = time.monotonic()
        child, reading = forked(lambda say, first=first: _save_for_ever(reader.leg, first, say))
        try:
            os.set_blocking(reading, False)
            given = random.randint(1, MOST_SAVES)
            while reader.promised < first + given - 1:
                reader.promised = _last_said(reading, reader.promised, alive=True)
                reader.look()
                time.sleep(LOOK_S)
            # At a random moment of the next save.
            time.sleep(random.uniform(0, (time.monotonic() - started_s) / given))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        # A save may have been completed and reported at the last moment.
        reader.promised = _last_said(reading, reader.promised)
        os.close(reading)
        reader.expect_promised()
        done += 1
        saves += max(0, reader.promised - first + 1)
        # A committed name may exist that was not yet returned to the writer.
        first = max(reader.promised, *reader.steps()) + 1
    if not reader.wrong:
        time.sleep(LATER_S)
        reader.expect_promised()
    return KilledSaves(kills=done, saves=saves, wrong=reader.wrong)


def _last_said(reading: int, before: int, *, alive: bool = False) -> int:
    """The number of the newest save that the writer reported. Raises the ResourcesError that ended it."""
    try:
        said = os.read(reading, 1 << 16)
    except BlockingIOError:
        return before
    if not said:
        if alive:
            raise RuntimeError("the writer ended by itself")
        return before
    # Lines are shorter than a pipe's atomic write, so none is cut off.
    last = convert(json.loads(said.splitlines()[-1]), int | StorageFailure)
    if isinstance(last, StorageFailure):
        raise ResourcesError(last.error, hint=last.remedy)
    return last


def _save_for_ever(leg: LegLayout, first: int, say: Say) -> None:
    disk = Filesystem()
    store = CheckpointStore(leg, KEPT, disk)
    try:
        with storage_errors(leg.path):
            store.clear_staging()
            for number in count(first):
                _save(store, disk, number)
                say(number)
    except ResourcesError as error:
        say(StorageFailure.of(error))


def _save(store: CheckpointStore, disk: Filesystem, number: int) -> None:
    staged = store.stage(number, attempt=1)
    member = staged / MEMBER
    disk.make_directories(member.parent)
    descriptor = disk.open(member)
    try:
        disk.write(member, descriptor, Random(number).randbytes(SIZES[number % len(SIZES)]))
    finally:
        os.close(descriptor)
    whole = Manifest(
        step=number,
        position=ManifestPosition(epoch=0, batches=0, step=number),
        world_size=1,
        attempt=1,
        time_s=0.0,
        job_fingerprint="",
        files=store.seal(staged, [MEMBER]),
        digests={},
    )
    store.write_manifest(staged, whole)
    store.commit(staged, number)
    store.retain()
