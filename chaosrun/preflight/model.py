"""The values of a preflight: levels, findings (made by `Rows` alone), answers of nodes, checks. No I/O."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar

from msgspec import Struct

from chaosrun.cluster.probing import EXPLAINED, Call, Node, ProbeOutcome
from chaosrun.records.codec import convert

if TYPE_CHECKING:
    from chaosrun.preflight.checks.drill import Drills
    from chaosrun.preflight.earlier_run import EarlierRun
    from chaosrun.spec.job_file import Job

F = TypeVar("F")
PROBES = "chaosrun.preflight.probes"


class Level(StrEnum):
    """Each level includes the checks of the levels before it."""

    QUICK = "quick"
    STANDARD = "standard"
    DEEP = "deep"


class Status(StrEnum):
    """From good to bad; a group of findings has the worst status in it."""

    SKIP = "SKIP"
    """Does not apply here; never a PASS."""
    PASS = "PASS"
    WARN = "WARN"
    ERROR = "ERROR"
    """The check itself could not run; never a FAIL."""
    FAIL = "FAIL"


BAD = (Status.FAIL, Status.ERROR)


def worst(statuses: Sequence[Status]) -> Status:
    """The worst of several; SKIP when there are none."""
    return max(statuses, key=list(Status).index, default=Status.SKIP)


def graded(value: float | None, least: float, small: float) -> Status:
    """A FAIL below `least`, a WARN below `small`; None is no limit."""
    if value is None or value >= max(least, small):
        return Status.PASS
    return Status.FAIL if value < least else Status.WARN


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number that is compared with those of other nodes and with a baseline."""

    __pydantic_config__ = EXPLAINED
    number: float
    """the measured number"""
    unit: str
    """its unit"""
    better: Literal["higher", "lower"]
    """which way is better"""
    warn: float | None = None
    """worse than this share of the median or of the baseline, from 0 to 1, is a WARN; null: never"""
    fail: float | None = None
    """the same for a FAIL"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: one thing that was looked at on one node or device, or in the whole cluster."""

    __pydantic_config__ = EXPLAINED
    check: str
    """the check it is of"""
    name: str
    """what was looked at, in a few words, the same on every node: "memory", "clock", "all-reduce\""""
    status: Status
    """ERROR: it could not be looked at; SKIP: it does not apply here"""
    node: str | None = None
    """the node's name; null: of the whole cluster"""
    device: str | None = None
    """of that node: a device, a path, a port, the other node of a pair; else null"""
    measured: str = ""
    """the value, with its unit, for people"""
    threshold: str = ""
    """what it had to be"""
    reason: str = ""
    """what it means; why it does not apply; why it could not be looked at"""
    remedy: str = ""
    """what to do; never empty in a FAIL or a WARN"""
    measure: Measure | None = None
    """what is compared with the other nodes and with a baseline"""
    blames: tuple[str, ...] = ()
    """nodes it speaks against, besides `node`"""
    covers: tuple[str, ...] = ()
    """nodes that a PASS of the whole cluster was shown on: where a check names none, those that answered"""

    @property
    def title(self) -> str:
        return f"{self.check}: {self.name}" + (f" ({self.device})" if self.device else "")

    def __post_init__(self) -> None:
        if self.status in (Status.FAIL, Status.WARN):
            explained = self.measured and self.threshold and self.remedy
            assert explained, f"{self.check}, {self.name}: {self.status} must explain itself"
        if self.status in (Status.SKIP, Status.ERROR):
            assert self.reason, f"{self.check}, {self.name}: {self.status} without a reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Makes findings; values that several findings share are given once, to `of`."""

    check: str
    name: str = ""
    node: str | None = None
    device: str | None = None

    def of(self, **common: str | None) -> Self:
        return replace(self, **common)

    def row(self, status: Status, measured: str = "", threshold: str = "", **more: Any) -> Finding:
        common = {"check": self.check, "name": self.name, "node": self.node, "device": self.device}
        measure = more.get("measure")
        if measure is not None and not math.isfinite(measure.number):
            more["measure"] = None
        return Finding(**{**common, "status": status, "measured": measured, "threshold": threshold, **more})

    def passed(self, measured: str = "", threshold: str = "", **more: Any) -> Finding:
        return self.row(Status.PASS, measured, threshold, **more)

    def warn(self, measured: str, threshold: str, remedy: str, **more: Any) -> Finding:
        return self.row(Status.WARN, measured, threshold, remedy=remedy, **more)

    def fail(self, measured: str, threshold: str, remedy: str, **more: Any) -> Finding:
        return self.row(Status.FAIL, measured, threshold, remedy=remedy, **more)

    def skip(self, reason: str, **more: Any) -> Finding:
        return self.row(Status.SKIP, reason=reason, **more)

    def error(self, reason: str, remedy: str = "", **more: Any) -> Finding:
        return self.row(Status.ERROR, reason=reason, remedy=remedy, **more)

    def judged(self, status: Status, measured: str, threshold: str, remedy: str, *, reason: str = "", **more: Any) -> Finding:
        """A finding of this status; a PASS leaves reason and remedy out."""
        words = {} if status is Status.PASS else {"reason": reason, "remedy": remedy}
        return self.row(status, measured, threshold, **words, **more)


class Answers(Struct, Generic[F], frozen=True, kw_only=True):
    """The nodes' answers to the same call, by name."""

    answered: Mapping[str, F]
    unanswered: Mapping[str, ProbeOutcome]
    """Nodes without facts, and why."""
    asked_s: tuple[float, float] = (0.0, 0.0)
    """When the calls were sent and when the last answer had come, by the caller's clock: seconds since the epoch."""


def read_answers(outcomes: Mapping[str, ProbeOutcome], facts: type[F], asked_s: tuple[float, float] = (0.0, 0.0)) -> Answers[F]:
    """The facts of each node as one type. An answer of another form, as from a node with another version of chaosrun, counts as
    missing."""
    answered, unanswered = dict[str, F](), dict[str, ProbeOutcome]()
    for name, outcome in outcomes.items():
        try:
            if outcome.facts is None:
                unanswered[name] = outcome
            else:
                answered[name] = convert(outcome.facts, facts)
        except ValueError as wrong:
            unanswered[name] = ProbeOutcome(ended="raised", error=f"its answer cannot be read: {wrong}")
    return Answers(answered=answered, unanswered=unanswered, asked_s=asked_s)


def ask(probe: str, limit_s: float, env: Mapping[str, str] | None = None, **parameters: Any) -> Call:
    """A call of `preflight.probes.PROBE`; for a check with its probe in its own file, by that file's `__name__`."""
    module = probe if "." in probe else f"{PROBES}.{probe}"
    return Call(probe=module, parameters=parameters, limit_s=limit_s, env=env or {})


class Pool(Protocol):
    """The nodes that a check may probe."""

    @property
    def nodes(self) -> Sequence[Node]:
        """Nodes that are still included."""
        ...

    def ask(self, calls: Mapping[str, Call], facts: type[F]) -> Answers[F]:
        """Run calls, by node name, at the same time; returns when every one has ended. Never raises for errors there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    level: Level
    root: Path
    """Where runs are kept (absolute)."""
    storage: Path
    """Where checkpoints would be (absolute): the job's `checkpoint.storage` if it is a directory, else the root."""
    job: "Job | None" = None
    token: str = "token"
    """Unique to this preflight; used in file names."""
    seconds: float | None = None
    """How long a deep preflight may take, as requested; None: as long as its checks take."""
    mtbf_s: float | None = None
    """Mean time between failures of one node, if given."""
    forecast_nodes: Sequence[int] = ()
    """Cluster sizes to extrapolate to, if given."""
    earlier: Mapping[str, object] = field(default_factory=dict)
    """Facts of the checks before this one, by the check's name."""
    last_run: "EarlierRun | None" = None
    """The last completed run of the same job; None: there is none."""
    drills: "Drills | None" = None
    """Runs drills; None: no drills can be made."""

    @property
    def env(self) -> Mapping[str, str]:
        return self.job.spec.env if self.job else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Generic[F]):
    """The declaration of a module of `preflight.checks`: each node makes the check (`call`, `facts`), or several together
    (`gather`)."""

    name: str
    """Its name in --only and --skip."""
    about: str
    order: int
    """Its place among the checks, which run one after another."""
    level: Level = Level.QUICK
    """The lowest level that makes it."""
    call: Callable[[Setting, Node], Call] | None = None
    facts: type[Any] = dict
    """The answer type of the probe in `call`."""
    gather: Callable[[Setting, Pool], F] | None = None
    """Effects: runs probes, returns their facts."""
    judge: Callable[[Setting, Sequence[Node], F], Iterable[Finding]]
    """Pure: judges the facts; the nodes are those probed. For a check with `call` it gets `Answers`; a node without an answer
    that it does not mention gets its ERROR row from the engine."""

    def __post_init__(self) -> None:
        assert (self.call is None) != (self.gather is None), self.name
