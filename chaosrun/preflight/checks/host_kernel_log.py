"""Does the kernel complain of a GPU, a disk or the memory? Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Rows, Status
from chaosrun.preflight.probes.kernel_log import KernelLog, Message
from chaosrun.preflight.probes.room import Place
from chaosrun.wording import ago

ROWS = Rows(check="host")

NAME = "kernel's messages"
RECENT_S = 86400.0
"""Older than a day, and still up: somebody has seen to it, or it does no harm."""
OF_PROGRAMS = frozenset({8, 13, 31, 32, 43, 45, 68, 69})
"""Xids that a faulty or killed program causes. Source: NVIDIA's Xid catalog."""
DOES = {
    "gpu": "if it does not work: reset the GPU (`nvidia-smi --gpu-reset`) or reboot; if that does not help, have it replaced",
    "disk": "look at the disk (`smartctl -a`) or the server behind it, and check the file system",
    "out of memory": "see what used the memory, and lower workers or raise the limit",
    "hardware": "look at the machine's event log (`ipmitool sel list`, `mcelog`)",
}
WHY = {"gpu": "it may have been reset since, or be another container's: whether this node's GPUs work, the check devices tells"}
TOLD = {"gpu": "of a GPU", "disk": "of a disk", "out of memory": "of memory", "hardware": "of the machine"}


def kernel_log(node: Node, facts: KernelLog, places: Mapping[str, Place]) -> Iterator[Finding]:
    if facts.error:
        why = f"the kernel's messages cannot be read here: {facts.error}"
        yield ROWS.skip(why, name=NAME, node=node.name)
        return
    told = [message for message in facts.messages if message.code not in OF_PROGRAMS]
    recent = [message for message in told if message.age_s <= RECENT_S]
    if not recent and facts.truncated:
        why = "there are more of the kernel's messages than could be read in time; none of those that were read is of interest"
        yield ROWS.skip(why, name=NAME, node=node.name)
        return
    if not recent:
        old = f", {len(told)} older ones" if told else ""
        yield ROWS.passed(f"no error of a GPU, a disk or the memory{old}", "none within a day", name=NAME, node=node.name)
        return
    disks = {name for place in places.values() for name in place.block_devices}
    for (kind, device), messages in _grouped(recent).items():
        broken = [message for message in messages if _is_broken(message, disks)]
        last = min(broken or messages, key=lambda message: message.age_s)
        codes = Counter(message.code for message in messages if message.code is not None)
        xids = "Xid " + ", ".join(f"{code} × {count}" for code, count in sorted(codes.items())) + ": " if codes else ""
        yield ROWS.row(
            Status.FAIL if broken else Status.WARN,
            f"{xids}{len(messages)}, the last {ago(last.age_s)}: {last.text}",
            "none within a day",
            name=f"{NAME} {TOLD[kind]}",
            node=node.name,
            device=device or None,
            reason=WHY.get(kind, ""),
            remedy=DOES[kind],
        )


def _grouped(messages: Sequence[Message]) -> dict[tuple[str, str], list[Message]]:
    found: dict[tuple[str, str], list[Message]] = {}
    for message in messages:
        device = message.device if message.kind in ("gpu", "disk") else ""
        found.setdefault((message.kind, device), []).append(message)
    return found


def _is_broken(message: Message, disks: set[str]) -> bool:
    """A disk that the preflight's own files are on. Of a GPU its driver and what it computes tell more."""
    device = message.device
    # The kernel speaks of an NVMe disk, nvme0n1, also by its controller.
    own = device in disks or (device.startswith("nvme") and any(disk.startswith(f"{device}n") for disk in disks))
    return message.kind == "disk" and own
