"""What is reckoned of a plan before the start, held against a job that goes through it point by point, in any order."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.faults.kind import RESTORE_PHASES, TRAINING_PHASES
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.planner import make_plan
from chaosrun.spec.model import JobSpec
from tests.unit.job_model import JobModel, Outcome

MODELLED = ("kill", "kill", "kill", "exception", "stop", "pause", "slow", "preempt", "truncate", "stale_staging", "flip_bit")
NOT_MODELLED = ("checkpoint.fsync.before", "checkpoint.fsync.after")
CAN_BE_MANY = ("kill", "pause", "preempt", "flip_bit")
WAYS = 8
"""In which an accepted plan is gone through."""
WAYS_TO_FAIL = 400


@st.composite
def entries(draw: st.DrawFn, workers: int, last: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(MODELLED))
    phases = sorted(KINDS[kind].phases - {*NOT_MODELLED, *(["reduce"] if workers == 1 else [])})
    phase = draw(st.sampled_from(phases))
    entry: dict[str, Any] = {"kind": kind, "phase": phase}
    together = kind in CAN_BE_MANY and not phase.startswith("checkpoint.rename") and draw(st.integers(0, 3)) == 0
    entry["rank"] = "all" if together else 0 if phase.startswith("checkpoint.rename") else draw(st.integers(0, workers - 1))
    if draw(st.integers(0, 3)) == 0:
        entry["attempt"] = draw(st.integers(1, 4))
    if phase == "rendezvous" or (phase in RESTORE_PHASES and draw(st.booleans())):
        entry["occurrence"] = draw(st.integers(1, 3))
    elif phase in TRAINING_PHASES and draw(st.integers(0, 3)) == 0:
        entry["occurrence"] = draw(st.integers(1, 4))
    elif phase in TRAINING_PHASES or draw(st.booleans()):
        entry["at_step"] = draw(st.integers(1, last))
    if kind == "slow":
        entry["steps"] = draw(st.integers(1, 3))
    return entry


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    workers, last = draw(st.integers(1, 3)), draw(st.integers(4, 9))
    return {
        "name": "model",
        "script": "train.py",
        "workers": workers,
        "max_steps": last,
        "checkpoint": {"every_steps": draw(st.integers(1, 4)), "keep": draw(st.integers(2, 3))},
        "faults": {"schedule": draw(st.lists(entries(workers, last), min_size=1, max_size=4))},
    }


def gone_through(spec: JobSpec, plan: FaultPlan, way: int) -> Outcome:
    return JobModel(spec, plan, random.Random(way)).run()


def unchecked(spec: JobSpec) -> FaultPlan:
    """The plan that would be carried out if nobody objected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chaosrun.plan.planner.objections", lambda *_: [])
        return make_plan(spec)


def is_kept(job: dict[str, Any]) -> None:
    """An accepted plan is carried out, whichever rank is ahead."""
    spec = JobSpec.model_validate(job)
    try:
        plan = make_plan(spec)
    except UsageError:
        assume(False)
        return
    for way in range(WAYS):
        outcome = gone_through(spec, plan, way)
        missing = [fault.describe() for fault in plan.faults if fault.required and fault.id not in outcome.landed]
        assert not missing, f"way {way}: attempts from {outcome.attempts}: {missing}"


def can_fail(job: dict[str, Any]) -> None:
    """A refused plan would have failed, if not in every way."""
    spec = JobSpec.model_validate(job)
    try:
        make_plan(spec)
    except UsageError as error:
        message = error.message
    else:
        assume(False)
        return
    plan = unchecked(spec)
    for way in range(WAYS_TO_FAIL):
        if {fault.id for fault in plan.faults} - gone_through(spec, plan, way).landed:
            return
    raise AssertionError(f"{WAYS_TO_FAIL} ways, and every fault happened in each, though: {message}")


OFTEN = settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@settings(OFTEN, max_examples=120)
@given(job=jobs())
def test_in_an_accepted_plan_every_fault_happens_whichever_rank_is_ahead(job: dict[str, Any]) -> None:
    is_kept(job)


@settings(OFTEN, max_examples=80)
@given(job=jobs())
def test_a_refused_plan_can_fail(job: dict[str, Any]) -> None:
    can_fail(job)


def test_a_fault_of_all_ranks_right_before_they_leave_on_notice_is_not_cut_short() -> None:
    """Found by drawing plans at random: it was refused for nothing."""
    schedule = [
        {"kind": "kill", "phase": "checkpoint.begin", "rank": "all"},
        {"kind": "preempt", "phase": "fetch", "rank": "all", "occurrence": 4},
        {"kind": "flip_bit", "phase": "step", "rank": "all", "at_step": 5},
    ]
    job = {"name": "model", "script": "train.py", "workers": 2, "max_steps": 5}
    job |= {"checkpoint": {"every_steps": 1, "keep": 2}, "faults": {"schedule": schedule}}
    assert len(make_plan(JobSpec.model_validate(job)).faults) == 6
    is_kept(job)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@settings(OFTEN, max_examples=4_000, derandomize=False)
@given(job=jobs())
def test_many_accepted_plans(job: dict[str, Any]) -> None:
    is_kept(job)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@settings(OFTEN, max_examples=2_000, derandomize=False)
@given(job=jobs())
def test_many_refused_plans(job: dict[str, Any]) -> None:
    can_fail(job)
