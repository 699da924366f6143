"""Every trigger a job file may name: what the planner makes of it, what it refuses, and how it reads."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosrun.faults.fault import Fault
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.entries import MAX_FAULTS
from chaosrun.plan.planner import make_plan
from chaosrun.plan.sampling import exponential
from tests.unit.test_plan import refusal, spec

FIRST = {"rank": 1, "phase": "checkpoint.postcommit"}
"""Leads to a restore of step 10 in attempt 2."""
KNOWN_TIMES = [
    (32.173, 2),
    (63.298, 0),
    (65.394, 2),
    (78.129, 0),
    (81.843, 1),
    (100.666, 2),
    (132.064, 0),
    (140.752, 1),
    (251.164, 0),
]
"""Written down once: a change here changes the plan of every job that has such faults."""


def faults(*schedule, **fields) -> tuple[Fault, ...]:
    return make_plan(spec(*schedule, **fields)).faults


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"at_step": 7, "rank": 1}, "SIGKILL rank 1 after step 7"),
        ({"phase": "fetch", "occurrence": 3, "rank": 0}, "SIGKILL rank 0 after fetching its third batch"),
        ({"phase": "fetch", "occurrence": 21, "rank": 0}, "SIGKILL rank 0 after fetching its 21st batch"),
        ({"phase": "fetch", "occurrence": 13, "rank": 0}, "SIGKILL rank 0 after fetching its 13th batch"),
        ({"phase": "fetch", "at_step": 3, "rank": 0}, "SIGKILL rank 0 after fetching a batch of step 3"),
        (
            {"phase": "checkpoint.file", "occurrence": 2, "rank": 0},
            "SIGKILL rank 0 while it writes the second checkpoint it reaches",
        ),
        ({"phase": "rendezvous", "rank": 2}, "SIGKILL rank 2 at its first rendezvous"),
        ({"phase": "rendezvous", "attempt": 1, "rank": 2}, "SIGKILL rank 2 at the rendezvous of attempt 1"),
        ({"phase": "forward", "attempt": 1, "rank": 2}, "SIGKILL rank 2 before its first backward pass in attempt 1"),
        (
            {"phase": "record", "at_step": 4, "attempt": 1, "rank": 2},
            "SIGKILL rank 2 right after the record of step 4 in attempt 1",
        ),
        ({"after": "90s", "rank": 1}, "SIGKILL rank 1 90 s after the start"),
        (
            {"phase": "checkpoint.fsync.before", "file": "model.safetensors", "rank": 0, "at_step": 20},
            "SIGKILL rank 0 before the fsync of model.safetensors in the checkpoint of step 20",
        ),
        (
            {"phase": "checkpoint.fsync.after", "at_step": 20, "occurrence": 2, "rank": 0},
            "SIGKILL rank 0 after the second fsync of a file in the checkpoint of step 20",
        ),
    ],
)
def test_each_trigger_reads_as_it_is_meant(entry, words):
    (fault,) = faults(entry)
    assert fault.describe() == words


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"phase": "restore.begin", "rank": 0}, "SIGKILL rank 0 before its first restore"),
        ({"phase": "restore.end", "attempt": 2, "rank": 0}, "SIGKILL rank 0 right after the restore of attempt 2"),
        ({"phase": "rendezvous", "occurrence": 2, "rank": 0}, "SIGKILL rank 0 at its second rendezvous"),
        ({"phase": "reduce", "attempt": 2, "rank": 0}, "SIGKILL rank 0 inside its first gradient all-reduce in attempt 2"),
        ({"phase": "step", "attempt": 2, "rank": 0}, "SIGKILL rank 0 after its first step in attempt 2"),
    ],
)
def test_faults_during_recovery_need_a_first_fault(entry, words):
    assert words in [fault.describe() for fault in faults(FIRST, entry)]
    assert refusal(entry)


def test_all_ranks_at_once_are_one_group():
    plan = faults({"rank": "all", "at_step": 7}, {"rank": "all", "phase": "fetch", "at_step": 9})
    assert [(fault.id, fault.rank, fault.group) for fault in plan] == [
        ("F1", 0, "G1/3"),
        ("F2", 1, "G1/3"),
        ("F3", 2, "G1/3"),
        ("F4", 0, "G2/3"),
        ("F5", 1, "G2/3"),
        ("F6", 2, "G2/3"),
    ]
    assert plan[0].describe() == "SIGKILL rank 0 after step 7, 3 ranks at once"


@given(seed=st.integers(0, 2**63), at_once=st.integers(1, 5), workers=st.integers(5, 8))
def test_some_ranks_at_once_are_drawn_without_repetition(seed, at_once, workers):
    plan = faults({"at_once": at_once, "every_steps": 20}, seed=seed, workers=workers)
    for step in (20, 40, 60):
        members = [fault for fault in plan if fault.at_step == step]
        assert len({fault.rank for fault in members}) == len(members) == at_once
        assert len({fault.group for fault in members}) == 1
        assert (members[0].group is None) == (at_once == 1)


def test_groups_of_an_entry_that_repeats_are_told_apart():
    plan = faults({"rank": "all", "every_steps": 30}, workers=2)
    assert [fault.group for fault in plan] == ["G1/2", "G1/2", "G2/2", "G2/2"]


def test_several_ranks_are_struck_together_from_outside_too():
    plan = faults({"rank": "all", "after": "2s"}, {"rank": "all", "after": "4s"})
    assert [(fault.rank, fault.after_s, fault.group, fault.phase) for fault in plan] == [
        (rank, after_s, group, None) for after_s, group in ((2.0, "G1/3"), (4.0, "G2/3")) for rank in range(3)
    ]
    assert all(fault.required for fault in plan)


@pytest.mark.parametrize(
    ("entry", "fields", "reason"),
    [
        ({"at_step": 7, "at_once": 4}, {}, "4 ranks at once are more than there are: 3"),
        ({"at_step": 7, "rank": "all", "kind": "node"}, {}, "does not strike single ranks"),
        ({"at_step": 7, "rank": "all", "kind": "exception"}, {}, "only the first would be seen"),
        ({"at_step": 10, "rank": "all", "kind": "truncate"}, {}, "concerns the job's checkpoint"),
        (
            {"at_step": 10, "rank": "all", "phase": "checkpoint.rename.before"},
            {},
            "rank 1 never comes by checkpoint.rename.before",
        ),
        ({"at_step": 10, "rank": 1, "phase": "checkpoint.rename.after"}, {}, "only rank 0 does"),
        ({"at_step": 10, "rank": 1, "kind": "failed_rename"}, {}, "only rank 0 does"),
        ({"rank": 1, "kind": "port_taken"}, {}, "rank 1 never has the rendezvous port, only rank 0 does"),
        ({"kind": "port_taken"}, {"workers": 1}, "needs at least 2 workers"),
        ({"kind": "diverge", "at_step": 3}, {"workers": 1}, "one worker alone has no replicas"),
        (
            {"at_step": 10, "rank": 1, "phase": "checkpoint.fsync.before", "file": "MANIFEST.json"},
            {},
            "never syncs MANIFEST.json",
        ),
        (
            {"at_step": 10, "rank": 1, "phase": "checkpoint.fsync.before", "file": "chaosrun-rank-2.pt"},
            {},
            "rank 1 never syncs chaosrun-rank-2.pt, only rank 2 does",
        ),
        ({"at_step": 10, "phase": "checkpoint.fsync.before", "file": "../x"}, {}, "is not a path within a checkpoint"),
        ({"phase": "rendezvous", "attempt": 2}, {}, "attempt 2 may never begin, the other faults lead to 1 attempt"),
        ({"at_step": 5, "attempt": 3}, {}, "attempt 3 may never begin"),
        ({"phase": "rendezvous", "occurrence": 2}, {}, "attempt 2 may never begin, the other faults lead to 1 attempt"),
        ({"phase": "fetch", "occurrence": 61}, {}, "no attempt comes by there 61 times"),
        ({"phase": "checkpoint.file", "occurrence": 7}, {}, "no attempt comes by there 7 times"),
        ({"kind": "truncate", "at_step": 20}, {}, "nobody reads the checkpoint again"),
        ({"kind": "truncate", "at_step": 5, "phase": "step"}, {}, "there is no checkpoint yet"),
        ({"kind": "preempt", "at_step": 60}, {}, "leave after the step that follows the notice, and none may follow"),
        ({"kind": "slow", "at_step": 55}, {}, "it slows 10 steps down, and 5 follow step 55"),
        ({"kind": "slow", "at_step": 59}, {}, "and 1 follows step 59"),
        ({"kind": "flip_bit", "state": "moment", "at_step": 1}, {}, "no moment before its first step"),
        ({"after": "90s"}, {"timeout": "90s"}, "it comes 90 s after the start, when the run has been stopped (90 s, timeout)"),
    ],
)
def test_what_can_never_happen_is_refused_before_the_start(entry, fields, reason):
    message = refusal(entry, **fields)
    assert reason in message
    assert message.startswith(("faults.schedule[0]", "3 faults cannot", "2 faults cannot"))


@pytest.mark.parametrize(
    ("entry", "rank"),
    [
        ({"at_step": 10, "phase": "checkpoint.rename.before"}, 0),
        ({"at_step": 10, "kind": "failed_rename"}, 0),
        ({"kind": "port_taken"}, 0),
        ({"at_step": 10, "phase": "checkpoint.fsync.after", "file": "random_states_2.pkl"}, 2),
        ({"at_step": 10, "phase": "checkpoint.fsync.after", "file": "MANIFEST.json"}, 0),
    ],
)
def test_a_random_rank_is_one_that_comes_by_there(entry, rank):
    assert {faults(entry, seed=seed)[0].rank for seed in range(20)} == {rank}


class TestTogether:
    """What faults do to each other."""

    def test_an_attempt_that_only_a_race_may_save_is_left_to_the_drill(self):
        both = [{"at_step": 7, "rank": 0}, {"at_step": 7, "rank": 1}]
        assert len(faults(*both, {"phase": "rendezvous", "attempt": 3})) == 3
        assert "attempt 4 may never begin, the other faults lead to 3 attempts" in refusal(
            *both, {"phase": "rendezvous", "attempt": 4}
        )

    def test_an_attempt_that_does_not_come_by(self):
        message = refusal({"at_step": 17, "rank": 0}, {"at_step": 5, "attempt": 2, "rank": 1})
        assert "that attempt goes from step 10 to the end, and does not come by there" in message
        assert len(faults({"at_step": 17, "rank": 0}, {"at_step": 15, "attempt": 2, "rank": 1})) == 2

    def test_damage_is_met_by_the_next_restart(self):
        damage = {"kind": "truncate", "at_step": 20}
        assert len(faults(damage, {"at_step": 25, "rank": 0})) == 2
        assert "nobody reads" in refusal(damage, {"at_step": 35, "rank": 0})
        # Back at step 10, the job comes by step 20 once more.
        assert len(faults(damage, {"at_step": 25, "rank": 0}, {"phase": "restore.end", "at_step": 10, "rank": 1})) == 3
        message = refusal(damage, {"at_step": 25, "rank": 0}, {"phase": "restore.end", "at_step": 20, "rank": 1})
        assert "step 20 is never restored; the other faults lead to a restore of step 10" in message

    def test_damage_that_leaves_nothing_leads_back_to_the_beginning(self):
        kills = [{"at_step": 15, "rank": 0}, {"at_step": 9, "attempt": 2, "rank": 0}]
        assert "that attempt goes from step 10 to the end" in refusal(*kills)
        assert len(faults({"kind": "truncate", "at_step": 10}, *kills)) == 3

    def test_a_notice_makes_a_checkpoint_of_its_own(self):
        notice = {"kind": "preempt", "at_step": 12, "rank": 0}
        restored = {"phase": "restore.end", "rank": 1}
        assert len(faults(notice, {**restored, "at_step": 13})) == 2
        assert "never restored" in refusal(notice, {**restored, "at_step": 10})
        slow = {"kind": "slow_storage", "rank": 1}
        assert len(faults(notice, {**slow, "at_step": 13})) == 2
        assert "no checkpoint is saved at step 14" in refusal(notice, {**slow, "at_step": 14})
        assert len(faults({**notice, "at_step": 9}, {**restored, "at_step": 10})) == 2
        assert len(faults({**notice, "rank": 0}, {**restored, "at_step": 12, "rank": 0}, workers=1)) == 2

    @pytest.mark.parametrize(
        ("workers", "told", "other"),
        [
            (2, {"at_step": 43, "rank": 1}, {"at_step": 44, "rank": 1}),
            (2, {"at_step": 43, "rank": 1}, {"at_step": 44, "rank": 0}),
            (2, {"at_step": 43, "rank": 1}, {"at_step": 44, "rank": 0, "phase": "checkpoint.file"}),
            (2, {"at_step": 43, "rank": 1}, {"at_step": 43, "rank": 0, "phase": "reduce"}),
            (2, {"at_step": 49, "rank": 1}, {"at_step": 50, "rank": 0}),
            (2, {"at_step": 43, "rank": "all"}, {"kind": "stop", "at_step": 44, "rank": 1}),
            (1, {"at_step": 44, "rank": 0, "phase": "fetch"}, {"at_step": 44, "rank": 0}),
        ],
    )
    def test_what_ends_the_attempt_before_the_ranks_have_left_on_a_notice(self, workers, told, other):
        leave = told["at_step"] + (workers > 1)
        message = refusal({"kind": "preempt", **told}, other, workers=workers)
        assert f"the ranks leave after step {leave}, and faults.schedule[1] (SIG" in message
        assert f"may end the attempt before; let it strike at step {leave + 1} or later, in the next attempt" in message
        there = {key: value for key, value in other.items() if key != "phase"} | {"at_step": leave + 1}
        assert faults({"kind": "preempt", **told}, there, workers=workers)

    def test_what_ends_the_attempt_before_a_notice_can_come_leaves_it_for_the_next(self):
        notice = {"kind": "preempt", "at_step": 43, "rank": 1}
        assert len(faults(notice, {"at_step": 43, "rank": 0, "phase": "fetch"})) == 2
        assert len(faults({"at_step": 43, "rank": 1}, notice)) == 2

    def test_after_a_notice_at_the_end_there_is_no_next_attempt(self):
        message = refusal({"kind": "preempt", "at_step": 59, "rank": 1}, {"at_step": 60, "rank": 1})
        assert "let the notice come earlier" in message

    def test_a_rank_leaves_once(self):
        notice = {"kind": "preempt", "at_step": 43, "rank": 1}
        message = refusal(notice, {**notice, "at_step": 44})
        assert "faults.schedule[0] has given this rank notice before; it leaves once, after step 44" in message
        assert len(faults(notice, {**notice, "at_step": 45})) == len(faults(notice, {**notice, "at_step": 44, "rank": 0})) == 2

    def test_a_hang_is_cut_short_by_a_death_beside_it(self):
        stop = {"kind": "stop", "at_step": 7, "rank": 0}
        assert "may be cut short" in refusal(stop, {"at_step": 7, "rank": 1})
        assert len(faults(stop, {"at_step": 8, "rank": 1})) == 2

    def test_of_several_processes_that_are_stopped_each_is_found_so(self):
        stop = {"kind": "stop", "at_step": 7, "rank": 0}
        assert len(faults(stop, {**stop, "rank": 1})) == 2
        assert "may be cut short" in refusal(stop, {"kind": "hang", "at_step": 7, "rank": 1})

    def test_slow_steps_are_cut_short_by_a_death(self):
        slow = {"kind": "slow", "at_step": 7, "rank": 0, "steps": 5}
        assert "may be cut short" in refusal(slow, {"at_step": 11, "rank": 1})
        assert len(faults(slow, {"at_step": 13, "rank": 1})) == 2

    def test_a_group_that_something_else_keeps_apart_meets_in_a_later_attempt(self):
        together = {"rank": "all", "phase": "reduce", "at_step": 8}
        assert len(faults({"at_step": 7, "rank": 0}, together)) == 4
        attempts = [{"phase": "rendezvous", "attempt": 3}, {"phase": "restore.end", "occurrence": 1}]
        assert len(faults({"at_step": 17, "rank": 0}, {**together, "at_step": 18}, *attempts)) == 6
        # Whoever waits in vain may be taken for the one that hangs.
        message = refusal({"kind": "hang", "at_step": 7, "rank": 0}, together)
        assert "inside the gradient all-reduce of step 8, 3 ranks at once: its ranks wait for one another" in message
        assert "faults.schedule[0] hangs one of them: which rank is then found to hang is chance" in message

    def test_what_comes_from_outside_may_lead_anywhere(self):
        outside = {"after": "3s", "rank": 0}
        assert (
            len(faults(outside, {"phase": "restore.begin", "rank": 1}, {"phase": "rendezvous", "attempt": 2, "rank": 1})) == 3
        )
        assert len(faults(outside, {"kind": "truncate", "at_step": 20})) == 2
        assert "step 61 is never reached" in refusal(outside, {"at_step": 61, "rank": 0})


class TestRandom:
    def test_a_rate_is_a_probability_a_step(self):
        assert faults(random={"rate": 1.0}) == tuple(
            sorted(faults(random={"mean_steps": 1}), key=lambda fault: fault.at_step or 0)
        )
        plan = faults(random={"rate": 0.02}, max_steps=100_000, seed=3)
        assert 1_800 < len(plan) < 2_200

    def test_a_rate_needs_a_last_step(self):
        assert "needs to know the last step" in refusal(random={"rate": 0.1}, max_steps=None)
        assert "rate over 100000000 steps is too far" in refusal(random={"rate": 0.1}, max_steps=10**8)

    def test_times_between_failures(self):
        plan = faults(random={"mtbf": "30s"}, seed=7)
        assert [(fault.after_s, fault.rank) for fault in plan] == KNOWN_TIMES
        assert all(not fault.required and fault.phase is None and fault.at_step is None for fault in plan)

    def test_they_end_with_their_time(self):
        assert all((fault.after_s or 0) <= 60 for fault in faults(random={"mtbf": "5s", "within": "60s"}))
        assert f"more than {MAX_FAULTS} faults within" in refusal(random={"mtbf": "1ms", "within": "60s"})

    def test_they_are_exponential(self):
        chance = random.Random(5)
        drawn = sorted(exponential(chance) for _ in range(20_000))
        # Kolmogorov and Smirnov: 1.95 over the root of the number is exceeded once in a thousand seeds.
        distance = max(abs((place + 1) / len(drawn) - (1 - math.exp(-value))) for place, value in enumerate(drawn))
        assert distance < 1.95 / math.sqrt(len(drawn))

    def test_several_at_once(self):
        plan = faults(random={"count": 3, "at_once": 2}, seed=2)
        assert len(plan) == 6 and len({fault.group for fault in plan}) == 3
        plan = faults(random={"mtbf": "30s", "at_once": 2}, seed=2)
        assert len(plan) == 2 * len({fault.after_s for fault in plan}) == 2 * len({fault.group for fault in plan})

    @given(seed=st.integers(0, 2**63), count=st.integers(1, 29))
    def test_notices_are_drawn_apart(self, seed, count):
        plan = faults(random={"kind": "preempt", "count": count}, seed=seed)
        steps = [fault.at_step or 0 for fault in plan]
        assert len(steps) == count and steps[-1] < 60
        assert all(later - sooner >= 2 for sooner, later in pairwise(steps))

    def test_too_many_notices(self):
        assert "31 faults do not fit, 30 can be placed" in refusal(random={"kind": "preempt", "count": 31})

    @pytest.mark.parametrize("kind", sorted(name for name, kind in KINDS.items() if "step" in kind.phases))
    def test_every_kind_that_strikes_at_steps_can_be_drawn(self, kind):
        random_faults = {"kind": kind, "count": 1, "phase": "step", "between": [25, 26]}
        follow = [{"at_step": 29, "rank": 0}] if KINDS[kind].family == "storage" else []
        assert faults(*follow, random=random_faults)
