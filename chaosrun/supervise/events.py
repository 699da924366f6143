"""What the life of a leg is told in: events, which its state machine hears, actions, which it answers, and failures.

Values only; `supervise.lifecycle` decides, `supervise.supervisor` carries out.
"""

from dataclasses import dataclass
from typing import Literal

from chaosrun.records.events import EndCode, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended without a planned fault. The same kind of error at the same step is the script's own doing."""

    message: str
    code: EndCode | None = None
    """None: nothing is known that the outcome does not say."""
    hint: str | None = None
    outcome: Outcome = "recovery_failed"
    """What the leg ends as if this is not worth another attempt."""
    rank: int | None = None
    step: int | None = None
    error: tuple[str, str] | None = None
    """Type and message of an exception; None for a death that named no error."""
    reducer: bool = False
    """Raised by DDP's reducer: the script's doing, and another attempt in DETAIL tells which parameter it is about."""
    refused: bool = False
    """chaosrun refuses what the script does (MisuseError): another attempt would do the same, or hide it."""
    leaving: bool = False
    """It left in order, on a preemption notice, and the other ranks leave with it: nobody needs to be stopped."""
    reach: Literal["before", "in", "beyond"] = "beyond"
    """How far the attempt had come: before the restore of its checkpoint, in it, or beyond it."""
    of_node: bool = False
    """A node was lost: neither the script nor the checkpoint has to do with it."""
    raised_s: float | None = None
    """When the rank wrote the error down, wall clock; of deaths seen together the first to raise is the cause."""

    def repeats(self, earlier: "Failure | None") -> bool:
        """The same type of error at the same step; its message may name a rank, a port or an address."""
        if earlier is None or self.error is None or earlier.error is None:
            return False
        return (self.error[0], self.step) == (earlier.error[0], earlier.step)


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A supervisor takes a leg over: attempts so far and faults that have fired."""

    attempt: int
    fired: frozenset[str]


@dataclass(frozen=True, slots=True)
class Placed:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFailed:
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """The newest valid checkpoint, after the invalid ones have been put aside."""

    resume: str | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMissed:
    """A planned fault can no longer happen: the drill would prove nothing, however long it went on."""

    message: str


@dataclass(frozen=True, slots=True)
class Rested:
    """It is time for the next attempt."""


@dataclass(frozen=True, slots=True)
class Started:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A rank's process is gone. `fault` is the planned fault that this death proves; `failure` is any other bad end."""

    rank: int
    fault: str | None = None
    failure: Failure | None = None
    leaving: bool = False
    """Of a fault: as `Failure.leaving`."""
    stopped: bool = False
    """Killed by chaosrun, because its attempt was over."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Every process of the attempt is gone, on all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstoppable:
    """Processes of the attempt have been killed and do not go."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """No rank makes progress. `fault` is the planned fault that explains it."""

    message: str
    rank: int | None = None
    """The rank that stopped first, where that can be told."""
    step: int | None = None
    """Where it stopped."""
    reach: Literal["before", "in", "beyond"] = "beyond"
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """The agent of a node is gone, and every process below it. `fault` is the planned fault that ended it."""

    message: str
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class RunTimeout:
    message: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    pass


Event = (
    Resume
    | Placed
    | PlacementFailed
    | Audited
    | FaultMissed
    | Rested
    | Started
    | Death
    | Stopped
    | Unstoppable
    | Hang
    | AgentLost
    | RunTimeout
    | Interrupt
)

# Actions


@dataclass(frozen=True, slots=True)
class AcquirePlaces:
    pass


@dataclass(frozen=True, slots=True)
class Audit:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Quarantine a checkpoint that is whole, and yet nothing comes of it."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Wait, for whatever killed the attempt to pass, and tell when it is over."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    attempt: int
    resume: str | None
    resume_step: int
    distributed_debug: bool = False
    """The attempt before ended with an error of DDP's reducer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    outcome: Outcome
    message: str
    hint: str | None = None
    code: EndCode | None = None


Action = AcquirePlaces | Audit | SetAside | Rest | Start | Stop | Finish
