"""The life of one leg as a pure state machine: `decide(state, event) → (state, actions)`. No clock, no files, no ray.

    placing ──Placed──► auditing ──Audited──► starting ──Started──► running ──Died/Stopped──► [resting] auditing … ──► done

Only this module decides whether an attempt is restarted. Every decision carries its reason in the action it returns. What
ends an attempt, and what it costs:

- a planned fault: nothing
- anything else: one of `max_restarts`, which are refilled when the job begins from a checkpoint further on than ever before.
  The first restart comes at once, the second after `backoff_s`, each further one after twice as long, LONGEST_REST_S at most
- the same error at the same step twice in a row, a hang at the same place, or an error whenever the script begins: the script's
  fault; the leg ends
- a planned fault that can no longer happen: the leg ends
- two attempts in a row that began from one checkpoint and leave no newer one: it is quarantined, and the next older one, or the
  beginning, is tried. This refills no restarts, so that the number of attempts stays bounded. An attempt that never reached the
  restore, or that died with its node, says nothing about the checkpoint and does not count; with a planned fault in between the
  two are not in a row. An error in the restore itself is not blamed on the script until an older checkpoint has shown it as
  well.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from chaosrun.records.events import EndCode, Outcome
from chaosrun.supervise.failure import Failure, Reach

Phase = Literal["placing", "auditing", "starting", "running", "stopping", "resting", "done"]
LONGEST_REST_S = 30.0


class LegEvent(msgspec.Struct, frozen=True):
    """Something that happened; an input of `decide`."""


class Resume(LegEvent, frozen=True):
    """A supervisor continues the leg of another one, which has had this many attempts."""

    attempt: int


class Placed(LegEvent, frozen=True):
    """All ranks have their places."""


class Audited(LegEvent, frozen=True):
    """The newest valid checkpoint, after the invalid ones have been quarantined."""

    resume: str | None
    step: int


class EndLeg(LegEvent, frozen=True):
    """The leg ends like this once the processes of its attempts are gone, however those end."""

    ending: "Finish"


class Rested(LegEvent, frozen=True):
    """It is time for the next attempt."""


class Started(LegEvent, frozen=True):
    """All ranks have been forked."""


class RankDeath(LegEvent, frozen=True):
    """A rank's process is gone. `fault` is the planned fault that this death proves; `failure` is any other bad end."""

    rank: int
    fault: str | None = None
    failure: Failure | None = None
    leaving: bool = False
    """If it ended on a fault's preemption notice: as `Failure.leaving`."""
    stopped: bool = False
    """Killed by chaosrun, because its attempt was over."""


class Stopped(LegEvent, frozen=True):
    """Every process of the attempt is gone, on all nodes."""


class ProcessesRemain(LegEvent, frozen=True):
    """Processes of the attempt have been killed and do not end."""

    message: str


class Hang(LegEvent, frozen=True):
    """No rank makes progress. `fault` is the planned fault that explains it."""

    message: str
    rank: int | None = None
    """The rank that stopped first, where known."""
    step: int | None = None
    """Where it stopped."""
    stage: str | None = None
    reach: Reach = "beyond"
    fault: str | None = None


class AgentLost(LegEvent, frozen=True):
    """The agent of a node is gone, with every process below it. `fault` is the planned fault that ended it."""

    message: str
    fault: str | None = None


class Action(msgspec.Struct, frozen=True):
    """What the supervisor is to do."""


class AcquirePlaces(Action, frozen=True):
    """For all ranks."""


class Audit(Action, frozen=True):
    """Find the newest valid checkpoint."""


class SetAside(Action, frozen=True):
    """Quarantine a whole checkpoint from which attempts die without progress."""

    name: str
    reason: str


class Rest(Action, frozen=True):
    """Wait for the cause of the death to pass, then send `Rested`."""

    seconds: float


class Start(Action, frozen=True):
    attempt: int
    resume: str | None
    resume_step: int
    distributed_debug: bool = False
    """The previous attempt ended with an error of DDP's reducer."""


class Stop(Action, frozen=True):
    attempt: int
    reason: str


class Finish(Action, frozen=True):
    outcome: Outcome
    message: str
    hint: str | None = None
    code: EndCode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LegState:
    world_size: int
    max_restarts: int
    backoff_s: float = 0.0
    fault_free: bool = False
    """Nothing is done to this leg on purpose, and after a restart it is no reference."""
    phase: Phase = "placing"
    attempt: int = 0
    unplanned: tuple[int, ...] = ()
    """Attempts since the job last made progress that died unplanned and were followed by another."""
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
    """The unplanned failure that ended the previous attempt."""
    first: Failure | None = None
    """The first error of a leg without faults."""
    agent_lost: bool = False
    """A node's agent died: before the next attempt the places have to be acquired again."""
    ending: Finish | None = None
    """How the leg ends once its processes are gone, whatever else happens: timeout or interrupt."""

    @property
    def restarts(self) -> int:
        """Unplanned restarts since the job last made progress."""
        return len(self.unplanned)


DEATHS_FROM_ONE = 2
"""So many attempts in a row may die from one checkpoint."""
REPEATED = "the same error at the same step as in the attempt before: this is the script, not a fault"


def begin(
    world_size: int, max_restarts: int, backoff_s: float = 0.0, *, fault_free: bool = False
) -> tuple[LegState, tuple[Action, ...]]:
    state = LegState(world_size=world_size, max_restarts=max_restarts, backoff_s=backoff_s, fault_free=fault_free)
    return state, (AcquirePlaces(),)


def decide(state: LegState, event: LegEvent) -> tuple[LegState, tuple[Action, ...]]:
    """The next state and what to do. An event that the phase does not expect raises AssertionError: a bug in the supervisor."""
    if state.phase == "done":
        return state, ()
    match event:
        case Resume():
            assert state.phase == "placing" and state.attempt == 0
            return replace(state, attempt=event.attempt), ()
        case Placed():
            assert state.phase == "placing"
            return replace(state, phase="auditing", agent_lost=False), (Audit(),)
        case ProcessesRemain():
            hint = "a process in uninterruptible sleep: look at its storage or GPU driver, then `chaosrun resume`"
            stuck = Finish(outcome="recovery_failed", code="unkillable", message=event.message, hint=hint)
            return _finish(state, state.ending or stuck)
        case Audited():
            assert state.phase == "auditing"
            return _start(state, event)
        case Rested():
            assert state.phase == "resting"
            return _again(state)
        case Started():
            assert state.phase == "starting"
            return replace(state, phase="running"), ()
        case RankDeath():
            return _death(state, event)
        case Stopped():
            return _stopped(state)
        case Hang():
            if event.fault is not None and state.phase == "running":
                return _planned(state, event.fault)
            hint = "the ranks' stacks are in their logs (chaosrun logs); recovery.hang_timeout sets the patience"
            where = {"rank": event.rank, "step": event.step, "stage": event.stage, "reach": event.reach}
            return _fail(state, Failure(code="hung", message=event.message, hint=hint, **where))
        case AgentLost():
            state = replace(state, agent_lost=True)
            if event.fault is not None and state.phase in ("starting", "running", "stopping"):
                return _planned(state, event.fault)
            lost = Failure(code="node_lost", message=event.message, hint="its agent died; see `chaosrun logs`", of_node=True)
            if state.phase == "stopping" and state.planned is None and state.failure is not None:
                # The errors that its peers raised when they lost it arrived first.
                return replace(state, failure=lost), ()
            return _fail(state, lost)
        case EndLeg():
            return _end(state, event.ending)
        case _:
            raise AssertionError(event)


def _start(state: LegState, event: Audited) -> tuple[LegState, tuple[Action, ...]]:
    state = replace(
        state,
        phase="starting",
        attempt=state.attempt + 1,
        resume=event.resume,
        died_from=state.died_from if event.resume == state.resume else (),
        best_step=max(state.best_step, event.step),
        unplanned=() if event.step > state.best_step else state.unplanned,
        completed=frozenset(),
        planned=None,
        previous=state.failure,
        failure=None,
    )
    debug = state.previous is not None and state.previous.reducer
    return state, (Start(attempt=state.attempt, resume=event.resume, resume_step=event.step, distributed_debug=debug),)


def _death(state: LegState, event: RankDeath) -> tuple[LegState, tuple[Action, ...]]:
    assert state.phase in ("starting", "running", "stopping"), state.phase
    if event.fault is not None:
        if event.stopped and state.failure is not None:
            # A rank had reached the fault's point when an unplanned failure ended the attempt.
            return state, ()
        return _planned(state, event.fault, leaving=event.leaving)
    if event.failure is None:
        return replace(state, completed=state.completed | {event.rank}), ()
    if event.failure.leaving:
        return (state if state.planned else replace(state, failure=state.failure or event.failure)), ()
    if state.planned is not None:
        return _stop(state, event.failure.message)
    if state.phase == "stopping":
        return (state if event.stopped else replace(state, failure=_cause(state.failure, event.failure))), ()
    return _stop(replace(state, failure=event.failure), event.failure.message)


def _cause(first_seen: Failure | None, other: Failure) -> Failure | None:
    """The cause among two failures: a killed rank raised no error, and a rank that raised one may only have lost its killed
    peer."""
    if first_seen is None or first_seen.of_node or first_seen.raised_s is None:
        return first_seen
    if other.raised_s is None:
        return other if other.error is None else first_seen
    return min(first_seen, other, key=lambda failure: failure.raised_s or 0.0)


def _planned(state: LegState, fault: str, *, leaving: bool = False) -> tuple[LegState, tuple[Action, ...]]:
    # Further deaths in this attempt are consequences: survivors notice a lost peer within milliseconds.
    state = replace(state, planned=fault, failure=None)
    return (state, ()) if leaving else _stop(state, f"planned fault {fault}")


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
    # A launcher's failure comes after the ends of all ranks only if one left with an error, or if the launcher alone knows how
    # it ended: then the launcher decides.
    by_launcher = state.failure is not None and state.failure.code == "launcher_ended"
    if len(state.completed) == state.world_size and not by_launcher:
        return _finish(state, Finish(outcome="completed", message="all ranks completed the training"))
    if state.planned is not None:
        return _again(replace(state, died_from=()))
    failure = state.failure
    assert failure is not None, "an attempt stopped without a cause"
    # DDP's error in DETAIL mode ends the leg at any step: newer checkpoints would only postpone it, attempt after attempt.
    complaint = failure.reducer and state.previous is not None and state.previous.reducer
    if failure.outcome in ("inexact_restore", "resources") or failure.refused or complaint:
        return _finish(state, _ended_by(failure))
    if failure.reach != "before" and not failure.of_node:
        state = replace(state, died_from=(*state.died_from, state.attempt))
    spent, before = state.resume is not None and len(state.died_from) >= DEATHS_FROM_ONE, _before(state)
    if failure.repeats(state.previous) and not failure.reducer and not (spent and failure.reach == "in"):
        if failure.code == "hung":
            return _finish(state, _ended_by(failure, message=f"{failure.message}; attempt {state.attempt - 1} hung there, too"))
        said = failure.message + before
        return _finish(state, _ended_by(failure, outcome="user_error", hint=failure.hint or REPEATED, message=said))
    if state.fault_free and failure.recurs(state.previous):
        said = f"{failure.message}; attempt {state.attempt - 1} raised the same, without any fault{before}"
        return _finish(state, _ended_by(failure, message=said))
    if state.restarts >= state.max_restarts:
        if failure.outcome == "user_error":
            return _finish(state, _ended_by(failure, message=failure.message + before))
        died = f"attempt{'s' * bool(state.unplanned)} {', '.join(map(str, (*state.unplanned, state.attempt)))}"
        said = f"{failure.message} (died unplanned, without progress: {died}; max_restarts is {state.max_restarts})"
        return _finish(state, _ended_by(failure, outcome="recovery_failed", message=said + before))
    return _restart(state, failure, from_older=spent)


def _before(state: LegState) -> str:
    """What a failure hides that is only one of the restarts (of a resume that does not work)."""
    first, last = state.first, state.failure
    if not (first and last and first.error and last.error) or first.error[0] == last.error[0]:
        return ""
    return f"; before its restarts the job failed otherwise, without any fault: {first.message}"


def _restart(state: LegState, failure: Failure, *, from_older: bool) -> tuple[LegState, tuple[Action, ...]]:
    """After an unplanned death: at once the first time, then with ever longer rests."""
    aside: tuple[Action, ...] = ()
    if from_older:
        assert state.resume is not None
        attempts = " and ".join(map(str, state.died_from))
        reason = f"attempts {attempts} began from it and died without a newer checkpoint, the last of: {failure.message}"
        aside = (SetAside(name=state.resume, reason=reason),)
    rest_s = 0.0 if state.restarts == 0 else min(LONGEST_REST_S, state.backoff_s * 2.0 ** (state.restarts - 1))
    first = state.first or (failure if state.fault_free and failure.error else None)
    state = replace(state, unplanned=(*state.unplanned, state.attempt), first=first)
    if rest_s > 0:
        return replace(state, phase="resting"), (*aside, Rest(seconds=rest_s))
    state, actions = _again(state)
    return state, (*aside, *actions)


def _again(state: LegState) -> tuple[LegState, tuple[Action, ...]]:
    if state.agent_lost:
        return replace(state, phase="placing"), (AcquirePlaces(),)
    return replace(state, phase="auditing"), (Audit(),)


def _ended_by(failure: Failure, **otherwise: Any) -> Finish:
    told = {"outcome": failure.outcome, "code": failure.code, "message": failure.message, "hint": failure.hint}
    return Finish(**{**told, **otherwise})


def _finish(state: LegState, finish: Finish) -> tuple[LegState, tuple[Action, ...]]:
    return replace(state, phase="done"), (finish,)
