"""What `nvidia-smi -q -x` says, read into plain values. Pure: no process is started here.

The report's elements differ between drivers: names that changed are looked up under each, what a driver or a GPU does not have
is None.
"""

import re
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_NOTHING = re.compile(r"n/?a|\[n/a\]|not supported|none|-|requested functionality has been deprecated", re.IGNORECASE)
_LOST = re.compile(r"gpu is lost|gpu requires reset", re.IGNORECASE)
_REASON = re.compile(r"clocks_(?:event|throttle)_reason_(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ecc:
    mode: str | None
    pending: str | None
    uncorrectable: int | None
    """Errors since the driver was loaded."""
    uncorrectable_ever: int | None
    threshold_exceeded: bool | None
    unrepairable: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacements:
    """Rows of memory that were replaced; before Ampere whole pages were taken out of use instead."""

    kind: str
    count: int
    pending: bool | None
    failure: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mig:
    mode: str | None
    pending: str | None
    instances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    pid: int
    type: str | None
    name: str
    mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    bus: str
    uuid: str | None
    model: str | None
    lost: str | None
    recovery: str | None
    """What the driver asks for."""
    ecc: Ecc
    rows: Replacements | None
    throttling: tuple[str, ...] | None
    """Reasons why its clocks are lower now than they could be, as the driver names them; None: it does not say."""
    mig: Mig
    total_mib: int | None
    free_mib: int | None
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    there: bool = True
    silent: bool = False
    """Whether it gave no answer in time."""
    error: str = ""
    driver: str | None = None
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
    return Driver(driver=_text(root, "driver_version"), cuda=_text(root, "cuda_version"), gpus=gpus)


def _gpu(gpu: Element) -> Gpu:
    return Gpu(
        bus=gpu.get("id", ""),
        uuid=_text(gpu, "uuid"),
        model=_text(gpu, "product_name"),
        lost=next((text for element in gpu.iter() if _LOST.search(text := (element.text or "").strip())), None),
        recovery=_text(gpu, "gpu_recovery_action"),
        ecc=Ecc(
            mode=_text(gpu, "ecc_mode/current_ecc"),
            pending=_text(gpu, "ecc_mode/pending_ecc"),
            uncorrectable=_uncorrectable(gpu, "volatile"),
            uncorrectable_ever=_uncorrectable(gpu, "aggregate"),
            threshold_exceeded=_yes(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
            unrepairable=_yes(gpu, "ecc_errors/unrepairable_memory"),
        ),
        rows=_rows(gpu),
        throttling=_throttling(gpu),
        mig=Mig(
            mode=_text(gpu, "mig_mode/current_mig"),
            pending=_text(gpu, "mig_mode/pending_mig"),
            instances=len(gpu.findall("mig_devices/mig_device")),
        ),
        total_mib=_mib(gpu, "fb_memory_usage/total"),
        free_mib=_mib(gpu, "fb_memory_usage/free"),
        processes=tuple(
            GpuProcess(
                pid=int(_text(process, "pid") or 0),
                type=_text(process, "type"),
                name=_text(process, "process_name") or "",
                mib=_mib(process, "used_memory"),
            )
            for process in gpu.findall("processes/process_info")
        ),
    )


def _uncorrectable(gpu: Element, span: str) -> int | None:
    """Errors that ECC could not correct: since the driver was loaded (volatile) or ever (aggregate)."""
    counts = [
        _count(element)
        for element in gpu.findall(f"ecc_errors/{span}/*")
        if re.fullmatch(r"(?:sram|dram)_uncorrectable(?:_parity|_secded)?", element.tag)
    ]
    # GPUs before Ampere count by place, with a total.
    counts.extend(_count(element) for element in gpu.findall(f"ecc_errors/{span}/double_bit/total"))
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _rows(gpu: Element) -> Replacements | None:
    if (pending := _yes(gpu, "remapped_rows/remapped_row_pending")) is not None:
        counts = [_number(gpu, f"remapped_rows/remapped_row_{kind}") or 0 for kind in ("corr", "unc")]
        failure = _yes(gpu, "remapped_rows/remapped_row_failure")
        return Replacements(kind="remapped rows", count=sum(counts), pending=pending, failure=failure)
    pages = "retired_pages/{}/retired_count"
    found = [_number(gpu, pages.format(kind)) for kind in ("multiple_single_bit_retirement", "double_bit_retirement")]
    if found == [None, None]:
        return None
    waiting = any(_yes(gpu, f"retired_pages/pending_{name}") for name in ("retirement", "blacklist"))
    return Replacements(kind="retired pages", count=sum(each or 0 for each in found), pending=waiting, failure=False)


def _throttling(gpu: Element) -> tuple[str, ...] | None:
    for name in ("clocks_event_reasons", "clocks_throttle_reasons"):
        if (reasons := gpu.find(name)) is not None:
            named = [(_REASON.fullmatch(reason.tag), (reason.text or "").strip()) for reason in reasons]
            return tuple(match[1] for match, state in named if match and state == "Active")
    return None


def _text(element: Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if not text or _NOTHING.fullmatch(text) else text


def _yes(element: Element, path: str) -> bool | None:
    return {"Yes": True, "No": False}.get(_text(element, path) or "")


def _number(element: Element, path: str) -> int | None:
    found = element.find(path)
    return None if found is None else _count(found)


def _count(element: Element) -> int | None:
    text = (element.text or "").strip()
    return int(text) if text.isdecimal() else None


def _mib(element: Element, path: str) -> int | None:
    """MiB of "81559 MiB"."""
    number, _, unit = (_text(element, path) or "").partition(" ")
    return int(number) if unit == "MiB" and number.isdecimal() else None
