"""A suite: several drills and what is expected of each. Its model, and how a file of one is read.

Every drill's job file is loaded here, with its changes put in, so that whatever is wrong anywhere is told before anything
starts. Must not know what a drill does.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from chaosrun.errors import UsageError
from chaosrun.spec.diagnosis import problems_of
from chaosrun.spec.fields import Count, JobName, Number, Section, Text, conflict, raise_conflicts, wrong
from chaosrun.spec.problems import Place, Problem, spec_error
from chaosrun.spec.source import Job, load_job, read_source
from chaosrun.spec.tree import Mapping, find, flow, plain, read_tree

__all__ = ["Comparison", "DrillSpec", "Expectation", "Suite", "SuiteDrill", "SuiteSpec", "load_suite", "select"]

SMALLEST_SUITE = "the least a suite holds: name: nightly, job: job.yaml, drills: [{name: first, expect: PASS}]"


def _mapping(value: Any) -> Any:
    if not isinstance(value, dict):
        raise wrong("a mapping of keys of the job file to values, such as {workers: 4}")
    return value


def _verdict_alone(value: Any) -> Any:
    """`expect: PASS` is short for `expect: {verdict: PASS}`."""
    return {"verdict": value} if isinstance(value, str) else value


class Expectation(Section):
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"] = Field(description="the verdict the drill must end with")
    kind: Text | None = Field(default=None, description="what must differ first, such as data order")
    cause: Text | None = Field(default=None, description="words that the verdict's cause must contain")
    exit_code: Count | None = Field(default=None, description="the exit code that the drill must have")


class DrillSpec(Section):
    name: JobName = Field(description="the drill's name in this suite")
    job: Text | None = Field(default=None, description="its job file, relative to the suite; default: the suite's job")
    set: Annotated[dict[str, Any], BeforeValidator(_mapping)] = Field(
        default={}, description="changes to the job file, such as {workers: 4, faults.seed: 7}"
    )
    expect: Annotated[Expectation, BeforeValidator(_verdict_alone)] = Field(
        default=Expectation(verdict="PASS"),
        description="PASS, FAIL or INCONCLUSIVE, or a mapping {verdict, kind, cause, exit_code}",
    )


class Comparison(Section):
    """Loss trajectories of the drills' undisturbed legs, against that of one of them."""

    first: Text | None = Field(default=None, description="the drill that the others are compared with; default: the first")
    atol: Annotated[Number, Field(ge=0)] = Field(default=0.0, description="largest absolute difference of a step's loss")
    beyond: tuple[Text, ...] = Field(default=(), description="controls: drills whose losses must lie beyond the tolerance")


class SuiteSpec(Section):
    name: JobName = Field(description="the suite's name")
    job: Text | None = Field(default=None, description="the job file of drills that name none, relative to the suite")
    drills: Annotated[tuple[DrillSpec, ...], Field(min_length=1)] = Field(description="a list of drills")
    comparison: Comparison | None = Field(default=None, description="how the drills' losses compare: first, atol, beyond")

    @model_validator(mode="after")
    def _names_known(self) -> Self:
        found = []
        names = [drill.name for drill in self.drills]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            found.append(conflict("drills", f"two drills are called {twice[0]!r}", "give every drill its own name"))
        for named in self._compared():
            if named not in names:
                reason = f"comparison names {named!r}, which is no drill of this suite"
                found.append(conflict("comparison", reason, f"drills: {', '.join(names)}"))
        raise_conflicts("SuiteSpec", found)
        return self

    def _compared(self) -> list[str]:
        if self.comparison is None:
            return []
        return [*([self.comparison.first] if self.comparison.first else []), *self.comparison.beyond]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDrill:
    spec: DrillSpec
    job: Job
    overrides: tuple[str, ...]
    """Its changes, as the command line would say them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    spec: SuiteSpec
    path: Path
    drills: tuple[SuiteDrill, ...]


def load_suite(path: Path) -> Suite:
    """Read a suite and every job file in it.

    Raises SpecError with every wrong place of the first file that has any, UsageError for a file that cannot be read.
    """
    source = read_source(path, "suite")
    root, problems = read_tree(source)
    if not isinstance(root, Mapping):
        start = Place(source=source, line=0, column=0, end=1)
        raise spec_error(problems or [Problem(place=start, message="a suite holds keys and values", hint=SMALLEST_SUITE)])
    if problems:
        raise spec_error(problems)
    try:
        spec = SuiteSpec.model_validate(plain(root))
    except ValidationError as error:
        raise spec_error(problems_of(error, root, SuiteSpec)) from error
    drills = tuple(_drill(path, root, spec, number) for number in range(len(spec.drills)))
    return Suite(spec=spec, path=path, drills=drills)


def _drill(path: Path, root: Mapping, spec: SuiteSpec, number: int) -> SuiteDrill:
    drill = spec.drills[number]
    named = drill.job or spec.job
    key, node = find(root, ("drills", number, "set"))
    if named is None:
        _, entry = find(root, ("drills", number))
        message = f"drill {drill.name!r} has no job file, and the suite names none"
        raise spec_error([Problem(place=entry.place, message=message, hint="add job: …/job.yaml to the suite or to the drill")])
    job_path = path.parent / named
    if not os.path.isfile(job_path):
        where, _ = find(root, ("drills", number, "job") if drill.job else ("job",))
        assert where is not None
        raise spec_error([Problem(place=where, message=f"no such job file: {job_path}", hint="job is relative to the suite")])
    changes = node.entries if key is not None and drill.set and isinstance(node, Mapping) else {}
    overrides = tuple(f"{key}={flow(entry.value)}" for key, entry in changes.items())
    return SuiteDrill(spec=drill, job=load_job(job_path, changes=changes), overrides=overrides)


def select(suite: Suite, names: Sequence[str]) -> Suite:
    """The suite with these drills alone. Raises UsageError for a name that it does not have."""
    known = [drill.spec.name for drill in suite.drills]
    for name in names:
        if name not in known:
            raise UsageError(f"{suite.path}: no drill {name!r}", hint=f"drills: {', '.join(known)}")
    return Suite(spec=suite.spec, path=suite.path, drills=tuple(drill for drill in suite.drills if drill.spec.name in names))
