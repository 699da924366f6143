"""Which devices a job could get, and what came of computing on one: rows that the checks "devices" and "bits" share. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Measure, Rows, Setting, Status
from chaosrun.preflight.placement import gpus_per_worker
from chaosrun.preflight.probes.compute import ComputeFacts
from chaosrun.preflight.probes.per_device import Computed
from chaosrun.preflight.probes.processor import FEWER_THREADS

ROWS = Rows(check="devices")

UNUSED = "no worker gets this device"
DEVICE_ERRORS = ("RuntimeError", "OutOfMemoryError", "AcceleratorError")
"""How torch tells what a device refused. Anything else is said of the program."""


def gpus_for_work(setting: Setting, nodes: Sequence[Node], node: Node) -> list[str]:
    """GPUs that workers on this one of the nodes may get: of those that its Ray may use, the first that it counts."""
    return [f"cuda:{index}" for index in range(node.gpus)] if gpus_per_worker(setting, nodes) else []


def of_unused(check: str, node: str, device: str | None, rows: Sequence[Finding]) -> list[Finding]:
    """What is said of a device that no worker gets: that it is broken is worth knowing, and speaks against nothing."""
    broken = [row for row in rows if row.status is Status.FAIL]
    told = [replace(row, status=Status.WARN, reason="; ".join(filter(None, (row.reason, UNUSED)))) for row in broken]
    return told or [Rows(check=check).skip(UNUSED, name="GPUs", node=node, device=device)]


def unfinished(check: str, node: str, device: str, computed: Computed, holders: str = "") -> Finding:
    """A device that gave no answer: broken, unless its process never came to it, or something else ended it, or holds its
    memory (`holders` by name, where they are known)."""
    ended, phase, error = computed.ended, computed.phase, computed.error
    row: dict[str, Any] = {"check": check, "name": "product", "node": node, "device": device}
    if not computed.touched:
        remedy = "see whether torch can be imported on that node, and how busy it is"
        return ROWS.error(f"{error} (in: {phase})", remedy, **row)
    if ended == "died" and "SIGKILL" in error:
        remedy = "see in dmesg whether memory ran out"
        return ROWS.error(f"something ended its process (in: {phase})", remedy, **row)
    if ended == "raised" and ("OutOfMemoryError" in error or "out of memory" in error):
        who = f": {holders}" if holders else ", see which with nvidia-smi (of the CPU with `top`)"
        remedy = f"end what holds its memory{who}"
        why = f"other processes hold the memory that it would be tried with (in: {phase}): {error}"
        return ROWS.error(why, remedy, **row)
    if ended == "raised" and error.partition(":")[0] not in DEVICE_ERRORS:
        return ROWS.error(f"{error} (in: {phase})", "see whether this torch is for this device", **row)
    how = {"hung": "hangs", "died": "its process died", "raised": "gives an error"}[ended]
    return ROWS.fail(f"{how} in: {phase}", "finishes", remedy_for(device), reason=error, **row)


def product(check: str, node: str, device: str, facts: ComputeFacts) -> Iterator[Finding]:
    """Memory, products and their speed, of a device on which they were tried."""
    if not facts.products or facts.memory is None:
        return
    wrong = [entry for entry in facts.products if entry.wrong]
    types = ", ".join(entry.dtype for entry in facts.products)
    row: dict[str, Any] = {"check": check, "node": node, "device": device}
    if facts.memory.wrong:
        yield ROWS.fail(
            f"{facts.memory.wrong} of {facts.memory.bytes} bytes read back wrong",
            "as they were written",
            remedy_for(device, facts.kind),
            name="memory",
            **row,
        )
    if wrong:
        worst = max(wrong, key=lambda entry: entry.wrong)
        yield ROWS.fail(
            f"{worst.wrong} of {worst.entries} entries wrong in {', '.join(entry.dtype for entry in wrong)}",
            "exact: integers that have one right answer",
            remedy_for(device, facts.kind),
            name="product",
            reason=f"{worst.dtype}: {worst.first}",
            **row,
        )
        return
    gpu = device != "cpu"
    yield ROWS.passed(f"exact in {types}", "exact", name="product", **row)
    yield ROWS.passed(
        f"{facts.gflops:.3g} GFLOP/s",
        name=f"speed of {facts.kind['model']}" if gpu else "speed",
        measure=Measure(
            number=facts.gflops,
            unit="GFLOP/s",
            better="higher",
            warn=0.7 if gpu else 0.2,
            fail=0.25 if gpu else None,
        ),
        **row,
    )


def remedy_for(device: str, kind: Mapping[str, Any] | None = None) -> str:
    """`kind`: what is known of the device; what its environment does to it is tried first."""
    if device == "cpu":
        test = "take the node out and test its processor and memory (memtest86+, stress-ng --verify)"
        limits = [name for name in (kind or {}).get("settings", ()) if name in FEWER_THREADS]
        why = "libraries leave out what the threads that they do not get had to do"
        return f"unset {', '.join(limits)} and try again: {why}; if it comes again, {test}" if limits else test
    return "take the node out and test the GPU (dcgmi diag -r 3); reset it or have it replaced"
