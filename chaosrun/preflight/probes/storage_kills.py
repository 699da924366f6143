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

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.forked import Say, forked
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
TOLD = 5
_HEAD = 16


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
class _Place:
    folder: Path

    @property
    def latest(self) -> Path:
        return self.folder / "latest"

    @property
    def staging(self) -> Path:
        return self.folder / "staging"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@dataclass(slots=True)
class _Reader:
    place: _Place
    promised: int = 0
    seen: int = 0
    """The newest version that was read."""
    wrong: list[str] = field(default_factory=list)

    def look(self) -> None:
        """One look at both; nothing is torn and nothing goes back."""
        self._look_at_latest()
        if newest := max(self.steps(), default=0):
            self._look_at_checkpoint(newest)

    def expect_promised(self) -> None:
        """All that the writer was told is done is there, and whole."""
        self.look()
        if self.seen < self.promised:
            self._tell(self.place.latest, f"version {self.promised} had been written, {self.seen or 'none'} is there")
        steps = self.steps()
        if max(steps, default=0) < self.promised:
            self._tell(self.place.checkpoints, f"{checkpoint_name(self.promised)} had been committed and is not there")
        for step in steps:
            self._look_at_checkpoint(step)

    def _look_at_latest(self) -> None:
        try:
            number = number_in(data := self.place.latest.read_bytes())
        except FileNotFoundError:
            if self.seen:
                self._tell(self.place.latest, "is not there while it is replaced")
            return
        if number is None:
            self._tell(self.place.latest, f"torn: {len(data)} bytes that are no whole version")
        elif number < self.seen:
            self._tell(self.place.latest, f"version {number} after version {self.seen}")
        else:
            self.seen = number

    def _look_at_checkpoint(self, step: int) -> None:
        path = self.place.checkpoints / checkpoint_name(step)
        why = _why_torn(path, step)
        # One that retention took meanwhile is no wonder.
        if why and path.exists() and (why := _why_torn(path, step)) and path.exists():
            self._tell(path, why)

    def steps(self) -> list[int]:
        return [step for name in os.listdir(self.place.checkpoints) if (step := checkpoint_step(name)) is not None]

    def _tell(self, path: Path, what: str) -> None:
        self.wrong.append(f"{path.relative_to(self.place.folder)}: {what}")


def _why_torn(path: Path, step: int) -> str | None:
    try:
        manifest = json.loads((path / "MANIFEST.json").read_bytes() or b"null")
        data = (path / "model.bin").read_bytes()
    except FileNotFoundError as error:
        return f"torn: {os.path.basename(error.filename)} is missing"
    except ValueError:
        return "torn: its manifest is cut off"
    if manifest is None:
        return "torn: its manifest is empty"
    if number_in(data) != step or hashlib.sha256(data).hexdigest() != manifest:
        return f"torn: model.bin has {len(data)} bytes that are not what was written"
    return None


def kill_writers(folder: Path, *, kills: int, budget_s: float, random: Random, goes_on: Callable[[], None]) -> Facts:
    """{kills, saves, wrong: what was seen that must not be, wrong_count}. The writer tells when the storage answers."""
    place = _Place(folder)
    for path in (place.staging, place.checkpoints):
        os.mkdir(path)
    reader = _Reader(place)
    end_s = time.monotonic() + budget_s
    first, saves, save_s, done = 1, 0, 0.0, 0
    while done < kills and (done < FEWEST_KILLS or time.monotonic() < end_s) and not reader.wrong:
        started_s = time.monotonic()
        child, reading = forked(lambda say, first=first: _save_for_ever(place, first, say, goes_on))
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
    return {
        "kills": done,
        "saves": saves,
        "wrong": reader.wrong[:TOLD],
        "wrong_count": len(reader.wrong),
    }


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
    last = json.loads(said.splitlines()[-1])
    if isinstance(last, dict):
        raise OSError(last["errno"], last["error"], last["path"])
    return last


def _save_for_ever(place: _Place, first: int, say: Say, goes_on: Callable[[], None]) -> None:
    disk = Filesystem()
    disk.listeners.append(lambda _operation, moment: goes_on() if moment == "after" else None)
    try:
        for name in os.listdir(place.staging):
            disk.remove(place.staging / name)
        for number in count(first):
            _save(place, disk, number)
            say(number)
    except OSError as error:
        say({"errno": error.errno, "error": error.strerror, "path": os.fsdecode(error.filename or str(place.folder))})


def _save(place: _Place, disk: Filesystem, number: int) -> None:
    """As a checkpoint is made (`checkpoint.store`), and as a file is replaced."""
    data = payload(number, SIZES[number % len(SIZES)])
    staged = place.staging / f"{checkpoint_name(number)}.attempt-1"
    disk.mkdir(staged)
    descriptor = disk.open(staged / "model.bin")
    try:
        disk.write(staged / "model.bin", descriptor, data)
        disk.sync(staged / "model.bin", descriptor)
    finally:
        os.close(descriptor)
    disk.sync_directory(staged)
    disk.write_durably(staged / "MANIFEST.json", json.dumps(hashlib.sha256(data).hexdigest()).encode())
    disk.rename(staged, place.checkpoints / checkpoint_name(number))
    disk.sync_directory(place.checkpoints)
    disk.sync_directory(place.staging)
    disk.write_durably(place.latest, data)
    for name in sorted(os.listdir(place.checkpoints))[:-KEPT]:
        disk.rename(place.checkpoints / name, place.staging / name)
        disk.sync_directory(place.checkpoints)
        disk.remove(place.staging / name)
