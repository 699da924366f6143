"""The events of a leg's journal: decisions and observations of its supervisor, one typed value each; `event` names the type.

The journal gives each event its seq (1, 2, …) and time_s (wall clock).
"""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from chaosrun.errors import comes_each_time
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
"""settled, differed: ended early (`records.early_end`). diverged: stopped in production, as its recovery was not exact."""
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
"""Codes for how a leg ended, in addition to its outcome; `verify.code_ends` says what each means and whose fault it is."""
CONCLUSIVE: tuple[Outcome, ...] = ("completed", "settled", "differed", "inexact_restore", "diverged")
"""Outcomes that show whether the job recovered; with any other outcome the drill is INCONCLUSIVE."""
FINAL: tuple[Outcome, ...] = ("completed", "inexact_restore")
"""Ends of a run in production that leave nothing to do. After any other, a person may mend the cause and go on."""
RESUMABLE: tuple[Outcome | None, ...] = (None, "interrupted", "resources")
"""Ends of a drill's leg after which `chaosrun resume` can do better; None: it has not ended."""
TRAINED: tuple[Outcome, ...] = ("completed", "settled", "differed")
"""Outcomes of a leg that reached its planned end."""


def can_go_on(outcome: object, *, in_production: bool) -> bool:
    """Whether `chaosrun resume` trains on after this end of a run's main leg."""
    return outcome not in FINAL if in_production else outcome in RESUMABLE


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
    """Digest of the plan without injected faults."""


class SupervisorResumed(Event, frozen=True, kw_only=True, tag="supervisor.resumed"):
    """`chaosrun resume` took over."""

    supervisor_pid: int


class NodePlace(Record, frozen=True, kw_only=True, omit_defaults=False):
    address: str = ""
    ranks: tuple[int, ...]
    gpus: tuple[int, ...] = ()


class NotPreloaded(Record, frozen=True, kw_only=True):
    """A module that each rank imports for itself: a fork would lose what the import starts, such as threads."""

    module: str
    threads: tuple[str, ...] = ()
    cuda: bool = False
    import_s: float


class PlacementAcquired(Event, frozen=True, kw_only=True, tag="placement.acquired"):
    nodes: dict[str, NodePlace]
    """By node id."""
    ray: str = ""
    oversubscribed: bool = False
    gpus_too_few: Count = 0
    """GPUs that no rank gets, as there is not one for each."""
    stood_by: tuple[str, ...] = ()
    """Standby nodes that were used: they had done all imports in advance."""
    not_preloaded: tuple[NotPreloaded, ...] = ()


class StagingCleared(Event, frozen=True, kw_only=True, tag="staging.cleared"):
    """Half-written and half-deleted files of killed attempts have been removed."""

    names: tuple[str, ...]


class CheckpointQuarantined(Event, frozen=True, kw_only=True, tag="checkpoint.quarantined"):
    name: str
    step: int | None = None
    reason: str
    moved_to: str | None = None


class AttemptStarting(OfAttempt, frozen=True, kw_only=True, tag="attempt.starting"):
    by: Literal["chaosrun", "script"] = "chaosrun"
    """Who saves and resumes. If it is the script, only its traces say where it resumed."""
    resume: str | None
    """Name of the checkpoint."""
    resume_step: Count
    """0 without a checkpoint."""
    armed: tuple[str, ...]
    """Ids of the faults that may strike in this attempt."""
    distributed_debug: bool = False
    """Whether it runs with TORCH_DISTRIBUTED_DEBUG=DETAIL, after an error of DDP's reducer."""


class AttemptStarted(OfAttempt, frozen=True, kw_only=True, tag="attempt.started"):
    pids: dict[Count, int]
    """By rank; empty if a command starts the ranks."""
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
    """When the process died, as its agent saw it."""
    stopped: bool = False
    """Whether its agent stopped it together with the attempt."""


class FaultInjected(Event, frozen=True, kw_only=True, tag="fault.injected"):
    """`chaosrun inject` has put a fault into plan.json; it is to strike now."""

    fault: str
    kind: str = ""
    rank: int = 0
    what: str = ""
    plan: str | None = None
    """Digest of the fault."""


class FaultRequested(OfAttempt, frozen=True, kw_only=True, tag="fault.requested"):
    """A fault is about to strike: copied from the durable marker that is written before."""

    fault: str
    rank: int
    step: int | None
    phase: str | None
    requested_s: float | None = None


class FaultWithdrawn(Event, frozen=True, kw_only=True, tag="fault.withdrawn"):
    """The preceding request had no effect; the fault may strike again."""

    fault: str
    reason: str


class FaultObserved(OfAttempt, frozen=True, kw_only=True, tag="fault.observed"):
    fault: str
    rank: int
    pid: int
    how: str
    """The kind of evidence, see `faults.kind.Evidence`."""
    exit_code: int | None = None
    signal: int | None = None
    died_s: float | None = None
    """When the process died, if it did."""
    found: dict[str, Any] | None = None
    """Observations of the fault: see `faults.observed`."""


class SilentRank(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The state of a rank of a hanging attempt."""

    rank: int
    pid: int
    step: int | None = None
    stage: str | None = None
    """See `records.heartbeat`."""
    silent_s: float | None = None
    state: str | None = None
    """State letter in /proc; None if the process is gone."""
    stack: tuple[str, ...] = ()
    """Stack of its main thread, innermost frame first."""


class HangDeclared(OfAttempt, frozen=True, kw_only=True, tag="hang.declared"):
    """The attempt hangs. Written before anything is killed."""

    first: int
    """The rank that stopped first."""
    silent_s: float | None = None
    patience_s: float | None = None
    message: str = ""
    ranks: tuple[SilentRank, ...]


class RaisedError(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The error that a rank raised, from its end record."""

    type: str
    message: str
    hint: str | None = None
    exit_code: int | None = None
    traceback: str | None = None
    ours: bool = False
    """Whether it was raised inside chaosrun."""
    errno: int | None = None
    fault: str | None = None
    """Id of the fault that raised it on purpose."""

    @property
    def by_script(self) -> bool:
        """Whether the script raised what its code raises each time, and not what a network or a device may."""
        return not self.ours and comes_each_time(self.type)


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
    """A recovery in production was checked: the restored state and the steps that this attempt repeated equal the earlier
    ones."""

    steps: Count
    """How many steps were repeated and compared, on any rank."""
    last: Count = 0
    """The last repeated step; 0 without one."""
    states: Count
    """How many ranks had their restored state compared with the saved one."""
    source: Source | None = None
    """Where the state was restored from: storage, or copies in the memory of the nodes."""


START = "start"


class RecoveryDiverged(OfAttempt, frozen=True, kw_only=True, tag="recovery.diverged"):
    """A recovery in production was checked, and something differs."""

    step: Count
    rank: Count
    quantity: str
    """The first quantity that differs: a kind of `verify.compare`; START: none, but it resumed at a wrong step."""
    tensor: str | None = None
    code: str
    """Code of the cause, see `verify.codes`."""
    what: str
    source: Source | None = None


class RecoveryUnjudged(OfAttempt, frozen=True, kw_only=True, tag="recovery.unjudged"):
    """A recovery in production could not be checked."""

    why: str


Judgement = RecoveryAgreed | RecoveryDiverged | RecoveryUnjudged


class OutputsReplacing(OfAttempt, frozen=True, kw_only=True, tag="outputs.replacing"):
    """The power was cut: the script's outputs are about to be replaced by what the disk would hold."""

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
    """The last step if the training is complete; else the newest checkpoint's or, `by` a script, the last that was done."""
    by: Literal["chaosrun", "script"] = "chaosrun"


EventRecord = dict[str, Any]
"""An event as listeners receive it: JSON values, with the key `leg`; also for events that no journal holds."""
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
    | Judgement
    | OutputsReplacing
    | OutputsReplaced
    | LegFinished
)
EVENTS = msgspec.json.Decoder(JournalEvent)
