"""A fault and the plan that lists them: values, their JSON, and how they read to a person.

Owns the names of fault kinds and phases. Must not know the spec, a clock or a process: workers import this.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from chaosrun.errors import UsageError

__all__ = ["CHECKPOINT_PHASES", "KINDS", "PHASES", "PLAN_VERSION", "Fault", "FaultKind", "FaultPlan", "Phase"]

PLAN_VERSION = 1

FaultKind = Literal["kill"]
KINDS: tuple[str, ...] = get_args(FaultKind)

Phase = Literal["step", "checkpoint.file", "checkpoint.precommit", "checkpoint.postcommit", "restore.end", "reduce"]
PHASES: tuple[str, ...] = get_args(Phase)
CHECKPOINT_PHASES = frozenset({"checkpoint.file", "checkpoint.precommit", "checkpoint.postcommit"})

_SIGNALS: dict[str, str] = {"kill": "SIGKILL"}
_MOMENTS: dict[str, tuple[str, str]] = {
    "step": ("after step {}", "after its first step"),
    "reduce": ("inside the gradient all-reduce of step {}", "inside its first gradient all-reduce"),
    "checkpoint.file": ("while it writes the checkpoint of step {}", "while it writes the first checkpoint it reaches"),
    "checkpoint.precommit": (
        "between write and commit of the checkpoint of step {}",
        "between write and commit of the first checkpoint it reaches",
    ),
    "checkpoint.postcommit": (
        "right after the commit of the checkpoint of step {}",
        "right after the commit of the first checkpoint it reaches",
    ),
    "restore.end": ("right after restoring the checkpoint of step {}", "right after its first restore"),
}
"""Per phase, the words for a fault at a given step and for one at the first moment of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that will be done to one rank. Its identity is `id`: after a rollback the job crosses the same step again."""

    id: str
    kind: FaultKind = "kill"
    rank: int
    phase: Phase = "step"
    at_step: int | None
    """The step computed (reduce), done (step), saved (checkpoint.*) or restored (restore.end); None: the first reached."""
    source: str
    """The entry of the spec that asked for it, such as "faults.schedule[0]"."""

    def describe(self) -> str:
        """Say it in words: "SIGKILL rank 1 after step 7"."""
        at, first = _MOMENTS[self.phase]
        moment = first if self.at_step is None else at.format(self.at_step)
        return f"{_SIGNALS[self.kind]} rank {self.rank} {moment}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Fault":
        """Raises UsageError when the value is not a fault this version knows."""
        _expect_fields(value, cls, "a fault")
        if value["kind"] not in KINDS or value["phase"] not in PHASES:
            raise UsageError(
                f"fault {value['id']} has an unknown kind or phase: {value['kind']!r} at {value['phase']!r}",
                hint="the plan was written by another version of chaosrun, or by hand",
            )
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Every fault of a drill, in the order the job meets them; written to plan.json before anything starts."""

    version: int = PLAN_VERSION
    seed: int
    faults: tuple[Fault, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"version": self.version, "seed": self.seed, "faults": [fault.to_json() for fault in self.faults]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FaultPlan":
        """Raises UsageError when the value is not a plan of this version."""
        _expect_fields(value, cls, "a plan")
        if value["version"] != PLAN_VERSION:
            raise UsageError(
                f"the plan has version {value['version']!r}, this chaosrun reads version {PLAN_VERSION}",
                hint="read the run with the chaosrun that wrote it",
            )
        faults = tuple(Fault.from_json(fault) for fault in value["faults"])
        return cls(version=value["version"], seed=value["seed"], faults=faults)


def _expect_fields(value: Mapping[str, Any], of: type[Fault] | type[FaultPlan], what: str) -> None:
    expected = {field.name for field in dataclasses.fields(of)}
    if value.keys() != expected:
        raise UsageError(
            f"not {what}: fields {sorted(value)} where {sorted(expected)} are expected",
            hint="the plan was written by another version of chaosrun, or by hand",
        )
