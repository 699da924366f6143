"""The heartbeat of a rank: a small file, mapped into its memory, with its current stage and the time at which it reached it.

A beat is a few stores into memory without a system call, and can still be read when the rank is stopped or dead. 8-byte words,
little-endian:

    magic, version, then two slots {count, step, stage, beat_s, count again} that take turns, then per stage two durations
    {first, longest}: of the first time that this rank was at the stage, and the longest of the later ones; negative: not yet

A slot whose two counts differ is being written; then the other one is whole. `beat_s` is CLOCK_MONOTONIC.
"""

import mmap
import os
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a rank does between two beats."""

    words: str
    """The place of a rank that stopped at this stage, in words; {step} stands for the step."""
    waits: bool = False
    """Whether it waits for other ranks: then its silence says nothing about the rank itself."""
    own: bool = False
    """Whether the script's own code runs, for any time: a validation pass, or work after the training."""


STAGES: Mapping[str, Stage] = {
    # Once an attempt.
    "started": Stage(words="before it joined the rendezvous"),
    "script": Stage(words="in the script, before the process group"),
    "rendezvous": Stage(words="in the rendezvous", waits=True),
    "joined": Stage(words="in the script, before the training"),
    "restoring": Stage(words="in the restore of step {step}"),
    "restored": Stage(words="before the first batch"),
    "epoch": Stage(words="at the opening of an epoch's data, before step {step}"),
    # Once a step, in this order.
    "fetch": Stage(words="in the data loader, at step {step}"),
    "forward": Stage(words="in the forward pass of step {step}"),
    "backward": Stage(words="in the gradient all-reduce of step {step}", waits=True),
    "optimizer": Stage(words="in the optimizer's step {step}"),
    "record": Stage(words="in the record of step {step}"),
    "own": Stage(words="in the script, after step {step}", own=True),
    "after": Stage(words="after step {step}"),
    "checkpoint.write": Stage(words="in the checkpoint of step {step}, writing"),
    "checkpoint.gather": Stage(words="in the checkpoint of step {step}, waiting for the other ranks' hashes", waits=True),
    "checkpoint.manifest": Stage(words="in the checkpoint of step {step}, between write and commit"),
    "checkpoint.precommit": Stage(words="in the checkpoint of step {step}, waiting for the other ranks' files", waits=True),
    "checkpoint.commit": Stage(words="in the commit of the checkpoint of step {step}"),
    "checkpoint.postcommit": Stage(words="in the checkpoint of step {step}, waiting for its commit", waits=True),
    "checkpoint.retention": Stage(words="after the commit of the checkpoint of step {step}"),
    "over": Stage(words="after step {step}"),
    "ended": Stage(words="in the script, after the training", own=True),
    "leaving": Stage(words="as it left the process group", waits=True),
    "unrecorded": Stage(words="as it ended, its end not recorded"),
}
"""In the order in which a rank passes them: of ranks at the same step, the others wait for the one at the earliest stage."""
_NAMES = tuple(STAGES)
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}

_MAGIC = int.from_bytes(b"chaosrun", "little")
_VERSION = 1
_SLOTS = (2, 7)
_COUNT, _STEP, _STAGE, _BEAT, _COUNT_AGAIN = range(5)
_FIRST = 12
_LONGEST = _FIRST + len(STAGES)
_WORDS = _LONGEST + len(STAGES)
_NEVER = array("d", [-1.0] * (_WORDS - _FIRST))
_TRIES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A rank's newest beat, read."""

    count: int
    step: int
    """The step that the stage belongs to."""
    stage: str
    silent_s: float
    """Seconds from the beat to its reading."""
    first: Mapping[str, float]
    """By stage, seconds that the first visit in this attempt took; stages that the rank has not left yet are missing."""
    longest: Mapping[str, float]
    """By stage, seconds of the longest later visit."""

    @property
    def place(self) -> tuple[int, int]:
        """Step and stage; the smaller, the further behind the rank is."""
        return self.step, _NUMBERS[self.stage]

    @property
    def recorded(self) -> int:
        """The last step that the rank had recorded; 0 if unknown."""
        number = _NUMBERS[self.stage]
        return 0 if number < _NUMBERS["fetch"] else self.step - (number < _NUMBERS["own"])

    @property
    def facts(self) -> Stage:
        return STAGES[self.stage]

    @property
    def words(self) -> str:
        return self.facts.words.format(step=self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The state of a rank at one moment, as observed from outside."""

    beat: Heartbeat | None
    """None before the first beat."""
    cpu_s: float
    """Processor time used so far; 0 when its process is gone."""
    is_stopped: bool = False
    """Whether a signal has stopped it (state T)."""


class Heart:
    """The writing side, one for each rank. Beats before `open` are not kept in any file."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._number, self._beat_s = 0, clock()
        self._use(memoryview(bytearray(_WORDS * 8)))

    def open(self, path: Path) -> None:
        """Write beats into this new file from now on. Raises OSError if it cannot be made."""
        assert sys.byteorder == "little"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Written, not only extended: a store into a page for which the disk then has no space is a SIGBUS.
            os.write(descriptor, self._integers.tobytes())
            self._use(memoryview(mmap.mmap(descriptor, _WORDS * 8)))
        finally:
            os.close(descriptor)

    def _use(self, memory: memoryview) -> None:
        self._integers, self._durations = memory.cast("q"), memory.cast("d")
        self._integers[0], self._integers[1] = _MAGIC, _VERSION
        self._durations[_FIRST:_WORDS] = _NEVER

    def beat(self, stage: str, step: int) -> None:
        number, now_s = _NUMBERS[stage], self._clock()
        integers, durations = self._integers, self._durations
        self._count = count = self._count + 1
        slot = _SLOTS[count & 1]
        integers[slot] = count
        integers[slot + _STEP] = step
        integers[slot + _STAGE] = number
        durations[slot + _BEAT] = now_s
        integers[slot + _COUNT_AGAIN] = count
        took_s, left = now_s - self._beat_s, self._number
        self._number, self._beat_s = number, now_s
        if count == 1:
            return
        if durations[_FIRST + left] < 0:
            durations[_FIRST + left] = took_s
        elif took_s > durations[_LONGEST + left]:
            durations[_LONGEST + left] = took_s


def read_heartbeat(path: Path, clock: Callable[[], float] = time.monotonic) -> Heartbeat | None:
    """The newest whole beat; None if the file has none. Only on the rank's own machine, whose clock the beat has."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        for _ in range(_TRIES):
            copies = [os.pread(descriptor, _WORDS * 8, 0) for _ in range(3)]
            if min(map(len, copies)) < _WORDS * 8:
                return None
            words = copies[1]
            earlier, integers, later = (memoryview(copy).cast("q") for copy in copies)
            if (integers[0], integers[1]) != (_MAGIC, _VERSION):
                return None
            # A slot whose last count before the copy equals its first count after it was not written meanwhile.
            whole = [slot for slot in _SLOTS if earlier[slot + _COUNT_AGAIN] == integers[slot] == later[slot]]
            newest = max(whole, key=lambda slot: integers[slot], default=None)
            # If the other slot is more than one beat ahead, this one was overtaken while it was read.
            if newest is not None and integers[newest] >= max(integers[slot] for slot in _SLOTS) - 1:
                return _heartbeat(words, newest, clock())
    finally:
        os.close(descriptor)
    return None


def _heartbeat(words: bytes, slot: int, now_s: float) -> Heartbeat | None:
    integers, durations = memoryview(words).cast("q"), memoryview(words).cast("d")
    number = integers[slot + _STAGE]
    if integers[slot] <= 0 or not 0 <= number < len(_NAMES):
        return None

    def seen(start: int) -> dict[str, float]:
        return {name: durations[start + place] for place, name in enumerate(_NAMES) if durations[start + place] >= 0}

    return Heartbeat(
        count=integers[slot],
        step=integers[slot + _STEP],
        stage=_NAMES[number],
        silent_s=max(0.0, now_s - durations[slot + _BEAT]),
        first=seen(_FIRST),
        longest=seen(_LONGEST),
    )
