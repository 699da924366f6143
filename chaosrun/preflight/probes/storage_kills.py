"""A writer that saves as chaosrun does and is killed at random, again and again, while a reader looks.

What the reader may see: of a file that is replaced, always one whole version, never an older one than before; of checkpoints,
whole ones. What must be there after a kill: all that the writer had been told was done. A SIGKILL leaves the kernel's cache as
it is: this shows the order in which processes see changes, not what a power cut would leave.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from msgspec import Struct

from chaosrun.preflight.probes.forked import Failed, Say, forked
from chaosrun.records.codec import convert
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.layout import checkpoint_name, checkpoint_step

KEPT = 2
SIZES = (5_000, 60_000, 250_000)
"""Bytes of the files: of one page and of many."""
FEWEST_KILLS = 3
FIRST_SAVES = 2
"""That the first writer is given before it is killed."""
LATER_S = 0.02
"""What a layer below loses with its writer may go a moment later."""
LOOK_S = 0.0002
"""Between two looks: a reader that never rests would take the writer's processor."""
LONGEST_RUN = "J" + "o-b_." * 12 + "nam" + "-20991231-235959-99"
"""As long a name as a run has, of all the characters that there can be in one."""
MANIFEST, MEMBER = "MANIFEST.json", "pytorch_model_fsdp_0/__0_0.distcp"
_HEAD = 16


class Saves(Struct, frozen=True, kw_only=True):
    kills: int
    saves: int
    wrong: list[str]
    """What was seen that must not be."""


def payload(number: int, size: int) -> bytes:
    """Bytes that say which they are and whether they are whole."""
    body = number.to_bytes(8, "little") + size.to_bytes(8, "little") + Random(number).randbytes(size)
    return body + hashlib.sha256(body).digest()


def number_in(data: bytes) -> int | None:
    """The number of a whole payload."""
    size = int.from_bytes(data[8:_HEAD], "little")
    whole = len(data) == _HEAD + size + 32 and hashlib.sha256(data[:-32]).digest() == data[-32:]
    return int.from_bytes(data[:8], "little") if whole else None


@dataclass(slots=True)
class _Reader:
    leg: Path
    promised: int = 0
    """The newest save that the writer told of."""
    seen: int = 0
    """The newest version that was read."""
    wrong: list[str] = field(default_factory=list)

    def look(self) -> None:
        """One look at both; nothing is torn and nothing goes back."""
        latest = self.leg / "latest"
        try:
            number = number_in(data := latest.read_bytes())
            if number is None:
                self._tell(latest, f"torn: {len(data)} bytes that are no whole version")
            elif number < self.seen:
                self._tell(latest, f"version {number} after version {self.seen}")
            self.seen = max(self.seen, number or 0)
        except FileNotFoundError:
            if self.seen:
                self._tell(latest, "is not there while it is replaced")
        for step in self.steps()[-1:]:
            self._look_at(step)

    def expect_promised(self) -> None:
        """All that the writer was told is done is there, and whole."""
        self.look()
        if self.seen < self.promised:
            self._tell(self.leg / "latest", f"version {self.promised} had been written, {self.seen or 'none'} is there")
        if max(self.steps(), default=0) < self.promised:
            self._tell(self.leg / "checkpoints", f"{checkpoint_name(self.promised)} had been committed and is not there")
        for step in self.steps():
            self._look_at(step)

    def steps(self) -> list[int]:
        names = os.listdir(self.leg / "checkpoints")
        return sorted(step for name in names if (step := checkpoint_step(name)) is not None)

    def _look_at(self, step: int) -> None:
        path = self.leg / "checkpoints" / checkpoint_name(step)
        why = _why_torn(path, step)
        # One that retention took meanwhile is no wonder.
        if why and path.exists() and (why := _why_torn(path, step)) and path.exists():
            self._tell(path, why)

    def _tell(self, path: Path, what: str) -> None:
        self.wrong.append(f"{path.relative_to(self.leg)}: {what}")


def _why_torn(path: Path, step: int) -> str:
    for name in (MANIFEST, MEMBER):
        try:
            data = (path / name).read_bytes()
        except FileNotFoundError:
            return f"torn: {name} is missing"
        if number_in(data) != step:
            return f"torn: {name} has {len(data)} bytes that are not what was written"
    return ""


def kill_writers(folder: Path, *, kills: int, budget_s: float, random: Random, goes_on: Callable[[], None]) -> Saves:
    """The writer tells when the storage answers. Raises the OSError that it ends with."""
    reader = _Reader(folder / LONGEST_RUN / "reference")
    disk = Filesystem()
    for name in ("staging", "checkpoints"):
        disk.make_directories_durably(reader.leg / name, above=2)
    end_s = time.monotonic() + budget_s
    first, saves, save_s, done = 1, 0, 0.0, 0
    while done < kills and (done < FEWEST_KILLS or time.monotonic() < end_s) and not reader.wrong:
        started_s = time.monotonic()
        child, reading = forked(lambda say, first=first: _save_for_ever(reader.leg, first, say, goes_on))
        try:
            os.set_blocking(reading, False)
            until_s = started_s + random.uniform(0, 3 * save_s) if save_s else None
            while until_s is None or time.monotonic() < until_s:
                reader.promised = _last_said(reading, reader.promised, alive=True)
                reader.look()
                time.sleep(LOOK_S)
                if until_s is None and reader.promised >= FIRST_SAVES:
                    save_s = (time.monotonic() - started_s) / reader.promised
                    until_s = time.monotonic() + random.uniform(0, save_s)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        # A save may have been done and told in the last moment.
        reader.promised = _last_said(reading, reader.promised)
        os.close(reading)
        reader.expect_promised()
        done += 1
        saves += max(0, reader.promised - first + 1)
        # A name of which the writer had not been told yet may be there already.
        first = max(reader.promised, reader.seen, *reader.steps()) + 1
    if not reader.wrong:
        time.sleep(LATER_S)
        reader.expect_promised()
    return Saves(kills=done, saves=saves, wrong=reader.wrong)


def _last_said(reading: int, before: int, *, alive: bool = False) -> int:
    """The number of the newest save that the writer told of. Raises the OSError that ended it."""
    try:
        said = os.read(reading, 1 << 16)
    except BlockingIOError:
        return before
    if not said:
        if alive:
            raise RuntimeError("the writer ended by itself")
        return before
    # Lines are shorter than what a pipe takes at once: none is cut off.
    last = convert(json.loads(said.splitlines()[-1]), int | Failed)
    if isinstance(last, Failed):
        raise last.again()
    return last


def _save_for_ever(leg: Path, first: int, say: Say, goes_on: Callable[[], None]) -> None:
    disk = Filesystem()
    disk.listeners.append(lambda _operation, moment: goes_on() if moment == "after" else None)
    try:
        for name in os.listdir(leg / "staging"):
            disk.remove(leg / "staging" / name)
        for number in count(first):
            _save(leg, disk, number)
            say(number)
    except OSError as error:
        say(Failed.of(error))


def _save(leg: Path, disk: Filesystem, number: int) -> None:
    """As a checkpoint is made (`checkpoint.store`), and as a file is replaced."""
    data = payload(number, SIZES[number % len(SIZES)])
    staging, checkpoints = leg / "staging", leg / "checkpoints"
    staged = staging / f"{checkpoint_name(number)}.attempt-1"
    member = staged / MEMBER
    disk.make_directories(member.parent)
    descriptor = disk.open(member)
    try:
        disk.write(member, descriptor, data)
        disk.sync(member, descriptor)
    finally:
        os.close(descriptor)
    for folder in (member.parent, staged):
        disk.sync_directory(folder)
    disk.write_durably(staged / MANIFEST, payload(number, 100))
    disk.rename(staged, checkpoints / checkpoint_name(number))
    disk.sync_directory(checkpoints)
    disk.sync_directory(staging)
    disk.write_durably(leg / "latest", data)
    for name in sorted(os.listdir(checkpoints))[:-KEPT]:
        disk.rename(checkpoints / name, staging / name)
        disk.sync_directory(checkpoints)
        disk.remove(staging / name)
