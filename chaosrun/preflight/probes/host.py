"""The machine of a node: CPUs, memory, disks, limits; other processes, leftovers of runs; kernel messages."""

import os
import re
import resource
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec import Struct

from chaosrun.observe.limits import cpu_limit, memory_limit, memory_room, process_room
from chaosrun.preflight.probes.software import raylet_options
from chaosrun.preflight.probes.storage_place import nearest_folder

LONGEST_S = 0.5
RECORD_BYTES = 8192
MOST = 20
"""Messages kept of each kind: the last ones."""
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
APART_S = 0.4
KERNEL = 2
"""The process above all threads of the kernel."""
OURS = re.compile(r"chaosrun\.preflight|chaosrun\.cluster\.(probe_guard|cleanup)|ProbeAgent|chaosrun\0preflight")
"""And all that runs below them: a preflight's own Ray, its probes, and what these start."""
RAYS = re.compile(r"^ray::(IDLE|SPILL|RESTORE|DELETE|Dashboard|RuntimeEnv)|/ray/(core|dashboard|_private|autoscaler)/")
"""Ray's own processes, as opposed to work that runs on Ray."""
NAMED = 5
LEAST_CORES = 0.1
"""Least use of processors of a process that is reported by name."""
MARK = "CHAOSRUN_SESSION"
HOLDERS = re.compile(r"chaosrun\.cluster\.(forkserver|probe_guard)")
"""Processes above everything that carries a mark."""
ADOPTERS = {"init", "systemd", "tini", "dumb-init", "docker-init", "catatonit"}
RAY_FOLDER = re.compile(r"chaosrun-ray-[a-z0-9_]+")
ENDING_S = 10.0
"""How long a process may take to clean up after itself."""


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


class DirectoryFacts(Struct, frozen=True, kw_only=True):
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


class ProcessEntry(Struct, frozen=True, kw_only=True):
    parent: int
    name: str
    command: str
    """Its command line, with NUL between the words."""
    cpu_s: float
    created_s: float


class Process(Struct, frozen=True, kw_only=True):
    pid: int
    name: str
    """Without its arguments, which may contain secrets; for a Python program the script's name."""
    cores: float = 0.0
    created_s: float = 0.0
    """Where relevant."""


class Busy(Struct, frozen=True, kw_only=True):
    cores: float
    """In use by all processes."""
    ours: float
    """By this preflight and by Ray itself."""
    others: float
    heavy: tuple[Process, ...]
    """The first of the others."""
    hidden: bool
    """Whether other users' processes cannot be seen at all."""


class HostFacts(Struct, frozen=True, kw_only=True):
    cpus: Cpus
    memory: Memory
    places: dict[str, DirectoryFacts]
    """By purpose."""
    shared_memory: DirectoryFacts
    limits: Limits
    busy: Busy
    left_over: tuple[Process, ...]
    kernel_log: KernelLog


def probe(*, places: dict[str, str]) -> HostFacts:
    """`places`: paths by purpose; those of temporary files and Ray are added."""
    rays = raylet_options().get("temp_dir")
    asked = {**places, "temporary files": temporary_files(), **({"Ray's files": rays} if rays else {})}
    return HostFacts(
        cpus=_cpus(),
        memory=_memory(),
        places={purpose: _place(path) for purpose, path in asked.items()},
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


def _place(path: str, there: str = "") -> DirectoryFacts:
    """`there`: the folder to look at; default: the nearest that exists."""
    try:
        there = there or str(nearest_folder(Path(path)))
        seen = os.statvfs(there)
    except OSError as error:
        return DirectoryFacts(path=path, error=f"{error.filename}: {error.strerror}")
    return DirectoryFacts(
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
    found = (each.info for each in psutil.process_iter(["uids", "num_threads"]))
    return sum(each["num_threads"] or 0 for each in found if each["uids"] and each["uids"].effective == os.geteuid())


# Other processes: those that use the CPUs, and those left over from earlier runs. Every process is read twice, some tenths of a
# second apart.


def _look() -> dict[int, ProcessEntry]:
    """All processes except zombies and kernel threads."""
    found: dict[int, ProcessEntry] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            seen = ProcessEntry(
                parent=process.ppid(),
                name=process.name(),
                command="\0".join(process.cmdline()),
                cpu_s=times.user + times.system,
                created_s=process.create_time(),
            )
            if KERNEL not in (process.pid, seen.parent) or seen.command:
                found[process.pid] = seen
    return found


def busy() -> Busy:
    began, first = time.monotonic(), _look()
    cores = psutil.cpu_percent(APART_S) / 100 * (psutil.cpu_count() or 1)
    second, seconds = _look(), time.monotonic() - began
    used: dict[int, float] = {}
    for pid, seen in second.items():
        earlier = first.get(pid)
        since_s = earlier.cpu_s if earlier is not None and earlier.created_s == seen.created_s else 0.0
        used[pid] = (seen.cpu_s - since_s) / seconds
    above = {process.pid for process in (psutil.Process(), *psutil.Process().parents())}
    own = {pid for pid, seen in second.items() if pid in above or RAYS.search(seen.command) or _is_ours(pid, second)}
    foreign = sorted(second.keys() - own, key=lambda pid: used[pid], reverse=True)
    return Busy(
        cores=cores,
        ours=sum(used[pid] for pid in own),
        others=sum(used[pid] for pid in foreign),
        heavy=tuple(_process(pid, second[pid], cores=used[pid]) for pid in foreign[:NAMED] if used[pid] >= LEAST_CORES),
        # Process 1 always exists, unless /proc hides it from this user (mount option hidepid).
        hidden=1 not in second,
    )


def _is_ours(pid: int, seen: Mapping[int, ProcessEntry]) -> bool:
    """Whether it, or an ancestor, belongs to a preflight, on any node of this machine."""
    while pid in seen:
        if OURS.search(seen[pid].command):
            return True
        pid = seen[pid].parent
    return False


def _process(pid: int, seen: ProcessEntry, cores: float = 0.0, created_s: float = 0.0) -> Process:
    script = next((os.path.basename(word) for word in seen.command.split("\0")[1:3] if word.endswith(".py")), "")
    return Process(pid=pid, name=" ".join(filter(None, (seen.name, script))), cores=cores, created_s=created_s)


def temporary_files() -> str:
    """The folder for temporary files. `tempfile` would write there first, and raise when the disk is full."""
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    return next(filter(os.path.isdir, named), "/tmp")


def left_over() -> tuple[Process, ...]:
    """Processes of earlier runs on this machine whose supervisors are gone; of other users only those that can be read."""
    seen, marked = _look(), set[int]()
    for pid in seen:
        with suppress(psutil.Error):
            if MARK in psutil.Process(pid).environ():
                marked.add(pid)
    left: list[Process] = []
    for pid, process in sorted(seen.items()):
        old = time.time() - process.created_s > ENDING_S
        if old and (_forsaken(pid, seen, marked) or (_adopted(process, seen) and RAY_FOLDER.search(process.command))):
            left.append(_process(pid, process, created_s=process.created_s))
    return tuple(left)


def _forsaken(pid: int, seen: Mapping[int, ProcessEntry], marked: Collection[int]) -> bool:
    """Whether the topmost marked process above it has lost the parent that held it."""
    while seen[pid].parent in marked:
        pid = seen[pid].parent
    return pid in marked and (_adopted(seen[pid], seen) or not HOLDERS.search(seen[pid].command))


def _adopted(process: ProcessEntry, seen: Mapping[int, ProcessEntry]) -> bool:
    return process.parent in (0, 1) or (process.parent in seen and seen[process.parent].name in ADOPTERS)


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
