"""The life of one leg as a pure state machine: `decide(state, event) → (state, actions)`. No clock, no files, no ray.

    placing ──Placed──► auditing ──Audited──► starting ──Started──► running ──Died/Stopped──► auditing … ──► done

Only this module decides whether an attempt is restarted. Every decision carries its reason in the action it returns.
"""

from dataclasses import dataclass, replace
from typing import Literal

from chaosrun.records.journal import Outcome

__all__ = [
    "Action",
    "AgentLost",
    "Audit",
    "Audited",
    "Death",
    "Event",
    "Failure",
    "Finish",
    "Hang",
    "Interrupt",
    "LegState",
    "Place",
    "Placed",
    "PlacementFailed",
    "Resume",
    "RunTimeout",
    "Start",
    "Started",
    "Stop",
    "Stopped",
    "Unstoppable",
    "begin",
    "decide",
]

Phase = Literal["placing", "auditing", "starting", "running", "stopping", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended without a planned fault. The same kind of error at the same step is the script's own doing."""

    message: str
    hint: str | None = None
    outcome: Outcome = "recovery_failed"
    """What the leg ends as if this is not worth another attempt."""
    rank: int | None = None
    step: int | None = None
    error: tuple[str, str] | None = None
    """Type and message of an exception; None for a death that named no error."""
    reducer: bool = False
    """Raised by DDP's reducer: the script's doing, and another attempt in DETAIL tells which parameter it is about."""
    raised_s: float | None = None
    """When the rank wrote the error down, wall clock; of deaths seen together the first to raise is the cause."""

    def repeats(self, earlier: "Failure | None") -> bool:
        """The same type of error at the same step; its message may name a rank, a port or an address."""
        if earlier is None or self.error is None or earlier.error is None:
            return False
        return (self.error[0], self.step) == (earlier.error[0], earlier.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegState:
    world_size: int
    max_restarts: int
    phase: Phase = "placing"
    attempt: int = 0
    fired: frozenset[str] = frozenset()
    restarts: int = 0
    """Unplanned restarts used since the job last made progress."""
    best_step: int = 0
    """The furthest checkpointed step any attempt began from."""
    completed: frozenset[int] = frozenset()
    """Ranks of this attempt that ended well."""
    planned: str | None = None
    """The fault that ended this attempt."""
    failure: Failure | None = None
    """The first unplanned death of this attempt."""
    previous: Failure | None = None
    """The unplanned failure before this attempt."""
    distributed_debug: bool = False
    """This attempt runs with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    agent_lost: bool = False
    """A node's agent died: before the next attempt the places have to be acquired again."""
    ending: "Finish | None" = None
    """How the leg ends once its processes are gone, whatever else happens: timeout or interrupt."""


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


@dataclass(frozen=True, slots=True)
class Started:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A rank's process is gone. `fault` is the planned fault that this death proves; `failure` is any other bad end."""

    rank: int
    fault: str | None = None
    failure: Failure | None = None


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
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    message: str


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
class Place:
    pass


@dataclass(frozen=True, slots=True)
class Audit:
    pass


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


Action = Place | Audit | Start | Stop | Finish

REPEATED = "the same error at the same step as in the attempt before: this is the script, not a fault"


def begin(world_size: int, max_restarts: int) -> tuple[LegState, tuple[Action, ...]]:
    return LegState(world_size=world_size, max_restarts=max_restarts), (Place(),)


def decide(state: LegState, event: Event) -> tuple[LegState, tuple[Action, ...]]:
    """The next state and what to do. An event that the phase does not expect raises AssertionError: the shell is wrong."""
    if state.phase == "done":
        return state, ()
    match event:
        case Resume():
            assert state.phase == "placing" and state.attempt == 0
            return replace(state, attempt=event.attempt, fired=event.fired), ()
        case Placed():
            assert state.phase == "placing"
            return replace(state, phase="auditing", agent_lost=False), (Audit(),)
        case PlacementFailed():
            return _end(state, Finish(outcome="resources", message=event.message, hint=event.hint))
        case Unstoppable():
            hint = "a process in uninterruptible sleep: look at its storage or GPU driver, then `chaosrun resume`"
            return _finish(state, state.ending or Finish(outcome="recovery_failed", message=event.message, hint=hint))
        case Audited():
            assert state.phase == "auditing"
            return _start(state, event)
        case Started():
            assert state.phase == "starting"
            return replace(state, phase="running"), ()
        case Death():
            return _death(state, event)
        case Stopped():
            return _stopped(state)
        case Hang():
            if event.fault is not None and state.phase == "running":
                state = replace(state, fired=state.fired | {event.fault}, planned=event.fault, failure=None)
                return _stop(state, f"planned fault {event.fault}")
            hint = "see the ranks' logs; recovery.hang_timeout sets the patience"
            return _fail(state, Failure(message=event.message, hint=hint, rank=event.rank))
        case AgentLost():
            state = replace(state, agent_lost=True)
            return _fail(state, Failure(message=event.message, hint="the node's agent died; see `chaosrun logs`"))
        case RunTimeout():
            return _end(state, Finish(outcome="timeout", message=event.message))
        case Interrupt():
            return _end(state, Finish(outcome="interrupted", message="interrupted"))


def _start(state: LegState, event: Audited) -> tuple[LegState, tuple[Action, ...]]:
    progressed = event.step > state.best_step
    state = replace(
        state,
        phase="starting",
        attempt=state.attempt + 1,
        best_step=max(state.best_step, event.step),
        restarts=0 if progressed else state.restarts,
        completed=frozenset(),
        planned=None,
        previous=state.failure,
        failure=None,
        distributed_debug=state.failure is not None and state.failure.reducer,
    )
    start = Start(attempt=state.attempt, resume=event.resume, resume_step=event.step, distributed_debug=state.distributed_debug)
    return state, (start,)


def _death(state: LegState, event: Death) -> tuple[LegState, tuple[Action, ...]]:
    assert state.phase in ("starting", "running", "stopping"), state.phase
    if event.fault is not None:
        # Whatever else died in this attempt died of this: survivors notice a lost peer within milliseconds.
        state = replace(state, fired=state.fired | {event.fault}, planned=event.fault, failure=None)
        return _stop(state, f"planned fault {event.fault}")
    if event.failure is None:
        state = replace(state, completed=state.completed | {event.rank})
        return state, ()
    if state.planned is not None:
        return state, ()
    if state.phase == "stopping":
        return replace(state, failure=_cause(state.failure, event.failure)), ()
    return _stop(replace(state, failure=event.failure), event.failure.message)


def _cause(first_seen: Failure | None, other: Failure) -> Failure | None:
    if first_seen is None or first_seen.raised_s is None or other.raised_s is None:
        return first_seen
    return min(first_seen, other, key=lambda failure: failure.raised_s or 0.0)


def _stop(state: LegState, reason: str) -> tuple[LegState, tuple[Action, ...]]:
    if state.phase == "stopping":
        return state, ()
    return replace(state, phase="stopping"), (Stop(attempt=state.attempt, reason=reason),)


def _fail(state: LegState, failure: Failure) -> tuple[LegState, tuple[Action, ...]]:
    if state.phase not in ("starting", "running"):
        return state, ()
    return _stop(replace(state, failure=state.failure or failure), failure.message)


def _end(state: LegState, ending: Finish) -> tuple[LegState, tuple[Action, ...]]:
    if state.phase in ("starting", "running"):
        return _stop(replace(state, ending=ending), ending.message)
    if state.phase == "stopping":
        return replace(state, ending=ending), ()
    return _finish(state, ending)


def _stopped(state: LegState) -> tuple[LegState, tuple[Action, ...]]:
    assert state.phase in ("starting", "running", "stopping"), state.phase
    if state.ending is not None:
        return _finish(state, state.ending)
    if len(state.completed) == state.world_size:
        return _finish(state, Finish(outcome="completed", message="all ranks completed the training"))
    if state.planned is not None:
        return _again(state)
    failure = state.failure
    assert failure is not None, "an attempt stopped without a cause"
    if failure.outcome in ("inexact_restore", "resources"):
        return _finish(state, _ended_by(failure))
    if failure.reducer and state.distributed_debug:
        # At whatever step: a checkpoint taken since would only move the error on, attempt after attempt.
        return _finish(state, _ended_by(failure))
    if failure.repeats(state.previous) and not failure.reducer:
        return _finish(state, Finish(outcome="user_error", message=failure.message, hint=failure.hint or REPEATED))
    if state.restarts >= state.max_restarts:
        if failure.outcome == "user_error":
            return _finish(state, _ended_by(failure))
        spent = f"{failure.message} (after {state.restarts} unplanned restarts without progress)"
        return _finish(state, Finish(outcome="recovery_failed", message=spent, hint=failure.hint))
    return _again(replace(state, restarts=state.restarts + 1))


def _again(state: LegState) -> tuple[LegState, tuple[Action, ...]]:
    if state.agent_lost:
        return replace(state, phase="placing"), (Place(),)
    return replace(state, phase="auditing"), (Audit(),)


def _ended_by(failure: Failure) -> Finish:
    return Finish(outcome=failure.outcome, message=failure.message, hint=failure.hint)


def _finish(state: LegState, finish: Finish) -> tuple[LegState, tuple[Action, ...]]:
    return replace(state, phase="done"), (finish,)
