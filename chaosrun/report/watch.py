"""Watching a run from its files alone, beside whatever supervises it. It must never disturb the run."""

import time
from collections.abc import Callable
from typing import TextIO

from chaosrun.records.layout import RunLayout
from chaosrun.report.follow import RunFollower
from chaosrun.report.live import POLL_S, REDRAW_S, Display


def watch(run: RunLayout, *, stream: TextIO, terminal: bool, ended: Callable[[], bool]) -> None:
    """Show a run until `ended()`, then take in what is left, and return. KeyboardInterrupt passes, the terminal put right.

    `terminal`: draw the picture, which is gone when this returns but for the lines that last; else write one line an event,
    from the run's first on. When nobody reads the stream any more this only waits.
    """
    display = Display(stream, terminal=terminal)
    display.follow(RunFollower(run), past=not terminal)
    try:
        over = False
        while not over:
            # Asked first: what was written before the end is then there to be read.
            over = ended()
            display.refresh()
            if not over:
                time.sleep(REDRAW_S if terminal else POLL_S)
    finally:
        display.close()
