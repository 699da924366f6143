"""The check "host": does a node's machine have the resources that training needs, and is it healthy? Pure. Before the job has
run, only a lower bound of its needs is known; less than that is a FAIL, slightly more a WARN.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.model import Answers, Check, Finding, Measure, Rows, Setting, Status, ask, graded
from chaosrun.preflight.placement import workers_on
from chaosrun.preflight.probes.host import Busy, Cpus, DirectoryFacts, HostFacts, KernelLog, Limits, Memory, Process
from chaosrun.records.grouping import grouped
from chaosrun.records.order import ASYNC_FROM_BYTES
from chaosrun.wording import GIB, MIB, ago, count, listed, size

ROWS = Rows(check="host")
LIMIT_S = 15.0

LEAST_WORKER_BYTES = 256 * MIB
"""Python, torch and accelerate alone, measured: 0.2 GiB."""
SMALL_WORKER_BYTES = GIB
RAY_KILLS_ABOVE = 0.95
"""Ray's memory_usage_threshold: it kills processes on a node that uses more of its memory."""
HALF = 0.5
PEERS_WARN = 0.9

ROOM = {"storage": (256 * MIB, 2 * GIB), "runs": (256 * MIB, 2 * GIB)}
"""FAIL and WARN below so many bytes: small checkpoints, traces, logs. The storage check sees whether the job's fit."""
ROOM_ELSEWHERE = (32 * MIB, 512 * MIB)
"""Sockets, logs, a compiler's temporary files."""
SHM_FAIL_BYTES = MIB
"""A lock that processes share takes a page there, a batch of text 128 KiB."""
SHM_WARN_BYTES = 64 * MIB
"""What Docker gives unless it is told otherwise; torch's own README calls it too little for loader workers."""

FILES_OF_A_WORKER = 256
"""Measured: 21 with torch and Gloo. Loader workers take one more for every tensor that is on its way from them."""
FILES_PER_RANK = 4
"""Gloo connects every rank with every other one, in each process group."""
FEW_FILES = 1024
"""What Linux gives unless it is told otherwise."""
THREADS_OF_A_WORKER = 32
"""Measured: 7 with torch and Gloo, of one compute thread. Loader workers and what a script starts come on top."""
OTHERS_SHARE, LEAST_OTHERS = 0.25, 0.75
"""Load of other processes that counts, as a share of the CPUs and in cores: less is a desktop or a background service."""
NAMED = 3

RECENT_S = 86400.0
"""Kernel messages older than a day do not count: the cause has been repaired, or does no harm."""
OF_PROGRAMS = frozenset({8, 13, 31, 32, 43, 45, 68, 69})
"""Xids that a faulty or killed program causes. Source: NVIDIA's Xid catalog."""
MESSAGES = {
    "gpu": (
        "of a GPU",
        "it may have been reset since, or be another container's: whether this node's GPUs work, the check devices tells",
        "if it does not work: reset the GPU (`nvidia-smi --gpu-reset`) or reboot; if that does not help, have it replaced",
    ),
    "disk": ("of a disk", "", "look at the disk (`smartctl -a`) or the server behind it, and check the file system"),
    "out of memory": ("of memory", "", "see what used the memory, and lower workers or raise the limit"),
    "hardware": ("of the machine", "", "look at the machine's event log (`ipmitool sel list`, `mcelog`)"),
}
"""Of each kind: its name, why it is no FAIL, what to do."""


def call(setting: Setting, node: Node) -> Call:
    places = {"storage": setting.storage}
    if not setting.storage.is_relative_to(setting.root):
        places["runs"] = setting.root
    return ask("host", LIMIT_S, places={purpose: str(path) for purpose, path in places.items()})


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[HostFacts]) -> Iterator[Finding]:
    best = max((_share(facts.cpus, node) for node in nodes if (facts := told.answered.get(node.name))), default=1.0)
    for node in nodes:
        if (facts := told.answered.get(node.name)) is None:
            continue  # the engine reports why
        row = ROWS.of(node=node.name)
        workers = max(1, workers_on(setting, node, nodes))
        world = workers if setting.job is None else setting.job.spec.workers
        yield _cpus(row.of(name="CPUs"), node, facts.cpus, best)
        yield _memory(row.of(name="memory"), facts.memory, workers)
        yield from _copy(row.of(name="memory for a copy of the state"), facts.memory, workers, setting)
        for purpose, place in facts.places.items():
            yield from _place(row, purpose, place)
        yield _shared_memory(row.of(name="/dev/shm", device="/dev/shm"), facts.shared_memory, several_gpus=node.gpus > 1)
        yield from _limits(row, facts.limits, workers, world)
        yield _others(row.of(name="other processes"), facts.busy, facts.cpus.usable)
        yield _left(row.of(name="left over of earlier runs"), facts.left_over, facts.busy.hidden)
        yield from _kernel_log(row, facts.kernel_log)


def _enough(row: Rows, value: int | None, limits: tuple[float, float], show: Callable[[Any], str], **words: Any) -> Finding:
    """A FAIL below the first limit, a WARN below the second; None: there is no limit."""
    status = graded(value, *limits)
    words = {"measured": "no limit" if value is None else show(value), **words}
    return row.judged(status, threshold=f"at least {show(limits[status is not Status.FAIL])}", **words)


def _share(cpus: Cpus, node: Node) -> float:
    """The share of the CPUs counted by Ray that processes can really use."""
    return min(1.0, cpus.usable / node.cpus) if node.cpus else 1.0


def _cpus(row: Rows, node: Node, cpus: Cpus, best: float) -> Finding:
    """A finding on usable CPUs, as all ranks wait for the slowest: a node that can use a far smaller share than another. If all
    nodes have equally little, as in containers that appear large, the job trains, but slowly."""
    share = _share(cpus, node)
    limited = f" (limited by {cpus.limited_by})" if cpus.limited_by else ""
    return row.judged(
        Status.PASS if share >= 1 else Status.FAIL if share <= HALF * best else Status.WARN,
        f"{cpus.usable:g} of the machine's {cpus.machine} can be used{limited}",
        f"at least {node.cpus:g}, as Ray counts",
        "give the container or the service more CPUs, or start Ray there with a --num-cpus that is true",
        reason="workers share CPUs, and every rank waits for the slowest",
        measure=Measure(number=cpus.usable, unit="CPUs", better="higher", warn=PEERS_WARN),
    )


def _memory(row: Rows, memory: Memory, workers: int) -> Finding:
    kept = (1 - RAY_KILLS_ABOVE) * memory.total
    return _enough(
        row,
        memory.available,
        (workers * LEAST_WORKER_BYTES + kept, workers * SMALL_WORKER_BYTES + kept),
        size,
        measured=f"{size(memory.available)} of {size(memory.total)} free{' (control group)' if memory.limited else ''}",
        reason=f"{count(workers, 'worker')} of {size(SMALL_WORKER_BYTES)} and {size(kept)} that Ray keeps free: it kills "
        f"processes above {RAY_KILLS_ABOVE:.0%}",
        remedy="end what else uses memory there, or raise the container's limit",
        measure=Measure(number=memory.total / GIB, unit="GiB", better="higher", warn=PEERS_WARN),
    )


def _copy(row: Rows, memory: Memory, workers: int, setting: Setting) -> Iterator[Finding]:
    """Memory for the copies of asynchronous saves, if the job would save asynchronously given an earlier run's state size."""
    last, mode = setting.last_run, setting.job.spec.checkpoint.mode if setting.job else "sync"
    if last is None or last.bytes is None or mode == "sync" or (mode == "auto" and last.bytes < ASYNC_FROM_BYTES):
        return
    need = (workers + 1) * last.bytes + (1 - RAY_KILLS_ABOVE) * memory.total
    yield row.judged(
        Status.PASS if memory.available >= need else Status.WARN,
        f"{size(memory.available)} free",
        f"at least {size(need)}: {size(last.bytes)} of state, as in {last.run}, for each worker and for its copy",
        "raise the container's limit, or use fewer workers a node",
        reason="where a copy does not fit, the training waits until each checkpoint is written (checkpoint.mode: sync)",
    )


def _place(row: Rows, purpose: str, place: DirectoryFacts) -> Iterator[Finding]:
    row = row.of(name=f"room for {purpose}", device=place.path)
    if place.error:
        yield row.error(place.error, "look at the mount, or choose another directory")
        return
    if place.read_only or not place.writable:
        why = "is mounted read-only" if place.read_only else "may not be written to by this user"
        remedy = "remount it, or give this user write permission; or choose another directory"
        yield row.fail(f"{place.there} {why}", "can be written to", remedy)
        return
    elsewhere = "or set TMPDIR, and Ray's --temp-dir, to a larger disk"
    if purpose in ROOM:
        elsewhere = "for example with `chaosrun clean`, or choose another directory"
    yield _enough(
        row,
        place.free,
        ROOM.get(purpose, ROOM_ELSEWHERE),
        size,
        measured=f"{size(place.free)} of {size(place.total)} free",
        remedy=f"make room below {place.there}, {elsewhere}",
    )


def _shared_memory(row: Rows, shm: DirectoryFacts, *, several_gpus: bool) -> Finding:
    """NCCL, loader workers and locks between processes need it; whether the job uses the latter two is not known."""
    if shm.error:
        status = Status.FAIL if several_gpus else Status.WARN
        reason = "loader workers and locks between processes need it"
        return row.judged(status, shm.error, "a directory in memory", "mount a tmpfs at /dev/shm", reason=reason)
    status = graded(shm.free, SHM_FAIL_BYTES, SHM_WARN_BYTES + 1)
    return row.judged(
        status,
        f"{size(shm.free)} of {size(shm.total)} free",
        f"at least {size(SHM_FAIL_BYTES)}" if status is Status.FAIL else f"more than {size(SHM_WARN_BYTES)}",
        "start the container with a larger --shm-size (Kubernetes: an emptyDir of medium Memory), or remove what lies "
        "there; or use fewer loader workers",
        reason="a DataLoader with workers, or NCCL, dies of a bus error where it is full",
    )


def _limits(row: Rows, limits: Limits, workers: int, world: int) -> Iterator[Finding]:
    least = FILES_OF_A_WORKER + FILES_PER_RANK * world
    yield _enough(
        row.of(name="open files"),
        limits.open_files,
        (least, max(FEW_FILES, least)),
        str,
        reason=f"files, and connections to the other ranks, of a job with {count(world, 'worker')}",
        remedy="raise it where Ray is started: `ulimit -n 65536`, LimitNOFILE= of a service, --ulimit nofile=65536 of a "
        "container",
    )
    least = workers * THREADS_OF_A_WORKER
    yield _enough(
        row.of(name="processes and threads"),
        limits.process_room,
        (least, 2 * least),
        str,
        reason=f"so many more can be started, for {count(workers, 'worker')} and what they start",
        remedy="raise it: `ulimit -u`, TasksMax= of a service, --pids-limit of a container; or end what is left over",
    )


def _others(row: Rows, busy: Busy, usable: float) -> Finding:
    # Other containers' processes are not visible in a container, but the time they take is.
    cores = max(busy.others, busy.cores - busy.ours, 0.0)
    most = max(OTHERS_SHARE * usable, LEAST_OTHERS)
    who = ""
    if cores > most:
        unseen = " by processes that cannot be seen from here" if busy.others < cores / 2 else ""
        named = [f"{process.name} (pid {process.pid}) {process.cores:.1f}" for process in busy.heavy[:NAMED]]
        who = f": {', '.join(named)}" if named else unseen
    return row.judged(
        Status.WARN if cores > most else Status.PASS,
        f"{cores:.1f} CPUs{who}",
        f"at most {most:.2g} CPUs",
        "end them, or wait for them to end",
        reason="they slow this node down, and with it every rank",
    )


def _left(row: Rows, left: Sequence[Process], hidden: bool) -> Finding:
    if left:
        since = [datetime.fromtimestamp(each.created_s, tz=UTC).strftime(", since %Y-%m-%d %H:%M:%S UTC") for each in left]
        named = [f"{each.name} (pid {each.pid}{when * (each.created_s > 0)})" for each, when in zip(left, since, strict=True)]
        remedy, why = f"kill -9 {' '.join(str(each.pid) for each in left)}", "it may hold memory, a GPU or a port"
        return row.warn(listed(named, NAMED), "no process whose supervisor is gone", remedy, reason=why)
    if hidden:
        return row.skip("/proc shows no processes of other users here (hidepid)")
    return row.passed("nothing", "nothing", reason="of the processes that this user may look into")


def _kernel_log(row: Rows, log: KernelLog) -> Iterator[Finding]:
    name, limit = "kernel's messages", "none within a day"
    told = [message for message in log.messages if message.code not in OF_PROGRAMS]
    recent = [message for message in told if message.age_s <= RECENT_S]
    groups = grouped(recent, lambda each: (each.kind, each.device if each.kind in ("gpu", "disk") else ""))
    if log.error:
        yield row.skip(f"the kernel's messages cannot be read here: {log.error}", name=name)
    elif not groups:
        old = f", {len(told)} older ones" if told else ""
        yield row.passed(f"no error of a GPU, a disk or the memory{old}", limit, name=name)
    for (kind, device), messages in groups.items():
        what, reason, remedy = MESSAGES[kind]
        last = min(messages, key=lambda message: message.age_s)
        codes = Counter(message.code for message in messages if message.code is not None)
        xids = "Xid " + ", ".join(f"{code} × {count}" for code, count in sorted(codes.items())) + ": " if codes else ""
        # The check "devices" says more about GPUs, the checks of storage about disks.
        yield row.warn(
            f"{xids}{len(messages)}, the last {ago(last.age_s)}: {last.text}",
            limit,
            remedy,
            reason=reason,
            name=f"{name} {what}",
            device=device or None,
        )


CHECK = Check(
    name="host", about="memory, processors, disks, limits, what else runs", order=20, judge=judge, call=call, facts=HostFacts
)
