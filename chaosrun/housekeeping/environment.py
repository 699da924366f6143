"""What a bug report needs to know of the machine and what is installed. Never fails: says so where it cannot find out.

torch is asked in a process of its own, as a broken torch may crash it. Ray is not imported at all.
"""

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import chaosrun
from chaosrun.observe.limits import cpu_limit, memory_limit
from chaosrun.records.naming import default_root
from chaosrun.wording import LEFT_OUT, SECRET

Facts = dict[str, object]
PACKAGES = (
    "accelerate",
    "ray",
    "numpy",
    "safetensors",
    "pydantic",
    "ruamel.yaml",
    "rich",
    "transformers",
    "datasets",
    "torchdata",
)
TORCH_TIMEOUT_S = 120.0
TORCH_FACTS = """
import json, sys
from torch.utils import collect_env
sys.stdout.write("\\n" + json.dumps(collect_env.get_env_info()._asdict()))
"""
"""What torch's own bug reports say: its build, compilers, driver and GPUs, the operating system and the processor."""
VARIABLES = re.compile(
    r"(CHAOSRUN|RAY|NCCL|OMP|MKL|OPENBLAS|CUDA|CUBLAS|TORCH|PYTORCH|GLOO|ACCELERATE|HF|SLURM)_.*"
    r"|PYTHON(PATH|HASHSEED|UNBUFFERED)|LD_(PRELOAD|LIBRARY_PATH)|MASTER_(ADDR|PORT)|WORLD_SIZE|RANK|LOCAL_RANK|TMPDIR|NO_COLOR|TERM|CI"
)
PASSWORD_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]*@")


def environment(root: Path | None = None) -> Facts:
    """Facts by subject, all of them JSON values."""
    return {
        "v": 1,
        "chaosrun": {"version": chaosrun.__version__, "path": str(Path(chaosrun.__file__).parent)},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "path": sys.executable,
        },
        "torch": _torch(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "system": {
            "platform": platform.platform(),
            "container": os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"),
        },
        "cpu": {"count": os.cpu_count(), "usable": len(os.sched_getaffinity(0)), "cgroup_limit": cpu_limit()},
        "memory": {
            "total_bytes": psutil.virtual_memory().total,
            "available_bytes": psutil.virtual_memory().available,
            "cgroup_limit_bytes": memory_limit(),
            "shm": _room(Path("/dev/shm")),
        },
        "limits": {
            "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
            "processes": list(resource.getrlimit(resource.RLIMIT_NPROC)),
        },
        "root": _root(default_root() if root is None else root),
        "environment": listed_variables(os.environ),
    }


def listed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, without what may be a secret."""
    return {
        name: LEFT_OUT if SECRET.search(name) else PASSWORD_IN_ADDRESS.sub("", value)
        for name, value in sorted(environ.items())
        if VARIABLES.fullmatch(name)
    }


def _torch() -> Facts:
    """What torch reports about itself, or why it cannot."""
    installed = installed_version("torch")
    if installed is None:
        return {"version": None, "error": "not installed"}
    command = [sys.executable, "-P", "-c", TORCH_FACTS]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"version": installed, "error": f"importing it took more than {TORCH_TIMEOUT_S:g} s"}
    except OSError as error:
        return {"version": installed, "error": f"could not be asked: {error.strerror}"}
    if asked.returncode < 0:
        return {"version": installed, "error": f"importing it ended the process by signal {-asked.returncode}"}
    try:
        told = json.loads(PASSWORD_IN_ADDRESS.sub("", asked.stdout.splitlines()[-1]))
        return {"version": installed, **{name: value for name, value in told.items() if value not in (None, "N/A", {})}}
    except (IndexError, ValueError):
        said = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        return {"version": installed, "error": said[-1]}


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _room(path: Path) -> Facts:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return {"error": error.strerror}
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def _root(root: Path) -> Facts:
    """Where runs are, or would be, kept, with the disk space of the nearest directory that exists."""
    place = root.absolute()
    there = next(folder for folder in (place, *place.parents) if folder.is_dir())
    kind = None
    for part in psutil.disk_partitions(all=True):
        if there.is_relative_to(part.mountpoint) and (kind is None or len(part.mountpoint) >= len(kind[0])):
            kind = (part.mountpoint, part.fstype)
    return {
        "path": str(place),
        "exists": place.is_dir(),
        "writable": os.access(there, os.W_OK | os.X_OK),
        "file_system": kind and kind[1],
        **_room(there),
    }
