"""Faults of one process: it dies, leaves, hangs, slows down, runs out of something."""

import signal

from chaosrun.inject.strike import Strike

__all__ = ["kill"]


def kill(strike: Strike) -> None:
    strike.die(signal.SIGKILL)
