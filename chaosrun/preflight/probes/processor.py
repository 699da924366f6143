"""Which processor this is, as far as it decides the bits that kernels compute. Reads /proc and /sys; loads nothing."""

import os
import platform
import re
from pathlib import Path

FEWER_THREADS = ("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS")
"""Environment variables that let OpenMP give a library fewer threads than it has shared its work out to. Measured with torch
2.13, 2 threads and any of the three: of a bfloat16 product half of the entries are 0."""

_COMPUTES = re.compile(r"(?:avx|fma|f16c|sse|ssse|amx|sve|sme|asimd|bf16|fphp|i8mm).*")
"""Features that libraries choose kernels by. The others come and go with kernels and hypervisors."""


def processor() -> dict[str, str]:
    """{"model", "features", "caches"}, each "" where it cannot be read."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    return {**read_cpuinfo(cpuinfo, platform.machine()), "caches": _caches(Path("/sys/devices/system/cpu/cpu0/cache"))}


def read_cpuinfo(text: str, machine: str) -> dict[str, str]:
    """Of the first processor in the text of /proc/cpuinfo."""
    first = text.partition("\n\n")[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = [fields[name] for name in ("cpu family", "model", "CPU implementer", "CPU part") if fields.get(name)]
    name = fields.get("model name") or machine
    features = fields.get("flags", fields.get("Features", "")).split()
    return {
        # Hypervisors give whole generations one name.
        "model": f"{name} ({'/'.join(numbers)})" if numbers else name,
        "features": " ".join(sorted(feature for feature in features if _COMPUTES.fullmatch(feature))),
    }


def _caches(folder: Path) -> str:
    """Sizes, which libraries cut their blocks to."""
    try:
        levels = sorted(entry for entry in os.listdir(folder) if entry.startswith("index"))
        return " ".join((folder / level / "size").read_text().strip() for level in levels)
    except OSError:
        return ""
