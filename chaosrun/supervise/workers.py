"""The messages that wake a supervisor, and the orders for its workers."""

from dataclasses import dataclass
from pathlib import Path

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.run_file import RunInfo
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.reference import job_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptLeg:
    """End the leg in order."""

    to: object
    """The supervisor to interrupt; it may have ended when this arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFaults:
    """Add these faults to the leg."""

    to: object
    faults: tuple[Fault, ...]


Woken = InterruptLeg | AddFaults


def order_template(name: str, leg: LegLayout, spec: JobSpec, info: RunInfo, *, reference: Path | None = None) -> WorkerOrder:
    """The orders that every worker of a leg gets; attempt and rank are filled in later. `reference`: the leg that this one is
    to be compared with."""
    own = LegLayout(leg.path.resolve())
    itself = spec.by == "script"
    return WorkerOrder(
        leg=name,
        leg_path=str(own.path),
        storage_path=leg.place,
        attempt=0,
        rank=0,
        world_size=spec.workers,
        local_rank=0,
        local_world_size=spec.workers,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
        script=info.script,
        args=tuple(map(own.filled_in, spec.args)),
        cwd=str(own.work) if itself else info.directory,
        directory=info.directory,
        drill_began_s=info.created_s,
        by=spec.by,
        module=spec.module,
        command=spec.command or (),
        resume_args=tuple(map(own.filled_in, spec.resume.args)),
        resume_env={name: own.filled_in(value) for name, value in spec.resume.env.items()},
        outputs=(str(own.output), str(own.work)) if itself else (),
        prime_buckets=spec.prime_buckets,
        reference_path=str(reference.resolve()) if reference else None,
        seed=spec.seed,
        deterministic=spec.deterministic,
        threads=spec.threads,
        max_steps=spec.max_steps,
        every_steps=spec.checkpoint.every_steps,
        keep=spec.checkpoint.keep,
        mode=spec.checkpoint.mode,
        memory_limit=None if spec.checkpoint.memory == "auto" else int(spec.checkpoint.memory),
        from_memory=info.kind == "run" if spec.checkpoint.memory == "auto" else spec.checkpoint.memory > 0,
        classes=spec.checkpoint.classes,
        data_resume=spec.data.resume,
        probe=spec.data.probe,
        job_fingerprint=job_fingerprint(spec),
    )


def resume_values(template: WorkerOrder, attempt: int, plan: FaultPlan) -> dict[str, object]:
    """How an attempt resumes. Only a restart gets `resume.args` and `resume.env`. With a fault that damages files, copies in
    memory are not used, so that the files are read."""
    restart = attempt > 1
    args = (*template.args, *(template.resume_args if restart else ()))
    damaged = any(fault.facts.family == "storage" for fault in plan.faults)
    about: dict[str, object] = {"from_memory": template.from_memory and not damaged}
    return {**about, "args": args, "resume_args": (), "resume_env": template.resume_env if restart else {}}
