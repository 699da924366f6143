"""A driver for a test of standbys: a job of two ranks on a Ray of four raylets loses the whole node of rank 1, unplanned.

`python -m tests.integration.drive_standby <root folder> [repeats]`: by turns without and with a node that stands by; the last
line of its output is what happened, as JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from chaosrun import api
from chaosrun.errors import InterruptedRunError
from chaosrun.processes import children
from chaosrun.records.layout import LegLayout, RunLayout
from tests.conftest import REPOSITORY
from tests.e2e.drills import events, eventually, reached
from tests.e2e.test_resume import parent_of
from tests.integration.raylets import add, raylets
from tests.records import read_lines

JOB = REPOSITORY / "jobs" / "probe" / "job.yaml"
OVERRIDES = ("args=[--steps, 100000, --step-seconds, 0.05]", "checkpoint.every_steps=10")
PATIENCE_S = 180.0
MOMENTS = {"attempt.stopped": 0, "placement.acquired": 1}


class NodeLoss:
    """Kills the raylet of rank 1's node and all below it when `servers` nodes are warm; ends the run when it trains again."""

    def __init__(self, nodes: Cluster, servers: int) -> None:
        self._nodes, self._servers = nodes, servers
        self.leg: LegLayout | None = None
        self.killed_s = 0.0
        self.thread: threading.Thread | None = None

    def on_event(self, record: dict[str, Any]) -> None:
        if record["event"] == "run.created":
            self.leg = RunLayout(Path(record["path"])).leg("run")
        elif record["event"] == "attempt.started" and self.thread is None:
            self.thread = threading.Thread(target=self._lose, args=(record["pids"]["1"],))
            self.thread.start()

    def _lose(self, rank: int) -> None:
        leg = self.leg
        assert leg is not None
        try:
            eventually(lambda: reached(leg, 1, 25) and self._warm() == self._servers, timeout_s=PATIENCE_S)
            server = parent_of(rank)
            agent = parent_of(server)
            doomed = [parent_of(agent), agent, server, *children(server)]
            self.killed_s = time.time()
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: any(steps_of(leg, 2)), timeout_s=PATIENCE_S)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def _warm(self) -> int:
        """Fork servers with children."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self._nodes.worker_nodes]
        found = (pid for raylet in raylets for agent in children(raylet) for pid in children(agent))
        return sum(b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() and bool(children(pid)) for pid in found)


def steps_of(leg: LegLayout, attempt: int) -> list[float]:
    traces = [path for rank in (0, 1) if (path := leg.attempt(attempt).trace(rank)).exists()]
    return [line["time_s"] for path in traces for line in read_lines(path) if line["kind"] == "step"]


def lost(root: Path, nodes: Cluster, standby: int) -> dict[str, Any]:
    """With the seconds from the node's SIGKILL to the first new step of any rank."""
    loss = NodeLoss(nodes, servers=2 + standby)
    with suppress(InterruptedRunError):
        overrides = [*OVERRIDES, f"recovery.standby={standby}"]
        api.run(JOB, overrides=overrides, root=root / f"{time.time()}", address=nodes.address, on_event=loss.on_event)
    assert loss.thread is not None and loss.leg is not None
    loss.thread.join()
    steps, placed = steps_of(loss.leg, 2), events(loss.leg, "placement.acquired")
    moments = {name: events(loss.leg, name)[at]["time_s"] - loss.killed_s for name, at in MOMENTS.items()}
    return {
        "nodes": [list(record["nodes"]) for record in placed],
        "stood_by": [record.get("stood_by", []) for record in placed],
        "recovery_s": min(steps) - loss.killed_s,
        "load": os.getloadavg()[0],
        **moments,
        "unplanned": [record["reason"] for record in events(loss.leg, "death.unplanned")],
    }


def main(root: Path, repeats: int = 1) -> None:
    with raylets(num_cpus=0) as nodes:
        told: dict[str, list[Any]] = {"cold": [], "warm": []}
        for _ in range(3):
            add(nodes, num_cpus=1)
        for _ in range(repeats):
            for number, name in enumerate(told):
                told[name].append(lost(root, nodes, number))
                add(nodes, num_cpus=1)
                print(name, told[name][-1], file=sys.stderr, flush=True)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
