"""Which devices this node has, what the driver says of them, and what comes of computing on each."""

import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Any

import psutil

from chaosrun.preflight.probes.nvidia import Driver, parse
from chaosrun.preflight.probes.per_device import Computed, compute, gpu_devices, visible_gpus

DRIVER_PATIENCE_S = 30.0
"""Without persistence mode a driver starts every GPU anew when it is asked."""
PROBES = "chaosrun.preflight.probes."


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesFacts:
    visible: list[str] | None
    """See `visible_gpus`."""
    driver: Driver
    computed: dict[str, Computed]
    """By the device's name."""


def probe(*, gpus: int, patience_s: float, work: dict[str, Any]) -> DevicesFacts:
    """`gpus`: as Ray counts them; `patience_s` of a phase; `work`: what the probe `compute` takes."""
    visible = visible_gpus()
    # First of all: what computes below would be found as another's process.
    driver = ask_driver()
    devices = gpu_devices(gpus, visible, [gpu.uuid for gpu in driver.gpus if gpu.uuid])
    computed = compute({name: {**work, "visible": token} for name, token in devices.items()}, patience_s)
    return DevicesFacts(visible=visible, driver=driver, computed=computed)


def ask_driver() -> Driver:
    """What nvidia-smi says."""
    if not shutil.which("nvidia-smi"):
        return Driver(there=False, error="there is no nvidia-smi on this node")
    try:
        asked = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=DRIVER_PATIENCE_S)
        driver = parse(asked.stdout if asked.returncode == 0 else asked.stdout + asked.stderr)
    except subprocess.TimeoutExpired:
        return Driver(silent=True, error=f"nvidia-smi gave no answer within {DRIVER_PATIENCE_S:g} s")
    except (ValueError, OSError) as error:
        return Driver(error=f"nvidia-smi: {error}")
    return replace(
        driver,
        gpus=tuple(replace(gpu, processes=tuple(each for each in gpu.processes if not _ours(each.pid))) for gpu in driver.gpus),
    )


def _ours(pid: int) -> bool:
    """Whether it is another preflight's, as of a second node on this machine."""
    try:
        return any(word.startswith(PROBES) for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
