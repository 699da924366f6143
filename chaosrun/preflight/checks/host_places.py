"""Is there room on the disks, and in /dev/shm? Pure."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.host_rows import row
from chaosrun.preflight.model import Finding, Setting, Status, graded
from chaosrun.preflight.probes.room import Place, SharedMemory
from chaosrun.wording import GIB, MIB, size

ROOM = {"storage": (256 * MIB, 2 * GIB), "runs": (256 * MIB, 2 * GIB)}
"""FAIL and WARN below this many bytes: a small model's checkpoints, a run's traces and logs. Whether the job's own checkpoints
fit, the check of the storage knows."""
ROOM_ELSEWHERE = (32 * MIB, 512 * MIB)
"""Sockets, logs, a compiler's temporary files."""
INODES = (1_000, 20_000)
"""A run of a few hundred checkpoints makes some thousand files."""

SHM_FAIL_BYTES = MIB
"""A lock that processes share takes a page there, a batch of text 128 KiB."""
SHM_WARN_BYTES = 64 * MIB
"""What Docker gives unless it is told otherwise; torch's own README calls it too little for loader workers."""
BATCHES_AHEAD = 2
"""DataLoader's prefetch_factor: batches that a loader worker has ready, each in shared memory."""
BATCH_WARN_BYTES = 32 * MIB
"""A batch of 64 colour images of 224 × 224 has 37 MB as floats."""
LOADER_ARGUMENT = re.compile(r"--?[\w-]*workers(?:=(\d+))?")


def places(node: Node, facts: Mapping[str, Place]) -> Iterator[Finding]:
    for purpose, place in facts.items():
        name = f"room for {purpose}"
        if place.error:
            reason, remedy = place.error, "look at the mount, or choose another directory"
            yield row(node, name, Status.ERROR, device=place.path, reason=reason, remedy=remedy)
        elif place.read_only or not place.writable:
            why = "is mounted read-only" if place.read_only else "may not be written to by this user"
            remedy = (
                "remount it, or look at the kernel's messages for why it was"
                if place.read_only
                else "give this user write permission"
            )
            yield row(
                node,
                name,
                Status.FAIL,
                device=place.path,
                measured=f"{place.there} {why}",
                threshold="can be written to",
                remedy=f"{remedy}; or choose another directory",
            )
        else:
            yield from _room(node, name, purpose, place)


def _room(node: Node, name: str, purpose: str, place: Place) -> Iterator[Finding]:
    least, small = ROOM.get(purpose, ROOM_ELSEWHERE)
    free = place.free
    status = graded(free, least, small)
    yield row(
        node,
        name,
        status,
        device=place.path,
        measured=f"{size(free)} of {size(place.total)} free",
        threshold=f"at least {size(least if status is Status.FAIL else small)}",
        remedy=_make_room(purpose, place.there),
    )
    status = graded(place.inodes_free, *INODES)
    # Only where they are short: some file systems count none, and elsewhere bytes run out first.
    if place.inodes and status is not Status.PASS:
        yield row(
            node,
            f"{name}, files",
            status,
            device=place.path,
            measured=f"{place.inodes_free} of {place.inodes} inodes free",
            threshold=f"at least {INODES[0] if status is Status.FAIL else INODES[1]}",
            remedy=f"remove files below {place.there}; `df -i` shows which file system is full of them",
        )


def _make_room(purpose: str, there: str) -> str:
    if purpose in ROOM:
        return f"make room below {there} (`chaosrun clean` removes old runs), or choose another directory"
    return f"make room below {there}, or set TMPDIR, and Ray's --temp-dir, to a larger disk"


def shared_memory(setting: Setting, node: Node, shm: SharedMemory, workers: int) -> Finding:
    """Batches in flight are what fills it: every loader worker of every rank keeps some there."""
    loaders = _loader_workers(setting, node)
    used = bool(loaders) or node.gpus > 1
    if shm.error:
        return row(
            node,
            "/dev/shm",
            Status.FAIL if used else Status.WARN,
            device="/dev/shm",
            measured=shm.error,
            threshold="a directory in memory",
            reason="loader workers and locks between processes need it",
            remedy="mount a tmpfs at /dev/shm",
        )
    may_use = used or loaders is None
    batches = workers * (loaders or 0) * BATCHES_AHEAD
    # Docker's own size is too little; a job that is known to put nothing there needs nothing there.
    small = max(SHM_WARN_BYTES + 1, batches * BATCH_WARN_BYTES) if may_use else SHM_FAIL_BYTES
    status = graded(shm.free, SHM_FAIL_BYTES if may_use else 0, small)
    need = f" for {batches} batches that loader workers keep ready" if batches else ""
    return row(
        node,
        "/dev/shm",
        status,
        device="/dev/shm",
        measured=f"{size(shm.free)} of {size(shm.total)} free",
        threshold=f"at least {size(SHM_FAIL_BYTES)}" if status is Status.FAIL else f"more than {size(small - 1)}{need}",
        reason="a DataLoader with workers, or NCCL, dies of a bus error where it is full",
        remedy="start the container with a larger --shm-size (Kubernetes: an emptyDir of medium Memory), or remove what "
        "lies there; or use fewer loader workers",
    )


def _loader_workers(setting: Setting, node: Node) -> int | None:
    """What the script says as a number (the check "cluster" has read it), else what an argument such as --num-workers says;
    None: unknown."""
    if setting.job is None:
        return None
    script = setting.earlier.get("cluster", {}).get("answered", {}).get(node.name, {}).get("script") or {}
    if (in_script := script.get("loader_workers")) is not None:
        return in_script
    for word, following in pairwise([*setting.job.spec.args, ""]):
        if match := LOADER_ARGUMENT.fullmatch(str(word)):
            number = match[1] or str(following)
            return int(number) if number.isdecimal() else None
    return None
