"""The check "cluster": what every node has, asked of all of them at the same time, so that they can be compared."""

import os
import time

from chaosrun.cluster.probing import Call
from chaosrun.preflight.assess.cluster import assess
from chaosrun.preflight.model import PROBES, Check, Facts, Level, Pool, Setting
from chaosrun.spec.model import JobSpec

LIMIT_S = 10.0
UNCERTAIN_S = 0.2
"""Clocks known less well than this are asked once more, on their own: starting a process costs less than that where nothing
holds it up."""


def gather(setting: Setting, pool: Pool) -> Facts:
    job = setting.job
    asked = {
        "script": None if job is None else str(job.script_path),
        "path": [] if job is None else _own_path(job.spec),
    }
    began_s = time.time()
    calls = {node.name: Call(probe=f"{PROBES}.software", parameters=asked, limit_s=LIMIT_S) for node in pool.nodes}
    told = pool.ask(calls, dict).raw()
    ended_s = time.time()
    clocks = {name: _offset(facts["clock"], began_s, ended_s) for name, facts in told["answered"].items()}
    doubtful = [name for name, (low, high) in clocks.items() if high - low > UNCERTAIN_S]
    if doubtful and len(clocks) > 1:
        began_s = time.time()
        again = pool.ask({name: Call(probe=f"{PROBES}.clock", limit_s=LIMIT_S) for name in doubtful}, dict).answered
        ended_s = time.time()
        for name, facts in again.items():
            clocks[name] = min(
                clocks[name], _offset(facts["clock"], began_s, ended_s), key=lambda bounds: bounds[1] - bounds[0]
            )
    return {**told, "clocks": clocks}


def _offset(clock: Facts, began_s: float, ended_s: float) -> tuple[float, float]:
    """Bounds of how far a node's clock is ahead of this one: its process ran between the two readings here."""
    return clock["now_s"] - ended_s, clock["began_s"] - began_s


def _own_path(spec: JobSpec) -> list[str]:
    """Directories that the job's own environment adds."""
    return [part for part in spec.env.get("PYTHONPATH", "").split(os.pathsep) if part]


CHECK = Check(
    name="cluster",
    about="nodes, resources, versions, variables, clocks",
    order=10,
    level=Level.QUICK,
    judge=assess,
    gather=gather,
)
