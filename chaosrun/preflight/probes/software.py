"""The software installed on a node and the environment of its processes. Nothing is imported: torch alone would take
seconds."""

import ctypes
import importlib.util
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec import Struct

import chaosrun
from chaosrun.housekeeping.environment import installed_version, listed_variables
from chaosrun.observe.limits import read
from chaosrun.preflight.probes.script import ScriptFacts, script_facts

PACKAGES = ("ray", "accelerate", "numpy")
DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
PARAMETER = re.compile(r"^(__version__|cuda|hip)\b[^=]*= *'([^']*)'", re.MULTILINE)
"""Of torch/version.py."""


class SoftwareFacts(Struct, frozen=True, kw_only=True):
    versions: dict[str, str | None]
    variables: dict[str, str]
    auth: str | None
    cpus: int
    own_ray: bool
    """Whether chaosrun has started this Ray."""
    script: ScriptFacts | None


def probe(*, script: str | None, path: list[str]) -> SoftwareFacts:
    """`path`: additional directories of the script's imports."""
    torch = _torch()
    return SoftwareFacts(
        versions={
            "python": platform.python_version(),
            "chaosrun": chaosrun.__version__,
            **{name: installed_version(name) for name in PACKAGES},
            "torch": torch.get("__version__") or installed_version("torch"),
            "driver": next(filter(None, map(read, DRIVERS)), None),
            "NCCL": _nccl() if "cuda" in torch else None,
        },
        variables=listed_variables(os.environ),
        auth=os.environ.get("RAY_AUTH_MODE"),
        cpus=os.cpu_count() or 1,
        own_ray="chaosrun-ray-" in raylet_options().get("temp_dir", ""),
        # It puts the script's directory on the path.
        script=None if script is None else script_facts(script, path),
    )


def _torch() -> dict[str, str]:
    """The version in torch/version.py of the torch that would be imported, which the package's metadata may not match."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        return dict(PARAMETER.findall((Path(spec.origin).parent / "version.py").read_text()))
    except FileNotFoundError:
        return {}


def _nccl() -> str | None:
    """The version reported by the library itself: torch's own, else the system's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    bundled = [os.path.join(folder, "nccl", "lib", "libnccl.so.2") for folder in folders]
    for name in (*bundled, "libnccl.so.2"):
        number = ctypes.c_int()
        with suppress(OSError, AttributeError):
            if ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number)) == 0:
                return _dotted(number.value)
    return None


def _dotted(number: int) -> str:
    """NCCL encodes 2.8.4 as 2804, and from 2.9 on 2.9.6 as 20906."""
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def raylet_options() -> dict[str, str]:
    """Options of the raylet above this process, by name without dashes; empty without one, or if it is another user's."""
    try:
        raylet = next((parent for parent in psutil.Process().parents() if parent.name() == "raylet"), None)
        words = [] if raylet is None else raylet.cmdline()
    except psutil.Error:
        return {}
    return dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
