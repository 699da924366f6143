"""What a kind of fault is: one value that says all of it. The kinds stand in their families, `faults.kinds` has them all."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn, get_args

from chaosrun.faults.observed import Observation, Problem
from chaosrun.faults.outside import LastAct, OutsideStrike
from chaosrun.faults.strike import Strike
from chaosrun.records.events import FaultRequested
from chaosrun.records.history import LegHistory
from chaosrun.records.markers import Note

Phase = Literal[
    "rendezvous",
    "restore.begin",
    "restore.end",
    "fetch",
    "forward",
    "reduce",
    "optimizer",
    "record",
    "checkpoint.begin",
    "checkpoint.file",
    "checkpoint.fsync.before",
    "checkpoint.fsync.after",
    "checkpoint.precommit",
    "checkpoint.rename.before",
    "checkpoint.rename.after",
    "checkpoint.postcommit",
    "checkpoint.retention",
    "step",
    "save",
]
"""The named points in a worker, in the order in which an attempt comes by them."""
PHASES: tuple[str, ...] = get_args(Phase)
CHECKPOINT_PHASES = frozenset(phase for phase in PHASES if phase.startswith("checkpoint."))
RESTORE_PHASES = frozenset({"restore.begin", "restore.end"})
ONCE_AN_ATTEMPT = RESTORE_PHASES | {"rendezvous"}
TRAINING_PHASES = frozenset({"fetch", "forward", "reduce", "optimizer", "record", "step"})

Option = Literal[
    "grace_s", "duration_s", "factor", "steps", "mebibytes", "state", "tensor", "bit", "file", "operation", "unsynced"
]
OPTIONS: tuple[Option, ...] = get_args(Option)
Value = int | float | str | None

Family = Literal["process", "node", "control", "memory", "storage", "rendezvous"]
Evidence = Literal["death", "note", "hang", "node", "successor"]
"""How a fault is known to have happened.

death: the very process it was meant for was seen, from outside, to end in the way of this kind.
note: the process goes on, and whoever struck wrote down what it found before and after.
hang: the supervisor declared the hang, and named this rank as the one that stopped first.
node: the agent, and with it every process below, was seen to be gone, from outside.
successor: the supervisor itself was gone; the one after it says so.
"""

EVERYWHERE = frozenset(PHASES) - {"save"}
"""A save is the script's own: what strikes there is known by its operations (`faults.saves`)."""
WITHIN_AN_ATTEMPT = EVERYWHERE - {"rendezvous"}
AT_STEPS = frozenset({"step"})
PREEMPTED_EXIT_CODE = 85
"""What a rank leaves with after a preemption notice, its checkpoint committed."""
LEFT_ON_NOTICE = "preempted"
"""The status in the end record of such a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault: everything that there is to know of it."""

    name: str
    family: Family
    words: str
    """What it does; {rank} stands for "rank 1", {option} for an option's value."""
    proof: str
    """For people: how chaosrun knows that it happened."""
    verdict: Literal["PASS", "FAIL"] = "PASS"
    """Of a job that comes back exactly."""

    # When
    phases: frozenset[str] = EVERYWHERE
    """Where it may strike; `default_phase` is one of them."""
    default_phase: Phase = "step"
    options: Mapping[Option, Value] = field(default_factory=dict)
    """With their defaults; None: chosen where it strikes, or not at all."""
    beside: bool = False
    """Of a checkpoint that is saved beside the training it strikes there; any other strikes in the rank itself."""
    only_rank: int | None = None
    """The one rank that it can be done to."""
    needs_peers: str | None = None
    """Why one worker alone cannot have it: "one worker alone {needs_peers}"."""

    needs_objects: bool = False
    """It strikes requests to an object store."""

    # How it strikes
    inside: Callable[[Strike], None] | None = None
    """In the worker, at its point. None: the rank comes to the point and the supervisor, who learns of it, strikes."""
    outside: Callable[[OutsideStrike], bool] | None = None
    """On the word of the supervisor, by the agent of the rank's node. False when the rank was gone, and nothing was done."""
    last_act: Callable[[LastAct], NoReturn] | None = None
    """By the supervisor, which does not outlive it."""

    # What comes of it
    notice: bool = False
    """The ranks are told to go, and leave some moments later with a checkpoint of their own."""
    damages: Literal["checkpoint", "staging"] | None = None
    """What it spoils or leaves behind, which only a later start looks at."""
    ends_node: bool = False
    """Nothing is started on that node again."""
    strikes_ray: Literal["raylet", "head"] | None = None
    """Ray's own process that it kills, which is another's unless this Ray is private."""
    may_end: bool = False
    """The rank may die of it, with an error, or go on: that is the script's to decide."""
    witnessed: bool = False
    """The other ranks write down what they do meanwhile."""
    loss: bool = False
    """A loss in a recorded trace may be played as this."""

    # What shows it
    evidence: Evidence = "death"
    signals: tuple[int, ...] = ()
    """Of evidence "death": signals that the process may end by."""
    exit_code: int | Literal["failure"] | None = None
    """Of evidence "death": that the process may end with; failure: any but 0."""
    note: type[Note] = Note
    """What is written down of it."""
    shows: Callable[[Observation], Problem | None] | None = None
    """Why what was seen of it, beyond what its evidence asks of every kind, does not show it; None when it does."""
    aftermath: Callable[[Observation, FaultRequested, LegHistory], Problem | None] | None = None
    """Why the records of its leg before and after do not bear it out; None when they do."""
    tell: Callable[[Observation], str] | None = None
    """In a few words, what was seen. None: how its process ended is all there is to say."""

    @property
    def ends_attempt(self) -> bool:
        """The job goes on from a checkpoint afterwards."""
        return self.evidence != "note"

    @property
    def timed(self) -> bool:
        """It may also strike after a delay, from outside."""
        return self.outside is not None or self.last_act is not None

    @property
    def outlives_its_attempt(self) -> bool:
        """It is seen to happen even where its process is killed with the attempt right after the fault was claimed."""
        return not self.ends_attempt or signal.SIGKILL in self.signals

    @property
    def takes_ray_along(self) -> bool:
        """It ends what other drills may be using: a node for good, the supervising process, Ray's head."""
        return self.ends_node or self.last_act is not None

    @property
    def waits(self) -> bool:
        """The rank that has come to its point waits there for what does not strike inside it, unless that is a notice to it."""
        return self.inside is None and not self.notice
