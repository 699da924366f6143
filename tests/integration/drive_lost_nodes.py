"""A driver for a test of lost nodes: drills of three ranks on a Ray of five raylets, of which some are killed or drained.

`python -m tests.integration.drive_lost_nodes <root folder>`; the last line of its output is what happened, as JSON.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import ray

from chaosrun import api
from chaosrun.records.layout import RunLayout
from tests.conftest import REPOSITORY
from tests.e2e.drills import events, eventually, reached
from tests.e2e.test_resume import parent_of
from tests.integration.raylets import add, raylets

JOB = REPOSITORY / "jobs" / "probe" / "job.yaml"
# A dead raylet is noticed within 2 s, not 15.
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


def drill(root: Path, address: Any, faults: str, *more: str, **options: Any) -> dict[str, Any]:
    overrides = ["workers=3", 'args=["--steps","24"]', "checkpoint.every_steps=6", "faults.allow_cluster_faults=true"]
    result = api.submit(JOB, overrides=[*overrides, f"faults.schedule={faults}", *more], root=root, address=address, **options)
    chaos, verdict = result.run.leg("chaos"), result.verdict
    assert not ray.is_initialized()
    return {
        "status": verdict.status,
        "exit_code": verdict.exit_code,
        "message": (events(chaos, "leg.finished") or events(result.run.reference, "leg.finished"))[-1]["message"],
        "landed": [fault.landed for fault in verdict.faults],
        "found": [record["found"] for record in events(chaos, "fault.observed")],
        "nodes": [list(record["nodes"]) for record in events(chaos, "placement.acquired")],
    }


class RayletKiller:
    """Kills, unplanned, the raylet of the node of rank 2 in the first attempt of the chaos leg."""

    def __init__(self) -> None:
        self._run: RunLayout | None = None
        self.threads: list[threading.Thread] = []

    def on_event(self, record: dict[str, Any]) -> None:
        if record["event"] == "run.created":
            self._run = RunLayout(Path(record["path"]))
        elif (record["leg"], record["event"], record.get("attempt")) == ("chaos", "attempt.started", 1):
            self.threads.append(threading.Thread(target=self._kill, args=(record["pids"]["2"],)))
            self.threads[0].start()

    def _kill(self, pid: int) -> None:
        run = self._run
        assert run is not None
        agent = parent_of(parent_of(pid))
        eventually(lambda: reached(run.leg("chaos"), 1, 2))
        os.kill(parent_of(agent), signal.SIGKILL)


def main(root: Path) -> None:
    with raylets(num_cpus=0, _system_config=QUICK) as nodes:
        for _ in range(4):
            add(nodes, num_cpus=2)
        raylet, drain = "{rank: 2, at_step: 8, kind: raylet}", "{rank: 0, at_step: 15, kind: drain, grace: 20s}"
        told = {"recovers": drill(root, nodes.address, f"[{raylet}, {drain}]")}
        killer = RayletKiller()
        late = "[{rank: 0, at_step: 20, kind: kill}]"
        slow = ('args=["--steps","40"]',)
        told["unplanned"] = drill(root, nodes.address, late, *slow, on_event=killer.on_event)
        killer.threads[0].join()
        # Two nodes are left: without one of them three ranks do not fit.
        brief = "recovery.acquire_timeout=15s"
        told["spent"] = drill(root, nodes.address, "[{rank: 0, at_step: 8, kind: drain}]", brief)
    # A raylet fault where the driver's own raylet runs ranks: a cluster of one node.
    with raylets(num_cpus=3) as alone:
        told["spent"]["beside"] = drill(root, alone.address, "[{rank: 2, at_step: 8, kind: raylet}]")
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
