"""The picture of a run: the fold of records, trace lines, heartbeats and markers; and that reading follows the files."""

import json
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.codec import encode
from chaosrun.records.heartbeat import Heart, Heartbeat
from chaosrun.records.journal import Journal
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.markers import write_marker
from chaosrun.records.tail import Tail
from chaosrun.report.facts import RunFacts
from chaosrun.report.follow import RunFollower
from chaosrun.report.picture import FaultSeen, LegPicture, RunPicture, State, TraceLine
from tests.records import PlainTraceWriter
from tests.unit.events import event, history
from tests.unit.run_files import write_info

STARTED: dict[str, Any] = {"event": "leg.started", "leg": "chaos", "workers": 2, "supervisor_pid": 41}


def starting(attempt: int, resume_step: int = 0) -> dict[str, Any]:
    resume = f"step-{resume_step:08d}" if resume_step else None
    return {"event": "attempt.starting", "attempt": attempt, "resume": resume, "resume_step": resume_step, "armed": []}


def exited(rank: int, *, code: int | None = None, signal: int | None = None, attempt: int = 1) -> dict[str, Any]:
    about = {"event": "worker.exited", "attempt": attempt, "rank": rank, "pid": 9}
    return {**about, "exit_code": code, "signal": signal, "died_s": 20.0}


def observed(rank: int, how: str = "death", *, problem: str | None = None) -> dict[str, Any]:
    found = {"problem": problem} if problem else None
    ended = {"exit_code": None, "signal": 9 if how == "death" else None, "found": found}
    return {"event": "fault.observed", "fault": "F1", "attempt": 1, "rank": rank, "pid": 9, "how": how, **ended}


def step(number: int, *losses: float, time_s: float | None = None, items: int | None = None) -> TraceLine:
    at_s = 10.0 + number if time_s is None else time_s
    return TraceLine(kind="step", step=number, time_s=at_s, loss=tuple(loss.hex() for loss in losses), items=items)


def beat(stage: str, number: int, silent_s: float = 0.0) -> Heartbeat:
    return Heartbeat(count=1, step=number, stage=stage, silent_s=silent_s, first={}, longest={})


class Leg(LegPicture):
    """One that is told events alone."""

    def __init__(self, *records: dict[str, Any], name: str = "chaos") -> None:
        super().__init__(name, LegLayout(Path(name)))
        self.records: list[dict[str, Any]] = []
        self.tell(*records)

    def tell(self, *records: dict[str, Any]) -> None:
        self.records += records
        self.take_history(history(*self.records))


def leg_of(*records: dict[str, Any]) -> Leg:
    return Leg(STARTED, starting(1), *records)


class TestLanes:
    @pytest.mark.parametrize(
        ("records", "state", "note"),
        [
            ([], "starting", ""),
            ([exited(1, signal=9)], "killed", "SIGKILL"),
            ([exited(1, signal=9), {"event": "attempt.stopped", "attempt": 1, "killed": [1]}], "stopped", ""),
            ([exited(1, signal=11), {"event": "attempt.stopped", "attempt": 1, "killed": [1]}], "killed", "SIGSEGV"),
            ([exited(1, code=0)], "done", ""),
            ([exited(1, code=1)], "failed", "exit code 1"),
            ([exited(1, code=85)], "left", "on notice"),
            ([exited(1, signal=9), observed(1)], "killed", "F1"),
            ([exited(1, signal=9), observed(1), {"event": "attempt.stopped", "attempt": 1, "killed": [1]}], "killed", "F1"),
            ([observed(1, "note")], "starting", "F1"),
            ([observed(1, problem="it went on")], "starting", ""),
            ([observed(1, "hang")], "hung", "F1"),
            ([{"event": "hang.declared", "first": 1, "message": "m"}], "hung", ""),
            (
                [
                    {"event": "hang.declared", "first": 1, "message": "m"},
                    {"event": "attempt.stopped", "attempt": 1, "killed": [0, 1]},
                ],
                "hung",
                "",
            ),
            (
                [exited(1, code=1), {"event": "death.unplanned", "attempt": 1, "rank": 1, "step": 3, "reason": "r"}],
                "failed",
                "unplanned",
            ),
            ([exited(1, signal=9), starting(2)], "starting", ""),
            ([starting(2), exited(1, signal=9, attempt=1)], "starting", ""),
        ],
    )
    def test_how_they_end(self, records: list[dict[str, Any]], state: State, note: str) -> None:
        lane = leg_of(*records).lanes[1]
        assert (lane.state, lane.note) == (state, note)

    @pytest.mark.parametrize(
        ("stage", "state"),
        [
            ("started", "starting"),
            ("rendezvous", "starting"),
            ("restoring", "restoring"),
            ("restored", "restoring"),
            ("epoch", "training"),
            ("backward", "training"),
            ("settled", "training"),
            ("checkpoint.write", "saving"),
            ("checkpoint.retention", "saving"),
            ("ended", "ending"),
        ],
    )
    def test_what_they_do(self, stage: str, state: State) -> None:
        leg = leg_of(starting(2, 10))
        leg.take_beat(0, beat(stage, 10))
        assert leg.lanes[0].state == state

    def test_without_a_checkpoint_nothing_is_restored(self) -> None:
        leg = leg_of()
        leg.take_beat(0, beat("restored", 0))
        assert leg.lanes[0].state == "starting"

    @pytest.mark.parametrize(("stage", "number", "done"), [("forward", 8, 7), ("settle", 8, 8), ("checkpoint.write", 8, 8)])
    def test_a_beat_tells_the_step(self, stage: str, number: int, done: int) -> None:
        leg = leg_of()
        leg.take_beat(0, beat(stage, number))
        assert leg.lanes[0].step == done

    def test_the_beat_of_another_machine_is_old(self) -> None:
        leg = leg_of()
        leg.take_trace(1, 0, step(50, 1.0))
        leg.take_beat(0, beat("forward", 3, silent_s=900.0))
        assert (leg.lanes[0].step, leg.lanes[0].silent_s) == (50, 0.0)

    def test_who_waits_for_others_is_not_silent(self) -> None:
        leg = leg_of()
        for rank, stage in enumerate(("forward", "backward")):
            leg.take_beat(rank, beat(stage, 3, silent_s=30.0))
        assert [lane.silent_s for lane in leg.lanes.values()] == [30.0, 0.0]

    def test_the_dead_have_no_beat(self) -> None:
        leg = leg_of(exited(0, signal=9))
        leg.take_beat(0, beat("forward", 3))
        assert leg.lanes[0].state == "killed"


class TestSteps:
    def test_lost_steps_and_restarts(self) -> None:
        leg = leg_of()
        for number in range(1, 8):
            leg.take_trace(1, 0, step(number))
        leg.take_trace(1, 1, step(6))
        assert (leg.step, leg.reached, leg.lost_steps, leg.restarts) == (6, 7, 0, 0)
        leg.tell(exited(1, signal=9))
        leg.tell(starting(2, 5))
        assert (leg.step, leg.lost_steps, leg.restarts, leg.checkpoints) == (5, 2, 1, {5: True})
        # An attempt that did nothing loses nothing.
        leg.tell(starting(3, 5))
        assert (leg.lost_steps, leg.restarts) == (2, 2)
        leg.take_trace(3, 0, step(6, time_s=20.4))
        leg.take_trace(3, 1, step(6, time_s=20.3))
        assert leg.recoveries_s == []

    def test_recovery_is_from_the_death_to_the_first_step(self) -> None:
        leg = leg_of(exited(1, signal=9), starting(2))
        leg.take_trace(2, 0, step(1, time_s=20.5))
        leg.take_trace(2, 1, step(1, time_s=20.3))
        assert leg.recoveries_s == [pytest.approx(0.3)]

    def test_losses_of_all_ranks_once_a_step(self) -> None:
        leg = leg_of()
        leg.take_trace(1, 0, step(1, 2.0, 4.0))
        assert leg.losses == {}
        leg.take_trace(1, 1, step(1, 5.0, 7.0))
        assert leg.losses == {1: 4.5}
        leg.tell(starting(2))
        for rank, loss in ((0, 3.0), (1, 6.0)):
            leg.take_trace(2, rank, step(1, loss))
        assert leg.losses == {1: 4.5}

    def test_losses_of_windows_are_shares(self) -> None:
        leg = leg_of()
        for rank in (0, 1):
            leg.take_trace(1, rank, step(1, 0.5, 0.25, items=32))
        assert leg.losses == {1: 1.5}

    def test_a_loss_may_be_no_number(self) -> None:
        leg = leg_of()
        for rank in (0, 1):
            leg.take_trace(1, rank, step(1, math.nan))
        assert math.isnan(leg.losses[1])

    def test_the_pace_outlives_its_attempt(self) -> None:
        leg = leg_of()
        for number in (1, 2, 3):
            leg.take_trace(1, 0, step(number, time_s=0.5 * number))
        leg.tell(starting(2))
        assert leg.step_s == 0.5
        for number in (1, 2):
            leg.take_trace(2, 0, step(number, time_s=2.0 * number))
        assert leg.step_s == 2.0

    def test_checkpoints(self) -> None:
        leg = leg_of()
        leg.take_trace(1, 0, TraceLine(kind="checkpoint", step=10))
        leg.tell({"event": "checkpoint.quarantined", "name": "step-00000010", "step": 10, "reason": "hash"})
        assert leg.checkpoints == {10: False}
        leg.take_trace(1, 0, TraceLine(kind="checkpoint", step=10))
        assert leg.checkpoints == {10: True}


class TestFaults:
    """What is told of them before anybody has judged them."""

    FIRED: dict[str, Any] = {"event": "fault.requested", "fault": "F1", "attempt": 1, "rank": 1, "step": 7}  # noqa: RUF012

    def test_a_marker_or_the_journal_tells_that_it_fires(self) -> None:
        leg = leg_of()
        leg.take_request(event(**self.FIRED))
        assert leg.faults["F1"] == FaultSeen(state="fired", attempt=1, rank=1, step=7)
        assert leg_of(self.FIRED).faults == leg.faults

    def test_withdrawn(self) -> None:
        leg = leg_of(self.FIRED, {"event": "fault.withdrawn", "fault": "F1", "reason": "r"})
        assert leg.faults["F1"].state == "planned"

    @pytest.mark.parametrize(("state", "then"), [("fired", "planned"), ("landed", "landed")])
    def test_a_marker_that_is_gone(self, state: Any, then: str) -> None:
        leg = leg_of(self.FIRED)
        leg.faults["F1"].state = state
        leg.withdraw("F1")
        assert leg.faults["F1"].state == then


@pytest.mark.parametrize("line", [TraceLine(kind="step"), TraceLine(kind="step", step=1, loss=("1.5x",))])
def test_a_trace_line_that_is_none(line: TraceLine) -> None:
    with pytest.raises(ValueError):
        leg_of().take_trace(1, 0, line)


class TestRemaining:
    def run(self, name: str, *legs: LegPicture, faults: tuple[Fault, ...] = ()) -> RunPicture:
        picture = RunPicture(run_id="r", facts=RunFacts(max_steps=100, every_steps=10), faults=faults)
        for leg in legs:
            picture.legs[leg.name] = leg
        return picture

    def leg(self, name: str, done: int, step_s: float = 0.5) -> Leg:
        leg = Leg(STARTED, starting(1), name=name)
        for number in range(done - 1, done + 1):
            for rank in (0, 1):
                leg.take_trace(1, rank, step(number, time_s=number * step_s))
        return leg

    def test_at_the_pace_of_the_leg(self) -> None:
        assert self.run("chaos", self.leg("chaos", 60)).remaining_s() == pytest.approx(20.0)

    def test_faults_to_come_cost_the_steps_since_their_checkpoint(self) -> None:
        fault = Fault(id="F2", rank=0, at_step=87, source="s")
        assert self.run("chaos", self.leg("chaos", 60), faults=(fault,)).remaining_s() == pytest.approx(20.0 + 7 * 0.5)

    def test_faults_that_nobody_dies_of_cost_nothing(self) -> None:
        fault = Fault(id="F2", rank=0, at_step=87, kind="slow", source="s")
        assert self.run("chaos", self.leg("chaos", 60), faults=(fault,)).remaining_s() == pytest.approx(20.0)

    def test_after_the_reference_comes_the_chaos_leg(self) -> None:
        assert self.run("reference", self.leg("reference", 60)).remaining_s() == pytest.approx(20.0 + 50.0)

    def test_the_reference_lends_its_pace_and_its_end(self) -> None:
        reference, chaos = self.leg("reference", 60), Leg(name="chaos")
        reference.tell({"event": "leg.finished", "outcome": "completed", "final_step": 60})
        chaos.tell(STARTED)
        picture = self.run("chaos", reference, chaos)
        picture.facts = RunFacts()
        assert picture.remaining_s() == pytest.approx(30.0)

    def test_unknown(self) -> None:
        assert self.run("chaos").remaining_s() is None
        assert self.run("chaos", leg_of()).remaining_s() is None
        nobody_knows_the_end = self.run("chaos", self.leg("chaos", 60))
        nobody_knows_the_end.facts = RunFacts()
        assert nobody_knows_the_end.remaining_s() is None

    def test_over(self) -> None:
        leg = self.leg("chaos", 60)
        leg.tell({"event": "leg.finished", "outcome": "completed", "final_step": 60})
        assert self.run("chaos", leg).remaining_s() is None


class TestTail:
    def test_every_line_once(self, tmp_path: Path) -> None:
        path = tmp_path / "f"
        tail = Tail(path)
        assert tail.lines() == []
        path.write_bytes(b"a\nbc\nto")
        assert tail.lines() == [b"a", b"bc"]
        assert tail.lines() == []
        with path.open("ab") as file:
            file.write(b"rn\n\nd")
        assert tail.lines() == [b"torn", b""]

    @pytest.mark.parametrize("limit", [1, 2, 3, 7])
    def test_in_pieces(self, tmp_path: Path, limit: int) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"one\ntwo\nthree\nfour")
        tail, lines = Tail(path), []
        while some := tail.lines(limit):
            lines += some
        assert lines == [b"one", b"two", b"three"]

    @pytest.mark.parametrize(("last_bytes", "least"), [*((number, 1) for number in range(14)), (14, 3), (99, 3)])
    def test_the_end_only(self, tmp_path: Path, last_bytes: int, least: int) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"one\ntwo\nthree\n")
        tail = Tail(path, last_bytes=last_bytes)
        lines = tail.lines()
        assert len(lines) >= least
        assert lines == [b"one", b"two", b"three"][-len(lines) :]
        if last_bytes == 6:
            assert lines == [b"three"]
        with path.open("ab") as file:
            file.write(b"four\n")
        assert tail.lines() == [b"four"]

    def test_the_end_of_a_file_without_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"x" * 100)
        tail = Tail(path, last_bytes=10)
        assert tail.lines() == []
        path.write_bytes(b"x" * 100 + b"\nwhole\n")
        assert tail.lines()[-1] == b"whole"

    def test_a_replaced_file_begins_again(self, tmp_path: Path) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"a\nb\n")
        tail = Tail(path)
        tail.lines()
        (tmp_path / "g").write_bytes(b"c\nd\ne\n")
        (tmp_path / "g").rename(path)
        assert (tail.lines(), tail.restarts) == ([b"c", b"d", b"e"], 1)

    def test_a_file_cut_to_less_begins_again(self, tmp_path: Path) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"a\nb\n")
        tail = Tail(path)
        tail.lines()
        path.write_bytes(b"c\n")
        assert (tail.lines(), tail.restarts) == ([b"c"], 1)

    def test_a_torn_tail_that_is_cut_off(self, tmp_path: Path) -> None:
        # What a new supervisor does to the journal of one that a power cut ended.
        path = tmp_path / "f"
        path.write_bytes(b"a\ntorn")
        tail = Tail(path)
        assert tail.lines() == [b"a"]
        path.write_bytes(b"a\nb\n")
        assert (tail.lines(), tail.restarts) == ([b"b"], 0)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "runs" / "small-1")
    layout.path.mkdir(parents=True)
    spec = {"name": "small", "workers": 2, "max_steps": 40, "checkpoint": {"every_steps": 5}}
    plan = FaultPlan(seed=1, faults=(Fault(id="F1", rank=1, at_step=7, source="s"),))
    write_info(layout, plan, created_s=5.0, spec=spec)
    return layout


def line(number: int, *losses: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "time_s": 10.0 + number, "loss": [loss.hex() for loss in losses]}


def append(run: RunLayout, *records: dict[str, Any], leg: str = "chaos") -> None:
    journal = Journal(run.leg(leg).journal)
    for record in records:
        journal.append(event(**record))
    journal.close()


class TestFollower:
    def test_follows_the_files(self, run: RunLayout) -> None:
        follower = RunFollower(run)
        assert follower.poll() == []
        assert (follower.picture.began_s, follower.picture.facts.every_steps) == (5.0, 5)
        assert [fault.id for fault in follower.picture.faults] == ["F1"]
        append(run, STARTED, starting(1))
        assert [told.event for told in follower.poll()] == ["leg.started", "attempt.starting"]
        leg = follower.picture.leg
        assert leg is not None
        for rank in (0, 1):
            writer = PlainTraceWriter(run.leg("chaos").attempt(1).trace(rank))
            writer.put("probe", items="independent", detail="")
            for number in range(1, 4):
                writer.put(**line(number, 1.0))
            writer.close()
        assert follower.poll() == []
        assert (leg.step, leg.losses, leg.damage) == (3, {1: 1.0, 2: 1.0, 3: 1.0}, {})

    def test_faults_fire_when_their_marker_is_there(self, run: RunLayout) -> None:
        append(run, STARTED, starting(1))
        follower = RunFollower(run)
        follower.poll()
        assert write_marker(run.leg("chaos"), "F1", rank=1, attempt=1, pid=9, phase="step", step=7, ticks=1)
        (told,) = follower.poll()
        assert (told.leg, told.event, told.sentence) == ("chaos", "fault.requested", "F1 fired: rank 1, step 7")
        assert follower.picture.seen(follower.picture.faults[0]).state == "fired"
        assert follower.poll() == []
        (run.leg("chaos").faults / "F1.json").unlink()
        follower.poll()
        assert follower.picture.seen(follower.picture.faults[0]).state == "planned"

    def test_heartbeats(self, run: RunLayout) -> None:
        append(run, STARTED, starting(1))
        heart = Heart()
        heart.open(run.leg("chaos").attempt(1).heartbeat(1))
        heart.beat("checkpoint.write", 5)
        follower = RunFollower(run)
        follower.poll()
        assert [lane.state for lane in follower.picture.legs["chaos"].lanes.values()] == ["starting", "saving"]

    def test_a_fault_that_comes_to_the_plan(self, run: RunLayout) -> None:
        follower = RunFollower(run)
        follower.poll()
        faults = (*follower.picture.faults, Fault(id="I1", rank=0, at_step=9, source="inject"))
        run.plan_json.write_text(json.dumps(FaultPlan(seed=1, faults=faults).to_json()))
        follower.poll()
        assert [fault.id for fault in follower.picture.faults] == ["F1", "I1"]

    def test_a_leg_that_is_begun_again(self, run: RunLayout) -> None:
        append(run, STARTED, starting(1), exited(0, signal=9), leg="reference")
        follower = RunFollower(run)
        follower.poll()
        run.reference.journal.unlink()
        append(run, STARTED, starting(1), leg="reference")
        assert len(follower.poll()) == 2
        assert follower.picture.legs["reference"].lanes[0].state == "starting"

    def test_a_leg_that_another_is_put_in_the_place_of(self, run: RunLayout) -> None:
        end = {"event": "leg.finished", "outcome": "completed", "message": "m", "hint": None, "final_step": 3}
        append(run, STARTED, end, leg="reference")
        follower = RunFollower(run)
        assert len(follower.poll()) == 2
        assert follower.picture.last_step == 3, "where the undisturbed run ended, the spec does not count any more"
        run.reference.journal.unlink()
        append(run, STARTED, starting(1), {**end, "final_step": 4}, leg="reference")
        assert follower.poll() == []
        assert follower.picture.last_step == 4
        assert follower.picture.legs["reference"].final_step == 4

    @pytest.mark.parametrize("name", ["run_json", "plan_json"])
    @pytest.mark.parametrize("text", ["", "{", "[]", '{"spec": 7, "created_s": "x"}', "\x00"])
    def test_damaged_files_are_not_shown(self, run: RunLayout, name: str, text: str) -> None:
        getattr(run, name).write_text(text)
        append(run, STARTED, starting(1))
        follower = RunFollower(run)
        follower.poll()
        assert follower.picture.leg is not None

    def test_damaged_journals_and_traces_are_shown_as_far_as_they_go(self, run: RunLayout) -> None:
        append(run, STARTED, starting(1))
        with run.leg("chaos").journal.open("ab") as file:
            file.write(b'\xff\x00\n[1]\n"x"\n' + b"[" * 5000 + b"\n" + encode(event(**exited(0, code=0))) + b'\n{"event":"to')
        path = run.leg("chaos").attempt(1).trace(1)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\xff\n" + json.dumps(line(2, 1.0)).encode() + b'\n{"kind":"st')
        follower = RunFollower(run)
        follower.poll()
        assert [(lane.state, lane.step) for lane in follower.picture.legs["chaos"].lanes.values()] == [
            ("done", 0),
            ("training", 2),
        ]

    def test_long_traces_are_read_a_piece_at_a_time(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.follow.POLL_BYTES", 2000)
        append(run, STARTED, starting(1), starting(2, 50))
        for attempt, first in ((1, 1), (2, 51)):
            for rank in (0, 1):
                writer = PlainTraceWriter(run.leg("chaos").attempt(attempt).trace(rank))
                for number in range(first, first + 60):
                    writer.put(**line(number, float(attempt)))
                writer.close()
        follower = RunFollower(run)
        follower.poll()
        polls = 1
        while follower.is_behind:
            follower.poll()
            polls += 1
        leg = follower.picture.legs["chaos"]
        assert polls > 5
        assert (leg.step, leg.lost_steps, len(leg.losses)) == (110, 10, 110)
        # What the second attempt did again is as it had it.
        assert (leg.losses[50], leg.losses[51]) == (1.0, 2.0)

    def test_nothing_is_read_twice(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        append(run, STARTED, starting(1))
        writer = PlainTraceWriter(run.leg("chaos").attempt(1).trace(0))
        for number in range(1, 200):
            writer.put(**line(number, 1.0))
        follower = RunFollower(run)
        follower.poll()
        taken: list[int] = []
        take = LegPicture.take_trace
        monkeypatch.setattr(LegPicture, "take_trace", lambda *args: (taken.append(args[3].step), take(*args)))
        follower.poll()
        writer.put(**line(200, 1.0))
        follower.poll()
        assert taken == [200]
        writer.close()

    def test_a_glimpse_knows_where_it_is(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.follow.GLIMPSE_BYTES", 500)
        append(run, STARTED, starting(1), starting(2, 50))
        for attempt, first in ((1, 1), (2, 51)):
            for rank in (0, 1):
                writer = PlainTraceWriter(run.leg("chaos").attempt(attempt).trace(rank))
                for number in range(first, first + 60):
                    writer.put(**line(number, 1.0))
                writer.close()
        (run.leg("chaos").checkpoints / "step-00000105").mkdir(parents=True)
        (run.leg("chaos").checkpoints / "else").mkdir()
        follower = RunFollower(run, whole=False)
        follower.poll()
        leg = follower.picture.legs["chaos"]
        assert (leg.step, leg.lost_steps) == (110, 10)
        assert len(leg.losses) < 20
        assert leg.step_s == pytest.approx(1.0)

    def test_while_others_write(self, run: RunLayout) -> None:
        """Writers in other threads, in pieces that end anywhere: what was seen in the end is what was written."""
        append(run, STARTED, starting(1))
        steps = 400

        def write(rank: int) -> None:
            path = run.leg("chaos").attempt(1).trace(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = b"".join(json.dumps(line(number, 1.0)).encode() + b"\n" for number in range(1, steps + 1))
            with path.open("ab", buffering=0) as file:
                for start in range(0, len(whole), 37):
                    file.write(whole[start : start + 37])

        writers = [threading.Thread(target=write, args=(rank,)) for rank in (0, 1)]
        for writer in writers:
            writer.start()
        follower, seen = RunFollower(run), []
        while any(writer.is_alive() for writer in writers):
            follower.poll()
            seen.append(follower.picture.legs["chaos"].step)
        follower.poll()
        leg = follower.picture.legs["chaos"]
        assert (leg.step, len(leg.losses), leg.damage) == (steps, steps, {})
        assert seen == sorted(seen)


def calls_of(measured: Callable[[], Any]) -> int:
    """Functions that it calls, of Python and of C: a busy machine does not add to them."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        measured()
    finally:
        sys.setprofile(None)
    return calls


def test_a_poll_costs_the_same_however_long_the_run_is(run: RunLayout) -> None:
    """40 times as many steps, and a poll that finds nothing new does no more."""
    append(run, STARTED, starting(1))
    writer = PlainTraceWriter(run.leg("chaos").attempt(1).trace(0))
    follower = RunFollower(run)

    def grow(steps: range) -> int:
        for number in steps:
            writer.put(**line(number, 1.0))
        follower.poll()
        return calls_of(follower.poll)

    assert 0 < grow(range(1, 100)) == grow(range(100, 4000))
    writer.close()
