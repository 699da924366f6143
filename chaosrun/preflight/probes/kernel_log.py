"""What the kernel has said since boot of GPUs, disks and memory that fail, where this process may read it.

Source of the record format: the kernel's Documentation/ABI/testing/dev-kmsg; of Xid: NVIDIA's "XID Errors".
"""

import os
import re
import time

from msgspec import Struct

LONGEST_S = 0.5
RECORD_BYTES = 8192
MOST = 20
"""Of each kind, the last."""
KINDS = {
    "gpu": re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<code>\d+)"),
    "disk": re.compile(
        r"I/O error,? (?:on )?dev(?:ice)? (?P<block>[\w-]+)"
        r"|(?:EXT4-fs|BTRFS|F2FS-fs) (?:error|critical) \(device (?P<mounted>[\w-]+)"
        r"|XFS \((?P<xfs>[\w-]+)\): .*(?:error|corrupt|shut)"
        r"|(?P<controller>nvme\d+)(?:n\d+)?: (?:I/O .*timeout|controller is down)"
        r"|nfs: server (?P<server>\S+) not responding",
        re.IGNORECASE,
    ),
    "out of memory": re.compile(r"out of memory: Killed process \d+ \((?P<name>[^)]*)\)", re.IGNORECASE),
    "hardware": re.compile(r"\[Hardware Error\]|EDAC .*\bUE\b|Uncorrected hardware memory error", re.IGNORECASE),
}


class Message(Struct, frozen=True, kw_only=True):
    kind: str
    """One of KINDS."""
    device: str
    code: int | None
    """An Xid."""
    age_s: float
    text: str


class KernelLog(Struct, frozen=True, kw_only=True):
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
    kept = tuple(message for kind in KINDS for message in [one for one in found if one.kind == kind][-MOST:])
    return KernelLog(messages=kept, truncated=truncated)


def told_by(record: str, now_s: float) -> Message | None:
    """A record of /dev/kmsg, "priority,number,microseconds since boot,…;text"; None when it is about nothing of ours."""
    about, _, text = record.partition(";")
    text = text.partition("\n")[0]
    if int(about.split(",")[0]) >> 3:
        return None  # a program wrote it there, not the kernel
    age_s = max(0.0, now_s - int(about.split(",")[2]) / 1e6)
    for kind, pattern in KINDS.items():
        if match := pattern.search(text):
            groups = match.groupdict()
            code = groups.pop("code", None)
            device = next(filter(None, groups.values()), "")
            return Message(kind=kind, device=device, code=int(code) if code else None, age_s=age_s, text=text[:200])
    return None
