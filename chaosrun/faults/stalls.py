"""Faults of one process that keep it from its work and leave it there: stopped, paused, slowed down, hanging."""

import ctypes
import json
import os
import signal
import subprocess

from chaosrun.faults import delayed_signal
from chaosrun.faults.kind import AT_STEPS, CHECKPOINT_PHASES, TRAINING_PHASES, Kind
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


KINDS = (
    Kind(
        name="stop",
        family="process",
        words="SIGSTOP {rank}",
        proof="its process was seen stopped (state T) when the hang was declared",
        inside=stop,
        outside=lambda strike: strike.signal(signal.SIGSTOP),
        evidence="hang",
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
    ),
    Kind(
        name="hang",
        family="process",
        words="{rank} hangs, holding Python's global lock",
        proof="the hang was declared and this rank named as the first to stop",
        phases=TRAINING_PHASES | CHECKPOINT_PHASES,
        inside=hang,
        evidence="hang",
    ),
)
