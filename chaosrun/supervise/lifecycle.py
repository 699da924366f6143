"""The life of one leg as a pure state machine: `decide(state, event) → (state, actions)`. No clock, no files, no ray.

    placing ──Placed──► auditing ──Audited──► starting ──Started──► running ──Died/Stopped──► [resting] auditing … ──► done

Only this module decides whether an attempt is restarted. Every decision carries its reason in the action it returns. What
ends an attempt, and what it costs:

- a planned fault: nothing
- anything else: one of `max_restarts`, which come back when the job begins from a checkpoint further on than ever before. The
  first restart comes at once, the second after `backoff_s`, each further one after twice as long, LONGEST_REST_S at most
- the same error at the same step twice in a row: the script's doing, the leg ends
- a planned fault that can no longer happen: the leg ends
- two attempts in a row that began from one checkpoint and leave no newer one: it goes to quarantine, and the next older one, or
  the beginning, is tried. This gives no restart back, so that the number of attempts stays bounded. An attempt that never came
  to the restore, or that a node took along, says nothing of the checkpoint and does not count; a planned fault in between
  separates the two. An error in the restore itself is not called the script's before an older checkpoint has shown it too.
"""

from dataclasses import dataclass, replace
from typing import Literal

from chaosrun.supervise.events import (
    AcquirePlaces,
    Action,
    AgentLost,
    Audit,
    Audited,
    Death,
    Event,
    Failure,
    FaultMissed,
    Finish,
    Hang,
    Interrupt,
    Placed,
    PlacementFailed,
    Rest,
    Rested,
    Resume,
    RunTimeout,
    SetAside,
    Start,
    Started,
    Stop,
    Stopped,
    Unstoppable,
)

Phase = Literal["placing", "auditing", "starting", "running", "stopping", "resting", "done"]

LONGEST_REST_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LegState:
    world_size: int
    max_restarts: int
    backoff_s: float = 0.0
    phase: Phase = "placing"
    attempt: int = 0
    fired: frozenset[str] = frozenset()
    restarts: int = 0
    """Unplanned restarts used since the job last made progress."""
    resume: str | None = None
    """The checkpoint that this attempt began from."""
    died_from: tuple[int, ...] = ()
    """Attempts in a row, this one included, that began from it and died unplanned."""
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


DEATHS_FROM_ONE = 2
"""So many attempts in a row may die from one checkpoint.

A checkpoint that a quarantine has put aside is not begun from again, so there are never more in `LegState.died_from`."""
REPEATED = "the same error at the same step as in the attempt before: this is the script, not a fault"


def begin(world_size: int, max_restarts: int, backoff_s: float = 0.0) -> tuple[LegState, tuple[Action, ...]]:
    return LegState(world_size=world_size, max_restarts=max_restarts, backoff_s=backoff_s), (AcquirePlaces(),)


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
            return _finish(
                state, state.ending or Finish(outcome="recovery_failed", code="unkillable", message=event.message, hint=hint)
            )
        case Audited():
            assert state.phase == "auditing"
            return _start(state, event)
        case Rested():
            assert state.phase == "resting"
            return _again(state)
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
            hint = "the ranks' stacks are in their logs (chaosrun logs); recovery.hang_timeout sets the patience"
            return _fail(
                state,
                Failure(code="hung", message=event.message, hint=hint, rank=event.rank, step=event.step, reach=event.reach),
            )
        case AgentLost():
            state = replace(state, agent_lost=True)
            if event.fault is not None and state.phase in ("starting", "running", "stopping"):
                # Ranks on other nodes may have been seen to die of it before.
                state = replace(state, fired=state.fired | {event.fault}, planned=event.fault, failure=None)
                return _stop(state, f"planned fault {event.fault}")
            lost = Failure(
                code="node_lost", message=event.message, hint="the node's agent died; see `chaosrun logs`", of_node=True
            )
            if state.phase == "stopping" and state.planned is None and state.failure is not None:
                # What its peers raised when they lost it came here first.
                return replace(state, failure=lost), ()
            return _fail(state, lost)
        case FaultMissed():
            hint = "which rank comes first is chance: let the faults strike at different steps, or run it again"
            return _end(state, Finish(outcome="fault_missed", message=event.message, hint=hint))
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
        resume=event.resume,
        died_from=state.died_from if event.resume == state.resume else (),
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
        fired = state.fired | {event.fault}
        if event.stopped and state.failure is not None:
            # It had come to its point when something that nobody had planned ended the attempt.
            return replace(state, fired=fired), ()
        # Whatever else died in this attempt died of this: survivors notice a lost peer within milliseconds.
        state = replace(state, fired=fired, planned=event.fault, failure=None)
        return (state, ()) if event.leaving else _stop(state, f"planned fault {event.fault}")
    if event.failure is None:
        state = replace(state, completed=state.completed | {event.rank})
        return state, ()
    if event.failure.leaving:
        return (state if state.planned else replace(state, failure=state.failure or event.failure)), ()
    if state.planned is not None:
        return _stop(state, event.failure.message)
    if state.phase == "stopping":
        return (state if event.stopped else replace(state, failure=_cause(state.failure, event.failure))), ()
    return _stop(replace(state, failure=event.failure), event.failure.message)


def _cause(first_seen: Failure | None, other: Failure) -> Failure | None:
    """Of two that were seen to fail: who was killed raised nothing, and who raised an error may only have lost that peer."""
    if first_seen is None or first_seen.of_node:
        return first_seen
    if first_seen.raised_s is None:
        return first_seen
    if other.raised_s is None:
        return other if other.error is None else first_seen
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
        return _again(replace(state, died_from=()))
    failure = state.failure
    assert failure is not None, "an attempt stopped without a cause"
    if failure.outcome in ("inexact_restore", "resources") or failure.refused:
        return _finish(state, _ended_by(failure))
    if failure.reducer and state.distributed_debug:
        # At whatever step: a checkpoint taken since would only move the error on, attempt after attempt.
        return _finish(state, _ended_by(failure))
    if failure.reach != "before" and not failure.of_node:
        state = replace(state, died_from=(*state.died_from, state.attempt))
    spent = state.resume is not None and len(state.died_from) >= DEATHS_FROM_ONE
    if failure.repeats(state.previous) and not failure.reducer and not (spent and failure.reach == "in"):
        ending = replace(_ended_by(failure), outcome="user_error", hint=failure.hint or REPEATED)
        return _finish(state, ending)
    if state.restarts >= state.max_restarts:
        if failure.outcome == "user_error":
            return _finish(state, _ended_by(failure))
        said = f"{failure.message} (after {state.restarts} unplanned restarts without progress)"
        return _finish(state, replace(_ended_by(failure), outcome="recovery_failed", message=said))
    return _restart(state, failure, from_older=spent)


def _restart(state: LegState, failure: Failure, *, from_older: bool) -> tuple[LegState, tuple[Action, ...]]:
    """After an unplanned death: at once the first time, then with ever longer rests."""
    aside: tuple[Action, ...] = ()
    if from_older:
        assert state.resume is not None
        attempts = " and ".join(map(str, state.died_from))
        reason = f"attempts {attempts} began from it and died without a newer checkpoint, the last of: {failure.message}"
        aside = (SetAside(name=state.resume, reason=reason),)
    rest_s = 0.0 if state.restarts == 0 else min(LONGEST_REST_S, state.backoff_s * 2.0 ** (state.restarts - 1))
    state = replace(state, restarts=state.restarts + 1)
    if rest_s > 0:
        return replace(state, phase="resting"), (*aside, Rest(seconds=rest_s))
    state, actions = _again(state)
    return state, (*aside, *actions)


def _again(state: LegState) -> tuple[LegState, tuple[Action, ...]]:
    if state.agent_lost:
        return replace(state, phase="placing"), (AcquirePlaces(),)
    return replace(state, phase="auditing"), (Audit(),)


def _ended_by(failure: Failure) -> Finish:
    return Finish(outcome=failure.outcome, code=failure.code, message=failure.message, hint=failure.hint)


def _finish(state: LegState, finish: Finish) -> tuple[LegState, tuple[Action, ...]]:
    return replace(state, phase="done"), (finish,)
