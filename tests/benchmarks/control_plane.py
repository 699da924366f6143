"""What a supervisor has to do for each rank, from eight ranks to a thousand, on simulated nodes of eight ranks each.

One drill for each size loses a rank, ten ranks at once and a whole node. On this machine all nodes are one other process, which
takes the part of the time that nodes would take at the same time: what is measured on top is told apart as the supervisor's own
processor time. Times are those of the nodes: when the first rank was struck, the last node told, the last rank started.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaosrun.records.events import EventRecord
from tests.benchmarks.samples import Samples
from tests.simulated_nodes.cluster import SimulatedCluster
from tests.simulated_nodes.drill import carry_out_drill, write_job
from tests.simulated_nodes.fork_server import Pace

__all__ = ["NODES", "RANKS_PER_NODE", "TARGETS", "ControlPlane", "measure_control_plane"]

RANKS_PER_NODE = 8
NODES = (1, 8, 125)
TARGETS = {"told": 1.0, "restarted": 3.0, "cores": 1.0}
"""At the most ranks: seconds from the kill; processors while training."""
STEPS = 18
AT_ONCE = 10
LOSSES = ("one rank", "ten at once", "one node")


@dataclass(slots=True, kw_only=True)
class ControlPlane:
    """Of one number of ranks."""

    ranks: int
    told: dict[str, Samples] = field(default_factory=lambda: {loss: Samples() for loss in LOSSES})
    """From the loss until the last node that is left was told to stop."""
    restarted: dict[str, Samples] = field(default_factory=lambda: {loss: Samples() for loss in LOSSES})
    """From the loss until the last rank of the next attempt was started."""
    recovery_cpu: dict[str, Samples] = field(default_factory=lambda: {loss: Samples() for loss in LOSSES})
    """The supervisor's processor time in between."""
    cores: Samples = field(default_factory=Samples)
    """Processors that the supervisor uses while an attempt trains."""
    verdict: Samples = field(default_factory=Samples)
    """From the end of the last leg to the verdict."""

    def to_json(self) -> dict[str, Any]:
        each = {"told": self.told, "restarted": self.restarted, "recovery_cpu": self.recovery_cpu}
        by_loss = {name: {loss: samples.to_json() for loss, samples in found.items()} for name, found in each.items()}
        return {**by_loss, "cores": self.cores.to_json(), "verdict": self.verdict.to_json()}

    def per_rank(self, cpu: Samples) -> Samples:
        return Samples(values=[value / self.ranks for value in cpu.values])

    @property
    def failures(self) -> list[str]:
        return self.verdict.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record of the journal, as the supervisor wrote it."""

    event: str
    leg: str | None
    at_s: float
    cpu_s: float


def measure_control_plane(repeats: int, progress: Callable[[str], None]) -> list[ControlPlane]:
    """By number of ranks."""
    found = [ControlPlane(ranks=nodes * RANKS_PER_NODE) for nodes in NODES]
    for repeat in range(repeats):
        for each in found:
            with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
                _measure(Path(folder), each)
            progress(f"control plane {repeat + 1}/{repeats}, {each.ranks} ranks: {_line(each)}")
    return found


def _measure(folder: Path, into: ControlPlane) -> None:
    pace = Pace(steps=STEPS, step_s=0.25)
    together = min(AT_ONCE, into.ranks // 2)
    faults: list[dict[str, Any]] = [
        {"kind": "kill", "rank": 1, "at_step": 6},
        {"kind": "kill", "rank": "random", "at_once": together, "at_step": 10},
        {"kind": "node", "rank": into.ranks - 1, "at_step": 14},
    ]
    job = write_job(folder, workers=into.ranks, pace=pace, faults=faults, every_steps=4)
    seen: list[Seen] = []

    def listen(record: EventRecord) -> None:
        seen.append(Seen(event=record["event"], leg=record["leg"], at_s=time.time(), cpu_s=time.process_time()))

    with SimulatedCluster(nodes=into.ranks // RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE, pace=pace) as cluster:
        _, verdict = carry_out_drill(folder, cluster, job, listen)
        judged_s = time.time()
        happened = {what: cluster.happened(what) for what in ("struck", "told to stop", "started")}
    if verdict.status != "PASS":
        into.verdict.failures.append(f"{into.ranks} ranks: {verdict.status} ({verdict.code})")
        return
    into.verdict.values.append(judged_s - seen[-1].at_s)
    _read(seen, happened, into)


def _read(seen: Sequence[Seen], happened: dict[str, Sequence[dict[str, Any]]], into: ControlPlane) -> None:
    starts = [each for each in seen if each.leg == "chaos" and each.event == "attempt.started"]
    for loss, attempt, before, start in zip(LOSSES, (1, 2, 3), starts[:-1], starts[1:], strict=True):
        until_s = start.at_s
        struck_s = max(event["time_s"] for event in happened["struck"] if event["time_s"] < until_s)
        told = [event["time_s"] for event in happened["told to stop"] if struck_s <= event["time_s"] < until_s]
        started = [e["time_s"] for e in happened["started"] if e["attempt"] == attempt + 1 and e["time_s"] > struck_s]
        into.told[loss].values.append(max(told) - struck_s if told else 0.0)
        into.restarted[loss].values.append(max(started) - struck_s)
        first = seen[seen.index(before) + 1]
        into.recovery_cpu[loss].values.append(start.cpu_s - first.cpu_s)
        into.cores.values.append((first.cpu_s - before.cpu_s) / (first.at_s - before.at_s))


def _line(each: ControlPlane) -> str:
    if not each.verdict.values:
        return each.failures[-1]
    times = [
        f"{loss} told {1000 * each.told[loss].values[-1]:.0f} ms, restarted {each.restarted[loss].values[-1]:.2f} s "
        f"({1e6 * each.recovery_cpu[loss].values[-1] / each.ranks:.0f} µs CPU a rank)"
        for loss in LOSSES
    ]
    return "; ".join(times) + f"; {each.cores.values[-1]:.2f} cores; verdict {each.verdict.values[-1]:.1f} s"
