"""A result as JSON and back: what `chaosrun preflight -o json` prints and a baseline is read from; the models are its schema.

Versions: `v` is RESULT_VERSION. It is raised when a field is taken away, renamed, or changes its type or its meaning. A field
may be added without that. The names of checks and of what they look at, and their facts, are no part of the promise.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError, model_validator

from chaosrun.errors import UsageError
from chaosrun.preflight.model import Finding, Level, Measure, Node, Status
from chaosrun.preflight.result import CheckRun, Result, worst

RESULT_VERSION = 1
HINT = "name a file that `chaosrun preflight -o json` has written"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SavedNode(_Part):
    name: str = Field(description="how it is called in everything here; unique in the cluster")
    node_id: str = Field(description="Ray's")
    address: str = Field(description="IP address")
    hostname: str = Field(description="as the node itself says")
    cpus: NonNegativeFloat = Field(description="as Ray counts them")
    gpus: NonNegativeInt = Field(description="as Ray counts them")
    ports: dict[str, int] = Field(description="what Ray listens on there, by purpose")
    head: bool = Field(description="whether Ray's head runs there")
    good: bool = Field(description="whether it can be used")
    checked: bool = Field(description="whether anything was looked at there; a node that was not is neither good nor bad")
    against: tuple[str, ...] = Field(description="what speaks against it, as `check: name (device)`; none of a good one")


class SavedMeasure(_Part):
    number: float = Field(description="the measured number")
    unit: str = Field(description="its unit")
    better: Literal["higher", "lower"] = Field(description="which way is better")
    warn: float | None = Field(description="worse than this share of the median or of the baseline is a WARN; null: never")
    fail: float | None = Field(description="the same for a FAIL")


class SavedFinding(_Part):
    """One row: one thing that was looked at."""

    check: str = Field(description="the check it is of")
    name: str = Field(description="what was looked at, the same on every node")
    status: Status = Field(description="ERROR: it could not be looked at; SKIP: it does not apply here")
    node: str | None = Field(description="the node's name; null: of the whole cluster")
    device: str | None = Field(description="of that node: a device, a path, a port, the other node of a pair; else null")
    measured: str = Field(description="the value, with its unit, for people")
    threshold: str = Field(description="what it had to be")
    reason: str = Field(description="what it means; why it does not apply; why it could not be looked at")
    remedy: str = Field(description="what to do; never empty in a FAIL or a WARN")
    measure: SavedMeasure | None = Field(description="what is compared with the other nodes and with a baseline")
    blames: tuple[str, ...] = Field(description="nodes it speaks against, besides `node`")
    covers: tuple[str, ...] = Field(description="nodes that a PASS of the whole cluster was shown on")

    @model_validator(mode="after")
    def _explains_itself(self) -> Self:
        self.finding()
        return self

    def finding(self) -> Finding:
        measure = None if self.measure is None else Measure(**self.measure.model_dump())
        return Finding(**{**dict(self), "measure": measure})


class SavedCheck(_Part):
    name: str = Field(description="as --only and --skip have it")
    about: str = Field(description="what it finds out")
    seconds: NonNegativeFloat = Field(description="how long it took")
    status: Status = Field(description="what its findings come to")


class SavedResult(_Part):
    """What a preflight came to."""

    v: Literal[1] = Field(description="version of this schema")
    kind: Literal["preflight"] = Field(description="what this is")
    fit: bool = Field(description="nothing failed, every check that applies could run, and at least one thing passed")
    exit_code: Literal[0, 8] = Field(description="what `chaosrun preflight` exits with")
    level: Level = Field(description="which checks were made")
    strict: bool = Field(description="whether a WARN makes unfit")
    started_s: NonNegativeFloat = Field(description="seconds since the epoch")
    seconds: NonNegativeFloat = Field(description="how long all of it took")
    address: str | None = Field(description="of the cluster; null: a private Ray on this machine")
    job: str | None = Field(description="path of the job file; null: none was given")
    baseline: str | None = Field(description="path of the baseline that it was compared with; null: none was given")
    arguments: tuple[str, ...] = Field(description="job, overrides, --root and --address, as on the command line")
    options: tuple[str, ...] = Field(description="--level, --duration, --mtbf and --nodes, as on the command line")
    choice: tuple[str, ...] = Field(description="--only and --skip, as on the command line")
    nodes: tuple[SavedNode, ...] = Field(description="of the cluster")
    checks: tuple[SavedCheck, ...] = Field(description="in the order they were made")
    findings: tuple[SavedFinding, ...] = Field(description="the rows, check by check")
    facts: dict[str, dict[str, Any]] = Field(description="what the probes found, by check; differs from check to check")


def to_json(result: Result) -> dict[str, Any]:
    """JSON values. A float that is not finite becomes text, a measure of one null: JSON has no number for it."""
    bad, good = result.bad(), set(result.good())
    value = {
        "v": RESULT_VERSION,
        "kind": "preflight",
        "fit": result.fit,
        "exit_code": result.exit_code,
        "level": result.level.value,
        "strict": result.strict,
        "started_s": result.started_s,
        "seconds": result.seconds,
        "address": result.address,
        "job": result.job,
        "baseline": result.baseline,
        "arguments": result.arguments,
        "options": result.options,
        "choice": result.choice,
        "nodes": [
            {
                **_fields(node),
                "good": node.name in good,
                "checked": node.name in good or node.name in bad,
                "against": [_title(each) for each in bad.get(node.name, ())],
            }
            for node in result.nodes
        ],
        "checks": [{**_fields(run), "status": _status(result, run.name).value} for run in result.checks],
        "findings": [_finding(each) for each in result.findings],
        "facts": result.facts,
    }
    return _json(value)


def from_json(value: Any, label: str = "the result") -> Result:
    """The result that `to_json` wrote; `label` is what messages call it. Raises UsageError. What is derived (fit, good, the
    status of a check) is judged anew, not believed."""
    version = value.get("v") if isinstance(value, Mapping) and value.get("kind") == "preflight" else None
    if version is None:
        raise UsageError(f"{label} is no result of a preflight", hint=HINT)
    if version != RESULT_VERSION:
        raise UsageError(
            f"{label} is of version {version!r}; this chaosrun knows version {RESULT_VERSION}",
            hint="make it anew with this chaosrun: `chaosrun preflight -o json`",
        )
    try:
        # As text, since strict means different things for JSON and for Python's values.
        saved = SavedResult.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{label} is damaged: {place or 'all of it'}: {first['msg']}", hint=HINT) from error
    return Result(
        level=saved.level,
        strict=saved.strict,
        started_s=saved.started_s,
        seconds=saved.seconds,
        address=saved.address,
        job=saved.job,
        baseline=saved.baseline,
        arguments=saved.arguments,
        options=saved.options,
        choice=saved.choice,
        nodes=tuple(Node(**node.model_dump(exclude={"good", "checked", "against"})) for node in saved.nodes),
        checks=tuple(CheckRun(**check.model_dump(exclude={"status"})) for check in saved.checks),
        findings=tuple(finding.finding() for finding in saved.findings),
        facts=saved.facts,
    )


def _status(result: Result, check: str) -> Status:
    return worst([finding.status for finding in result.findings if finding.check == check])


def _title(finding: Finding) -> str:
    device = "" if finding.device is None else f" ({finding.device})"
    return f"{finding.check}: {finding.name}{device}"


def _finding(finding: Finding) -> dict[str, Any]:
    measure = finding.measure
    known = measure is not None and math.isfinite(measure.number)
    return {**_fields(finding), "measure": _fields(measure) if known else None}


def _fields(value: Any) -> dict[str, Any]:
    """Of a frozen dataclass, as they are: asdict copies, and knows no Mapping."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_json(str(key)): _json(inner) for key, inner in value.items()}
    if isinstance(value, str):
        # A name of a file or a process may hold bytes that are no text; JSON cannot.
        return str(value).encode(errors="backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Sequence):
        return [_json(inner) for inner in value]
    return value
