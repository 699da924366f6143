"""The check "host": has the machine under a node what training takes, and is it in order? Pure.

Of the job's need only a lower bound is known before it has run; what is below that is a FAIL, what is near it a WARN.
"""

from collections.abc import Sequence

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.host_activity import activity
from chaosrun.preflight.checks.host_kernel_log import kernel_log
from chaosrun.preflight.checks.host_limits import limits
from chaosrun.preflight.checks.host_places import places, shared_memory
from chaosrun.preflight.checks.host_rows import row
from chaosrun.preflight.model import Answers, Check, Finding, Level, Measure, Setting, Status, ask, graded
from chaosrun.preflight.placement import workers_on
from chaosrun.preflight.probes.host import HostFacts
from chaosrun.preflight.probes.room import Cpus, Memory
from chaosrun.wording import GIB, MIB, count, size

LIMIT_S = 15.0


def call(setting: Setting, node: Node) -> Call:
    places = {"storage": setting.storage}
    if not setting.storage.is_relative_to(setting.root):
        places["runs"] = setting.root
    return ask("host", LIMIT_S, places={purpose: str(path) for purpose, path in places.items()})


LEAST_WORKER_BYTES = 256 * MIB
"""Python, torch and accelerate alone, measured: 0.2 GiB."""
SMALL_WORKER_BYTES = GIB
RAY_KILLS_ABOVE = 0.95
"""Ray's memory_usage_threshold: it kills processes on a node that uses more of its memory."""
SWAP_SHARE = 0.25
PAGING_BYTES = 4 * MIB
HALF = 0.5
PEERS_WARN = 0.9


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[HostFacts]) -> list[Finding]:
    answered = told.answered
    found: list[Finding] = []
    shares = {node.name: _share(answered[node.name].cpus, node) for node in nodes if node.name in answered}
    for node in nodes:
        if node.name not in answered:
            continue  # the engine says why
        of_node = answered[node.name]
        workers = max(1, workers_on(setting, node, nodes))
        world = workers if setting.job is None else setting.job.spec.workers
        found += [
            _cpus(node, of_node.cpus, shares[node.name], max(shares.values())),
            _memory(node, of_node.memory, workers),
            _swap(node, of_node.memory, of_node.busy.paged_bytes),
            *places(node, of_node.places),
            shared_memory(setting, node, of_node.shared_memory, workers),
            *limits(node, of_node.limits, workers, world),
            *activity(node, of_node, usable_cpus(of_node.cpus)),
            *kernel_log(node, of_node.kernel_log, of_node.places),
        ]
    return found


def usable_cpus(cpus: Cpus) -> float:
    return min(cpus.usable, cpus.cgroup or cpus.usable)


def _share(cpus: Cpus, node: Node) -> float:
    """What there is of the CPUs that Ray counts on."""
    return min(1.0, usable_cpus(cpus) / node.cpus) if node.cpus else 1.0


def _cpus(node: Node, cpus: Cpus, share: float, best: float) -> Finding:
    """All ranks wait for the slowest: a node with far less of its CPUs than another one has. Where every node has as little,
    as in a container that is made to look large, the job trains, and slowly."""
    usable = usable_cpus(cpus)
    why = "control group" if cpus.cgroup is not None and cpus.cgroup <= cpus.usable else "affinity"
    limited = f" (limited by {why})" if usable < cpus.machine else ""
    return row(
        node,
        "CPUs",
        Status.PASS if share >= 1 else Status.FAIL if share <= HALF * best else Status.WARN,
        measured=f"{usable:g} of the machine's {cpus.machine} can be used{limited}",
        threshold=f"at least {node.cpus:g}, as Ray counts",
        reason="workers share CPUs, and every rank waits for the slowest",
        remedy="give the container or the service more CPUs, or start Ray there with a --num-cpus that is true",
        measure=Measure(number=usable, unit="CPUs", better="higher", warn=PEERS_WARN),
    )


def _memory(node: Node, memory: Memory, workers: int) -> Finding:
    limit, room = memory.cgroup_limit, memory.cgroup_room
    total = memory.total if limit is None else min(limit, memory.total)
    available = memory.available if room is None else min(room, memory.available)
    kept = (1 - RAY_KILLS_ABOVE) * total
    least, small = workers * LEAST_WORKER_BYTES + kept, workers * SMALL_WORKER_BYTES + kept
    status = graded(available, least, small)
    by_group = " (control group)" if limit is not None and limit <= total else ""
    return row(
        node,
        "memory",
        status,
        measured=f"{size(available)} of {size(total)} free{by_group}",
        threshold=f"at least {size(least if status is Status.FAIL else small)}",
        reason=f"{count(workers, 'worker')} of {size(SMALL_WORKER_BYTES)} and {size(kept)} that Ray keeps free: it kills "
        f"processes above {RAY_KILLS_ABOVE:.0%}",
        remedy="end what else uses memory there, or raise the container's limit",
        measure=Measure(number=total / GIB, unit="GiB", better="higher", warn=PEERS_WARN),
    )


def _swap(node: Node, memory: Memory, paged: int) -> Finding:
    used = memory.swap_used
    bad = used > SWAP_SHARE * memory.total or paged > PAGING_BYTES
    moving = f", {size(paged)} moved in a moment" if paged > PAGING_BYTES else ""
    return row(
        node,
        "swap",
        Status.WARN if bad else Status.PASS,
        measured=f"{size(used)} used{moving}" if memory.swap_total else "there is none",
        threshold=f"at most {size(SWAP_SHARE * memory.total)} used, nothing moving",
        reason="a rank whose pages are on the disk holds up all others",
        remedy="end what uses the memory; `swapoff -a && swapon -a` brings pages back",
    )


CHECK = Check(
    name="host",
    about="memory, processors, disks, limits, what else runs",
    order=20,
    level=Level.QUICK,
    judge=judge,
    call=call,
    facts=HostFacts,
)
