"""Do the limits of processes let the job's workers live? Pure."""

from collections.abc import Iterator

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.host_rows import row
from chaosrun.preflight.model import Finding, Status, graded
from chaosrun.preflight.probes.room import Limits
from chaosrun.wording import MIB, count, size

FILES_OF_A_WORKER = 256
"""Measured: 21 with torch and Gloo. Loader workers take one more for every tensor that is on its way from them."""
FILES_PER_RANK = 4
"""Gloo connects every rank with every other one, in each process group."""
FEW_FILES = 1024
"""What Linux gives unless it is told otherwise."""
THREADS_OF_A_WORKER = 32
"""Measured: 7 with torch and Gloo, of one compute thread. Loader workers and what a script starts come on top."""
SMALL_LOCKED_BYTES = 64 * MIB


def limits(node: Node, facts: Limits, workers: int, world: int) -> Iterator[Finding]:
    yield _open_files(node, facts.open_files, world)
    yield _processes(node, facts, workers)
    yield _locked_memory(node, facts)


def _open_files(node: Node, limit: int | None, world: int) -> Finding:
    least = FILES_OF_A_WORKER + FILES_PER_RANK * world
    small = max(FEW_FILES, least)
    status = graded(limit, least, small)
    return row(
        node,
        "open files",
        status,
        measured="no limit" if limit is None else f"{limit} in a process",
        threshold=f"at least {least if status is Status.FAIL else small}",
        reason=f"files, and connections to the other ranks, of a job with {count(world, 'worker')}",
        remedy="raise it where Ray is started: `ulimit -n 65536`, LimitNOFILE= of a service, --ulimit nofile=65536 of a "
        "container",
    )


def _processes(node: Node, facts: Limits, workers: int) -> Finding:
    of_user = None if facts.processes is None else facts.processes - facts.threads_of_user
    room = min((room for room in (of_user, facts.cgroup_room) if room is not None), default=None)
    least = workers * THREADS_OF_A_WORKER
    small = 2 * least
    status = graded(room, least, small)
    limit = " (control group)" if room == facts.cgroup_room else f" (of {facts.processes})"
    return row(
        node,
        "processes and threads",
        status,
        measured="no limit" if room is None else f"{room} more can be started{limit}",
        threshold=f"at least {least if status is Status.FAIL else small}",
        reason=f"for {count(workers, 'worker')} and what they start",
        remedy="raise it: `ulimit -u`, TasksMax= of a service, --pids-limit of a container; or end what is left over",
    )


def _locked_memory(node: Node, facts: Limits) -> Finding:
    name = "locked memory"
    if not facts.infiniband or not node.gpus:
        why = "no InfiniBand or RoCE here for GPUs to talk over" if node.gpus else "no GPU: it matters to those on InfiniBand"
        return row(node, name, Status.SKIP, reason=why)
    limit = facts.locked_memory
    return row(
        node,
        name,
        graded(limit, 0, SMALL_LOCKED_BYTES),
        measured="no limit" if limit is None else size(limit),
        threshold=f"at least {size(SMALL_LOCKED_BYTES)}, better no limit",
        reason=f"NCCL cannot register its buffers with {', '.join(facts.infiniband)}",
        remedy="raise it where Ray is started: `ulimit -l unlimited`, LimitMEMLOCK=infinity, --ulimit memlock=-1",
    )
