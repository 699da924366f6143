"""The few things a report says of a run besides its verdict: read from run.json and plan.json, which may not be there yet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from chaosrun.errors import UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_json

__all__ = ["RunFacts", "read_facts", "read_object"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    name: str | None = None
    job: str | None = None
    """Path of the job file."""
    overrides: tuple[str, ...] = ()
    workers: int | None = None
    max_steps: int | None = None
    faults: int | None = None
    """Planned; None before there is a plan."""
    reference_source: str | None = None
    """The leg that the reference was copied from; None when it was run for this drill."""

    @property
    def sentence(self) -> str:
        """Job name and workers, as far as they are known."""
        workers = None if self.workers is None else f"{self.workers} worker" + ("" if self.workers == 1 else "s")
        return ", ".join(part for part in (self.name, workers) if part)


def read_facts(run: RunLayout) -> RunFacts:
    """Raises UsageError when a file is there but holds no JSON object; what is not of the type it should be is left out."""
    info, plan = read_object(run.run_json) or {}, read_object(run.plan_json)
    spec, reference = (value if isinstance(value, dict) else {} for value in (info.get("spec"), info.get("reference")))
    overrides, faults = info.get("overrides"), (plan or {}).get("faults")
    return RunFacts(
        name=_only(str, spec.get("name")),
        job=_only(str, info.get("job")),
        overrides=tuple(filter(None, (_only(str, change) for change in overrides))) if isinstance(overrides, list) else (),
        workers=_only(int, spec.get("workers")),
        max_steps=_only(int, spec.get("max_steps")),
        faults=len(faults) if isinstance(faults, list) else None,
        reference_source=_only(str, reference.get("source")),
    )


_Kind = TypeVar("_Kind", int, str)


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
