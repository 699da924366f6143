"""The planner: what each entry becomes, what is refused, and that chance is the seed's alone."""

import json
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kind import PHASES
from chaosrun.plan.entries import MAX_FAULTS
from chaosrun.plan.planner import make_plan
from chaosrun.spec.model import JobSpec


def spec(*schedule, random=None, seed=0, workers=3, max_steps: int | None = 60, every_steps=10, timeout=None):
    faults = {"seed": seed, "schedule": schedule, "random": random}
    job = {"name": "probe", "script": "train.py", "workers": workers, "max_steps": max_steps, "timeout": timeout}
    return JobSpec.model_validate({**job, "faults": faults, "checkpoint": {"every_steps": every_steps}})


def planned(*schedule, **fields):
    return [(fault.id, fault.rank, fault.phase, fault.at_step) for fault in make_plan(spec(*schedule, **fields)).faults]


def refusal(*schedule, **fields) -> str:
    with pytest.raises(UsageError) as caught:
        make_plan(spec(*schedule, **fields))
    assert caught.value.hint
    return caught.value.message


def test_no_faults_no_plan():
    assert make_plan(spec()) == FaultPlan(seed=0, faults=())


def test_a_fault_at_a_step():
    assert make_plan(spec({"at_step": 7, "rank": 1})).faults == (
        Fault(id="F1", rank=1, at_step=7, phase="step", source="faults.schedule[0]"),
    )


def test_the_plan_is_in_the_order_the_job_meets_it_and_numbered_so():
    assert planned({"at_step": 30, "rank": 0}, {"at_step": 7, "rank": 1}, {"phase": "restore.end", "rank": 2}) == [
        ("F1", 2, "restore.end", None),
        ("F2", 1, "step", 7),
        ("F3", 0, "step", 30),
    ]


def test_every_so_many_steps_until_max_steps_or_until_step():
    every = {"every_steps": 25, "rank": 0}
    assert [step for *_, step in planned(every)] == [25, 50]
    assert [step for *_, step in planned(every, max_steps=100)] == [25, 50, 75, 100]
    assert [step for *_, step in planned({**every, "until_step": 50}, max_steps=None)] == [25, 50]


def test_the_same_point_twice_is_two_faults_where_the_job_comes_by_again():
    assert planned({"at_step": 7, "rank": 1}, {"at_step": 7, "rank": 1}) == [("F1", 1, "step", 7), ("F2", 1, "step", 7)]


def test_a_known_plan_stays_what_it_is():
    # Written down once: a change here changes the plan of every job that has random faults.
    plan = make_plan(spec({"at_step": 7}, random={"count": 4}, seed=7))
    assert [(fault.at_step, fault.rank) for fault in plan.faults] == KNOWN_COUNT
    plan = make_plan(spec(random={"mean_steps": 12}, seed=7))
    assert [(fault.at_step, fault.rank) for fault in plan.faults] == KNOWN_MEAN


KNOWN_COUNT = [(5, 1), (7, 0), (10, 0), (33, 1), (39, 0)]
KNOWN_MEAN = [(4, 2), (7, 0), (9, 2), (11, 1), (22, 1), (34, 1), (35, 2), (57, 2)]


@pytest.mark.parametrize(
    ("entry", "fields", "reason"),
    [
        ({"at_step": 7, "rank": 3}, {}, "faults.schedule[0]: rank 3 does not exist: the last of 3 workers is rank 2"),
        ({"at_step": 61, "rank": 0}, {}, "faults.schedule[0]: step 61 is never reached, max_steps is 60"),
        ({"at_step": 7, "phase": "reduce"}, {"workers": 1}, "needs at least 2 workers"),
        ({"at_step": 7, "phase": "checkpoint.file"}, {}, "no checkpoint is saved at step 7, only at multiples of 10"),
        ({"every_steps": 15, "phase": "checkpoint.precommit"}, {}, "no checkpoint is saved at step 15"),
        ({"at_step": 65, "phase": "checkpoint.file"}, {"max_steps": None}, "no checkpoint is saved at step 65"),
        ({"phase": "restore.end"}, {}, "nothing is ever restored"),
        ({"every_steps": 5}, {"max_steps": None}, "every_steps needs a last step, set until_step or max_steps"),
        ({"every_steps": 70}, {}, "every 70 steps comes to none within 60 steps"),
        ({"every_steps": 5, "until_step": 80}, {}, "until_step 80 is never reached, max_steps is 60"),
        ({"every_steps": 1}, {"max_steps": 10**9}, "more than a drill can do"),
    ],
)
def test_what_can_never_fire_is_refused(entry, fields, reason):
    assert reason in refusal(entry, **fields)


@pytest.mark.parametrize(
    ("random", "fields", "reason"),
    [
        ({"count": 3}, {"max_steps": None}, "needs to know the last step, set between or max_steps"),
        ({"mean_steps": 3}, {"max_steps": None}, "needs to know the last step, set between or max_steps"),
        ({"count": 3, "between": [1, 61]}, {}, "step 61 of between is never reached"),
        ({"count": 61}, {}, "61 faults do not fit, 60 can be placed"),
        ({"count": 1, "rank": 3}, {}, "rank 3 does not exist"),
        ({"count": 1, "phase": "reduce"}, {"workers": 1}, "needs at least 2 workers"),
        ({"mean_steps": 3}, {"max_steps": 10**8}, "too far"),
    ],
)
def test_random_faults_that_cannot_be_drawn_are_refused(random, fields, reason):
    assert reason in refusal(random=random, **fields)


def test_every_entry_at_fault_is_named():
    message = refusal({"at_step": 7, "rank": 8}, {"at_step": 5, "rank": 0}, {"at_step": 99, "rank": 9})
    assert message.startswith("3 faults cannot be planned:")
    assert message.count("faults.schedule[2]") == 2
    assert "faults.schedule[1]" not in message


def test_checkpoint_faults_may_name_the_last_step():
    last = {"at_step": 25, "phase": "checkpoint.file", "rank": 0}
    assert planned(last, max_steps=25) == [("F1", 0, "checkpoint.file", 25)]
    assert "no checkpoint is saved at step 25" in refusal(last, max_steps=60)


class TestAfterACommit:
    """Once the checkpoint of a step is committed, a second fault at that step has nothing left to fire at."""

    STEP: ClassVar = {"at_step": 20, "rank": 0}
    POSTCOMMIT: ClassVar = {"at_step": 20, "phase": "checkpoint.postcommit", "rank": 1}

    @pytest.mark.parametrize("pair", [(STEP, STEP), (STEP, POSTCOMMIT), (POSTCOMMIT, POSTCOMMIT)])
    def test_two_are_refused(self, pair):
        assert "faults.schedule[1]" in refusal(*pair)
        assert "resumes from the checkpoint of step 20" in refusal(*pair)

    def test_the_first_checkpoint_counts_where_no_step_is_named(self):
        message = refusal({"phase": "checkpoint.postcommit", "rank": 1}, {"at_step": 10, "rank": 0})
        assert "resumes from the checkpoint of step 10" in message

    @pytest.mark.parametrize("phase", ["checkpoint.file", "checkpoint.precommit", "reduce"])
    def test_a_fault_before_the_commit_leaves_room_for_one_after(self, phase):
        assert len(planned(self.STEP, {"at_step": 20, "phase": phase, "rank": 1})) == 2


class TestAfterARestore:
    RESTORED: ClassVar = {"phase": "restore.end", "rank": 0}

    @pytest.mark.parametrize(
        ("cause", "step"),
        [
            ({"at_step": 17}, 10),
            ({"at_step": 20}, 20),
            ({"at_step": 20, "phase": "reduce"}, 10),
            ({"at_step": 21, "phase": "reduce"}, 20),
            ({"at_step": 20, "phase": "checkpoint.file"}, 10),
            ({"at_step": 20, "phase": "checkpoint.precommit"}, 10),
            ({"at_step": 20, "phase": "checkpoint.postcommit"}, 20),
            ({"phase": "checkpoint.postcommit"}, 10),
        ],
    )
    def test_another_fault_must_lead_to_it(self, cause, step):
        assert len(planned(cause, {**self.RESTORED, "at_step": step})) == 2
        assert len(planned(cause, self.RESTORED, self.RESTORED)) == 3
        other = 30 - step
        assert f"step {other} is never restored" in refusal(cause, {**self.RESTORED, "at_step": other})

    @pytest.mark.parametrize("cause", [{"at_step": 9}, {"at_step": 10, "phase": "reduce"}, {"phase": "checkpoint.file"}])
    def test_a_fault_before_the_first_checkpoint_leads_to_none(self, cause):
        assert "nothing is ever restored" in refusal(cause, self.RESTORED)


def test_random_faults_keep_clear_of_scheduled_ones():
    schedule = {"every_steps": 2, "rank": 0}
    steps = [step for *_, step in planned(schedule, random={"count": 30}, every_steps=5)]
    assert steps == list(range(1, 61))


def test_random_faults_keep_clear_of_notices():
    notices = [{"kind": "preempt", "at_step": step, "rank": 0} for step in range(2, 60, 4)]
    steps = {step for *_, step in planned(*notices, random={"count": 30})}
    assert steps == {step for step in range(1, 61) if step % 4 in (0, 1)} | {step for step in range(2, 60, 4)}
    kills = [{"at_step": step, "rank": 0} for step in range(3, 60, 4)]
    assert all(planned(*kills, random={"kind": "preempt", "count": 10}, seed=seed) for seed in range(20))


seeds = st.integers(min_value=0, max_value=2**63)


@given(seed=seeds, workers=st.integers(1, 9), first=st.integers(1, 50), length=st.integers(0, 80), data=st.data())
def test_counted_faults_are_distinct_within_bounds_and_repeatable(seed, workers, first, length, data):
    count = data.draw(st.integers(1, length + 1))
    job = spec(random={"count": count, "between": [first, first + length]}, seed=seed, workers=workers, max_steps=None)
    plan = make_plan(job)
    steps = [fault.at_step or 0 for fault in plan.faults]
    assert steps == sorted(set(steps)) and len(steps) == count
    assert all(first <= step <= first + length for step in steps)
    assert all(0 <= fault.rank < workers for fault in plan.faults)
    assert [fault.id for fault in plan.faults] == [f"F{number}" for number in range(1, count + 1)]
    assert make_plan(job) == plan


@given(seed=seeds, mean=st.floats(1, 100), last=st.integers(1, 200))
def test_mean_steps_stays_within_bounds_and_is_repeatable(seed, mean, last):
    job = spec(random={"mean_steps": mean}, seed=seed, max_steps=last)
    steps = [fault.at_step or 0 for fault in make_plan(job).faults]
    assert steps == sorted(set(steps)) and all(1 <= step <= last for step in steps)
    assert make_plan(job) == make_plan(job)
    if mean == 1:
        assert steps == list(range(1, last + 1))


def test_mean_steps_is_the_mean():
    plan = make_plan(spec(random={"mean_steps": 50}, max_steps=100_000, seed=3))
    assert 1_800 < len(plan.faults) < 2_200
    assert len(plan.faults) < MAX_FAULTS


def test_seeds_differ_and_ranks_are_spread():
    plans = [make_plan(spec(random={"count": 6}, seed=seed)).faults for seed in range(20)]
    assert len(set(plans)) == 20
    assert {fault.rank for plan in plans for fault in plan} == {0, 1, 2}


@given(seed=seeds)
def test_a_plan_survives_json(seed):
    plan = make_plan(spec({"phase": "checkpoint.file"}, random={"count": 3}, seed=seed))
    assert FaultPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_foreign_json_is_refused():
    plan = make_plan(spec({"at_step": 7, "rank": 0})).to_json()
    fault = plan["faults"][0]
    for foreign in (
        {**plan, "version": 1},
        {**plan, "more": 1},
        {**plan, "faults": [{**fault, "phase": "lunch"}]},
        {**plan, "faults": [{**fault, "kind": "hug"}]},
        {**plan, "faults": [{key: value for key, value in fault.items() if key != "rank"}]},
    ):
        with pytest.raises(UsageError):
            FaultPlan.from_json(foreign)


def test_faults_in_words():
    def say(phase, step):
        return Fault(id="F1", rank=1, phase=phase, at_step=step, source="faults.schedule[0]").describe()

    assert say("step", 7) == "SIGKILL rank 1 after step 7"
    assert say("reduce", 7) == "SIGKILL rank 1 inside the gradient all-reduce of step 7"
    assert say("checkpoint.file", None) == "SIGKILL rank 1 while it writes the first checkpoint it reaches"
    assert len({say(phase, step) for phase in PHASES for step in (7, None)}) == 2 * len(PHASES)
