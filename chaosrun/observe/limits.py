"""A container's resource limits: those of this process's control groups, of either version.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page."""


def cpu_limit(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Cores that may be used; None without a limit."""
    found = []
    for folder in _folders("cpu", mount, membership):
        quota, _, period = read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that may be used; None without a limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (read(folder / name) for folder in _folders("memory", mount, membership) for name in names)
    return min((int(text) for text in texts if text.isdecimal() and int(text) < NO_LIMIT_BYTES), default=None)


def memory_room(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that may still be taken; None without a limit. Cached files, even those in use, count as free, as they can be
    evicted."""
    rooms: list[int] = []
    for folder in _folders("memory", mount, membership):
        for limit, usage, cached in (
            ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            most, used = read(folder / limit), read(folder / usage)
            if most.isdecimal() and used.isdecimal() and int(most) < NO_LIMIT_BYTES:
                stat = dict(line.split() for line in read(folder / "memory.stat").splitlines())
                rooms.append(int(most) - int(used) + sum(int(stat.get(name, 0)) for name in cached))
    return min(rooms, default=None)


def process_room(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Processes and threads that may still be started; None without a limit."""
    pairs = ((read(folder / "pids.max"), read(folder / "pids.current")) for folder in _folders("pids", mount, membership))
    return min((int(most) - int(used) for most, used in pairs if most.isdecimal() and used.isdecimal()), default=None)


def _folders(controller: str, mount: Path, membership: Path) -> Iterator[Path]:
    """This process's group for a controller, and all groups around it: the lowest of their limits counts."""
    for line in read(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = (
            mount
            if not controllers
            else next((mount / name for name in (controllers, controller) if (mount / name).is_dir()), mount)
        )
        group = top / path.strip("/")
        # In its own namespace a container sees its group as the top.
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def read(path: Path) -> str:
    """The text of a file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
