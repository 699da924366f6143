"""The clock of a node, read by a process at its two ends."""

import os
import time
from pathlib import Path

from msgspec import Struct

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ClockFacts(Struct, frozen=True, kw_only=True):
    """Two readings of the wall clock. The caller started this process before the first and got the answer after the second: the
    closer these are to the caller's own two readings, the smaller the uncertainty."""

    began_s: float
    now_s: float


def probe() -> ClockFacts:
    now_s = time.time()
    try:
        # After the name in parentheses: state is field 3, the start in ticks since boot field 22.
        start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return ClockFacts(began_s=now_s, now_s=now_s)
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks * TICK_S
    # Ticks are rounded down; a sandbox may count from another boot.
    return ClockFacts(began_s=now_s - max(0.0, age_s - TICK_S) if age_s < 3600 else now_s, now_s=now_s)
