"""What else goes on on a node: who uses its processors and memory, who waits for the kernel, what earlier runs have left.

Two looks at every process, some tenths of a second apart.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from chaosrun.preflight.probes.room import temporary_files
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


@dataclass(frozen=True, slots=True)
class Seen:
    parent: int
    state: str
    ticks: int
    start_ticks: int
    rss: int
    kernel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    pid: int
    name: str
    """Without its arguments, which may hold secrets; of a Python program its name."""
    rss: int
    cores: float = 0.0
    created_s: float = 0.0
    """Where that is of interest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    load: float
    cores: float
    """In use by anyone."""
    ours: float
    """By this preflight and by Ray itself."""
    others: float
    heavy: tuple[Process, ...]
    """The first of the others."""
    large: tuple[Process, ...]
    zombies: int
    waiting: tuple[Process, ...]
    """Who waited both times without a way to interrupt it."""
    hidden: bool
    """Whether other users' processes cannot be seen at all."""
    paged_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver:
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
                rss=int(fields[21]) * PAGE_BYTES,
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
    began, first = time.monotonic(), _look()
    before, paged = psutil.cpu_times(), _paged()
    time.sleep(APART_S)
    second, after = _look(), psutil.cpu_times()
    seconds = time.monotonic() - began
    own = _own(second)
    used = {
        pid: (seen.ticks - (first[pid].ticks if pid in first and first[pid].start_ticks == seen.start_ticks else 0))
        / TICKS_PER_S
        / seconds
        for pid, seen in second.items()
    }
    foreign = [pid for pid, seen in second.items() if pid not in own and not seen.kernel]
    heaviest = sorted(foreign, key=lambda pid: used[pid], reverse=True)[:NAMED]
    largest = sorted(foreign, key=lambda pid: second[pid].rss, reverse=True)[:NAMED]
    return Busy(
        load=os.getloadavg()[0],
        cores=_busy_seconds(after, before) / seconds,
        ours=sum(used[pid] for pid in own),
        others=sum(used[pid] for pid in foreign),
        heavy=tuple(_described(pid, second[pid], cores=used[pid]) for pid in heaviest if used[pid] >= LEAST_CORES),
        large=tuple(_described(pid, second[pid]) for pid in largest),
        zombies=sum(seen.state == "Z" for seen in second.values()),
        waiting=tuple(
            _described(pid, seen)
            for pid, seen in second.items()
            if seen.state == "D" and not seen.kernel and pid in first and first[pid].state == "D"
        ),
        hidden=_others_hidden(),
        paged_bytes=_paged() - paged,
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


def _described(pid: int, seen: Seen, **more: float) -> Process:
    words = [os.path.basename(word) for word in _command(pid).decode(errors="replace").split("\0")]
    script = next((word for word in words[1:3] if word.endswith(".py")), "")
    return Process(pid=pid, name=" ".join(filter(None, (_name(pid), script))), rss=seen.rss, **more)


def _busy_seconds(after: Any, before: Any) -> float:
    """Guests' time is in user's already."""
    idle = ("idle", "iowait", "steal", "guest", "guest_nice")
    return sum(getattr(after, part) - getattr(before, part) for part in after._fields if part not in idle)


def _paged() -> int:
    """Bytes that have gone to swap and come back, since boot."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("pswpin ", "pswpout "))) * PAGE_BYTES


def left_over() -> LeftOver:
    now_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S
    seen, marked, folders_in_use = _look(), set[int](), set[str]()
    unreadable = 0
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
    left = [
        pid
        for pid, process in seen.items()
        if process.state != "Z"
        and (now_ticks - process.start_ticks) / TICKS_PER_S > ENDING_S
        and ((pid in marked and _forsaken(pid, seen, marked)) or (_adopted(process) and RAY_FOLDER.search(_command(pid))))
    ]
    return LeftOver(
        processes=tuple(_described(pid, seen[pid], created_s=_created_s(seen[pid], now_ticks)) for pid in sorted(left)),
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


def _created_s(process: Seen, now_ticks: float) -> float:
    return time.time() - (now_ticks - process.start_ticks) / TICKS_PER_S


def _ray_folders() -> list[Path]:
    """Those of this user that are not being made or removed at this moment."""
    folders: list[Path] = []
    for path in {Path(temporary_files()), Path("/tmp")}:
        for folder in path.glob("chaosrun-ray-*"):
            try:
                about = folder.stat()
                if os.geteuid() in (0, about.st_uid) and time.time() - about.st_mtime > ENDING_S:
                    folders.append(folder)
            except OSError:
                continue
    return sorted(folders)


def _unused_shared_memory() -> dict[str, int]:
    """Names and bytes of entries in /dev/shm that nobody uses any more."""
    sizes: dict[str, int] = {}
    for name in unused_shared_memory(shared_memory_entries()):
        try:
            about = (SHARED_MEMORY / name).stat(follow_symlinks=False)
        except OSError:
            continue
        if time.time() - about.st_mtime > ENDING_S:
            sizes[name] = about.st_blocks * 512
    return sizes
