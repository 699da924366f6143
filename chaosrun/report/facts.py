"""The few facts that a report states about a run besides its verdict: read from run.json and plan.json, which may not exist
yet."""

from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
from msgspec import Struct

from chaosrun.errors import UsageError
from chaosrun.faults.fault import INJECTED, FaultPlan
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import DAMAGED, read_object, read_run
from chaosrun.wording import count


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    name: str | None = None
    in_production: bool = False
    """A run in production: one leg, compared with itself."""
    job: str | None = None
    """Path of the job file."""
    typed: tuple[str, ...] = ()
    """The words after `chaosrun submit` where there is no job file; the job is then the run's own copy."""
    directory: str | None = None
    """Where the job's relative paths start."""
    overrides: tuple[str, ...] = ()
    injected: tuple[str, ...] = ()
    """Overrides that plan all its faults, if some were injected while it ran; else empty, as `overrides` are enough."""
    joining: tuple[str, ...] = ()
    """`--address ADDRESS` of a run that was told to join a Ray cluster; else empty."""
    workers: int | None = None
    max_steps: int | None = None
    every_steps: int | None = None
    """Between two checkpoints."""
    faults: int | None = None
    """Number of planned and injected faults; None before there is a plan."""
    injected_faults: int = 0
    reference_source: str | None = None
    """The leg from which the reference was copied; None when it was run for this drill."""
    reference_run: str | None = None
    """The run named as the reference; None where it is the cache's."""
    seed: int | None = None
    """Of the job; `plan_seed` is that of its faults."""
    plan_seed: int | None = None
    created_s: float | None = None
    chaosrun: str | None = None
    """The chaosrun version that ran it."""

    @property
    def reference_from(self) -> str:
        """In words, where a copied reference was taken from."""
        return "the cache" if self.reference_run is None else f"run {self.reference_run}"

    @property
    def sentence(self) -> str:
        """Job name and workers, as far as they are known."""
        workers = None if self.workers is None else count(self.workers, "worker")
        return ", ".join(part for part in (self.name, workers) if part)

    @property
    def whose(self) -> str:
        """Text after a number of faults if some were injected: " (2 planned, 1 injected)"; else empty."""
        if not self.injected_faults:
            return ""
        return f" ({(self.faults or 0) - self.injected_faults} planned, {self.injected_faults} injected)"


class _Checkpoint(Struct, frozen=True):
    every_steps: int | None = None


class _Spec(Struct, frozen=True):
    name: str
    workers: int | None = None
    max_steps: int | None = None
    seed: int | None = None
    checkpoint: _Checkpoint = _Checkpoint()


def read_facts(run: RunLayout) -> RunFacts:
    """Raises UsageError when a file exists but is damaged."""
    info = read_run(run) if run.run_json.exists() else None
    plan = FaultPlan.read(run.plan_json) if run.plan_json.exists() else None
    injected = 0 if plan is None else sum(fault.source == INJECTED for fault in plan.faults)
    facts = RunFacts(faults=plan and len(plan.faults), injected_faults=injected, plan_seed=plan and plan.seed)
    if info is None:
        return facts
    try:
        spec = msgspec.convert(info.spec, _Spec)
    except ValueError as error:
        raise UsageError(f"{run.run_json} is damaged: spec: {error}", hint=DAMAGED) from error
    return replace(
        facts,
        **{name: getattr(spec, name) for name in ("name", "workers", "max_steps", "seed")},
        **{name: getattr(info, name) for name in ("job", "directory", "created_s")},
        overrides=info.shown_overrides,
        in_production=info.kind == "run",
        typed=info.typed or (),
        joining=("--address", info.address) if info.address else (),
        injected=_with_injected(info.spec, plan) if plan and injected else (),
        every_steps=spec.checkpoint.every_steps,
        reference_source=info.reference.source,
        reference_run=info.reference.run,
        chaosrun=info.chaosrun or None,
    )


def _with_injected(spec: object, plan: FaultPlan) -> tuple[str, ...]:
    from pydantic import ValidationError

    from chaosrun.spec.fragment import as_entries, cleared, scheduled
    from chaosrun.spec.model import JobSpec

    try:
        job = JobSpec.model_validate(spec)
    except ValidationError:
        return ()  # damaged: the verdict reports it
    return (*cleared(job), scheduled(as_entries(plan.faults, job.workers)))


def read_versions(run: RunLayout) -> dict[str, str]:
    """Versions of Python and the libraries in the chaos leg's environment, or the reference's if the former is not readable."""
    for leg in (run.main, "reference"):
        with suppress(UsageError):  # damaged: the check `records` reports it
            if found := read_object(run.leg(leg).environment):
                return {name: str(found[name]) for name in ("python", "torch", "accelerate", "numpy") if name in found}
    return {}
