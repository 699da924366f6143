"""The few things a report says of a run besides its verdict: read from run.json and plan.json, which may not be there yet."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from chaosrun.errors import UsageError
from chaosrun.faults.fault import INJECTED, FaultPlan
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    name: str | None = None
    job: str | None = None
    """Path of the job file."""
    typed: tuple[str, ...] = ()
    """What was typed after `chaosrun submit` where there is no job file; the job is then the run's own copy."""
    directory: str | None = None
    """Where the job's relative paths start."""
    overrides: tuple[str, ...] = ()
    injected: tuple[str, ...] = ()
    """Overrides that plan all its faults, where some were injected while it ran; else none are needed beside `overrides`."""
    workers: int | None = None
    max_steps: int | None = None
    every_steps: int | None = None
    """Between two checkpoints."""
    faults: int | None = None
    """Planned and injected; None before there is a plan."""
    injected_faults: int = 0
    """Of them."""
    reference_source: str | None = None
    """The leg that the reference was copied from; None when it was run for this drill."""
    seed: int | None = None
    """Of the job; `plan_seed` is that of its faults."""
    plan_seed: int | None = None
    created_s: float | None = None
    chaosrun: str | None = None
    """The version that ran it."""

    @property
    def sentence(self) -> str:
        """Job name and workers, as far as they are known."""
        workers = None if self.workers is None else f"{self.workers} worker" + ("" if self.workers == 1 else "s")
        return ", ".join(part for part in (self.name, workers) if part)

    @property
    def whose(self) -> str:
        """For after a number of faults, where some of them were not planned but injected."""
        if not self.injected_faults:
            return ""
        return f" ({(self.faults or 0) - self.injected_faults} planned, {self.injected_faults} injected)"


def read_facts(run: RunLayout) -> RunFacts:
    """Raises UsageError when a file is there but holds no JSON object; what is not of the type it should be is left out."""
    info, plan = read_object(run.run_json) or {}, read_object(run.plan_json)
    spec, reference = (_only(dict, info.get(key)) or {} for key in ("spec", "reference"))
    faults = (plan or {}).get("faults")
    return RunFacts(
        name=_only(str, spec.get("name")),
        job=_only(str, info.get("job")),
        typed=_strings(info.get("typed")),
        directory=_only(str, info.get("directory")),
        overrides=_strings(info.get("overrides")),
        injected=_with_injected(spec, plan or {}),
        injected_faults=_injected(plan or {}),
        workers=_only(int, spec.get("workers")),
        max_steps=_only(int, spec.get("max_steps")),
        every_steps=_only(int, (_only(dict, spec.get("checkpoint")) or {}).get("every_steps")),
        faults=len(faults) if isinstance(faults, list) else None,
        reference_source=_only(str, reference.get("source")),
        seed=_only(int, spec.get("seed")),
        plan_seed=_only(int, (plan or {}).get("seed")),
        created_s=_only(float, info.get("created_s")),
        chaosrun=_only(str, info.get("chaosrun")),
    )


def _injected(plan: dict[str, Any]) -> int:
    faults = plan.get("faults")
    each = faults if isinstance(faults, list) else []
    return sum(isinstance(fault, dict) and fault.get("source") == INJECTED for fault in each)


def _with_injected(spec: dict[str, Any], plan: dict[str, Any]) -> tuple[str, ...]:
    if not _injected(plan):
        return ()
    from pydantic import ValidationError

    from chaosrun.spec.fragment import as_entries, cleared, scheduled
    from chaosrun.spec.model import JobSpec

    try:
        job, planned = JobSpec.model_validate(spec), FaultPlan.from_json(plan)
    except (ValidationError, UsageError):
        return ()  # damaged, which whoever judges it says
    return (*cleared(job), scheduled(as_entries(planned.faults, job.workers)))


def read_versions(run: RunLayout) -> dict[str, str]:
    """Of Python and the libraries, as the chaos leg's environment has them, or the reference's where there is none to read."""
    for leg in ("chaos", "reference"):
        with suppress(UsageError):  # that it is damaged, the check of the records says
            found = read_object(run.leg(leg).environment) or {}
            if found:
                return {name: str(found[name]) for name in ("python", "torch", "accelerate", "numpy") if name in found}
    return {}


_Kind = TypeVar("_Kind", int, str, float, dict[str, Any])


def _strings(values: Any) -> tuple[str, ...]:
    return tuple(filter(None, (_only(str, value) for value in values))) if isinstance(values, list) else ()


def _only(kind: type[_Kind], value: Any) -> _Kind | None:
    return value if isinstance(value, kind) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON file's object, None when there is no file. Raises UsageError when it holds anything else."""
    try:
        value = read_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}", hint="it was changed from outside; submit the job again") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is damaged: not a JSON object", hint="it was changed from outside; submit the job again")
    return value
