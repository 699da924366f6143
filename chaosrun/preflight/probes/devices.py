"""Which devices this node has, what the driver says of them, and what comes of computing on each."""

import shutil
import subprocess
from typing import Any

import psutil

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.nvidia import parse
from chaosrun.preflight.probes.per_device import compute, gpu_devices, visible_gpus

DRIVER_PATIENCE_S = 30.0
"""Without persistence mode a driver starts every GPU anew when it is asked."""


def probe(**parameters: Any) -> Facts:
    """`gpus`: as Ray counts them; `patience_s` of a phase; `compute`: what the probe `compute` takes."""
    visible = visible_gpus()
    # First of all: what computes below would be found as another's process.
    driver = ask_driver()
    gpus = gpu_devices(parameters["gpus"], visible, [gpu["uuid"] for gpu in driver["gpus"] if gpu["uuid"]])
    orders = {name: {**parameters["compute"], "visible": token} for name, token in gpus.items()}
    computed = compute(orders, parameters["patience_s"])
    return {"visible": visible, "driver": driver, "computed": computed}


def ask_driver() -> dict[str, Any]:
    """What nvidia-smi says: {"there", "silent", "error", "driver", "cuda", "gpus"}."""
    nothing = {"silent": False, "driver": None, "cuda": None, "gpus": []}
    if not shutil.which("nvidia-smi"):
        return {"there": False, "error": "there is no nvidia-smi on this node", **nothing}
    try:
        asked = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=DRIVER_PATIENCE_S)
        report = parse(asked.stdout if asked.returncode == 0 else asked.stdout + asked.stderr)
    except subprocess.TimeoutExpired:
        return {**nothing, "there": True, "silent": True, "error": f"nvidia-smi gave no answer within {DRIVER_PATIENCE_S:g} s"}
    except (ValueError, OSError) as error:
        return {"there": True, "error": f"nvidia-smi: {error}", **nothing}
    for gpu in report["gpus"]:
        gpu["processes"] = [process for process in gpu["processes"] if not _ours(process["pid"])]
    return {**nothing, "there": True, "error": "", **report}


def _ours(pid: int) -> bool:
    """Whether it is another preflight's, as of a second node on this machine."""
    try:
        return any(word.startswith("chaosrun.preflight.probes.") for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
