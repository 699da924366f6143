"""The events of a leg's journal: what its supervisor decided and saw, one typed value each. `event` in the file says which.

The journal gives each its seq (1, 2, …) and time_s (wall clock).
"""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from chaosrun.records.codec import RECORDS_VERSION, Count, Record
from chaosrun.records.traces import Source

Outcome = Literal[
    "completed",
    "settled",
    "differed",
    "user_error",
    "recovery_failed",
    "inexact_restore",
    "diverged",
    "fault_missed",
    "resources",
    "timeout",
    "interrupted",
]
"""settled, differed: ended early (`records.early_end`). diverged: stopped in production, as it had not come back right."""
OUTCOMES: tuple[str, ...] = get_args(Outcome)
EndCode = Literal[
    "failed_inside_chaosrun",
    "out_of_memory",
    "killed",
    "told_to_leave",
    "notice_taken",
    "left_apart",
    "node_lost",
    "unkillable",
    "hung",
    "unsafe_checkpoint",
    "checkpoint_damaged",
    "registered_state_changed_on_load",
    "parameter_order",
    "hook_changes_state",
    "optimizer_state_cast_on_load",
    "launcher_ended",
    "launcher_misused",
]
"""What is known of an end beside its outcome; what each means and whose fault it is says `verify.code_ends`."""
CONCLUSIVE: tuple[Outcome, ...] = ("completed", "settled", "differed", "inexact_restore", "diverged")
"""How a leg ended that says whether the job came back; with any other outcome its drill is INCONCLUSIVE."""
TRAINED: tuple[Outcome, ...] = ("completed", "settled", "differed")
"""How a leg ended that trained as far as it was asked to."""

AttemptNumber = Annotated[int, Meta(gt=0, lt=10**9)]


class Event(Record, frozen=True, kw_only=True, omit_defaults=False, tag_field="event"):
    v: Literal[2] = RECORDS_VERSION
    seq: Count = 0
    time_s: float = 0.0

    @property
    def event(self) -> str:
        return str(self.__struct_config__.tag)


class OfAttempt(Event, frozen=True, kw_only=True, omit_defaults=False, tag_field="event"):
    attempt: AttemptNumber


class LegStarted(Event, frozen=True, kw_only=True, tag="leg.started"):
    leg: str
    workers: int
    supervisor_pid: int
    plan: str | None = None
    """Digest of the plan, its injected faults left out."""


class SupervisorResumed(Event, frozen=True, kw_only=True, tag="supervisor.resumed"):
    """`chaosrun resume` took over."""

    supervisor_pid: int


class NodePlace(Record, frozen=True, kw_only=True, omit_defaults=False):
    address: str = ""
    ranks: tuple[int, ...]
    gpus: tuple[int, ...] = ()


class NotPreloaded(Record, frozen=True, kw_only=True):
    """A module that each rank imports for itself: a fork would lose what it starts."""

    module: str
    threads: tuple[str, ...] = ()
    cuda: bool = False
    import_s: float


class PlacementAcquired(Event, frozen=True, kw_only=True, tag="placement.acquired"):
    nodes: dict[str, NodePlace]
    """By node id."""
    ray: str = ""
    oversubscribed: bool = False
    stood_by: tuple[str, ...] = ()
    """Nodes on which everything had been imported ahead."""
    not_preloaded: tuple[NotPreloaded, ...] = ()


class StagingCleared(Event, frozen=True, kw_only=True, tag="staging.cleared"):
    """What killed attempts left half-written, or half-deleted, has been removed."""

    names: tuple[str, ...]


class CheckpointQuarantined(Event, frozen=True, kw_only=True, tag="checkpoint.quarantined"):
    name: str
    step: int | None = None
    reason: str
    moved_to: str | None = None


class AttemptStarting(OfAttempt, frozen=True, kw_only=True, tag="attempt.starting"):
    by: Literal["chaosrun", "script"] = "chaosrun"
    """Who saves and resumes. Where a script goes on from its traces say, and nothing here."""
    resume: str | None
    """Name of the checkpoint."""
    resume_step: Count
    """0 without one."""
    armed: tuple[str, ...]
    """Ids of the faults that may strike in it."""
    distributed_debug: bool = False
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, after an error of DDP's reducer."""


class AttemptStarted(OfAttempt, frozen=True, kw_only=True, tag="attempt.started"):
    pids: dict[Count, int]
    """By rank; empty where a command starts them."""
    address: str = ""


class WorkerStarted(OfAttempt, frozen=True, kw_only=True, tag="worker.started"):
    """A process below a command has announced itself as a rank."""

    rank: int
    pid: int


class WorkerExited(OfAttempt, frozen=True, kw_only=True, tag="worker.exited"):
    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    died_s: float
    """Of the death, as its agent saw it."""
    stopped: bool = False
    """Its agent ended it, with its attempt."""


class FaultInjected(Event, frozen=True, kw_only=True, tag="fault.injected"):
    """`chaosrun inject` has put it into plan.json; it is to strike now."""

    fault: str
    kind: str = ""
    rank: int = 0
    what: str = ""
    plan: str | None = None
    """Digest of the fault."""


class FaultRequested(OfAttempt, frozen=True, kw_only=True, tag="fault.requested"):
    """Copied from the durable marker that was written before it struck."""

    fault: str
    rank: int
    step: int | None
    phase: str | None
    requested_s: float | None = None


class FaultWithdrawn(Event, frozen=True, kw_only=True, tag="fault.withdrawn"):
    """The request before it came to nothing; the fault may strike again."""

    fault: str
    reason: str


class FaultObserved(OfAttempt, frozen=True, kw_only=True, tag="fault.observed"):
    fault: str
    rank: int
    pid: int
    how: str
    """Its evidence, see `faults.kind.Evidence`."""
    exit_code: int | None = None
    signal: int | None = None
    died_s: float | None = None
    """Of a death."""
    found: dict[str, Any] | None = None
    """What was seen of it: see `faults.observed`."""


class SilentRank(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A rank of an attempt that hangs, as it was found."""

    rank: int
    pid: int
    step: int | None = None
    stage: str | None = None
    """See `records.heartbeat`."""
    silent_s: float | None = None
    state: str | None = None
    """Letter in /proc; None when it is gone."""
    stack: tuple[str, ...] = ()
    """Of its main thread, innermost first."""


class HangDeclared(OfAttempt, frozen=True, kw_only=True, tag="hang.declared"):
    """Before anything is killed."""

    first: int
    """The rank that stopped first."""
    silent_s: float | None = None
    patience_s: float | None = None
    message: str = ""
    ranks: tuple[SilentRank, ...]


class RaisedError(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What a rank raised, as its end record has it."""

    type: str
    message: str
    hint: str | None = None
    exit_code: int | None = None
    traceback: str | None = None
    ours: bool = False
    """Raised inside chaosrun."""
    errno: int | None = None
    fault: str | None = None
    """Id of the fault that raised it on purpose."""


class DeathUnplanned(OfAttempt, frozen=True, kw_only=True, tag="death.unplanned"):
    rank: int | None
    code: EndCode | None = None
    reason: str
    step: int | None = None
    error: RaisedError | None = None


class AttemptStopped(OfAttempt, frozen=True, kw_only=True, tag="attempt.stopped"):
    """Every process of the attempt is gone."""

    reason: str
    killed: tuple[int, ...] = ()


class RecoveryAgreed(OfAttempt, frozen=True, kw_only=True, tag="recovery.agreed"):
    """A run in production was held against itself: what this attempt restored and did again is as it was before."""

    steps: Count
    """Done again and compared, on any rank."""
    last: Count = 0
    """The last of them; 0 without one."""
    states: Count
    """Ranks whose restored state was held against the saved one."""
    source: Source | None = None
    """Of what was restored: the storage, or copies in the memory of the nodes."""


class RecoveryDiverged(OfAttempt, frozen=True, kw_only=True, tag="recovery.diverged"):
    """Likewise, and it is not."""

    step: Count
    rank: Count
    quantity: str
    """The first that differs: a kind of `verify.compare`."""
    tensor: str | None = None
    code: str
    """Of the cause, see `verify.codes`."""
    what: str
    source: Source | None = None


class RecoveryUnjudged(OfAttempt, frozen=True, kw_only=True, tag="recovery.unjudged"):
    """Likewise, and nothing can be said."""

    why: str


Judgement = RecoveryAgreed | RecoveryDiverged | RecoveryUnjudged


class OutputsReplacing(OfAttempt, frozen=True, kw_only=True, tag="outputs.replacing"):
    """The power was cut: the script's outputs are about to become what the disk would hold."""

    fault: str
    unsynced: str


class OutputsReplaced(OfAttempt, frozen=True, kw_only=True, tag="outputs.replaced"):
    fault: str
    gone: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()
    problem: str | None = None


class LegFinished(Event, frozen=True, kw_only=True, tag="leg.finished"):
    outcome: Outcome
    code: EndCode | None = None
    message: str | None
    hint: str | None = None
    final_step: Count = 0
    """Where it trained to its end, its last; else that of the newest checkpoint or, `by` a script, the last one done."""
    by: Literal["chaosrun", "script"] = "chaosrun"


EventRecord = dict[str, Any]
"""An event as a listener is told of it: JSON values, with the key `leg`; or what is told beside the journals."""
JournalEvent = (
    LegStarted
    | SupervisorResumed
    | PlacementAcquired
    | StagingCleared
    | CheckpointQuarantined
    | AttemptStarting
    | AttemptStarted
    | WorkerStarted
    | WorkerExited
    | FaultInjected
    | FaultRequested
    | FaultWithdrawn
    | FaultObserved
    | HangDeclared
    | DeathUnplanned
    | AttemptStopped
    | RecoveryAgreed
    | RecoveryDiverged
    | RecoveryUnjudged
    | OutputsReplacing
    | OutputsReplaced
    | LegFinished
)
EVENTS = msgspec.json.Decoder(JournalEvent)
