"""The leg's state machine: which events restart what, and when it stops. Exact actions, no I/O."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from chaosrun.records.events import Outcome
from chaosrun.supervise import lifecycle as life
from chaosrun.supervise.lifecycle import AcquirePlaces, Audit, Finish, Rest, SetAside, Start, Stop, begin, decide

PLANNED = life.RankDeath(rank=1, fault="F1")
RAISED = life.Failure(
    message="rank 0 raised ValueError at step 7: boom", outcome="user_error", rank=0, step=7, error=("ValueError", "boom")
)
KILLED = life.Failure(message="rank 0 was killed by SIGKILL", rank=0, step=3)


def run(
    *events: life.LegEvent, world_size: int = 2, max_restarts: int = 2, backoff_s: float = 0.0
) -> tuple[life.LegState, list[tuple[life.Action, ...]]]:
    state, actions = begin(world_size, max_restarts, backoff_s)
    seen = [actions]
    for event in events:
        state, actions = decide(state, event)
        seen.append(actions)
    return state, seen


def started(resume: str | None = None, step: int = 0) -> tuple[life.LegEvent, ...]:
    return (life.Audited(resume=resume, step=step), life.Started())


def over(outcome: Any, message: str, **more: Any) -> life.EndLeg:
    return life.EndLeg(Finish(outcome=outcome, message=message, **more))


def test_an_undisturbed_leg_is_placed_audited_started_and_completed() -> None:
    _, actions = run(life.Placed(), *started(), life.RankDeath(rank=0), life.RankDeath(rank=1), life.Stopped())
    began = [(AcquirePlaces(),), (Audit(),), (Start(attempt=1, resume=None, resume_step=0),)]
    assert actions == [*began, (), (), (), (Finish(outcome="completed", message="all ranks completed the training"),)]


def test_a_planned_fault_restarts_from_the_newest_checkpoint_and_costs_no_budget() -> None:
    state, actions = run(life.Placed(), *started(), PLANNED, life.Stopped(), *started("step-00000005", 5))
    again = Start(attempt=2, resume="step-00000005", resume_step=5)
    assert actions[4:] == [(Stop(attempt=1, reason="planned fault F1"),), (Audit(),), (again,), ()]
    assert (state.restarts, state.failure, state.planned) == (0, None, None)


def test_of_two_errors_seen_together_the_first_raised_is_the_cause() -> None:
    echo = life.Failure(message="peer gone", outcome="user_error", rank=1, step=7, error=("RuntimeError", "peer"), raised_s=2.0)
    cause = life.Failure(message="boom", outcome="user_error", rank=0, step=7, error=("ValueError", "boom"), raised_s=1.0)
    for deaths in ((echo, cause), (cause, echo)):
        seen = [life.RankDeath(rank=failure.rank or 0, failure=failure) for failure in deaths]
        _, actions = run(life.Placed(), *started(), *seen, life.Stopped(), max_restarts=0)
        assert actions[-1] == (Finish(outcome="user_error", message="boom"),)


@pytest.mark.parametrize(("outcome", "refused"), [("inexact_restore", False), ("resources", False), ("user_error", True)])
def test_what_another_attempt_cannot_mend_ends_the_leg_at_once(outcome: Outcome, refused: bool) -> None:
    failure = life.Failure(message="no", hint="so", outcome=outcome, refused=refused)
    _, actions = run(life.Placed(), *started(), life.RankDeath(rank=0, failure=failure), life.Stopped())
    assert actions[-1] == (Finish(outcome=outcome, message="no", hint="so"),)


@pytest.mark.parametrize(("code", "outcome"), [("launcher_ended", "user_error"), ("hung", "completed")])
def test_of_ranks_that_say_that_they_have_completed_the_launcher_may_know_better(code: Any, outcome: str) -> None:
    """As of Ray Train's workers, which Ray kills after any end of their training."""
    failed = life.Failure(code=code, message="ValueError: bad batch", outcome="user_error", error=("launcher", "1"))
    ends = (life.RankDeath(rank=0), life.RankDeath(rank=1), life.RankDeath(rank=0, failure=failed), life.Stopped())
    _, actions = run(life.Placed(), *started(), *ends, max_restarts=0)
    (end,) = actions[-1]
    assert isinstance(end, Finish) and end.outcome == outcome
    assert (end.message == "ValueError: bad batch") == (outcome == "user_error")


def test_nothing_happens_after_the_end() -> None:
    state, _ = run(over("resources", "no room"))
    assert decide(state, life.Stopped()) == (state, ())


REDUCER = life.Failure(
    **{"message": "rank 0 raised RuntimeError at step 7: marked ready twice", "hint": "use the wrapped model"},
    **{"outcome": "user_error", "rank": 0, "step": 7, "error": ("RuntimeError", "ready"), "reducer": True},
)
COMPLAINT = (life.RankDeath(rank=0, failure=REDUCER), life.Stopped())


def detail(attempt: int, resume: str | None = None, step: int = 0) -> Start:
    return Start(attempt=attempt, resume=resume, resume_step=step, distributed_debug=True)


def test_a_complaint_of_ddps_reducer_is_heard_once_more_in_detail_and_ends_the_leg() -> None:
    named = replace(REDUCER, message="rank 0 raised RuntimeError at step 7: net2.weight marked ready twice")
    _, actions = run(
        life.Placed(), *started(), *COMPLAINT, *started(), life.RankDeath(rank=0, failure=named), life.Stopped(), max_restarts=9
    )
    first = [(AcquirePlaces(),), (Audit(),), (Start(attempt=1, resume=None, resume_step=0),), ()]
    then = [(Stop(attempt=1, reason=REDUCER.message),), (Audit(),), (detail(2),), (), (Stop(attempt=2, reason=named.message),)]
    assert actions == [*first, *then, (Finish(outcome="user_error", message=named.message, hint=named.hint),)]


def test_only_the_attempt_after_a_complaint_is_in_detail() -> None:
    # A planned fault ends the attempt in DETAIL before the complaint comes again; then it does, and is heard in DETAIL anew.
    faulted = (*started(), PLANNED, life.Stopped())
    _, actions = run(life.Placed(), *started(), *COMPLAINT, *faulted, *started(), *COMPLAINT, *started(), *COMPLAINT)
    starts = [action for step in actions for action in step if isinstance(action, Start)]
    assert [(start.attempt, start.distributed_debug) for start in starts] == [(1, False), (2, True), (3, False), (4, True)]
    assert actions[-1] == (Finish(outcome="user_error", message=REDUCER.message, hint=REDUCER.hint),)


# Notices

LEFT = life.Failure(message="rank 1 was told to leave", rank=1, step=6, leaving=True)


def test_ranks_that_leave_on_a_planned_notice_are_waited_for() -> None:
    notice = life.RankDeath(rank=1, fault="F1", leaving=True)
    for deaths in ((life.RankDeath(rank=0, failure=LEFT), notice), (notice, life.RankDeath(rank=0, failure=LEFT))):
        state, actions = run(life.Placed(), *started(), *deaths, life.Stopped())
        assert actions[-3:] == [(), (), (Audit(),)]
        assert (state.planned, state.failure, state.restarts) == ("F1", None, 0)


def test_a_notice_that_nobody_planned_costs_a_restart_until_the_job_is_further() -> None:
    both = [life.RankDeath(rank=rank, failure=LEFT) for rank in (0, 1)]
    state, actions = run(life.Placed(), *started(), *both, life.Stopped())
    assert actions[-3:] == [(), (), (Audit(),)]
    assert (state.failure, state.restarts) == (LEFT, 1)
    state, _ = decide(state, life.Audited(resume="step-00000006", step=6))
    assert state.restarts == 0


def test_a_rank_that_dies_while_the_others_leave_ends_the_attempt() -> None:
    notice = life.RankDeath(rank=1, fault="F1", leaving=True)
    dies = life.RankDeath(rank=0, failure=KILLED)
    _, actions = run(life.Placed(), *started(), notice, dies)
    assert actions[-1] == (Stop(attempt=1, reason=KILLED.message),)
    state, actions = run(life.Placed(), *started(), life.RankDeath(rank=1, failure=LEFT), dies)
    assert actions[-1] == (Stop(attempt=1, reason=KILLED.message),)
    assert state.failure == KILLED


# Hangs


def test_a_planned_hang_costs_nothing_and_an_unplanned_one_names_its_rank() -> None:
    planned = life.Hang(message="rank 1 stopped first", rank=1, step=7, fault="F1")
    state, actions = run(life.Placed(), *started(), planned, life.Stopped())
    assert actions[-2:] == [(Stop(attempt=1, reason="planned fault F1"),), (Audit(),)]
    assert (state.restarts, state.failure, state.planned) == (0, None, "F1")
    state, _ = run(life.Placed(), *started(), msgspec.structs.replace(planned, fault=None))
    assert state.failure is not None
    assert (state.failure.rank, state.failure.step) == (1, 7)


HANG = life.Hang(message="attempt 2 hangs: rank 1 stopped first", rank=1, step=7, stage="forward")


def test_a_hang_at_the_same_place_twice_ends_the_leg_and_is_not_called_the_script() -> None:
    _, actions = run(life.Placed(), *started(), HANG, life.Stopped(), *started(), HANG, life.Stopped(), max_restarts=5)
    (finish,) = actions[-1]
    assert isinstance(finish, Finish) and (finish.outcome, finish.code) == ("recovery_failed", "hung")
    assert finish.message == "attempt 2 hangs: rank 1 stopped first; attempt 1 hung there, too"


@pytest.mark.parametrize(
    ("first", "then", "resume"),
    [
        (HANG, msgspec.structs.replace(HANG, step=8), ()),
        (HANG, msgspec.structs.replace(HANG, stage="reduce"), ()),
        (HANG, life.RankDeath(rank=1, failure=KILLED), ()),
        # In the restore it may be the checkpoint: an older one is tried before.
        *[(msgspec.structs.replace(HANG, stage="restoring", reach="in"),) * 2 + (C5,) for C5 in [("step-00000005", 5)]],
    ],
    ids=["other step", "other stage", "a death", "in the restore"],
)
def test_a_hang_elsewhere_is_followed_by_another_attempt(
    first: life.LegEvent, then: life.LegEvent, resume: tuple[Any, ...]
) -> None:
    _, actions = run(
        life.Placed(), *started(*resume), first, life.Stopped(), *started(*resume), then, life.Stopped(), max_restarts=5
    )
    assert actions[-1][-1] == Audit()


def test_the_message_at_the_end_of_the_budget_names_the_attempts_that_used_it() -> None:
    events = [life.Placed(), *started(), PLANNED, life.Stopped()]
    for step in (1, 2, 3, 4):
        events += [*started(), msgspec.structs.replace(HANG, message=f"attempt {step + 1} hangs", step=step), life.Stopped()]
    _, actions = run(*events, max_restarts=3)
    (finish,) = actions[-1]
    assert isinstance(finish, Finish)
    assert finish.message == "attempt 5 hangs (died unplanned, without progress: attempts 2, 3, 4, 5; max_restarts is 3)"


# Back-off


def test_the_first_restart_comes_at_once_and_the_next_ones_after_ever_longer_rests() -> None:
    death = (life.RankDeath(rank=0, failure=KILLED), life.Stopped())
    events = [life.Placed(), *started(), *death]
    for _ in range(8):
        events += [*started(), *death, life.Rested()]
    state, actions = run(*events, max_restarts=100, backoff_s=1.0)
    rests = [action.seconds for step in actions for action in step if isinstance(action, Rest)]
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert actions[5] == (Audit(),), "the first one"
    assert actions[-2:] == [(Rest(seconds=30.0),), (Audit(),)]
    assert state.restarts == 9


# Checkpoints that nothing comes of

C5, C10 = ("step-00000005", 5), ("step-00000010", 10)
REASON = "attempts 1 and 2 began from it and died without a newer checkpoint, the last of: rank 0 was killed by SIGKILL"


def died(**about: Any) -> tuple[life.LegEvent, ...]:
    return (life.RankDeath(rank=0, failure=replace(KILLED, **about)), life.Stopped())


def test_a_checkpoint_that_two_attempts_in_a_row_died_from_is_put_aside_and_costs_the_budget_as_ever() -> None:
    state, actions = run(
        life.Placed(), *started(*C10), *died(), *started(*C10), *died(), *started(*C5), *died(), *started(*C5), *died(),
        max_restarts=3,
    )  # fmt: skip
    taken = [action for step in actions for action in step if isinstance(action, SetAside | Start | Finish)]
    assert [action.resume for action in taken if isinstance(action, Start)] == [C10[0], C10[0], C5[0], C5[0]]
    assert taken[2] == SetAside(name=C10[0], reason=REASON)
    (finish,) = actions[-1]
    assert isinstance(finish, Finish) and finish.outcome == "recovery_failed"
    assert state.restarts == 3


ERROR = ("RuntimeError", "size mismatch for embedding")


@pytest.mark.parametrize(
    ("between", "put_aside"),
    [
        # One death, then progress: each of the two checkpoints has seen one.
        ([*died(), *started(*C10), *died()], False),
        # A planned fault in between separates them.
        ([*died(), *started(*C5), PLANNED, life.Stopped(), *started(*C5), *died()], False),
        # Planned ones alone are as many as one likes.
        ([PLANNED, life.Stopped(), *started(*C5), PLANNED, life.Stopped(), *started(*C5), PLANNED, life.Stopped()], False),
        # What never came to the restore says nothing of the checkpoint, neither for nor against it.
        ([*died(reach="before"), *started(*C5), *died(reach="before")], False),
        ([*died(), *started(*C5), *died(reach="before"), *started(*C5), *died()], True),
        # Nor does a lost node.
        ([*died(of_node=True), *started(*C5), *died(of_node=True)], False),
        ([life.AgentLost(message="gone"), life.Stopped(), life.Placed(), *started(*C5), *died()], False),
        # A hang is a death.
        ([life.Hang(message="hangs", rank=1), life.Stopped(), *started(*C5), *died()], True),
        # Errors of different kinds, or at different steps, are not the script's for certain.
        ([*died(error=ERROR, step=7), *started(*C5), *died(error=ERROR, step=8)], True),
        # The same one at the same step is, however it died.
        ([*died(error=ERROR, step=7), *started(*C5), *died(error=ERROR, step=7)], False),
    ],
    ids=[
        "progress", "planned between", "planned alone", "before the restore", "before, between", "node", "agent", "hang",
        "other step", "same step",
    ],
)  # fmt: skip
def test_which_deaths_count_against_a_checkpoint(between: list[life.LegEvent], put_aside: bool) -> None:
    _, actions = run(life.Placed(), *started(*C5), *between, max_restarts=9)
    assert any(isinstance(action, SetAside) for step in actions for action in step) is put_aside


def test_an_error_in_the_restore_is_the_checkpoints_until_an_older_one_shows_it_too() -> None:
    torn = died(error=ERROR, step=0, reach="in")
    events = (life.Placed(), *started(*C10), *torn, *started(*C10), *torn)
    _, actions = run(*events, max_restarts=9)
    assert [type(action) for action in actions[-1]] == [SetAside, Audit]
    # The older one restores: the job goes on.
    _, mended = run(*events, *started(*C5), life.RankDeath(rank=0), life.RankDeath(rank=1), life.Stopped(), max_restarts=9)
    assert mended[-1] == (Finish(outcome="completed", message="all ranks completed the training"),)
    # It does not, in the same way: no checkpoint is to blame for that.
    _, broken = run(*events, *started(*C5), *torn, max_restarts=9)
    assert broken[-1] == (Finish(outcome="user_error", message=KILLED.message, hint=life.REPEATED),)


@pytest.mark.parametrize(
    ("fault_free", "kind", "ends"), [(True, "KeyError", True), (True, "RuntimeError", False), (False, "KeyError", False)]
)
def test_without_faults_a_mistake_of_the_script_ends_a_leg_at_its_second_time(fault_free: bool, kind: str, ends: bool) -> None:
    """However far the training comes in between: after a restart the leg is no reference any more."""
    raised = [life.Failure(message=f"at step {n}", outcome="user_error", rank=0, step=n, error=(kind, "")) for n in (7, 9)]
    first, second = ((life.RankDeath(rank=0, failure=each), life.Stopped()) for each in raised)
    state, actions = begin(2, 9, fault_free=fault_free)
    for event in (life.Placed(), *started(), *first, *started("step-00000005", 5), *second):
        state, actions = decide(state, event)
    said = "at step 9; attempt 1 raised the same, without any fault"
    assert (actions == (Finish(outcome="user_error", message=said),)) is ends


@pytest.mark.parametrize(
    ("fault_free", "raised"),
    [
        (True, (("OSError", 40), ("NameError", 0), ("NameError", 0))),
        (True, (("", 50), ("OSError", 40), ("NameError", 0), ("NameError", 0))),
        (True, (("OSError", 40), ("KeyError", 1), ("KeyError", 2))),
        (True, (("NameError", 40), ("NameError", 0), ("NameError", 0))),
        (False, (("OSError", 40), ("NameError", 0), ("NameError", 0))),
    ],
    ids=["restarts fail alike", "killed before", "restarts fail elsewhere", "no other", "faults"],
)
def test_without_faults_an_error_of_the_restarts_alone_does_not_hide_what_they_began_with(
    fault_free: bool, raised: tuple[tuple[str, int], ...]
) -> None:
    """A script whose resume is broken, too: its first error is the one that a run by hand shows."""
    events: list[life.LegEvent] = [life.Placed()]
    for kind, step in raised:
        failure = life.Failure(message="killed", rank=0, step=step)
        if kind:
            failure = replace(failure, message=kind, outcome="user_error", error=(kind, ""), hint="its log")
        events += [*started(), life.RankDeath(rank=0, failure=failure), life.Stopped()]
    state, actions = begin(2, 9, fault_free=fault_free)
    for event in events:
        state, actions = decide(state, event)
        if any(isinstance(action, Finish) for action in actions):
            break
        if any(isinstance(action, life.Rest) for action in actions):
            state, actions = decide(state, life.Rested())
    (finish,) = actions
    assert isinstance(finish, Finish)
    hidden = "before its restarts the job failed otherwise, without any fault: OSError"
    assert (hidden in finish.message) is (fault_free and "OSError" in dict(raised)), finish.message


def test_a_leg_whose_every_attempt_dies_ends_after_a_bounded_number_of_them() -> None:
    """Whatever checkpoints there are: each begins from the newest that is left, and writes one beyond it now and then."""
    for writes in range(4):
        chance = random.Random(writes)
        left = [5, 10, 15]
        state, actions = begin(2, 3)
        attempts = 0
        pending: list[life.LegEvent] = [life.Placed()]
        while not any(isinstance(action, Finish) for action in actions):
            for action in actions:
                if isinstance(action, SetAside):
                    left.remove(int(action.name.removeprefix("step-")))
                if isinstance(action, Audit):
                    newest = max(left, default=0)
                    pending += started(f"step-{newest:08}" if newest else None, newest)
                if isinstance(action, Start):
                    attempts += 1
                    if chance.random() < writes / 4 and (step := action.resume_step + 5) <= 20:
                        left.append(step)
                    pending += [life.RankDeath(rank=0, failure=replace(KILLED, step=attempts)), life.Stopped()]
            state, actions = decide(state, pending.pop(0))
        assert attempts <= (3 + 1) * 5


P, S, STOPPED, LOST = life.Placed(), started(), life.Stopped(), life.AgentLost(message="the agent died")
RAISES = (life.RankDeath(rank=0, failure=RAISED), STOPPED)
AT_ITS_POINT = msgspec.structs.replace(PLANNED, stopped=True)
PEER_GONE = life.RankDeath(rank=0, failure=replace(RAISED, error=("RuntimeError", "Connection closed by peer"), raised_s=1.0))
RESTING = (P, *S, *died(), *S, *died())
TWICE_FROM_C5 = (P, *started(*C5), *died(), *started(*C5), *died())
BACK = (P, *started(*C10), *died(), *started(*C10), *died(), *started(*C5), *died(), *started(*C10))
C7 = ("step-00000007", 7)
COMPLAINED = Finish(outcome="user_error", message=REDUCER.message, hint=REDUCER.hint)


def gave_up(*attempts: int, max_restarts: int) -> Finish:
    died = f"attempt{'s' * (len(attempts) > 1)} {', '.join(map(str, attempts))}"
    message = f"{KILLED.message} (died unplanned, without progress: {died}; max_restarts is {max_restarts})"
    return Finish(outcome="recovery_failed", message=message)


@pytest.mark.parametrize(
    ("events", "options", "last", "state"),
    [
        # Survivors that die of a planned fault are no failures of their own, seen before the victim or after it.
        ([P, *S, PLANNED, life.RankDeath(rank=0, failure=RAISED), STOPPED], {}, [(Audit(),)], {"failure": None}),
        ([P, *S, life.RankDeath(rank=0, failure=RAISED), PLANNED, STOPPED], {}, [(Audit(),)], {"failure": None, "restarts": 0}),
        # Rank 1 waited for others at its fault when rank 0 failed of itself, and was killed with the attempt.
        (
            [P, *S, life.RankDeath(rank=0, failure=RAISED), AT_ITS_POINT, STOPPED], {}, [(Audit(),)],
            {"failure": RAISED, "restarts": 1, "planned": None},
        ),
        # A lost node is the cause of what its peers raise: no user error, and nothing against the checkpoint.
        (
            [P, *started(*C5), PEER_GONE, LOST, STOPPED, P, *started(*C5), PEER_GONE, LOST, STOPPED], {"max_restarts": 5},
            [(AcquirePlaces(),)], {"died_from": ()},
        ),
        ([P, *S, LOST, STOPPED, P], {}, [(AcquirePlaces(),), (Audit(),)], {"agent_lost": False}),
        # Who was killed comes before who raised an error over it.
        (
            [P, *S, PEER_GONE, life.RankDeath(rank=1, failure=replace(KILLED, rank=1)), STOPPED], {"max_restarts": 0},
            [(gave_up(1, max_restarts=0),)], {},
        ),
        # The same error at the same step twice is the script; not at another step, not with a planned fault in between.
        (
            [P, *S, *RAISES, *S, *RAISES], {},
            [(Finish(outcome="user_error", message=RAISED.message, hint=life.REPEATED),)], {},
        ),
        ([P, *S, *RAISES, *S, life.RankDeath(rank=0, failure=replace(RAISED, step=9)), STOPPED], {}, [(Audit(),)], {}),
        ([P, *S, *RAISES, *S, PLANNED, STOPPED, *S, *RAISES], {}, [(Audit(),)], {}),
        # Unplanned deaths without progress spend the budget; progress gives it back.
        ([P, *S, *died(), *S, *died(), *S, *died()], {}, [(gave_up(1, 2, 3, max_restarts=2),)], {}),
        ([P, *S, *died(), *started(*C5), *died()], {"max_restarts": 1}, [(Audit(),)], {"restarts": 1}),
        ([P, *S, life.RankDeath(rank=1), *died()], {}, [(Audit(),)], {}),
        # An interrupt or a timeout stops first, and finishes when all is gone.
        (
            [P, *S, over("interrupted", "interrupted"), STOPPED], {},
            [(Stop(attempt=1, reason="interrupted"),), (Finish(outcome="interrupted", message="interrupted"),)], {},
        ),
        ([P, *S, over("timeout", "too long"), STOPPED], {}, [(Finish(outcome="timeout", message="too long"),)], {}),
        ([P, over("timeout", "too long")], {}, [(Finish(outcome="timeout", message="too long"),)], {}),
        ([over("resources", "no room", hint="wait")], {}, [(Finish(outcome="resources", message="no room", hint="wait"),)], {}),
        (
            [P, *S, PLANNED, STOPPED, over("fault_missed", "F2 is missed")], {},
            [(Finish(outcome="fault_missed", message="F2 is missed"),)], {"phase": "done"},
        ),
        # A hang is an unplanned death.
        (
            [P, *S, life.Hang(message="no progress"), STOPPED], {},
            [(Stop(attempt=1, reason="no progress"),), (Audit(),)], {"restarts": 1},
        ),
        # A resumed leg goes on counting attempts.
        (
            [life.Resume(attempt=3), P, *started(*C5)], {},
            [(Start(attempt=4, resume=C5[0], resume_step=5),), ()], {},
        ),
        # Complaints of DDP's reducer: without restarts to spend, at a later step, and a death of something else in DETAIL.
        ([P, *S, *COMPLAINT], {"max_restarts": 0}, [(COMPLAINED,)], {}),
        (
            [P, *S, *COMPLAINT, *started(*C7), life.RankDeath(rank=1, failure=replace(REDUCER, rank=1, step=8)), STOPPED], {},
            [(detail(2, *C7),), (), (Stop(attempt=2, reason=REDUCER.message),), (COMPLAINED,)], {},
        ),
        (
            [P, *S, *COMPLAINT, *S, *died(), *S], {},
            [(Audit(),), (Start(attempt=3, resume=None, resume_step=0),), ()], {},
        ),
        # Rests: none after progress or a planned fault; an interrupt, a timeout or new places end one.
        ([*RESTING, life.Rested(), *started(*C5), *died()], {"backoff_s": 1.0}, [(Audit(),)], {}),
        ([P, *S, *died(), *S, PLANNED, STOPPED], {"backoff_s": 1.0}, [(Audit(),)], {}),
        ([*RESTING, over("interrupted", "x")], {"backoff_s": 1.0}, [(Finish(outcome="interrupted", message="x"),)], {}),
        ([*RESTING, over("timeout", "x")], {"backoff_s": 1.0}, [(Finish(outcome="timeout", message="x"),)], {}),
        ([*RESTING, LOST, life.Rested()], {"backoff_s": 1.0}, [(Rest(seconds=1.0),), (), (AcquirePlaces(),)], {}),
        # The last checkpoint is put aside, before the rest; the beginning cannot be, and without restarts left nothing is.
        (TWICE_FROM_C5, {"max_restarts": 9}, [(SetAside(name=C5[0], reason=REASON), Audit())], {}),
        (TWICE_FROM_C5, {"max_restarts": 9, "backoff_s": 1.0}, [(SetAside(name=C5[0], reason=REASON), Rest(seconds=1.0))], {}),
        ([P, *3 * (*S, *died())], {"max_restarts": 9}, [(Audit(),)], {}),
        (TWICE_FROM_C5, {"max_restarts": 1}, [(gave_up(1, 2, max_restarts=1),)], {}),
        # Going back does not give the budget back before it is made up for: step 10 has been there before.
        (BACK, {"max_restarts": 9}, [()], {"restarts": 3}),
        ([*BACK, *died(), *started("step-00000015", 15)], {"max_restarts": 9}, [()], {"restarts": 0}),
    ],
)  # fmt: skip
def test_what_comes_of_it(
    events: Sequence[life.LegEvent], options: dict[str, Any], last: list[tuple[life.Action, ...]], state: dict[str, Any]
) -> None:
    ended, actions = run(*events, **options)
    assert actions[-len(last) :] == last
    assert {name: getattr(ended, name) for name in state} == state
