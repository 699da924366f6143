"""Parses the output of `nvidia-smi -q -x` into plain values. Pure: starts no process.

The report's elements differ between drivers: changed names are looked up under each, and values that a driver or a GPU does not
have are None.
"""

import re
from collections.abc import Sequence
from typing import Literal
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from msgspec import Struct

_NOTHING = re.compile(r"n/?a|\[n/a\]|not supported|none|-|requested functionality has been deprecated", re.IGNORECASE)
_LOST = re.compile(r"gpu is lost|gpu requires reset", re.IGNORECASE)
_REASON = re.compile(r"clocks_(?:event|throttle)_reason_(.+)")


class GpuProcess(Struct, frozen=True, kw_only=True):
    pid: int
    type: str | None
    name: str
    mib: int | None


class Gpu(Struct, frozen=True, kw_only=True):
    bus: str
    uuid: str | None
    model: str | None
    lost: str | None
    recovery: str | None
    """The driver's recommended action."""
    ecc: str | None
    """Its mode."""
    uncorrectable: int | None
    """Errors that ECC could not correct since the driver was loaded."""
    threshold_exceeded: bool
    unrepairable: bool
    remapped: int
    remapping_pending: bool | None
    """Whether more rows wait for a reset; None: this GPU does not remap rows."""
    remapping_failed: bool
    throttling: tuple[str, ...] | None
    """Reasons for lowered clocks, as named by the driver; None: not reported."""
    mig: str | None
    """Its mode."""
    instances: int
    total_mib: int | None
    free_mib: int | None
    processes: tuple[GpuProcess, ...]


class Driver(Struct, frozen=True, kw_only=True):
    told: Literal["all", "absent", "silent", "nothing"]
    """absent: there is no nvidia-smi; silent: it gave no answer in time."""
    error: str = ""
    """Why the report is incomplete."""
    version: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    """In the driver's order."""


def parse(report: str) -> Driver:
    """Raises ValueError for anything but a report."""
    try:
        root = ElementTree.fromstring(report)
    except ElementTree.ParseError as error:
        raise ValueError(" ".join(report.split())[:200] or "nothing") from error
    if root.tag != "nvidia_smi_log":
        raise ValueError(f"<{root.tag}> instead of <nvidia_smi_log>")
    gpus = tuple(_gpu(gpu) for gpu in root.findall("gpu"))
    return Driver(told="all", version=_text(root, "driver_version"), cuda=_text(root, "cuda_version"), gpus=gpus)


def matched(gpus: Sequence[Gpu], visible: Sequence[str] | None) -> dict[str, Gpu]:
    """GPUs by their name in a program on Ray, "cuda:0": those that CUDA_VISIBLE_DEVICES clearly names, by index or by (the
    beginning of) their UUID. None: it is not set."""
    found: dict[str, Gpu] = {}
    for index, token in enumerate(map(str, range(len(gpus))) if visible is None else visible):
        same = [gpu for at, gpu in enumerate(gpus) if token == str(at) or (gpu.uuid or "").startswith(token)]
        if len(same) == 1:
            found[f"cuda:{index}"] = same[0]
    return found


def _gpu(gpu: Element) -> Gpu:
    return Gpu(
        bus=gpu.get("id", ""),
        uuid=_text(gpu, "uuid"),
        model=_text(gpu, "product_name"),
        lost=next((text for element in gpu.iter() if _LOST.search(text := (element.text or "").strip())), None),
        recovery=_text(gpu, "gpu_recovery_action"),
        ecc=_text(gpu, "ecc_mode/current_ecc"),
        uncorrectable=_uncorrectable(gpu),
        threshold_exceeded=_yes(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
        unrepairable=_yes(gpu, "ecc_errors/unrepairable_memory"),
        remapped=sum(_number(gpu, f"remapped_rows/remapped_row_{kind}") or 0 for kind in ("corr", "unc")),
        remapping_pending={"Yes": True, "No": False}.get(_text(gpu, "remapped_rows/remapped_row_pending") or ""),
        remapping_failed=_yes(gpu, "remapped_rows/remapped_row_failure"),
        throttling=_throttling(gpu),
        mig=_text(gpu, "mig_mode/current_mig"),
        instances=len(gpu.findall("mig_devices/mig_device")),
        total_mib=_number(gpu, "fb_memory_usage/total"),
        free_mib=_number(gpu, "fb_memory_usage/free"),
        processes=tuple(
            GpuProcess(
                pid=_number(process, "pid") or 0,
                type=_text(process, "type"),
                name=_text(process, "process_name") or "",
                mib=_number(process, "used_memory"),
            )
            for process in gpu.findall("processes/process_info")
        ),
    )


def _uncorrectable(gpu: Element) -> int | None:
    # GPUs before Ampere count by location, with a total.
    ampere = r"(?:sram|dram)_uncorrectable(?:_parity|_secded)?"
    volatile = gpu.find("ecc_errors/volatile")
    paths = ["double_bit/total"] + [each.tag for each in volatile or () if re.fullmatch(ampere, each.tag)]
    known = [count for path in paths if (count := _number(gpu, f"ecc_errors/volatile/{path}")) is not None]
    return sum(known) if known else None


def _throttling(gpu: Element) -> tuple[str, ...] | None:
    for name in ("clocks_event_reasons", "clocks_throttle_reasons"):
        if (reasons := gpu.find(name)) is not None:
            named = [(_REASON.fullmatch(reason.tag), (reason.text or "").strip()) for reason in reasons]
            return tuple(match[1] for match, state in named if match and state == "Active")
    return None


def _text(element: Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if not text or _NOTHING.fullmatch(text) else text


def _yes(element: Element, path: str) -> bool:
    return _text(element, path) == "Yes"


def _number(element: Element, path: str) -> int | None:
    """ "81559 MiB" too."""
    number, _, unit = (_text(element, path) or "").partition(" ")
    return int(number) if unit in ("", "MiB") and number.isdecimal() else None
