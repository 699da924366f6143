"""Small real drills, on one node or over several: what is wanted of one. Pure.

Who carries them out is a `Drills`; `preflight.drills.on_ray` has the one on a Ray.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Facts, Setting
from chaosrun.preflight.placement import gpus_per_worker, room_on
from chaosrun.spec.source import Job

MOST_WORKERS = 2
"""Of a drill on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRequest:
    """A drill that is wanted: where, how large, and the overrides of the drill's job file."""

    nodes: tuple[Node, ...]
    workers: int
    cpu: float
    gpu: int
    overrides: tuple[str, ...]

    @property
    def spread(self) -> bool:
        """One worker on each node."""
        return len(self.nodes) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    root: Path
    begin_within_s: float | None
    """Drills that have not begun by then are left out; None: all of them are made."""
    limit_s: float
    """After this a drill has not ended."""
    repeat_s: float = 0.0
    """A drill that passes is repeated until this much time is over."""


class Drills(Protocol):
    """Carries drills out."""

    def run(self, wanted: Sequence[DrillRequest], terms: Terms) -> list[Facts | None]:
        """What became of each, as many at a time as there is room for; None: it was not begun in time.

        Facts: {"status", "outcome", "cause", "hint", "irreproducible", "divergence", "landed", "planned", "rounds", "ranks"
        {rank: node name}, "costs", "seconds", "run", "run_argument"} of the first that did not pass, or of the last one; or
        {"error", "seconds"}. A KeyboardInterrupt is raised again once no drill runs any more.
        """
        ...


def request_on(setting: Setting, node: Node, nodes: Sequence[Node]) -> DrillRequest | str:
    """The drill of one of the nodes: two workers, or one where there is no room for more; why there can be none."""
    job = setting.job
    gpu = gpus_per_worker(setting, [node] if job is None else nodes)
    if gpu and not node.gpus:
        return "a worker of the job needs a GPU, and Ray counts none there"
    most = min(MOST_WORKERS, node.gpus) if gpu else MOST_WORKERS
    cpu = min(1.0, node.cpus / most) if job is None else job.spec.per_worker.cpu
    workers = min(most, room_on(node, cpu=cpu, gpu=gpu)) if cpu else 0
    if not workers:
        need = "a CPU" if job is None or cpu == 1 else f"{cpu:g} CPUs"
        return f"a worker needs {need}, and Ray counts {node.cpus:g} there"
    return _request([node], workers, cpu, gpu, job)


def request_over(alone: Sequence[DrillRequest], job: Job | None) -> DrillRequest:
    """The drill over the nodes of these, one worker on each. Those that have GPUs are drilled without the others: a training
    on both would leave the GPUs idle."""
    on_gpus = [wish for wish in alone if wish.gpu]
    chosen = on_gpus if len(on_gpus) > 1 else alone
    nodes = [node for wish in chosen for node in wish.nodes]
    cpu = min(1.0, *(node.cpus for node in nodes)) if job is None else job.spec.per_worker.cpu
    return _request(nodes, len(nodes), cpu, int(all(wish.gpu for wish in chosen)), job)


def _request(nodes: Sequence[Node], workers: int, cpu: float, gpu: int, job: Job | None) -> DrillRequest:
    overrides = {
        "workers": workers,
        "per_worker.cpu": cpu,
        "per_worker.gpu": gpu,
        "faults.schedule[0].rank": workers - 1,
    }
    if job is not None:
        overrides |= {
            "env": dict(job.spec.env),
            "deterministic": job.spec.deterministic,
            "recovery.preload": list(job.spec.recovery.preload),
        }
        if job.spec.checkpoint.storage is not None:
            overrides["checkpoint.storage"] = str(job.directory / job.spec.checkpoint.storage)
    return DrillRequest(
        nodes=tuple(nodes),
        workers=workers,
        cpu=cpu,
        gpu=gpu,
        overrides=tuple(f"{key}={json.dumps(value)}" for key, value in overrides.items()),
    )
