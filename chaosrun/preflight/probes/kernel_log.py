"""What the kernel has said since boot of GPUs, disks and memory that fail, where this process may read it.

Source of the record format: the kernel's Documentation/ABI/testing/dev-kmsg; of Xid: NVIDIA's "XID Errors".
"""

import os
import re
import time
from dataclasses import dataclass

LONGEST_S = 0.5
RECORD_BYTES = 8192
MOST = 20
"""Of each kind, the last."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
DISK = re.compile(
    r"I/O error,? (?:on )?dev(?:ice)? (?P<block>[\w-]+)"
    r"|(?:EXT4-fs|BTRFS|F2FS-fs) (?:error|critical) \(device (?P<mounted>[\w-]+)"
    r"|XFS \((?P<xfs>[\w-]+)\): .*(?:error|corrupt|shut)"
    r"|(?P<controller>nvme\d+)(?:n\d+)?: (?:I/O .*timeout|controller is down)"
    r"|nfs: server (?P<server>\S+) not responding",
    re.IGNORECASE,
)
OUT_OF_MEMORY = re.compile(r"out of memory: Killed process \d+ \((?P<name>[^)]*)\)", re.IGNORECASE)
HARDWARE = re.compile(r"\[Hardware Error\]|EDAC .*\bUE\b|Uncorrected hardware memory error", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    kind: str
    """gpu, disk, out of memory, hardware."""
    device: str
    code: int | None
    """An Xid."""
    age_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    messages: tuple[Message, ...] = ()
    truncated: bool = False
    """Whether there was no time for the newest."""
    error: str = ""


def kernel_log(path: str = "/dev/kmsg", longest_s: float = LONGEST_S) -> KernelLog:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return KernelLog(error=f"{path}: {error.strerror}")
    now_s, deadline = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic() + longest_s
    found: list[Message] = []
    truncated = True
    try:
        while time.monotonic() < deadline:
            try:
                record = os.read(descriptor, RECORD_BYTES)
            except BlockingIOError:
                truncated = False  # all read
                break
            except BrokenPipeError:
                continue  # overwritten meanwhile
            if told := told_by(record.decode(errors="replace"), now_s):
                found.append(told)
    except OSError as error:
        return KernelLog(error=f"{path}: {error.strerror}")
    finally:
        os.close(descriptor)
    by_kind: dict[str, list[Message]] = {}
    for message in found:
        by_kind.setdefault(message.kind, []).append(message)
    kept = tuple(message for messages in by_kind.values() for message in messages[-MOST:])
    return KernelLog(messages=kept, truncated=truncated)


def told_by(record: str, now_s: float) -> Message | None:
    """A record of /dev/kmsg, "priority,number,microseconds since boot,…;text"; None when it is about nothing of ours."""
    about, _, text = record.partition(";")
    text = text.partition("\n")[0]
    if int(about.split(",")[0]) >> 3:
        return None  # a program wrote it there, not the kernel
    age_s = max(0.0, now_s - int(about.split(",")[2]) / 1e6)

    def message(kind: str, device: str, code: int | None = None) -> Message:
        return Message(kind=kind, device=device, code=code, age_s=age_s, text=text[:200])

    if match := XID.search(text):
        return message("gpu", match["device"], int(match["code"]))
    if match := DISK.search(text):
        return message("disk", next(filter(None, match.groups()), ""))
    if match := OUT_OF_MEMORY.search(text):
        return message("out of memory", match["name"])
    if HARDWARE.search(text):
        return message("hardware", "")
    return None
