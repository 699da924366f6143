"""How much of everything a node has: processors, memory, swap, disks, shared memory, limits of processes."""

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaosrun.housekeeping.limits import cpu_limit, memory_limit, memory_room, process_room
from chaosrun.preflight.probes.raylet_options import raylet_options
from chaosrun.preflight.probes.storage_place import nearest_folder
from chaosrun.processes import pids, stat_fields

SHARED_MEMORY = "/dev/shm"
INFINIBAND = Path("/sys/class/infiniband")
MAY_LOCK_MEMORY = 14
"""CAP_IPC_LOCK."""
RAYS_FILES = "Ray's files"
OF_RAYLET = {"temp_dir": RAYS_FILES, "fallback_directory": "Ray's spill"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    machine: int
    usable: int
    """That this process may run on."""
    cgroup: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """In bytes."""

    total: int
    available: int
    cgroup_limit: int | None
    cgroup_room: int | None
    swap_total: int
    swap_used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The file system that a directory is on, or will be once it is made."""

    path: str
    error: str = ""
    """Why nothing else is known."""
    there: str = ""
    """The nearest folder that is there already."""
    total: int = 0
    free: int = 0
    inodes: int = 0
    inodes_free: int = 0
    read_only: bool = False
    writable: bool = False
    block_devices: tuple[str, ...] = ()
    """As the kernel's messages call it: the partition, and the disk that it is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    total: int = 0
    free: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Soft limits, as every process below this one has them; None: none."""

    open_files: int | None
    processes: int | None
    threads_of_user: int
    cgroup_room: int | None
    locked_memory: int | None
    infiniband: tuple[str, ...]
    """Names of its devices."""


def cpus() -> Cpus:
    return Cpus(machine=os.cpu_count() or 1, usable=len(os.sched_getaffinity(0)), cgroup=cpu_limit())


def memory() -> Memory:
    found, swap = psutil.virtual_memory(), psutil.swap_memory()
    return Memory(
        total=found.total,
        available=found.available,
        cgroup_limit=memory_limit(),
        cgroup_room=memory_room(),
        swap_total=swap.total,
        swap_used=swap.used,
    )


def places(asked: Mapping[str, str]) -> dict[str, Place]:
    """By purpose: those that were asked for, temporary files, and what Ray uses."""
    return {
        purpose: _place(Path(path)) for purpose, path in {**asked, "temporary files": temporary_files(), **_of_ray()}.items()
    }


def temporary_files() -> str:
    """Where programs put them. `tempfile` tries to write there first, and raises where the disk is full."""
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    return next(filter(os.path.isdir, named), "/tmp")


def _of_ray() -> dict[str, str]:
    options = raylet_options()
    found = {purpose: options[option] for option, purpose in OF_RAYLET.items() if option in options}
    return {purpose: path for purpose, path in found.items() if purpose == RAYS_FILES or not _is_inside(path, found)}


def _is_inside(path: str, found: Mapping[str, str]) -> bool:
    return RAYS_FILES in found and Path(path).is_relative_to(found[RAYS_FILES])


def _place(path: Path) -> Place:
    try:
        there = nearest_folder(path)
        seen, number = os.statvfs(there), there.stat().st_dev
    except OSError as error:
        return Place(path=str(path), error=f"{error.filename}: {error.strerror}")
    return Place(
        path=str(path),
        there=str(there),
        total=seen.f_blocks * seen.f_frsize,
        # What is kept for root is not for training.
        free=seen.f_bavail * seen.f_frsize,
        inodes=seen.f_files,
        inodes_free=seen.f_favail,
        read_only=bool(seen.f_flag & os.ST_RDONLY),
        writable=os.access(there, os.W_OK | os.X_OK),
        block_devices=_block_devices(number),
    )


def _block_devices(number: int) -> tuple[str, ...]:
    try:
        device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return ()  # of a network, or of memory
    return (device.name, device.parent.name) if (device / "partition").exists() else (device.name,)


def shared_memory() -> SharedMemory:
    try:
        seen = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return SharedMemory(error=error.strerror or str(error))
    return SharedMemory(total=seen.f_blocks * seen.f_frsize, free=seen.f_bavail * seen.f_frsize)


def limits() -> Limits:
    def soft(which: int) -> int | None:
        found = resource.getrlimit(which)[0]
        return None if found == resource.RLIM_INFINITY else found

    return Limits(
        open_files=soft(resource.RLIMIT_NOFILE),
        processes=None if os.geteuid() == 0 else soft(resource.RLIMIT_NPROC),  # root's are not counted
        threads_of_user=_threads_of_this_user(),
        cgroup_room=process_room(),
        locked_memory=None if _may_lock_memory() else soft(resource.RLIMIT_MEMLOCK),
        infiniband=tuple(sorted(path.name for path in INFINIBAND.iterdir())) if INFINIBAND.is_dir() else (),
    )


def _threads_of_this_user() -> int:
    """What the kernel holds against the limit of processes."""
    count = 0
    for pid in pids():
        # One that has ended meanwhile, or that is another user's.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid() and (fields := stat_fields(pid)) is not None:
                count += int(fields[17])
    return count


def _may_lock_memory() -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    capabilities = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(capabilities >> MAY_LOCK_MEMORY & 1)
