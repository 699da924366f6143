"""A writer that saves checkpoints in chaosrun's own store and is repeatedly killed at random, while a reader checks them.

The reader must see only complete checkpoints. After a kill, every save whose commit the writer had reported must exist. A
SIGKILL does not affect the kernel's cache: this shows the order in which processes see changes, not the effect of a power cut.
"""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from msgspec import Struct

from chaosrun.checkpoint.audit import audit_directory
from chaosrun.checkpoint.storage_errors import storage_errors
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import InvalidCheckpointError, ResourcesError
from chaosrun.preflight.probes.forked import Say, forked
from chaosrun.preflight.probes.storage_place import Failed
from chaosrun.records.codec import convert
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.layout import LegLayout, checkpoint_name, checkpoint_step
from chaosrun.records.manifest import Manifest, Position

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


class Saves(Struct, frozen=True, kw_only=True):
    kills: int
    saves: int
    wrong: list[str]
    """The violation that was seen."""


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


def kill_writers(folder: Path, *, kills: int, budget_s: float, random: Random) -> Saves:
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
    return Saves(kills=done, saves=saves, wrong=reader.wrong)


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
    last = convert(json.loads(said.splitlines()[-1]), int | Failed)
    if isinstance(last, Failed):
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
        say(Failed.of(error))


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
        position=Position(epoch=0, batches=0, step=number),
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
