"""How long preflight's per-node checks take for many nodes beside few, with simulated agents.

The checks are made once on this machine. Then agents that are only names give what was found here, after the time that it took
here: what is measured on top is asking, judging, comparing with peers and the report of it.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from chaosrun.preflight.conduct import CHECKS
from chaosrun.preflight.engine import Engine
from chaosrun.preflight.model import Check, Level, Setting
from chaosrun.preflight.report.text import render_text
from tests.benchmarks.samples import Samples
from tests.local_pool import LocalPool

__all__ = ["NODES", "TARGET_RATIO", "measure_preflight"]

NODES = (4, 64, 512)
TARGET_RATIO = 2.0
"""Of 64 nodes to 4."""


@dataclass(slots=True, kw_only=True)
class SimulatedAgents:
    """Every node answers a call with the recorded outcome of its probe, when its time has passed."""

    nodes: Sequence[Node]
    recorded: Mapping[str, ProbeOutcome]
    took_s: Mapping[str, float]
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def everyone(self) -> Sequence[Node]:
        return self.nodes

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        """All at the same time, of one probe."""
        outcomes = {name: self.recorded[call.probe] for name, call in calls.items()}
        time.sleep(max(self.took_s[call.probe] for call in calls.values()))
        return outcomes

    def check_agents(self) -> None: ...


def measure_preflight(repeats: int, progress: Callable[[str], None]) -> dict[int, Samples]:
    """By number of nodes."""
    checks = [check for check in CHECKS if check.call is not None and check.level is Level.QUICK]
    found = {nodes: Samples() for nodes in NODES}
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        setting = Setting(level=Level.QUICK, root=Path(folder), storage=Path(folder))
        recorded, took_s = _recorded(setting, checks)
        for repeat in range(repeats):
            for nodes, samples in found.items():
                names = [f"node-{number:03}" for number in range(nodes)]
                pool = SimulatedAgents(nodes=[_node(name) for name in names], recorded=recorded, took_s=took_s)
                began = time.perf_counter()
                engine = Engine(setting=setting, pool=pool, checks=checks, on_event=lambda event: None)
                result = engine.run(time.time())
                render_text(result, width=100, colour=False)
                seconds = time.perf_counter() - began
                samples.values.append(seconds)
                progress(f"preflight {repeat + 1}/{repeats}, {nodes} nodes: {seconds:.3f} s")
    return found


def _recorded(setting: Setting, checks: Sequence[Check]) -> tuple[dict[str, ProbeOutcome], dict[str, float]]:
    """What became of each check's probe on this machine, and the seconds that it took, by the probe's name."""
    pool = LocalPool({"here": {}})
    found: dict[str, ProbeOutcome] = {}
    took_s: dict[str, float] = {}
    for check in checks:
        assert check.call is not None
        call = check.call(setting, pool.nodes[0])
        began = time.monotonic()
        outcome = pool.probe({"here": call})["here"]
        assert outcome.facts is not None, f"{check.name}: {outcome.error}"
        found[call.probe], took_s[call.probe] = outcome, time.monotonic() - began
    return found, took_s


def _node(name: str) -> Node:
    return Node(name=name, node_id=name, address="10.0.0.1", hostname=name, cpus=2.0, gpus=0)
