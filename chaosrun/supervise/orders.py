"""What every worker of a leg is told, from the job's spec and the run's facts."""

from typing import Any

from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.reference import job_fingerprint


def order_template(name: str, leg: LegLayout, spec: JobSpec, info: dict[str, Any]) -> WorkerOrder:
    """What every worker of a leg is told; attempt and rank are filled in later."""
    return WorkerOrder(
        leg=name,
        leg_path=str(leg.path.resolve()),
        storage_path=str(leg.storage) if leg.storage else None,
        attempt=0,
        rank=0,
        world_size=spec.workers,
        local_rank=0,
        local_world_size=spec.workers,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
        script=info["script"],
        args=spec.args,
        cwd=info["directory"],
        seed=spec.seed,
        deterministic=spec.deterministic,
        threads=spec.threads,
        max_steps=spec.max_steps,
        every_steps=spec.checkpoint.every_steps,
        keep=spec.checkpoint.keep,
        classes=spec.checkpoint.classes,
        data_resume=spec.data.resume,
        probe=spec.data.probe,
        job_fingerprint=job_fingerprint(spec),
    )
