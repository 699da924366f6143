"""Other processes on a node: those that use its CPUs, and those left over from earlier runs.

Reads every process twice, some tenths of a second apart.
"""

import os
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

import psutil
from msgspec import Struct

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


class Seen(Struct, frozen=True, kw_only=True):
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


def _look() -> dict[int, Seen]:
    """All processes except zombies and kernel threads."""
    found: dict[int, Seen] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            seen = Seen(
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


def _is_ours(pid: int, seen: Mapping[int, Seen]) -> bool:
    """Whether it, or an ancestor, belongs to a preflight, on any node of this machine."""
    while pid in seen:
        if OURS.search(seen[pid].command):
            return True
        pid = seen[pid].parent
    return False


def _process(pid: int, seen: Seen, cores: float = 0.0, created_s: float = 0.0) -> Process:
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


def _forsaken(pid: int, seen: Mapping[int, Seen], marked: Collection[int]) -> bool:
    """Whether the topmost marked process above it has lost the parent that held it."""
    while seen[pid].parent in marked:
        pid = seen[pid].parent
    return pid in marked and (_adopted(seen[pid], seen) or not HOLDERS.search(seen[pid].command))


def _adopted(process: Seen, seen: Mapping[int, Seen]) -> bool:
    return process.parent in (0, 1) or (process.parent in seen and seen[process.parent].name in ADOPTERS)
