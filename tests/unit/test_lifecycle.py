"""The leg's state machine: which events restart what, and when it stops. Exact actions, no I/O."""

from dataclasses import replace

import pytest

from chaosrun.supervise import lifecycle as life
from chaosrun.supervise.lifecycle import Audit, Finish, Place, Start, Stop, begin, decide

PLANNED = life.Death(rank=1, fault="F1")
RAISED = life.Failure(
    message="rank 0 raised ValueError at step 7: boom", outcome="user_error", rank=0, step=7, error=("ValueError", "boom")
)
KILLED = life.Failure(message="rank 0 was killed by SIGKILL", rank=0, step=3)


def run(*events: life.Event, world_size: int = 2, max_restarts: int = 2) -> tuple[life.LegState, list[tuple[life.Action, ...]]]:
    state, actions = begin(world_size, max_restarts)
    seen = [actions]
    for event in events:
        state, actions = decide(state, event)
        seen.append(actions)
    return state, seen


def started(resume: str | None = None, step: int = 0) -> tuple[life.Event, ...]:
    return (life.Audited(resume=resume, step=step), life.Started())


def test_an_undisturbed_leg_is_placed_audited_started_and_completed() -> None:
    _, actions = run(life.Placed(), *started(), life.Death(rank=0), life.Death(rank=1), life.Stopped())
    assert actions == [
        (Place(),),
        (Audit(),),
        (Start(attempt=1, resume=None, resume_step=0),),
        (),
        (),
        (),
        (Finish(outcome="completed", message="all ranks completed the training"),),
    ]


def test_a_planned_fault_restarts_from_the_newest_checkpoint_and_costs_no_budget() -> None:
    state, actions = run(life.Placed(), *started(), PLANNED, life.Stopped(), *started("step-00000005", 5))
    assert actions[4:] == [
        (Stop(attempt=1, reason="planned fault F1"),),
        (Audit(),),
        (Start(attempt=2, resume="step-00000005", resume_step=5),),
        (),
    ]
    assert (state.restarts, state.fired) == (0, frozenset({"F1"}))


def test_survivors_that_die_of_a_planned_fault_are_no_failures_of_their_own() -> None:
    state, actions = run(life.Placed(), *started(), PLANNED, life.Death(rank=0, failure=RAISED), life.Stopped())
    assert actions[-1] == (Audit(),)
    assert state.failure is None


def test_a_survivor_reported_before_the_victim_does_not_hide_the_planned_fault() -> None:
    state, actions = run(life.Placed(), *started(), life.Death(rank=0, failure=RAISED), PLANNED, life.Stopped())
    assert actions[-1] == (Audit(),)
    assert (state.failure, state.restarts) == (None, 0)


def test_of_two_errors_seen_together_the_first_raised_is_the_cause() -> None:
    echo = life.Failure(message="peer gone", outcome="user_error", rank=1, step=7, error=("RuntimeError", "peer"), raised_s=2.0)
    cause = life.Failure(message="boom", outcome="user_error", rank=0, step=7, error=("ValueError", "boom"), raised_s=1.0)
    for deaths in ((echo, cause), (cause, echo)):
        seen = [life.Death(rank=failure.rank or 0, failure=failure) for failure in deaths]
        _, actions = run(life.Placed(), *started(), *seen, life.Stopped(), max_restarts=0)
        assert actions[-1] == (Finish(outcome="user_error", message="boom"),)


def test_the_same_error_at_the_same_step_twice_is_the_script() -> None:
    once = (life.Death(rank=0, failure=RAISED), life.Stopped())
    _, actions = run(life.Placed(), *started(), *once, *started(), *once)
    assert actions[-1] == (Finish(outcome="user_error", message=RAISED.message, hint=life.REPEATED),)


def test_the_same_error_at_a_later_step_is_not_the_same() -> None:
    later = life.Failure(message="again", outcome="user_error", rank=0, step=9, error=RAISED.error)
    _, actions = run(
        life.Placed(), *started(), life.Death(rank=0, failure=RAISED), life.Stopped(),
        *started(), life.Death(rank=0, failure=later), life.Stopped(),
    )  # fmt: skip
    assert actions[-1] == (Audit(),)


def test_a_planned_fault_between_two_equal_errors_separates_them() -> None:
    error = (life.Death(rank=0, failure=RAISED), life.Stopped())
    _, actions = run(life.Placed(), *started(), *error, *started(), PLANNED, life.Stopped(), *started(), *error)
    assert actions[-1] == (Audit(),)


def test_unplanned_deaths_without_progress_spend_the_budget() -> None:
    death = (life.Death(rank=0, failure=KILLED), life.Stopped())
    _, actions = run(life.Placed(), *started(), *death, *started(), *death, *started(), *death, max_restarts=2)
    (last,) = actions[-1]
    assert isinstance(last, Finish)
    assert last.outcome == "recovery_failed"
    assert "2 unplanned restarts" in last.message


def test_progress_gives_the_budget_back() -> None:
    death = (life.Death(rank=0, failure=KILLED), life.Stopped())
    state, actions = run(life.Placed(), *started(), *death, *started("step-00000005", 5), *death, max_restarts=1)
    assert actions[-1] == (Audit(),)
    assert state.restarts == 1


@pytest.mark.parametrize("outcome", ["inexact_restore", "resources"])
def test_what_another_attempt_cannot_mend_ends_the_leg_at_once(outcome: str) -> None:
    failure = life.Failure(message="no", hint="so", outcome=outcome)  # type: ignore[arg-type]
    _, actions = run(life.Placed(), *started(), life.Death(rank=0, failure=failure), life.Stopped())
    assert actions[-1] == (Finish(outcome=outcome, message="no", hint="so"),)  # type: ignore[arg-type]


def test_a_rank_that_left_early_while_others_completed_is_not_a_completed_leg() -> None:
    _, actions = run(life.Placed(), *started(), life.Death(rank=1), life.Death(rank=0, failure=KILLED), life.Stopped())
    assert actions[-1] == (Audit(),)


def test_interrupt_and_timeout_stop_first_and_finish_when_all_is_gone() -> None:
    _, actions = run(life.Placed(), *started(), life.Interrupt(), life.Stopped())
    assert actions[-2:] == [(Stop(attempt=1, reason="interrupted"),), (Finish(outcome="interrupted", message="interrupted"),)]
    _, actions = run(life.Placed(), life.RunTimeout("too long"))
    assert actions[-1] == (Finish(outcome="timeout", message="too long"),)


def test_a_timeout_keeps_its_message_when_processes_have_to_be_stopped_first() -> None:
    _, actions = run(life.Placed(), *started(), life.RunTimeout("the run's timeout of 5 s has passed"), life.Stopped())
    assert actions[-1] == (Finish(outcome="timeout", message="the run's timeout of 5 s has passed"),)


def test_a_hang_is_an_unplanned_death() -> None:
    state, actions = run(life.Placed(), *started(), life.Hang(message="no progress"), life.Stopped())
    assert actions[-2:] == [(Stop(attempt=1, reason="no progress"),), (Audit(),)]
    assert state.restarts == 1


def test_a_lost_agent_is_replaced_before_the_next_attempt() -> None:
    state, actions = run(life.Placed(), *started(), life.AgentLost(message="gone"), life.Stopped())
    assert actions[-1] == (Place(),)
    state, again = decide(state, life.Placed())
    assert again == (Audit(),)
    assert not state.agent_lost


def test_no_placement_ends_the_leg() -> None:
    _, actions = run(life.PlacementFailed(message="no room", hint="wait"))
    assert actions[-1] == (Finish(outcome="resources", message="no room", hint="wait"),)


def test_a_resumed_leg_goes_on_counting_attempts() -> None:
    _, actions = run(life.Resume(attempt=3, fired=frozenset({"F1"})), life.Placed(), *started("step-00000005", 5))
    assert actions[-2] == (Start(attempt=4, resume="step-00000005", resume_step=5),)


def test_nothing_happens_after_the_end() -> None:
    state, _ = run(life.PlacementFailed(message="no room"))
    assert decide(state, life.Stopped()) == (state, ())


REDUCER = life.Failure(
    message="rank 0 raised RuntimeError at step 7: marked ready twice",
    hint="use the wrapped model",
    outcome="user_error",
    rank=0,
    step=7,
    error=("RuntimeError", "ready"),
    reducer=True,
)
COMPLAINT = (life.Death(rank=0, failure=REDUCER), life.Stopped())


def detail(attempt: int, resume: str | None = None, step: int = 0) -> Start:
    return Start(attempt=attempt, resume=resume, resume_step=step, distributed_debug=True)


def test_a_complaint_of_ddps_reducer_is_heard_once_more_in_detail_and_ends_the_leg() -> None:
    named = replace(REDUCER, message="rank 0 raised RuntimeError at step 7: net2.weight marked ready twice")
    _, actions = run(
        life.Placed(), *started(), *COMPLAINT, *started(), life.Death(rank=0, failure=named), life.Stopped(), max_restarts=9
    )
    assert actions == [
        (Place(),),
        (Audit(),),
        (Start(attempt=1, resume=None, resume_step=0),),
        (),
        (Stop(attempt=1, reason=REDUCER.message),),
        (Audit(),),
        (detail(2),),
        (),
        (Stop(attempt=2, reason=named.message),),
        (Finish(outcome="user_error", message=named.message, hint=named.hint),),
    ]


def test_a_complaint_that_moves_on_with_every_checkpoint_is_no_loop() -> None:
    later = life.Death(rank=1, failure=replace(REDUCER, rank=1, step=8))
    _, actions = run(life.Placed(), *started(), *COMPLAINT, *started("step-00000007", 7), later, life.Stopped())
    assert actions[6] == (detail(2, "step-00000007", 7),)
    assert actions[-1] == (Finish(outcome="user_error", message=REDUCER.message, hint=REDUCER.hint),)


def test_without_restarts_to_spend_a_complaint_ends_the_leg_as_it_is() -> None:
    _, actions = run(life.Placed(), *started(), *COMPLAINT, max_restarts=0)
    assert actions[-1] == (Finish(outcome="user_error", message=REDUCER.message, hint=REDUCER.hint),)


def test_only_the_attempt_after_a_complaint_is_in_detail() -> None:
    # A planned fault ends the attempt in DETAIL before the complaint comes again; then it does, and is heard in DETAIL anew.
    _, actions = run(
        life.Placed(),
        *started(),
        *COMPLAINT,
        *started(),
        PLANNED,
        life.Stopped(),
        *started(),
        *COMPLAINT,
        *started(),
        *COMPLAINT,
    )
    starts = [action for step in actions for action in step if isinstance(action, Start)]
    assert [(start.attempt, start.distributed_debug) for start in starts] == [(1, False), (2, True), (3, False), (4, True)]
    assert actions[-1] == (Finish(outcome="user_error", message=REDUCER.message, hint=REDUCER.hint),)


def test_an_attempt_in_detail_that_dies_of_something_else_is_not_blamed_on_the_script() -> None:
    other = life.Death(rank=0, failure=KILLED)
    _, actions = run(life.Placed(), *started(), *COMPLAINT, *started(), other, life.Stopped(), *started())
    assert actions[-3:-1] == [(Audit(),), (Start(attempt=3, resume=None, resume_step=0),)]
