"""Faults that stop one process's progress but leave it alive: stopped, paused, slowed down, hanging."""

import ctypes
import json
import os
import signal
import statistics
import subprocess
import time
from functools import partial

from chaosrun.faults import delayed_signal
from chaosrun.faults.kind import AT_STEPS, CHECKPOINT_PHASES, TRAINING_PHASES, Kind
from chaosrun.faults.observed import Disproof, Observation
from chaosrun.faults.outside import OutsideStrike
from chaosrun.faults.process import signal_later
from chaosrun.faults.strike import Strike
from chaosrun.records.codec import convert
from chaosrun.records.markers import Note
from chaosrun.wording import duration


class PauseNote(Note, frozen=True, kw_only=True):
    """States are letters of /proc/PID/stat: when it was seen stopped, before SIGCONT, and after it."""

    signal: str = "SIGSTOP"
    state_stopped: str | None = None
    state_before: str | None = None
    state_after: str | None = None
    stopped_s: float = 0.0


class SlowNote(Note, frozen=True, kw_only=True):
    steps: int = 0
    before_s: float | None = None
    during_s: float | None = None


def pause(strike: Strike) -> None:
    """Stop this process; another one checks that it is stopped, sends SIGCONT, checks that it runs, and reports."""
    with signal_later(strike, strike.option("duration_s"), "resume", stdout=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        if report := watcher.stdout.readline():  # the watcher is ready
            os.kill(strike.pid, signal.SIGSTOP)
            report = watcher.stdout.readline()
    died = PauseNote(problem="the process that watched the pause died")
    strike.note(convert(json.loads(report), PauseNote) if report else died)


def pause_from_outside(strike: OutsideStrike) -> None:
    strike.note(convert(delayed_signal.pause(strike.victim, strike.option("duration_s")), PauseNote))


def stop(strike: Strike) -> None:
    os.kill(strike.pid, signal.SIGSTOP)


def slow(strike: Strike) -> None:
    """Make each of the next `steps` steps take `factor` times as long as the steps so far."""
    if not strike.pace.took:
        strike.note(SlowNote(problem="no step was timed before it"))
        return
    strike.pace.stretches.append(Stretch(strike, statistics.median(strike.pace.took)))


class Stretch:
    """The slowed steps. The note is rewritten at every step, as the attempt may end before the last one."""

    def __init__(self, strike: Strike, before_s: float) -> None:
        self._strike = strike
        self._before_s = before_s
        self._factor: float = strike.option("factor")
        self._took: list[float] = []
        self.left: int = strike.option("steps")
        self._tell()

    def delay(self, own_s: float) -> None:
        time.sleep(max(0.0, self._factor * max(own_s, self._before_s) - own_s))

    def took(self, took_s: float) -> None:
        self._took.append(took_s)
        self.left -= 1
        self._tell()

    def _tell(self) -> None:
        done = len(self._took)
        during_s = statistics.median(self._took) if self._took else None
        problem = f"only {done} of {done + self.left} steps were stretched" if self.left else None
        if during_s is not None and during_s < self._factor * self._before_s:
            problem = f"steps took {during_s:.3g} s, not {self._factor:g} times the {self._before_s:.3g} s before it"
        rounded = None if during_s is None else round(during_s, 6)
        before_s = round(self._before_s, 6)
        self._strike.note(SlowNote(final=not self.left, steps=done, before_s=before_s, during_s=rounded, problem=problem))


def hang(strike: Strike) -> None:
    """Wait forever, in C and with the GIL held, for a mutex that this thread itself holds."""
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL during a call
    mutex = ctypes.create_string_buffer(256)  # zeroed, like PTHREAD_MUTEX_INITIALIZER on Linux
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _stopped(seen: Observation) -> Disproof | None:
    assert seen.hang is not None
    told = f"its process was in state {seen.hang.state}, a process that SIGSTOP stopped is in state T"
    return None if seen.hang.state == "T" else Disproof("other_state", told)


def _paused(seen: Observation) -> Disproof | None:
    note: PauseNote = seen.note
    stopped, before, after = note.state_stopped, note.state_before, note.state_after
    if (stopped, before) != ("T", "T") or after in ("T", "Z", None):
        told = f"the process was seen in the states {stopped}, {before} and {after}, not stopped and then running"
        return Disproof("no_pause", told)
    wanted_s = seen.fault.option("duration_s")
    told = f"the process was stopped for {note.stopped_s} s, not for {wanted_s:g} s"
    return Disproof("short_pause", told) if note.stopped_s < wanted_s else None


def _slowed(seen: Observation) -> Disproof | None:
    note: SlowNote = seen.note
    wanted, factor = seen.fault.option("steps"), seen.fault.option("factor")
    if note.steps != wanted:
        return Disproof("other_steps", f"{note.steps} steps were stretched, not {wanted}")
    # Both were rounded when recorded.
    if not note.before_s or not note.during_s or note.during_s < factor * note.before_s - 1e-4:
        told = f"steps took {note.during_s} s, not {factor:g} times the {note.before_s} s before it"
        return Disproof("not_slower", told)
    return None


def _describe_slow(seen: Observation) -> str:
    took, before = (duration(seconds or 0.0) for seconds in (seen.note.during_s, seen.note.before_s))
    return f"{seen.process}: {seen.note.steps} steps at {took}, {before} before"


_of_one = partial(Kind, family="process")

KINDS = (
    _of_one(
        name="stop",
        words="SIGSTOP {rank}",
        proof="its process was seen stopped (state T) when the hang was declared",
        inside=stop,
        outside=lambda strike: strike.signal(signal.SIGSTOP),
        evidence="hang",
        shows=_stopped,
        tell=lambda seen: f"{seen.process}: stopped {seen.standstill}",
    ),
    _of_one(
        name="pause",
        words="SIGSTOP {rank}, SIGCONT after {duration_s:g} s",
        proof="its process was seen stopped (state T), and running again after SIGCONT",
        options={"duration_s": 1.0},
        inside=pause,
        outside=lambda strike: strike.later(partial(pause_from_outside, strike)),
        evidence="note",
        note=PauseNote,
        shows=_paused,
        tell=lambda seen: f"{seen.process}: stopped for {seen.note.stopped_s:g} s (state T), then running",
    ),
    _of_one(
        name="slow",
        words="{rank} takes {factor:g} times as long for {steps} steps",
        proof="its steps were timed before and during",
        phases=AT_STEPS,
        options={"factor": 3.0, "steps": 10},
        inside=slow,
        evidence="note",
        note=SlowNote,
        shows=_slowed,
        tell=_describe_slow,
    ),
    _of_one(
        name="hang",
        words="{rank} hangs, holding Python's global lock",
        proof="the hang was declared and this rank named as the first to stop",
        phases=TRAINING_PHASES | CHECKPOINT_PHASES,
        inside=hang,
        evidence="hang",
        tell=lambda seen: f"{seen.process}: alive {seen.standstill}",
    ),
)
