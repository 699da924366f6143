"""What a fork server imports for all its ranks, and whether it can still be forked after that."""

import importlib
import os
import sys
from pathlib import Path

from chaosrun.cluster.standby import Target


def import_all(names: list[str], target: str) -> Target:
    module, _, function = target.partition(":")
    for name in (*names, module):
        importlib.import_module(name)
    return getattr(sys.modules[module], function)


def why_unsafe_to_fork() -> str | None:
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        names = sorted({Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in threads})
        return f"the preloaded modules started {len(threads) - 1} thread(s) ({', '.join(names)}); a fork would lose them"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the preloaded modules initialised CUDA; a forked process could not use it"
    return None
