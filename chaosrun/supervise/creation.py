"""From a job file to a run that can begin: its plan, and the directory that says what is going to happen."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.records.layout import RunLayout
from chaosrun.supervise.run import expected_ray
from chaosrun.supervise.runs import find_run

if TYPE_CHECKING:
    from chaosrun.faults.fault import FaultPlan
    from chaosrun.spec.source import Job


def plan(job: Path, overrides: Sequence[str] = ()) -> "tuple[Job, FaultPlan]":
    """Load a job and expand its faults; starts nothing. Raises SpecError or UsageError."""
    from chaosrun.plan.planner import make_plan
    from chaosrun.spec.refused import refused
    from chaosrun.spec.source import load_job

    loaded = load_job(job, overrides)
    return loaded, make_plan(loaded.spec, loaded.trace, partial(refused, loaded))


def create(job: Path, overrides: Sequence[str], root: Path, address: str | None, reference: str) -> RunLayout:
    """A run directory for the job under an absolute root. Raises UsageError or SpecError, also for faults that the Ray at
    `address`, or a private one, will not allow."""
    from chaosrun.plan.permission import ask_permission
    from chaosrun.supervise.drill import create_run

    loaded, faults = plan(job, overrides)
    if reference not in ("auto", "fresh"):
        reference = str(find_run(reference, root).path.resolve())
    if expected := expected_ray(address):
        ask_permission(faults.faults, ray=expected, allow_cluster_faults=loaded.spec.faults.allow_cluster_faults, kept=True)
    return create_run(
        root,
        loaded.spec,
        job_path=loaded.path.resolve(),
        script=loaded.script_path.resolve(),
        text=loaded.text,
        plan=faults,
        overrides=list(overrides),
        reference=reference,
    )
