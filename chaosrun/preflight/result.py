"""The result of a preflight, and its JSON form: what `chaosrun preflight -o json` prints and a baseline is read from.

Versions: `v` is RESULT_VERSION. It is raised when a field is removed, renamed, or changes its type or meaning. A field may be
added without that. The names of checks and of their subjects, and their facts, are not covered.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
from pydantic import TypeAdapter, ValidationError, computed_field

from chaosrun.cluster.probing import EXPLAINED, Node
from chaosrun.errors import UsageError
from chaosrun.preflight.model import BAD, Finding, Level, Status, worst

RESULT_VERSION = 2
EXIT_UNFIT = 8
ANSWERS = "answers"
"""The name under which a node that does not answer is reported, in the place of a check."""
HINT = "name a file that `chaosrun preflight -o json` has written"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """A check that was made."""

    __pydantic_config__ = EXPLAINED
    name: str
    """as --only and --skip have it"""
    about: str
    """what it finds out"""
    seconds: float = 0.0
    """how long it took"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a preflight."""

    __pydantic_config__ = EXPLAINED
    v: Literal[2] = RESULT_VERSION
    """version of this schema"""
    kind: Literal["preflight"] = "preflight"
    """what this is"""
    level: Level
    """which checks were made"""
    strict: bool = False
    """whether a WARN makes unfit"""
    started_s: float
    """seconds since the epoch"""
    seconds: float
    """how long all of it took"""
    address: str | None = None
    """of the cluster; null: a private Ray on this machine"""
    job: str | None = None
    """path of the job file; null: none was given"""
    baseline: str | None = None
    """path of the baseline that it was compared with; null: none was given"""
    arguments: tuple[str, ...] = ()
    """job, overrides, --root and --address, as on the command line: of `chaosrun submit` as well"""
    options: tuple[str, ...] = ()
    """--level, --duration, --mtbf and --nodes, as on the command line"""
    choice: tuple[str, ...] = ()
    """--only and --skip, as on the command line"""
    nodes: tuple[Node, ...]
    """of the cluster"""
    checks: tuple[CheckRun, ...]
    """in the order they were made"""
    findings: tuple[Finding, ...]
    """the rows, check by check"""
    facts: Mapping[str, Any]
    """what the probes found, by check; differs from check to check"""

    def bad(self) -> dict[str, tuple[Finding, ...]]:
        """Nodes that are left out of the good ones, and what speaks against each: a FAIL or an ERROR (under strict a WARN)."""
        against: dict[str | None, list[Finding]] = {}
        for finding in self.findings:
            if self._counts(finding):
                for name in {finding.node, *finding.blames} - {None}:
                    against.setdefault(name, []).append(finding)
        return {node.name: tuple(against[node.name]) for node in self.nodes if node.name in against}

    @computed_field(description="nothing failed, every check that applies could run, and at least one thing passed")
    @property
    def fit(self) -> bool:
        return self._any_pass() and not any(self._counts(finding) for finding in self.findings)

    @computed_field(description="what `chaosrun preflight` exits with: 0 or 8")
    @property
    def exit_code(self) -> int:
        return 0 if self.fit else EXIT_UNFIT

    @computed_field(description="names of the nodes that can be used: nothing speaks against them, and they were looked at")
    @property
    def good(self) -> tuple[str, ...]:
        bad, found = self.bad(), [each for each in self.findings if each.status in (Status.PASS, Status.WARN)]
        looked_at = {name for each in found for name in (each.node, *each.covers)} if self._any_pass() else set[str]()
        return tuple(node.name for node in self.nodes if node.name not in bad and node.name in looked_at)

    @computed_field(description="names of the nodes on which all was skipped: neither good nor bad, they do not make unfit")
    @property
    def unchecked(self) -> tuple[str, ...]:
        known = {*self.good, *self.bad()}
        return tuple(node.name for node in self.nodes if node.name not in known)

    @computed_field(description="what speaks against each node that cannot be used, as `check: name (device)`")
    @property
    def against(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(finding.title for finding in findings) for name, findings in self.bad().items()}

    @computed_field(description="what the findings of each check come to")
    @property
    def statuses(self) -> dict[str, Status]:
        names = dict.fromkeys([*(run.name for run in self.checks), *(finding.check for finding in self.findings)])
        return {name: worst([each.status for each in self.findings if each.check == name]) for name in names}

    def _counts(self, finding: Finding) -> bool:
        return finding.status in BAD or (self.strict and finding.status is Status.WARN)

    def _any_pass(self) -> bool:
        return any(finding.status is Status.PASS for finding in self.findings)


DERIVED = ("fit", "exit_code", "good", "unchecked", "against", "statuses")
"""Values in the JSON that are derived, and computed again when it is read."""


@cache
def result_adapter() -> TypeAdapter[Result]:
    return TypeAdapter(Result)


def to_json(result: Result) -> dict[str, Any]:
    """JSON values. In facts a float that is not finite becomes text: JSON has no number for it."""
    derived = {name: getattr(result, name) for name in DERIVED}
    return _json({**msgspec.to_builtins(result, str_keys=True), **derived})


def from_json(value: Any, label: str = "the result") -> Result:
    """The result that `to_json` wrote; `label` is what messages call it. Raises UsageError. Derived values (fit, good, the
    status of a check) are computed again, not read."""
    version = value.get("v") if isinstance(value, Mapping) and value.get("kind") == "preflight" else None
    if version is None:
        raise UsageError(f"{label} is not a result of a preflight", hint=HINT)
    if version != RESULT_VERSION:
        raise UsageError(
            f"{label} is of version {version!r}; this chaosrun knows version {RESULT_VERSION}",
            hint="make it again with this chaosrun: `chaosrun preflight -o json`",
        )
    own = {name: part for name, part in value.items() if name not in DERIVED}
    try:
        # As text, since strict differs between JSON and Python values.
        return result_adapter().validate_json(json.dumps(own))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{label} is damaged: {place or 'all of it'}: {first['msg']}", hint=HINT) from error


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_json(str(key)): _json(inner) for key, inner in value.items()}
    if isinstance(value, str):
        # A file or process name may contain bytes that are not text, which JSON cannot hold.
        return str(value).encode(errors="backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Sequence):
        return [_json(inner) for inner in value]
    return value
