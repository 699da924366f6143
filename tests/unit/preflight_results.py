"""Results of preflights as they are on real clusters: what a sound one comes to, and what single faults add to it."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Level, Measure, Status
from chaosrun.preflight.result import CheckRun, Result

CHECKS = {
    "cluster": ("nodes, resources, versions, environment, clocks", 0.41),
    "host": ("memory, CPUs, limits, disks and leftovers", 0.62),
    "devices": ("devices, their memory, and a matrix product on each", 2.31),
    "bits": ("a little training three times: the same bits", 3.42),
    "storage": ("the storage keeps what it promises", 1.73),
    "network": ("names, ports, all-reduce", 4.05),
    "kill": ("a killed worker is gone", 1.24),
    "shared storage": ("what one node writes another reads", 0.55),
    "drill": ("a small drill on each node, and over all of them", 31.2),
    "forecast": ("goodput and the best checkpoint interval", 0.01),
}
TOGETHER = ("network", "kill", "shared storage", "drill", "forecast")
"""Checks that take several nodes."""


def node(number: int, name: str = "gpu-{:03}", **changes: Any) -> Node:
    facts = {
        "name": name.format(number),
        "node_id": f"{number:056x}",
        "address": f"10.0.{number // 250}.{number % 250}",
        "hostname": name.format(number),
        "cpus": 96.0,
        "gpus": 8,
        "ports": {"raylet": 6000 + number % 8},
        "head": number == 1,
    }
    return Node(**{**facts, **changes})


def sound(nodes: Sequence[Node]) -> list[Finding]:
    """Everything passes, or does not apply."""
    return [
        *_of(nodes, "cluster", ["ray", "python", "torch", "clock"]),
        Finding(check="cluster", name="resources", status=Status.PASS, measured="16 GPUs", threshold="at least 16"),
        *_of(nodes, "host", ["/dev/shm", "nofile", "swap"]),
        *_measured(nodes, "host", "free memory", 900e9, "B"),
        *(finding for each in nodes for finding in _devices(each)),
        *_measured(nodes, "storage", "fsync", 0.004, "s", "lower"),
        *_of(nodes, "storage", ["rename", "torn file", "exclusive create"]),
        Finding(check="network", name="all-reduce 1 MiB int64", status=Status.PASS, measured="exact"),
        *_measured(nodes, "network", "bus bandwidth", 371.0, "GB/s"),
        *_of(nodes, "kill", ["worker and child"]),
        Finding(check="shared storage", name="visible to others", status=Status.PASS, measured="p99 4 ms", threshold="1 s"),
        *_of(nodes, "drill", ["dropout, mid-epoch kill, kill during a save"]),
        Finding(check="forecast", name="goodput", status=Status.SKIP, reason="no --mtbf was given"),
    ]


def result(nodes: Sequence[Node], findings: Sequence[Finding], **changes: Any) -> Result:
    checks = tuple(CheckRun(name=name, about=about, seconds=seconds) for name, (about, seconds) in CHECKS.items())
    order = {name: place for place, name in enumerate(CHECKS)}
    whole = {
        "level": Level.STANDARD,
        "started_s": 1_795_000_000.0,
        "seconds": 48.2,
        "nodes": tuple(nodes),
        "checks": checks,
        "findings": tuple(sorted(findings, key=lambda finding: order.get(finding.check, len(order)))),
        "facts": {"cluster": {"answered": {each.name: {"ray": "2.40.0"} for each in nodes}}},
    }
    return Result(**{**whole, **changes})


def odd_bits(node: str, device: str = "cuda:3") -> Finding:
    return Finding(
        check="bits",
        name="repeats",
        status=Status.FAIL,
        node=node,
        device=device,
        measured="2 different fingerprints in 3 repeats",
        threshold="1",
        reason="the device disagrees with itself: the same computation gave different bits",
        remedy="take the node out of the cluster and have the GPU tested (dcgmi diag -r 3)",
    )


def small_shm(node: str, measured: str = "64 MiB") -> Finding:
    return Finding(
        check="host",
        name="/dev/shm",
        status=Status.FAIL,
        node=node,
        device="/dev/shm",
        measured=measured,
        threshold="at least 2.3 GiB",
        reason="Ray's object store and data loaders' workers share it",
        remedy="start the container with --shm-size=8g",
    )


def swap(node: str) -> Finding:
    return Finding(
        check="host",
        name="swap",
        status=Status.WARN,
        node=node,
        measured="1.2 GiB in use",
        threshold="none",
        remedy="swapoff -a, or give the node more memory",
    )


def lost(node: str) -> Iterator[Finding]:
    """The agent died in the middle: nothing is known of what it had not answered."""
    for check in ("devices", "bits", "storage"):
        yield Finding(
            check=check,
            name=CHECKS[check][0],
            status=Status.ERROR,
            node=node,
            reason="its agent is gone: the node died",
            remedy="look at the raylet.err there, start Ray again",
        )


def left_out(node: str, why: str, *checks: str) -> Iterator[Finding]:
    """What an engine says of a check that a bad node took no part in."""
    for check in checks:
        yield Finding(check=check, name=CHECKS[check][0], status=Status.SKIP, node=node, reason=f"left out: {why}")


@cache
def three_bad_of_512() -> Result:
    nodes = [node(number) for number in range(1, 513)]
    dead = "gpu-300"
    findings = [
        finding
        for finding in sound(nodes)
        if not (finding.node == "gpu-017" and finding.check == "bits" and finding.device == "cuda:3")
        and not (finding.node == dead and finding.check not in ("cluster", "host"))
        and not (finding.node == "gpu-400" and finding.device == "/dev/shm")
        and not (finding.node in ("gpu-017", "gpu-400") and finding.check in TOGETHER)
    ]
    findings += [odd_bits("gpu-017"), *lost(dead), small_shm("gpu-400"), *(swap(each.name) for each in nodes[40:44])]
    for name, why in (("gpu-017", "FAIL of bits: repeats"), (dead, "the node died"), ("gpu-400", "FAIL of host: /dev/shm")):
        findings += left_out(name, why, *TOGETHER)
    return result(nodes, findings, address="10.0.0.1:6379", job="jobs/gpt/job.yaml")


def _of(nodes: Sequence[Node], check: str, names: Sequence[str]) -> Iterator[Finding]:
    for each in nodes:
        for name in names:
            device = name if name.startswith("/") else None
            yield Finding(check=check, name=name, status=Status.PASS, node=each.name, device=device, measured="as it must be")


def _measured(
    nodes: Sequence[Node], check: str, name: str, number: float, unit: str, better: Any = "higher"
) -> Iterator[Finding]:
    for place, each in enumerate(nodes):
        measure = Measure(number=number * (1 + place % 7 / 100), unit=unit, better=better, warn=0.8, fail=0.25)
        yield Finding(
            check=check, name=name, status=Status.PASS, node=each.name, measured=f"{measure.number:g}", measure=measure
        )


def _devices(node: Node) -> Iterator[Finding]:
    if node.gpus == 0:
        yield Finding(check="devices", name="GPUs", status=Status.SKIP, node=node.name, reason="Ray counts no GPU on this node")
    devices = [f"cuda:{number}" for number in range(node.gpus)] or ["cpu"]
    for device in devices:
        for check, name in (("devices", "matrix product"), ("bits", "repeats"), ("bits", "same as others")):
            yield Finding(check=check, name=name, status=Status.PASS, node=node.name, device=device, measured="exact")
