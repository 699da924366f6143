"""Every trigger a job file may name: what the planner makes of it, what it refuses, and how it reads."""

import math
import random
from itertools import pairwise
from typing import Any

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
    *((32.173, 2), (63.298, 0), (65.394, 2), (78.129, 0), (81.843, 1)),
    *((100.666, 2), (132.064, 0), (140.752, 1), (251.164, 0)),
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
        (f"F{n + 1}", n % 3, f"G{n // 3 + 1}/3") for n in range(6)
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
            "rank 1 never reaches checkpoint.rename.before",
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
        ({"phase": "fetch", "occurrence": 61}, {}, "no attempt gets there 61 times"),
        ({"phase": "checkpoint.file", "occurrence": 7}, {}, "no attempt gets there 7 times"),
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


def kill(at_step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"at_step": at_step, "rank": rank, **more}


STOP, SLOW = kill(7, kind="stop"), kill(7, kind="slow", steps=5)
AGAIN = [kill(15), kill(9, attempt=2)]
FIT: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "an attempt that only a race may save is left to the drill": (
        [kill(7), kill(7, 1), {"phase": "rendezvous", "attempt": 3}],
        [kill(7), kill(7, 1), {"phase": "rendezvous", "attempt": 4}],
        "attempt 4 may never begin, the other faults lead to 3 attempts",
    ),
    "an attempt that does not come by": (
        [kill(17), kill(15, 1, attempt=2)],
        [kill(17), kill(5, 1, attempt=2)],
        "that attempt goes from step 10 to the end, and does not get there",
    ),
    "damage that leaves nothing leads back to the beginning": (
        [{"kind": "truncate", "at_step": 10}, *AGAIN],
        AGAIN,
        "that attempt goes from step 10 to the end",
    ),
    "a hang is cut short by a death beside it": ([STOP, kill(8, 1)], [STOP, kill(7, 1)], "may be cut short"),
    "of several that are stopped each is found so": ([STOP, STOP | {"rank": 1}], [STOP, kill(7, 1, kind="hang")], "cut short"),
    "slow steps are cut short by a death": ([SLOW, kill(13, 1)], [SLOW, kill(11, 1)], "may be cut short"),
}
"""What fits together, what does not, and why."""


class TestTogether:
    """What faults do to each other."""

    @pytest.mark.parametrize("name", FIT)
    def test_what_fits_and_what_does_not(self, name: str) -> None:
        fitting, refused, why = FIT[name]
        assert len(faults(*fitting)) == len(fitting)
        assert why in refusal(*refused)

    def test_damage_is_met_by_the_next_restart(self):
        damage = {"kind": "truncate", "at_step": 20}
        assert len(faults(damage, kill(25))) == 2
        assert "nobody reads" in refusal(damage, kill(35))
        # Back at step 10, the job reaches step 20 once more.
        assert len(faults(damage, kill(25), kill(10, 1, phase="restore.end"))) == 3
        message = refusal(damage, kill(25), kill(20, 1, phase="restore.end"))
        assert "step 20 is never restored; the other faults lead to a restore of step 10" in message

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
            (2, kill(43, 1), kill(44, 1)),
            (2, kill(43, 1), kill(44)),
            (2, kill(43, 1), kill(44, phase="checkpoint.file")),
            (2, kill(43, 1), kill(43, phase="reduce")),
            (2, kill(49, 1), kill(50)),
            (2, {"at_step": 43, "rank": "all"}, kill(44, 1, kind="stop")),
            (1, kill(44, phase="fetch"), kill(44)),
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
        notice = kill(43, 1, kind="preempt")
        assert len(faults(notice, kill(43, phase="fetch"))) == len(faults(kill(43, 1), notice)) == 2

    def test_after_a_notice_at_the_end_there_is_no_next_attempt(self):
        assert "let the notice come earlier" in refusal(kill(59, 1, kind="preempt"), kill(60, 1))

    def test_a_rank_leaves_once(self):
        notice = kill(43, 1, kind="preempt")
        message = refusal(notice, {**notice, "at_step": 44})
        assert "faults.schedule[0] has given this rank notice before; it leaves once, after step 44" in message
        assert len(faults(notice, {**notice, "at_step": 45})) == len(faults(notice, {**notice, "at_step": 44, "rank": 0})) == 2

    def test_a_group_that_something_else_keeps_apart_meets_in_a_later_attempt(self):
        together = {"rank": "all", "phase": "reduce", "at_step": 8}
        assert len(faults(kill(7), together)) == 4
        attempts = [{"phase": "rendezvous", "attempt": 3}, {"phase": "restore.end", "occurrence": 1}]
        assert len(faults(kill(17), {**together, "at_step": 18}, *attempts)) == 6
        # Whoever waits in vain may be taken for the one that hangs.
        message = refusal(kill(7, kind="hang"), together)
        assert "inside the gradient all-reduce of step 8, 3 ranks at once: its ranks wait for one another" in message
        assert "faults.schedule[0] hangs one of them: which rank is then found to hang is chance" in message

    def test_what_comes_from_outside_may_lead_anywhere(self):
        outside = {"after": "3s", "rank": 0}
        rendezvous = {"phase": "rendezvous", "attempt": 2, "rank": 1}
        assert len(faults(outside, {"phase": "restore.begin", "rank": 1}, rendezvous)) == 3
        assert len(faults(outside, {"kind": "truncate", "at_step": 20})) == 2
        assert "step 61 is never reached" in refusal(outside, kill(61))


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
