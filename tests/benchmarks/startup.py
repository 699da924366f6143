"""How long `chaosrun --help` takes, from the start of its process to its end."""

import subprocess
import time
from collections.abc import Callable

from tests.benchmarks.launch import chaosrun_command
from tests.benchmarks.samples import Samples

__all__ = ["TARGET_S", "measure_startup"]

TARGET_S = 0.3


def measure_startup(repeats: int, progress: Callable[[str], None]) -> Samples:
    found = Samples()
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        subprocess.run([chaosrun_command(), "--help"], stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - began
        if repeat:  # the first one filled the page cache
            found.values.append(seconds)
            progress(f"startup {repeat}/{repeats}: {seconds:.3f} s")
    return found
