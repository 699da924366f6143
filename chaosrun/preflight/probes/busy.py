"""What else goes on on a node: who uses its processors, who waits for the kernel, what earlier runs have left.

Two looks at every process, some tenths of a second apart.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from chaosrun.processes import SHARED_MEMORY, pids, shared_memory_entries, stat_fields, unused_shared_memory

APART_S = 0.4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KERNEL_THREAD = 0x00200000
"""PF_KTHREAD."""
OURS = re.compile(rb"chaosrun\.preflight|chaosrun\.cluster\.(guard|cleanup)|ProbeAgent|chaosrun\0preflight")
"""And all that runs below them: a preflight's own Ray, its probes, and what these start."""
RAYS = re.compile(rb"^ray::(IDLE|SPILL|RESTORE|DELETE|Dashboard|RuntimeEnv)|/ray/(core|dashboard|_private|autoscaler)/")
"""Of any Ray, what is not somebody's work on it."""
NAMED = 5
LEAST_CORES = 0.1
"""Of what is told by name."""
MARK = b"CHAOSRUN_SESSION="
HOLDERS = re.compile(rb"chaosrun\.cluster\.(forkserver|guard)")
"""Processes above everything that carries a mark."""
ADOPTERS = {"init", "systemd", "tini", "dumb-init", "docker-init", "catatonit"}
RAY_FOLDER = re.compile(rb"chaosrun-ray-[a-z0-9_]+")
ENDING_S = 10.0
"""So long something may take to clean up after itself."""


class Seen(Struct, frozen=True):
    parent: int
    state: str
    ticks: int
    start_ticks: int
    kernel: bool


class Process(Struct, frozen=True, kw_only=True):
    pid: int
    name: str
    """Without its arguments, which may hold secrets; of a Python program its name."""
    cores: float = 0.0
    created_s: float = 0.0
    """Where that is of interest."""


class Busy(Struct, frozen=True, kw_only=True):
    cores: float
    """In use by anyone."""
    ours: float
    """By this preflight and by Ray itself."""
    others: float
    heavy: tuple[Process, ...]
    """The first of the others."""
    waiting: tuple[Process, ...]
    """Who waited both times without a way to interrupt it."""
    hidden: bool
    """Whether other users' processes cannot be seen at all."""


class LeftOver(Struct, frozen=True, kw_only=True):
    """Of earlier runs on this machine, whose supervisors are gone."""

    processes: tuple[Process, ...]
    folders: tuple[str, ...]
    shared_memory: dict[str, int]
    """Bytes, by name."""
    unreadable: int
    """How many of other users' processes could not be looked into for it."""


def _look() -> dict[int, Seen]:
    found: dict[int, Seen] = {}
    for pid in pids():
        fields = None
        with suppress(PermissionError):  # hidden; `_others_hidden` tells
            fields = stat_fields(pid)
        if fields is not None:
            found[pid] = Seen(
                parent=int(fields[1]),
                state=fields[0].decode(),
                ticks=int(fields[11]) + int(fields[12]),
                start_ticks=int(fields[19]),
                kernel=bool(int(fields[6]) & KERNEL_THREAD),
            )
    return found


def _others_hidden() -> bool:
    """Whether /proc keeps other users' processes from this one (its mount option hidepid): the first is always there."""
    try:
        return stat_fields(1) is None
    except PermissionError:
        return True


def busy() -> Busy:
    began, first, before = time.monotonic(), _look(), psutil.cpu_times()
    time.sleep(APART_S)
    second, after = _look(), psutil.cpu_times()
    seconds = time.monotonic() - began
    own = _own(second)
    used: dict[int, float] = {}
    for pid, seen in second.items():
        earlier = first.get(pid)
        since = earlier.ticks if earlier is not None and earlier.start_ticks == seen.start_ticks else 0
        used[pid] = (seen.ticks - since) / TICKS_PER_S / seconds
    foreign = [pid for pid, seen in second.items() if pid not in own and not seen.kernel]
    heaviest = sorted(foreign, key=lambda pid: used[pid], reverse=True)[:NAMED]
    stuck = [pid for pid, seen in second.items() if seen.state == "D" and not seen.kernel]
    return Busy(
        cores=_busy_seconds(after, before) / seconds,
        ours=sum(used[pid] for pid in own),
        others=sum(used[pid] for pid in foreign),
        heavy=tuple(Process(pid=pid, name=_title(pid), cores=used[pid]) for pid in heaviest if used[pid] >= LEAST_CORES),
        waiting=tuple(Process(pid=pid, name=_title(pid)) for pid in stuck if pid in first and first[pid].state == "D"),
        hidden=_others_hidden(),
    )


def _own(seen: Mapping[int, Seen]) -> set[int]:
    """This preflight's processes, on any node of this machine, and Ray's own."""
    above, pid = {os.getpid()}, os.getppid()
    while pid in seen and pid not in above:
        above.add(pid)
        pid = seen[pid].parent
    commands = {pid: _command(pid) for pid in seen}
    ours = {pid for pid, command in commands.items() if OURS.search(command)}
    below: dict[int, list[int]] = {}
    for pid, process in seen.items():
        below.setdefault(process.parent, []).append(pid)
    left = list(ours)
    while left:
        found = [pid for pid in below.get(left.pop(), ()) if pid not in ours]
        ours.update(found)
        left += found
    return {pid for pid in seen if pid in above or pid in ours or RAYS.search(commands[pid])}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def _title(pid: int) -> str:
    words = [os.path.basename(word) for word in _command(pid).decode(errors="replace").split("\0")]
    script = next((word for word in words[1:3] if word.endswith(".py")), "")
    return " ".join(filter(None, (_name(pid), script)))


def _busy_seconds(after: Any, before: Any) -> float:
    """Guests' time is in user's already."""
    idle = ("idle", "iowait", "steal", "guest", "guest_nice")
    return sum(getattr(after, part) - getattr(before, part) for part in after._fields if part not in idle)


def paged_bytes() -> int:
    """That have gone to swap and come back, since boot."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("pswpin ", "pswpout "))) * PAGE_BYTES


def temporary_files() -> str:
    """Where programs put them. `tempfile` tries to write there first, and raises where the disk is full."""
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    return next(filter(os.path.isdir, named), "/tmp")


def left_over() -> LeftOver:
    now_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S
    seen, marked, folders_in_use, unreadable = _look(), set[int](), set[str](), 0
    for pid, process in seen.items():
        environment = b""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except PermissionError:
            unreadable += not process.kernel
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if MARK in environment:
            marked.add(pid)
        folders_in_use |= {found.decode() for found in RAY_FOLDER.findall(_command(pid) + environment)}
    left: list[Process] = []
    for pid, process in sorted(seen.items()):
        age_s = (now_ticks - process.start_ticks) / TICKS_PER_S
        forsaken = pid in marked and _forsaken(pid, seen, marked)
        if process.state != "Z" and age_s > ENDING_S and (forsaken or (_adopted(process) and RAY_FOLDER.search(_command(pid)))):
            left.append(Process(pid=pid, name=_title(pid), created_s=time.time() - age_s))
    return LeftOver(
        processes=tuple(left),
        folders=tuple(str(path) for path in _ray_folders() if path.name not in folders_in_use),
        shared_memory=_unused_shared_memory(),
        unreadable=unreadable,
    )


def _forsaken(pid: int, seen: Mapping[int, Seen], marked: set[int]) -> bool:
    """Whether the topmost marked process above has lost whoever held it."""
    top = pid
    while seen[top].parent in marked:
        top = seen[top].parent
    return _adopted(seen[top]) or not HOLDERS.search(_command(top))


def _adopted(process: Seen) -> bool:
    return process.parent in (0, 1) or _name(process.parent) in ADOPTERS


def _ray_folders() -> list[Path]:
    """Those of this user that are not being made or removed at this moment."""
    folders: list[Path] = []
    for path in {Path(temporary_files()), Path("/tmp")}:
        for folder in path.glob("chaosrun-ray-*"):
            with suppress(OSError):
                about = folder.stat()
                if os.geteuid() in (0, about.st_uid) and time.time() - about.st_mtime > ENDING_S:
                    folders.append(folder)
    return sorted(folders)


def _unused_shared_memory() -> dict[str, int]:
    """Names and bytes of entries in /dev/shm that nobody uses any more."""
    sizes: dict[str, int] = {}
    for name in unused_shared_memory(shared_memory_entries()):
        with suppress(OSError):
            about = (SHARED_MEMORY / name).stat(follow_symlinks=False)
            if time.time() - about.st_mtime > ENDING_S:
                sizes[name] = about.st_blocks * 512
    return sizes
