"""When silence is a hang and who stopped first: tables of heartbeats, without a clock or a process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.messages import RankStack
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.landed import hang_problem
from chaosrun.faults.observed import HungRank, Observation
from chaosrun.records.codec import changed
from chaosrun.records.events import HangDeclared, SilentRank
from chaosrun.records.heartbeat import Activity, Heartbeat
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import write_marker
from chaosrun.spec.model import SHORTEST_HANG_S
from chaosrun.supervise.hangs import FACTOR, VALIDATION, HangWatch, Silence, Standstill
from chaosrun.supervise.observations import Observations

START_S = 300.0
STEADY = {"fetch": 0.01, "forward": 0.1, "backward": 0.1, "optimizer": 0.01, "record": 0.01, "own": 0.01, "after": 0.01}
GLOO = "/site-packages/torch/distributed/distributed_c10d.py:4914 in barrier"
ENGINE = "/site-packages/torch/autograd/graph.py:820 in _engine_run_backward"
SCRIPT = "/jobs/train.py"


def activity(
    stage: str | None,
    step: int = 5,
    *,
    count: int = 1,
    cpu_s: float = 0.0,
    is_stopped: bool = False,
    first: Mapping[str, float] | None = None,
    longest: Mapping[str, float] | None = None,
) -> Activity:
    if stage is None:
        return Activity(beat=None, cpu_s=cpu_s, is_stopped=is_stopped)
    first, longest = STEADY if first is None else first, STEADY if longest is None else longest
    beat = Heartbeat(count=count, step=step, stage=stage, silent_s=1.0, first=first, longest=longest)
    return Activity(beat=beat, cpu_s=cpu_s, is_stopped=is_stopped)


def watch(hang_timeout_s: float | None = None, world_size: int = 2) -> HangWatch:
    return HangWatch(hang_timeout_s=hang_timeout_s, start_timeout_s=START_S, world_size=world_size)


def silence(over: HangWatch, activities: Mapping[int, Activity], *, for_s: float, from_s: float = 0.0) -> Silence | None:
    """What a second-by-second look at ranks that do not move comes to within `for_s`."""
    for second in range(int(for_s) + 1):
        if found := over.look(from_s + second, activities, activities.keys()):
            return found
    return None


# How long a stage is given


@pytest.mark.parametrize(
    ("hang_timeout_s", "seen", "given_s"),
    [
        # Derived: ten times the longest gap between beats of steps and checkpoints, and never less than the floor.
        (None, activity("forward"), SHORTEST_HANG_S),
        (None, activity("forward", longest={**STEADY, "forward": 7.0}), 7.0 * FACTOR),
        (None, activity("forward", longest={**STEADY, "checkpoint.write": 30.0}), 30.0 * FACTOR),
        # The script's own code says nothing of how long a step takes, nor the other way round.
        (None, activity("forward", longest={**STEADY, "own": 3600.0}), SHORTEST_HANG_S),
        (None, activity("own"), START_S),
        (None, activity("ended"), START_S),
        # What this rank has not done before in this attempt.
        (None, activity("checkpoint.write"), START_S),
        (None, activity("forward", first={}, longest={}), START_S),
        (None, activity("started", 0, first={}, longest={}), START_S),
        (None, activity(None), START_S),
        # The second time there is only the first to go by, with all that was slow about it.
        (None, activity("forward", first={"forward": 60.0}, longest={}), 60.0 * FACTOR),
        # As the user says, once a step has been recorded.
        (3.0, activity("forward"), 3.0),
        (3.0, activity("own"), 3.0),
        (3.0, activity("checkpoint.write", longest={**STEADY, "checkpoint.write": 30.0}), 3.0),
        (3.0, activity("forward", first={"script": 2.0}, longest={}), START_S),
        (3.0, activity("rendezvous", 0, first={"started": 0.1}, longest={}), START_S),
        (900.0, activity("started", 0, first={}, longest={}), 900.0),
    ],
)
def test_what_a_stage_is_given(hang_timeout_s: float | None, seen: Activity, given_s: float) -> None:
    judge = watch(hang_timeout_s, world_size=1)
    judge.look(0.0, {0: seen}, {0})
    assert judge.given_s(seen.beat) == pytest.approx(given_s)


def test_the_wait_of_a_rank_for_a_slow_one_does_not_count_as_the_time_of_a_stage() -> None:
    waits, works = (activity("forward", longest={**STEADY, "backward": took_s}) for took_s in (400.0, 4.0))
    judge = watch()
    judge.look(0.0, {0: waits, 1: works}, {0, 1})
    assert judge.given_s(works.beat) == 4.0 * FACTOR


def test_a_later_attempt_knows_how_long_the_start_takes() -> None:
    judge = watch()
    slow = {"started": 0.1, "script": 40.0, "rendezvous": 0.1}
    judge.look(0.0, {0: activity("joined", 0, first=slow), 1: activity("joined", 0, first={**slow, "script": 1.0})}, {0, 1})
    judge.begin()
    assert judge.given_s(activity("script", 0, first={}).beat) == 40.0 * FACTOR
    assert judge.given_s(activity("started", 0, first={}).beat) == SHORTEST_HANG_S
    assert judge.given_s(activity("restoring", 5, first={}).beat) == START_S, "nobody has done that yet"


def test_an_attempt_that_not_all_ranks_came_through_teaches_nothing_of_the_start() -> None:
    judge = watch()
    judge.look(0.0, {0: activity("rendezvous", 0, first={"script": 1.0}), 1: activity("script", 0, first={})}, {0, 1})
    judge.begin()
    assert judge.given_s(activity("script", 0, first={}).beat) == START_S


# Silence


def test_a_stopped_rank_is_found_although_all_others_only_wait() -> None:
    still = {0: activity("backward", 12), 1: activity("forward", 12)}
    assert silence(watch(5.0), still, for_s=5) is None
    found = silence(watch(5.0), still, for_s=7)
    assert found is not None
    assert found.patience_s == 5.0 < found.silent_s <= 7.0


def test_a_rank_that_waits_for_one_that_gets_on_is_not_silent_in_vain() -> None:
    judge = watch(5.0)
    for second in range(60):
        busy = activity("own", 12, count=1 + second // 4)
        assert judge.look(float(second), {0: activity("backward", 13), 1: busy}, {0, 1}) is None


def test_all_of_those_furthest_behind_have_to_be_silent() -> None:
    judge = watch(5.0)
    for second in range(60):
        assert judge.look(float(second), {0: activity("own", 12), 1: activity("own", 12, count=second)}, {0, 1}) is None


def test_a_rank_that_hangs_after_the_others_have_finished_is_found() -> None:
    still = {0: activity("ended", 20), 1: activity("forward", 18)}
    assert watch(5.0).look(0.0, still, {0}) is None
    judge = watch(5.0)
    found = [judge.look(float(second), still, {1}) for second in range(10)]
    assert found[5] is None and found[7] is not None


def test_after_the_training_whoever_computes_is_not_silent() -> None:
    judge, idle = watch(5.0), watch(5.0)
    for second in range(100):
        busy = {0: activity("ended", 20, cpu_s=0.05 * second)}
        assert judge.look(float(second), busy, {0}) is None
    assert silence(idle, {0: activity("ended", 20, cpu_s=7.0)}, for_s=7) is not None
    # Before its end a rank that computes for ever, in a loop that makes no step, does hang.
    looping = watch(5.0)
    found = [looping.look(float(second), {0: activity("forward", cpu_s=float(second))}, {0}) for second in range(10)]
    assert found[-1] is not None


@pytest.mark.parametrize(("hang_timeout_s", "given_s"), [(None, SHORTEST_HANG_S), (5.0, 5.0)])
@pytest.mark.parametrize("stage", ["own", "script", "checkpoint.write", "ended", None])
def test_a_process_that_is_stopped_is_given_no_time_for_what_it_may_be_doing(
    stage: str | None, hang_timeout_s: float | None, given_s: float
) -> None:
    others = activity("restored", 0, first={}, longest={})
    stopped = activity(stage, is_stopped=True, first={}, longest={})
    found = silence(watch(hang_timeout_s), {0: others, 1: stopped}, for_s=given_s + 1)
    assert found is not None and found.patience_s == given_s
    assert silence(watch(hang_timeout_s), {0: others, 1: activity(stage, first={}, longest={})}, for_s=given_s + 1) is None


def test_time_in_which_nobody_looked_makes_nobody_silent() -> None:
    """The machine slept, or the clock was set: an hour between two looks."""
    still = {0: activity("backward"), 1: activity("forward")}
    judge = watch(30.0)
    for look in range(10):
        assert judge.look(3600.0 * look, still, {0, 1}) is None
    backwards = watch(30.0)
    for look in range(10):
        assert backwards.look(-3600.0 * look, still, {0, 1}) is None


def test_a_new_attempt_begins_with_silence_of_its_own() -> None:
    judge = watch(5.0)
    still = {0: activity("backward"), 1: activity("forward")}
    assert silence(judge, still, for_s=5) is None
    judge.begin()
    assert silence(judge, still, for_s=5, from_s=6.0) is None


# Who stopped first


def standstill(activities: Mapping[int, Activity], **seen: tuple[str | None, list[str]]) -> Standstill:
    """`seen`: by "rankN" the process's state and its stack."""
    found = {
        int(name.removeprefix("rank")): RankStack(pid=1, state=state, stack=tuple(stack))
        for name, (state, stack) in seen.items()
    }
    return Standstill.of(2, Silence(silent_s=3.2, patience_s=3.0), activities, dict.fromkeys(activities, 1), found)


def test_the_rank_furthest_behind_stopped_first_and_the_others_waited_for_it() -> None:
    found = standstill(
        {0: activity("backward", 12), 1: activity("forward", 12), 2: activity("backward", 12)},
        rank0=("S", [ENGINE]),
        rank1=("S", ["/lib/library.py:8 in wait", f"{SCRIPT}:31 in <module>"]),
        rank2=("S", [ENGINE]),
    )
    assert found.first.rank == 1
    assert found.also_stopped() == ()
    assert found.message(SCRIPT) == (
        "attempt 2 hangs: no progress for 3 s; rank 1 stopped first, in the forward pass of step 12 (train.py:31); "
        "the others waited for it in the gradient all-reduce of step 12"
    )


@pytest.mark.parametrize(
    ("activities", "seen", "first", "also"),
    [
        # Stopped inside the all-reduce that the others are in.
        (("backward", "backward"), {"rank0": ("S", [ENGINE]), "rank1": ("T", [])}, 1, []),
        # Stopped where others ask it for something before they can go on: the store lives in rank 0.
        (("fetch", "over"), {"rank0": ("T", []), "rank1": ("S", [GLOO])}, 0, []),
        # At the same stage: whose stack is in a collective waits.
        (("backward", "backward"), {"rank0": ("S", [ENGINE]), "rank1": ("S", ["/chaosrun/faults/x.py:9 in hang"])}, 1, []),
        (("own", "own"), {"rank0": ("S", [f"{SCRIPT}:9 in evaluate"]), "rank1": ("S", [GLOO])}, 0, []),
        # Both stopped at once.
        (("forward", "forward"), {"rank0": ("T", []), "rank1": ("T", [])}, 0, [1]),
        # A deadlock of the script's own: nothing tells them apart.
        (("backward", "backward"), {"rank0": ("S", [GLOO]), "rank1": ("S", [GLOO])}, 0, [1]),
        (("rendezvous", "started"), {"rank0": ("S", [GLOO]), "rank1": ("S", ["/chaosrun/faults/rendezvous.py:9 in x"])}, 1, []),
        (("started", None), {"rank0": ("S", []), "rank1": (None, [])}, 1, []),
    ],
)
def test_who_stopped_first(
    activities: tuple[str | None, ...], seen: dict[str, tuple[str | None, list[str]]], first: int, also: list[int]
) -> None:
    found = standstill({rank: activity(stage) for rank, stage in enumerate(activities)}, **seen)
    assert found.first.rank == first
    assert [other.rank for other in found.also_stopped()] == also


def test_a_stopped_process_and_a_rank_without_a_beat_are_said_to_be_that() -> None:
    found = standstill({0: activity("over", 3), 1: activity(None)}, rank0=("T", []), rank1=("S", []))
    assert "rank 0 stopped first, after step 3 (its process is stopped); rank 1 waited for it before" in found.message(SCRIPT)
    both = standstill({0: activity("backward", 3), 1: activity("backward", 3)}, rank0=("S", [GLOO]), rank1=("S", [GLOO]))
    assert both.message(SCRIPT).endswith("; ranks 0 and 1 stopped together, in the gradient all-reduce of step 3")
    alone = standstill({0: activity("own", 3)}, rank0=("S", []))
    assert alone.message(SCRIPT).endswith("rank 0 stopped first, in the script, after step 3")


def test_what_the_journal_says_of_it() -> None:
    found = standstill({0: activity("backward", 12), 1: activity(None)}, rank0=("S", [ENGINE]))
    first = SilentRank(rank=0, step=12, stage="backward", silent_s=1.0, pid=1, state="S", stack=(ENGINE,))
    ranks = (first, SilentRank(rank=1, pid=1))
    assert found.declared("m") == HangDeclared(attempt=2, first=1, silent_s=3.2, patience_s=3.0, message="m", ranks=ranks)


# What it proves of a fault


@pytest.mark.parametrize(
    ("kind", "state", "stage", "problem"),
    [
        ("stop", "T", "forward", None),
        ("stop", "S", "forward", "its process was in state S, a process that SIGSTOP stopped is in state T"),
        ("stop", None, "forward", "its process was in state None, a process that SIGSTOP stopped is in state T"),
        ("hang", "S", "forward", None),
        ("hang", "R", "backward", None),
        ("hang", "T", "forward", "its process was in state T, a fault of kind hang leaves it alive"),
        ("no_arrival", "S", "started", None),
        ("no_arrival", "S", "rendezvous", "it was at the stage rendezvous, past the rendezvous that it was never to reach"),
        ("no_arrival", "Z", "started", "its process was in state Z, a fault of kind no_arrival leaves it alive"),
    ],
)
def test_what_is_found_of_the_first_rank_has_to_agree_with_the_fault(
    kind: Any, state: str | None, stage: str, problem: str | None
) -> None:
    fault = Fault(id="F1", kind=kind, rank=1, phase="forward", at_step=7, source="test")
    found = hang_problem(Observation(fault=fault, pid=7, hang=HungRank(rank=1, pid=7, state=state, stage=stage)))
    assert (found and found.words) == problem


def test_a_fault_is_seen_in_a_hang_of_its_own_rank_and_attempt_alone(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path)
    fault = Fault(id="F1", kind="stop", rank=1, phase="forward", at_step=7, source="test")
    write_marker(leg, "F1", rank=1, attempt=2, pid=1, phase="forward", step=7)
    journal: list[Any] = []
    observations = Observations(leg, FaultPlan(seed=0, faults=(fault,)), lambda event, durable=True: journal.append(event))
    found = SilentRank(rank=1, pid=1, state="S", stage="forward")
    assert observations.of_hang(1, 1, found) is None
    assert observations.of_hang(2, 0, found) is None
    assert journal == []
    assert observations.of_hang(2, 1, found) is None, "a hang of another cause: nobody had planned it"
    assert [record.event for record in journal] == ["fault.requested", "fault.observed"]
    assert journal[1].how == "hang"
    assert "a process that SIGSTOP stopped is in state T" in journal[1].found["problem"]
    assert observations.of_hang(2, 1, changed(found, state="T")) is None, "once"


def test_the_scripts_own_code_is_given_longer_while_it_computes() -> None:
    def declared_after_s(cpu_s_a_second: float, hang_timeout_s: float | None = None) -> int:
        judge = watch(hang_timeout_s=hang_timeout_s)
        for second in range(10_000):
            own = activity("own", cpu_s=second * cpu_s_a_second)
            if judge.look(float(second), {0: own}, {0}) is not None:
                return second
        raise AssertionError("never")

    idle, computing = declared_after_s(0.0), declared_after_s(1.0)
    assert START_S < idle < START_S + 5
    assert VALIDATION * START_S < computing < VALIDATION * START_S + 5
    assert declared_after_s(1.0, hang_timeout_s=30.0) < 40, "the user has said how long it may take"
