"""What a preflight is made of: nodes, calls of probes and their outcomes, checks, findings. Values only: no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from chaosrun.preflight.drills.wanted import Drills
    from chaosrun.spec.source import Job

Facts = Mapping[str, Any]
"""What probes found: JSON values."""


class Level(StrEnum):
    QUICK = "quick"
    STANDARD = "standard"
    DEEP = "deep"

    def includes(self, other: "Level") -> bool:
        """Whether a preflight of this level makes the checks of the other."""
        order = list(Level)
        return order.index(self) >= order.index(other)


class Status(StrEnum):
    """From good to bad: what a group of findings comes to is its last one."""

    SKIP = "SKIP"
    """Does not apply here; never a PASS."""
    PASS = "PASS"
    WARN = "WARN"
    ERROR = "ERROR"
    """The check itself could not run; never a FAIL."""
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster."""

    name: str
    """How it is called in everything that people see; unique in the cluster."""
    node_id: str
    """Ray's."""
    address: str
    """IP address."""
    hostname: str
    cpus: float
    gpus: int
    """As Ray counts them."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """What Ray listens on there, by purpose."""
    head: bool = False
    """Whether Ray's head runs there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number that can be compared with peers and with a baseline."""

    number: float
    unit: str
    better: Literal["higher", "lower"]
    warn: float | None = None
    """Worse than this share of the median (or of the baseline), from 0 to 1, is a WARN; None: it is only written down."""
    fail: float | None = None
    """The same for a FAIL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: one thing that was looked at on one node or device, or in the whole cluster."""

    check: str
    """Name of its check in the catalogue."""
    name: str
    """What was looked at, in a few words, the same on every node: "memory", "clock", "all-reduce"."""
    status: Status
    node: str | None = None
    """`Node.name`; None: it is of the whole cluster."""
    device: str | None = None
    """Of that node: "cpu", "cuda:0", a path, a port, the peer's name of a pair."""
    measured: str = ""
    """The value, with its unit, for people."""
    threshold: str = ""
    """What it had to be."""
    reason: str = ""
    """What it means, where the two do not say it; of a SKIP why it does not apply; of an ERROR why it could not run."""
    remedy: str = ""
    """What to do. A FAIL and a WARN always have one."""
    measure: Measure | None = None
    """What is compared with peers: see `assess.peers`."""
    blames: Sequence[str] = ()
    """Nodes that a finding of the whole cluster speaks against: they are not good. Of `node` itself it need not be said."""
    covers: Sequence[str] = ()
    """Nodes that a PASS of the whole cluster was shown on. Where it names none, the engine names those that answered."""

    def __post_init__(self) -> None:
        if self.status in (Status.FAIL, Status.WARN):
            assert self.measured and self.threshold and self.remedy, (
                f"{self.check}, {self.name}: {self.status} must explain itself"
            )
        if self.status in (Status.SKIP, Status.ERROR):
            assert self.reason, f"{self.check}, {self.name}: {self.status} without a reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A probe to be run in a process of its own: the function `probe(parameters) → facts` of chaosrun.preflight.probes.NAME."""

    probe: str
    parameters: Facts = field(default_factory=dict)
    limit_s: float
    """After this its process and everything below it are killed."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the process's environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a call: `facts`, or why there are none."""

    facts: Facts | None = None
    error: str = ""
    """In one line, for people: it raised, was killed, could not be started, the agent or its node is gone."""
    ended: Literal["done", "raised", "limit", "died", "lost"] = "done"
    """limit: killed after `limit_s`; died: its process ended by itself without an answer; lost: its agent or node is gone."""
    seconds: float = 0.0


def answers(outcomes: Mapping[str, Outcome], calls: Mapping[str, Call]) -> dict[str, dict[str, Any]]:
    """Outcomes by node name, as facts: {"answered": {name: facts}, "unanswered": {name: {"ended", "error", "limit_s"}}}."""
    return {
        "answered": {name: outcome.facts for name, outcome in outcomes.items() if outcome.facts is not None},
        "unanswered": {
            name: {"ended": outcome.ended, "error": outcome.error, "limit_s": calls[name].limit_s}
            for name, outcome in outcomes.items()
            if outcome.facts is None
        },
    }


class Crew(Protocol):
    """One agent a node, as checks see them."""

    @property
    def nodes(self) -> Sequence[Node]:
        """Those that are still in."""
        ...

    def probe(self, calls: Mapping[str, Call]) -> dict[str, Outcome]:
        """Run calls, by node name, at the same time; returns when every one has ended. Never raises for what happens there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a preflight was asked for."""

    level: Level
    root: Path
    """Where runs are kept (absolute)."""
    storage: Path
    """Where checkpoints would be (absolute): of the job, or below the root."""
    job: "Job | None" = None
    seconds: float | None = None
    """How long a deep preflight may take, as asked; None: as long as its checks take."""
    mtbf_s: float | None = None
    """Mean time between failures of one node, if given."""
    forecast_nodes: Sequence[int] = ()
    """Cluster sizes to extrapolate to, if given."""
    earlier: Mapping[str, Facts] = field(default_factory=dict)
    """Facts of the checks before this one, by the check's name."""
    former: Facts | None = None
    """What `earlier_run` says of the last run of the job; None: there is none."""
    drills: "Drills | None" = None
    """Who carries drills out; None: there is nobody."""


Gather = Callable[[Setting, Crew], Facts]
"""Effects: runs probes, returns what they found."""
Assess = Callable[[Setting, Sequence[Node], Facts], Sequence[Finding]]
"""Pure: judges what was found; the nodes are those that were asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One entry of the catalogue. Either `call` (of a check that each node makes for itself) or `gather`."""

    name: str
    """As --only and --skip have it."""
    about: str
    """What it finds out, in a few words."""
    level: Level
    """The lowest level that makes it."""
    assess: Assess
    """The facts of a check with `call` are what `answers` makes of them. An unanswered node of which it makes no finding gets
    its ERROR row from the engine."""
    call: Callable[[Setting, Node], Call] | None = None
    gather: Gather | None = None

    def __post_init__(self) -> None:
        assert (self.call is None) != (self.gather is None), self.name
