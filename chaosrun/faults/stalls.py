"""Faults of one process that keep it from its work and leave it there: stopped, paused, slowed down, hanging."""

import ctypes
import json
import os
import signal
import subprocess

from chaosrun.faults import delayed_signal
from chaosrun.faults.kind import AT_STEPS, CHECKPOINT_PHASES, TRAINING_PHASES, Kind
from chaosrun.faults.observed import Observation, Problem
from chaosrun.faults.outside import OutsideStrike
from chaosrun.faults.process import signal_later
from chaosrun.faults.strike import Strike


def stop(strike: Strike) -> None:
    os.kill(strike.pid, signal.SIGSTOP)


def pause(strike: Strike) -> None:
    """Stop; another process sees it stopped, tells it to go on, sees it running, and reports."""
    with signal_later(strike, strike.option("duration_s"), "resume", stdout=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        if report := watcher.stdout.readline():  # it is there, and watches
            os.kill(strike.pid, signal.SIGSTOP)
            report = watcher.stdout.readline()
    strike.note(**(json.loads(report) if report else {"problem": "the process that watched the pause died"}))


def pause_from_outside(strike: OutsideStrike) -> bool:
    return strike.later(lambda: strike.note(**delayed_signal.pause(strike.victim, strike.option("duration_s"))))


def slow(strike: Strike) -> None:
    strike.pace.stretch(strike, factor=strike.option("factor"), steps=strike.option("steps"))


def hang(strike: Strike) -> None:
    """Wait for ever, in C and without letting go of Python's global lock, for a mutex that this thread holds itself."""
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock during a call
    mutex = ctypes.create_string_buffer(256)  # zeroed: what PTHREAD_MUTEX_INITIALIZER is on Linux
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _stopped(seen: Observation) -> Problem | None:
    state = seen.found.get("state")
    told = f"its process was in state {state}, a process that SIGSTOP stopped is in state T"
    return None if state == "T" else Problem("other_state", told)


def _paused(seen: Observation) -> Problem | None:
    stopped, before, after = (seen.found.get(f"state_{when}") for when in ("stopped", "before", "after"))
    if (stopped, before) != ("T", "T") or after in ("T", "Z", None):
        told = f"the process was seen in the states {stopped}, {before} and {after}, not stopped and then running"
        return Problem("no_pause", told)
    stopped_s, duration_s = seen.found.get("stopped_s", 0.0), seen.fault.option("duration_s")
    told = f"the process was stopped for {stopped_s} s, not for {duration_s:g} s"
    return Problem("short_pause", told) if stopped_s < duration_s else None


def _slowed(seen: Observation) -> Problem | None:
    steps, before_s, during_s = (seen.found.get(key) for key in ("steps", "before_s", "during_s"))
    wanted, factor = seen.fault.option("steps"), seen.fault.option("factor")
    if steps != wanted:
        return Problem("other_steps", f"{steps} steps were stretched, not {wanted}")
    # Both were rounded when they were written down.
    if not before_s or not during_s or during_s < factor * before_s - 1e-4:
        return Problem("not_slower", f"steps took {during_s} s, not {factor:g} times the {before_s} s of before")
    return None


def _tell_pause(seen: Observation) -> str:
    return f"{seen.process}: stopped for {seen.found['stopped_s']:g} s (state {seen.found['state_before']}), then running"


def _tell_slow(seen: Observation) -> str:
    before_s, during_s = seen.found.get("before_s") or 0.0, seen.found.get("during_s") or 0.0
    return f"{seen.process}: {seen.found.get('steps')} steps at {_time(during_s)}, {_time(before_s)} before"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


KINDS = (
    Kind(
        name="stop",
        family="process",
        words="SIGSTOP {rank}",
        proof="its process was seen stopped (state T) when the hang was declared",
        inside=stop,
        outside=lambda strike: strike.signal(signal.SIGSTOP),
        evidence="hang",
        shows=_stopped,
        tell=lambda seen: f"{seen.process}: stopped (state {seen.found.get('state')}){seen.silence}",
    ),
    Kind(
        name="pause",
        family="process",
        words="SIGSTOP {rank}, SIGCONT after {duration_s:g} s",
        proof="its process was seen stopped (state T), and running again after SIGCONT",
        options={"duration_s": 1.0},
        inside=pause,
        outside=pause_from_outside,
        ends_attempt=False,
        evidence="note",
        shows=_paused,
        tell=_tell_pause,
    ),
    Kind(
        name="slow",
        family="process",
        words="{rank} takes {factor:g} times as long for {steps} steps",
        proof="its steps were timed before and during",
        phases=AT_STEPS,
        options={"factor": 3.0, "steps": 10},
        inside=slow,
        ends_attempt=False,
        evidence="note",
        shows=_slowed,
        tell=_tell_slow,
    ),
    Kind(
        name="hang",
        family="process",
        words="{rank} hangs, holding Python's global lock",
        proof="the hang was declared and this rank named as the first to stop",
        phases=TRAINING_PHASES | CHECKPOINT_PHASES,
        inside=hang,
        evidence="hang",
        tell=lambda seen: f"{seen.process}: alive (state {seen.found.get('state')}){seen.silence}",
    ),
)
