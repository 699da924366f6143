"""The machine of a node: CPUs, memory, disks, limits; other processes, leftovers of runs; kernel messages."""

import os
import re
import resource
import time
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec import Struct

from chaosrun.observe.limits import cpu_limit, memory_limit, memory_room, process_room
from chaosrun.preflight.probes.busy import Busy, Process, busy, left_over, temporary_files
from chaosrun.preflight.probes.software import raylet_options
from chaosrun.preflight.probes.storage_place import nearest_folder
from chaosrun.processes import pids, stat_fields

OF_RAYLET = {"temp_dir": "Ray's files"}
LONGEST_S = 0.5
RECORD_BYTES = 8192
MOST = 20
"""Of each kind, the last."""
KINDS = {
    "gpu": re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<code>\d+)"),
    "disk": re.compile(
        r"I/O error,? (?:on )?dev(?:ice)? (?P<block>[\w-]+)"
        r"|(?:EXT4-fs|BTRFS|F2FS-fs) (?:error|critical) \(device (?P<mounted>[\w-]+)"
        r"|XFS \((?P<xfs>[\w-]+)\): .*(?:error|corrupt|shut)"
        r"|(?P<controller>nvme\d+)(?:n\d+)?: (?:I/O .*timeout|controller is down)"
        r"|nfs: server (?P<server>\S+) not responding",
        re.IGNORECASE,
    ),
    "out of memory": re.compile(r"out of memory: Killed process \d+ \((?P<name>[^)]*)\)", re.IGNORECASE),
    "hardware": re.compile(r"\[Hardware Error\]|EDAC .*\bUE\b|Uncorrected hardware memory error", re.IGNORECASE),
}


class Cpus(Struct, frozen=True, kw_only=True):
    machine: int
    usable: float
    """CPUs that this process may run on and its control group may use."""
    limited_by: str = ""
    """The reason, if they are fewer than the machine's."""


class Memory(Struct, frozen=True, kw_only=True):
    """In bytes; the control group's limits where they are lower."""

    total: int
    available: int
    limited: bool
    """By the control group."""


class Place(Struct, frozen=True, kw_only=True):
    """The file system of a directory that may not exist yet."""

    path: str
    error: str = ""
    """The error, if nothing else is known."""
    there: str = ""
    """The nearest existing folder."""
    total: int = 0
    free: int = 0
    read_only: bool = False
    writable: bool = False


class Limits(Struct, frozen=True, kw_only=True):
    """Soft limits, as every process below this one has them; None: none."""

    open_files: int | None
    process_room: int | None
    """How many more processes and threads may be started."""


class Message(Struct, frozen=True, kw_only=True):
    kind: str
    """One of KINDS."""
    device: str
    code: int | None
    """An Xid."""
    age_s: float
    text: str


class KernelLog(Struct, frozen=True, kw_only=True):
    messages: tuple[Message, ...] = ()
    error: str = ""
    """Why it could not be read, or not to its end."""


class HostFacts(Struct, frozen=True, kw_only=True):
    cpus: Cpus
    memory: Memory
    places: dict[str, Place]
    """By purpose."""
    shared_memory: Place
    limits: Limits
    busy: Busy
    left_over: tuple[Process, ...]
    kernel_log: KernelLog


def probe(*, places: dict[str, str]) -> HostFacts:
    """`places`: paths by purpose; those of temporary files and Ray are added."""
    ray = {purpose: path for option, purpose in OF_RAYLET.items() if (path := raylet_options().get(option))}
    asked = {**places, "temporary files": temporary_files(), **ray}
    return HostFacts(
        cpus=_cpus(),
        memory=_memory(),
        places={purpose: _nearest(path) for purpose, path in asked.items()},
        shared_memory=_place("/dev/shm", "/dev/shm"),
        limits=_limits(),
        busy=busy(),
        left_over=left_over(),
        kernel_log=kernel_log(),
    )


def _cpus() -> Cpus:
    machine, usable, group = os.cpu_count() or 1, len(os.sched_getaffinity(0)), cpu_limit()
    if group is not None and group <= usable:
        return Cpus(machine=machine, usable=group, limited_by="control group" if group < machine else "")
    return Cpus(machine=machine, usable=usable, limited_by="affinity" if usable < machine else "")


def _memory() -> Memory:
    found, limit, room = psutil.virtual_memory(), memory_limit(), memory_room()
    return Memory(
        total=found.total if limit is None else min(limit, found.total),
        available=found.available if room is None else min(room, found.available),
        limited=limit is not None and limit <= found.total,
    )


def _nearest(path: str) -> Place:
    try:
        return _place(path, str(nearest_folder(Path(path))))
    except OSError as error:
        return Place(path=path, error=f"{error.filename}: {error.strerror}")


def _place(path: str, there: str) -> Place:
    try:
        seen = os.statvfs(there)
    except OSError as error:
        return Place(path=path, error=f"{error.filename}: {error.strerror}")
    return Place(
        path=path,
        there=there,
        total=seen.f_blocks * seen.f_frsize,
        # Space reserved for root is not for training.
        free=seen.f_bavail * seen.f_frsize,
        read_only=bool(seen.f_flag & os.ST_RDONLY),
        writable=os.access(there, os.W_OK | os.X_OK),
    )


def _limits() -> Limits:
    processes = None if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC)  # root's are not counted
    rooms = (None if processes is None else processes - _threads_of_this_user(), process_room())
    return Limits(
        open_files=_soft(resource.RLIMIT_NOFILE), process_room=min((room for room in rooms if room is not None), default=None)
    )


def _soft(which: int) -> int | None:
    found = resource.getrlimit(which)[0]
    return None if found == resource.RLIM_INFINITY else found


def _threads_of_this_user() -> int:
    """Threads of this user, which the kernel counts against the limit of processes."""
    found = 0
    for pid in pids():
        # It has ended meanwhile, or is another user's.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid() and (fields := stat_fields(pid)) is not None:
                found += int(fields[17])
    return found


# The kernel's messages since boot about failing GPUs, disks and memory. Source of the record format: the kernel's
# Documentation/ABI/testing/dev-kmsg; of Xid: NVIDIA's "XID Errors".


def kernel_log(path: str = "/dev/kmsg", longest_s: float = LONGEST_S) -> KernelLog:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return KernelLog(error=f"{path}: {error.strerror}")
    now_s, deadline = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic() + longest_s
    found: list[Message] = []
    error = f"there is more of {path} than could be read in {longest_s:g} s"
    try:
        while time.monotonic() < deadline:
            try:
                record = os.read(descriptor, RECORD_BYTES)
            except BlockingIOError:
                error = ""  # all read
                break
            except BrokenPipeError:
                continue  # overwritten meanwhile
            if told := told_by(record.decode(errors="replace"), now_s):
                found.append(told)
    except OSError as error:
        return KernelLog(error=f"{path}: {error.strerror}")
    finally:
        os.close(descriptor)
    kept = tuple(message for kind in KINDS for message in [one for one in found if one.kind == kind][-MOST:])
    return KernelLog(messages=kept, error=error)


def told_by(record: str, now_s: float) -> Message | None:
    """A record of /dev/kmsg, "priority,number,microseconds since boot,…;text"; None when it is not relevant to the check."""
    about, _, text = record.partition(";")
    text = text.partition("\n")[0]
    if int(about.split(",")[0]) >> 3:
        return None  # a program wrote it there, not the kernel
    age_s = max(0.0, now_s - int(about.split(",")[2]) / 1e6)
    for kind, pattern in KINDS.items():
        if match := pattern.search(text):
            groups = match.groupdict()
            code = groups.pop("code", None)
            device = next(filter(None, groups.values()), "")
            return Message(kind=kind, device=device, code=int(code) if code else None, age_s=age_s, text=text[:200])
    return None
