"""The clock of a node, read by a process at its two ends. As a probe of its own it does nothing else."""

import os
import time
from pathlib import Path
from typing import Any

from chaosrun.preflight.model import Facts

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def probe(**parameters: Any) -> Facts:
    return {"clock": clock_of_this_process()}


def clock_of_this_process() -> Facts:
    """{began_s, now_s} by the wall clock. Whoever started this process did so before the first and hears of it after the
    second: the closer they are to his own two readings, the less is uncertain."""
    now_s = time.time()
    try:
        # After the name in parentheses: state is field 3, the start, in ticks since boot, is field 22.
        start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return {"began_s": now_s, "now_s": now_s}
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks * TICK_S
    # A tick is rounded down; a sandbox may count from another boot.
    return {"began_s": now_s - max(0.0, age_s - TICK_S) if age_s < 3600 else now_s, "now_s": now_s}
