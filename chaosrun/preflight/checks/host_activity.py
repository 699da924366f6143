"""Does somebody else use the machine, does anything wait for ever, and what have earlier runs left? Pure."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from shlex import join

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.host_rows import row
from chaosrun.preflight.model import Finding, Status
from chaosrun.preflight.probes.busy import Busy, LeftOver, Process
from chaosrun.preflight.probes.host import HostFacts
from chaosrun.wording import count, listed, size

OTHERS_SHARE, LEAST_OTHERS = 0.25, 0.75
"""Of the CPUs, and in cores: less is a desktop, or a service that woke up."""
LARGE_SHARE = 0.25
LOAD_PER_CPU = 2.0
MANY_ZOMBIES = 100
NAMED = 3
HIDDEN = "/proc shows no processes of other users here (hidepid)"


def activity(node: Node, facts: HostFacts, usable: float) -> Iterator[Finding]:
    busy = facts.busy
    found = [
        _load(node, busy.load, facts.cpus.machine),
        _others(node, busy, usable, facts.memory.total),
    ]
    of_all = [_waiting(node, busy.waiting), _zombies(node, busy.zombies), *_left_over(node, facts.left_over)]
    for finding in of_all:
        # That nothing was found among a part of them shows nothing.
        unseen = busy.hidden and finding.status is Status.PASS
        found.append(row(node, finding.name, Status.SKIP, reason=HIDDEN) if unseen else finding)
    yield from found


def _load(node: Node, load: float, machine: int) -> Finding:
    """The kernel counts the whole machine's, also within a container."""
    return row(
        node,
        "load",
        Status.WARN if load > LOAD_PER_CPU * machine else Status.PASS,
        measured=f"{load:.1f} on {machine} CPUs",
        threshold=f"at most {LOAD_PER_CPU * machine:g}",
        reason="as many processes have been waiting for a CPU or a disk over the last minute",
        remedy="see with `top` what it is, and end it or wait",
    )


def _others(node: Node, busy: Busy, usable: float, total: int) -> Finding:
    # Within a container other containers' processes cannot be seen, but the time that they take.
    cores = max(busy.others, busy.cores - busy.ours, 0.0)
    most = max(OTHERS_SHARE * usable, LEAST_OTHERS)
    large = [process for process in busy.large if process.rss > LARGE_SHARE * total]
    named = [f"{process.name} (pid {process.pid}) {process.cores:.1f}" for process in busy.heavy[:NAMED]]
    named += [f"{process.name} (pid {process.pid}) {size(process.rss)}" for process in large]
    bad = cores > most or bool(large)
    unseen = " by processes that cannot be seen from here" if busy.others < cores / 2 else ""
    who = (f": {', '.join(named)}" if named else unseen) if bad else ""
    return row(
        node,
        "other processes",
        Status.WARN if bad else Status.PASS,
        measured=f"{cores:.1f} CPUs{who}",
        threshold=f"at most {most:.2g} CPUs, none with more than {LARGE_SHARE:.0%} of the memory",
        reason="they slow this node down, and with it every rank",
        remedy="end them, or wait for them to end",
    )


def _waiting(node: Node, waiting: Sequence[Process]) -> Finding:
    return row(
        node,
        "processes in the kernel",
        Status.WARN if waiting else Status.PASS,
        measured=_named(waiting) + " wait for a device" if waiting else "none waits for a device",
        threshold="none that cannot be killed",
        reason="a disk, a network file system or a GPU does not answer, or is slow",
        remedy="look at the kernel's messages (`dmesg`) and at the mounts; such a process ends only when the device answers",
    )


def _zombies(node: Node, count: int) -> Finding:
    return row(
        node,
        "zombies",
        Status.WARN if count >= MANY_ZOMBIES else Status.PASS,
        measured=str(count),
        threshold=f"at most {MANY_ZOMBIES - 1}",
        reason="their parent never waits for them; each takes a process number",
        remedy="restart their parent; give a container an init (`docker run --init`)",
    )


def _left_over(node: Node, facts: LeftOver) -> Iterator[Finding]:
    name = "left over of earlier runs"
    processes, folders, entries = facts.processes, facts.folders, facts.shared_memory
    if not (processes or folders or entries):
        unread = facts.unreadable
        others = f"; {unread} processes of other users could not be looked into" if unread else ""
        yield row(node, name, Status.PASS, measured=f"nothing{others}", threshold="nothing")
    if processes:
        yield row(
            node,
            name,
            Status.WARN,
            measured=_named(processes, dated=True),
            threshold="no process whose supervisor is gone",
            reason="it may hold memory, a GPU or a port",
            remedy=join(["kill", "-9", *(str(process.pid) for process in processes)]),
        )
    if folders:
        yield row(
            node,
            name,
            Status.WARN,
            measured=f"{count(len(folders), 'folder')} of a Ray that is gone: {listed(folders, NAMED)}",
            threshold="none",
            reason="they take room on the disk for temporary files",
            remedy=join(["rm", "-r", "--", *folders]),
        )
    if entries:
        paths = [f"/dev/shm/{entry}" for entry in sorted(entries)]
        yield row(
            node,
            name,
            Status.WARN,
            measured=f"{len(entries)} in /dev/shm, {size(sum(entries.values()))}: {listed(sorted(entries), NAMED)}",
            threshold="none that no process here uses",
            reason="they take memory",
            remedy="unless a container uses the same /dev/shm: " + join(["rm", "--", *paths]),
        )


def _named(processes: Sequence[Process], *, dated: bool = False) -> str:
    told = [f"{process.name} (pid {process.pid}{_since(process.created_s) if dated else ''})" for process in processes]
    return listed(told, NAMED)


def _since(created_s: float) -> str:
    return f", since {datetime.fromtimestamp(created_s, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"
