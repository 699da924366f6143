"""A whole drill on simulated nodes, by the way that every drill goes: created, carried out, judged, reported."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from chaosrun.records.events import EventRecord
from chaosrun.records.layout import RunLayout
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import carry_out, create
from chaosrun.verify.verdict import Verdict
from tests.simulated_nodes.cluster import SimulatedCluster
from tests.simulated_nodes.fork_server import Pace

SCRIPT = "import chaosrun\n\nrun = chaosrun.attach(None)\n"


def write_job(folder: Path, *, workers: int, pace: Pace, faults: Sequence[dict[str, Any]], every_steps: int) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    job = {
        "name": "simulated",
        "script": "train.py",
        "workers": workers,
        "max_steps": pace.steps,
        "checkpoint": {"every_steps": every_steps},
        "faults": {"schedule": list(faults), "allow_cluster_faults": True},
        "verify": {"confirm": 0},
        "timeout": 600,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def carry_out_drill(
    folder: Path, cluster: SimulatedCluster, job: Path, listener: Callable[[EventRecord], None] = lambda record: None
) -> tuple[RunLayout, Verdict]:
    """From the job file to the verdict."""
    root = folder / ".chaosrun"
    run = create(job, [], root, "ray://simulated:10001", "fresh")
    with Interrupts() as interrupts:
        return run, carry_out(run, root, None, listener, interrupts, cluster=cluster)
