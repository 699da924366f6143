"""`Kind`, which holds everything about a kind of fault. Each family's module declares its kinds; `faults.kinds` has all."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn, get_args

from chaosrun.faults.observed import Disproof, Observation
from chaosrun.faults.outside import FinalStrike, OutsideStrike
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
"""The named points in a worker, in the order in which an attempt reaches them."""
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

death: the very process it was meant for was seen, from outside, to end in this kind's way.
note: the process goes on, and the one that struck recorded what it found before and after.
hang: the supervisor declared the hang, and named this rank as the one that stopped first.
node: the agent, and with it every process below, was seen to be gone, from outside.
successor: the supervisor itself was gone; the one that took over noted it.
"""

EVERYWHERE = frozenset(PHASES) - {"save"}
"""All phases but `save`, a script's own: `faults.saves` declares what strikes there."""
WITHIN_AN_ATTEMPT = EVERYWHERE - {"rendezvous"}
AT_STEPS = frozenset({"step"})
PREEMPTED_EXIT_CODE = 85
"""Exit code of a rank that left on a preemption notice, with its checkpoint committed."""
LEFT_ON_NOTICE = "preempted"
"""The status in the end record of such a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Everything about one kind of fault."""

    name: str
    family: Family
    words: str
    """Its effect; {rank} stands for "rank 1", {option} for an option's value."""
    proof: str
    """For users: how chaosrun knows that it happened."""
    verdict: Literal["PASS", "FAIL"] = "PASS"
    """The verdict that a correct job gets under this fault."""

    # When
    phases: frozenset[str] = EVERYWHERE
    """The points at which it may strike; `default_phase` is one of them."""
    default_phase: Phase = "step"
    options: Mapping[Option, Value] = field(default_factory=dict)
    """Its options with defaults; None: chosen when it strikes, or unused."""
    beside: bool = False
    """At an asynchronously saved checkpoint it strikes from the writer process; if False, in the rank itself."""
    only_rank: int | None = None
    """The only rank that it can strike."""
    needs_peers: str | None = None
    """Why it needs several workers; completes the sentence "one worker alone {needs_peers}"."""

    needs_objects: bool = False
    """Whether it strikes requests to an object store."""

    # How it strikes
    inside: Callable[[Strike], None] | None = None
    """Strikes in the worker, at its point. None: the supervisor strikes when it learns that the rank is at the point."""
    outside: Callable[[OutsideStrike], bool] | None = None
    """Strikes from the agent of the rank's node, on the supervisor's order. Returns False if the rank was gone already."""
    last_act: Callable[[FinalStrike], NoReturn] | None = None
    """Strikes from the supervisor, which does not outlive it."""

    # Its effects
    notice: bool = False
    """The ranks get a preemption notice, and leave a little later, with their own checkpoint."""
    damages: Literal["checkpoint", "staging"] | None = None
    """The files that it damages or leaves behind, which only a later start reads."""
    ends_node: bool = False
    """No process can be started on that node again."""
    strikes_ray: Literal["raylet", "head"] | None = None
    """Ray's own process that it kills; other people's unless this Ray is private."""
    may_end: bool = False
    """The rank may die of it with an error, or continue: the script decides."""
    witnessed: bool = False
    """The other ranks record the operations of their saves for it."""
    loss: bool = False
    """`faults.replay` may use it for a rank lost in a recorded trace."""

    # Its evidence
    evidence: Evidence = "death"
    signals: tuple[int, ...] = ()
    """For evidence "death": signals by which the process may end."""
    exit_code: int | Literal["failure"] | None = None
    """For evidence "death": the code with which the process may exit; "failure": any but 0."""
    note: type[Note] = Note
    """The type of the note that its strike writes."""
    shows: Callable[[Observation], Disproof | None] | None = None
    """Additional checks of this kind's evidence. Returns why the observation does not show it; None when it does."""
    aftermath: Callable[[Observation, FaultRequested, LegHistory], Disproof | None] | None = None
    """Checks the leg's records before and after it. Returns why they do not confirm it; None when they do."""
    tell: Callable[[Observation], str] | None = None
    """Describes the observation in a few words. None: only how its process ended."""

    @property
    def ends_attempt(self) -> bool:
        """Whether the job resumes from a checkpoint afterwards."""
        return self.evidence != "note"

    @property
    def timed(self) -> bool:
        """Whether it may also strike after a delay, from outside."""
        return self.outside is not None or self.last_act is not None

    @property
    def outlives_its_attempt(self) -> bool:
        """Whether it can be shown even if its process is killed with the attempt right after the fault was claimed."""
        return not self.ends_attempt or signal.SIGKILL in self.signals

    @property
    def takes_ray_along(self) -> bool:
        """Whether it ends something that other drills may use: a node for good, the supervising process, Ray's head."""
        return self.ends_node or self.last_act is not None

    @property
    def waits(self) -> bool:
        """Whether the rank waits at its point, as the strike comes from outside and is more than a notice to it."""
        return self.inside is None and not self.notice
