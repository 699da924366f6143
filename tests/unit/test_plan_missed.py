"""A planned fault that can no longer happen is found when an attempt has ended, and named with what took its place."""

from typing import Any

import pytest

from chaosrun.faults.fault import Fault
from chaosrun.plan.missed import Outlook, first_missed
from chaosrun.plan.planner import make_plan
from tests.unit.test_plan import spec


def faults(*schedule: dict[str, Any], **fields: Any) -> tuple[Fault, ...]:
    return make_plan(spec(*schedule, workers=2, **fields)).faults


def found(plan: tuple[Fault, ...], **known: Any) -> str | None:
    """`known`: how the leg stands, where it is not at its second attempt, from step 10, F1 having struck and been seen."""
    standing: dict[str, Any] = {"attempt": 2, "resume": 10, "restores": 0, "every": 10, "last": 60}
    standing |= {"struck": {"F1": 1}, "observed": {"F1"}, "ended_by": "F1 ended attempt 1", **known}
    result = first_missed(plan, Outlook(**standing))
    return result and result.message()


KILL = {"rank": 0, "at_step": 7}
LATE = {"rank": 0, "at_step": 57}
NOTICE = {"kind": "preempt", "rank": 0, "at_step": 12}
DAMAGE = {"kind": "truncate", "rank": 0, "at_step": 50}


@pytest.mark.parametrize(
    ("schedule", "known", "why"),
    [
        # The attempt that it was bound to is over.
        (
            [KILL, {"rank": 1, "phase": "checkpoint.postcommit", "attempt": 1}],
            {"struck": {"F2": 1}, "observed": {"F2"}},
            "F1 ended attempt 1, and attempt 1 is over",
        ),
        ([KILL, {"rank": 1, "at_step": 7}], {"resume": 0}, None),
        # The job goes on from beyond its step.
        ([KILL, {"rank": 1, "at_step": 7}], {}, "F1 ended attempt 1, and the job resumes from the checkpoint of step 10"),
        ([KILL, {"rank": 1, "at_step": 11}], {}, None),
        ([KILL, {"rank": 1, "at_step": 10, "phase": "checkpoint.begin"}], {}, "resumes from the checkpoint of step 10"),
        ([KILL, {"rank": 1, "at_step": 7}, DAMAGE, LATE], {}, None),  # that may lead it back
        # Nothing is left that leads to another attempt, or to a restore.
        (
            [KILL, {"rank": 1, "at_step": 7}, {"rank": 0, "phase": "rendezvous", "attempt": 3}],
            {"struck": {"F2": 1, "F3": 1}, "observed": {"F2", "F3"}},
            "F1 ended attempt 1, and no fault is left that ends attempt 2",
        ),
        ([KILL, LATE, {"rank": 0, "phase": "rendezvous", "attempt": 3}], {"struck": {"F2": 1}, "observed": {"F2"}}, None),
        (
            [LATE, {"rank": 0, "phase": "restore.end", "occurrence": 1}],
            {"resume": 0, "struck": {"F2": 1}, "observed": {"F2"}},
            "no fault is left that ends attempt 2",
        ),
        ([LATE, {"rank": 0, "phase": "restore.end", "occurrence": 1}], {"struck": {"F2": 1}, "observed": {"F2"}}, None),
        (
            [{"rank": 0, "at_step": 21}, {"rank": 0, "phase": "restore.end", "at_step": 20}],
            {"resume": 30},
            "the job resumes from the checkpoint of step 30",
        ),
        (
            [KILL, LATE, LATE | {"at_step": 50}, {"rank": 0, "phase": "rendezvous", "attempt": 4}],
            {"struck": {"F2": 1, "F3": 1}, "observed": {"F2", "F3"}},
            "F1 ended attempt 1, and too few faults are left that end an attempt",
        ),
        # It is not often enough that the job still comes by.
        ([KILL, {"rank": 1, "phase": "fetch", "occurrence": 51}], {"struck": {"F2": 1}, "observed": {"F2"}}, "step 10"),
        ([KILL, {"rank": 1, "phase": "fetch", "occurrence": 50}], {"struck": {"F2": 1}, "observed": {"F2"}}, None),
        ([KILL, {"rank": 1, "phase": "checkpoint.file", "occurrence": 6}], {"struck": {"F2": 1}, "observed": {"F2"}}, "10"),
        ([KILL, {"rank": 1, "phase": "checkpoint.file", "occurrence": 5}], {"struck": {"F2": 1}, "observed": {"F2"}}, None),
        # The checkpoint of a notice that came otherwise.
        ([NOTICE, {"kind": "slow_storage", "rank": 1, "at_step": 13}], {}, "no checkpoint will be saved at step 13"),
        ([KILL, NOTICE, {"kind": "slow_storage", "rank": 1, "at_step": 13}], {}, None),
        # It struck, and nobody saw it.
        ([KILL, {"rank": 1, "at_step": 17}], {"observed": set()}, "it struck in attempt 1, and F1 ended attempt 1 before"),
        # From outside, after a delay, it may always come.
        ([KILL, {"rank": 1, "after": "90s"}], {}, None),
        ([{"rank": 1, "after": "90s"}, {"rank": 1, "phase": "rendezvous", "attempt": 3}, KILL], {"resume": 0}, None),
    ],
)
def test_what_can_no_longer_happen_is_named_with_its_reason(schedule, known, why) -> None:
    message = found(faults(*schedule), **known)
    if why is None:
        assert message is None
    else:
        assert message is not None and why in message and "can no longer happen: " in message, message


def test_faults_that_the_training_may_outrun_are_not_missed() -> None:
    plan = make_plan(spec(KILL, random={"mtbf": "30s"}, workers=2)).faults
    assert found(plan, resume=50, attempt=9) is None
