"""The picture of a run: the fold of records, trace lines, heartbeats and markers; and that reading follows the files."""

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.appended import Tail
from chaosrun.records.codec import encode
from chaosrun.records.heartbeat import Heart, Heartbeat
from chaosrun.records.layout import RunLayout
from chaosrun.records.markers import write_marker
from chaosrun.records.trace_reader import read_ends
from chaosrun.records.traces import RankTrace
from chaosrun.report.facts import RunFacts
from chaosrun.report.follow import RunFollower
from chaosrun.report.picture import FaultSeen, LegPicture, RunPicture, State
from tests.records import PlainTraceWriter
from tests.unit.events import event, leg_picture, trace
from tests.unit.run_files import begin_trace, step_line, tell, write_info

HANG: dict[str, Any] = {"event": "hang.declared", "first": 1, "message": "m"}
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


def beat(stage: str, number: int, silent_s: float = 0.0) -> Heartbeat:
    return Heartbeat(count=1, step=number, stage=stage, silent_s=silent_s, first={}, longest={})


def leg_of(
    *records: dict[str, Any], traces: Sequence[RankTrace] = (), beats: Mapping[int, Heartbeat] | None = None
) -> LegPicture:
    return leg_picture([STARTED, starting(1), *records], *traces, beats=beats)


STAGES: dict[State, str] = {
    "starting": "started rendezvous",
    "restoring": "restoring restored",
    "training": "epoch backward over",
    "saving": "checkpoint.write checkpoint.retention",
    "ending": "ended",
}


class TestLanes:
    @pytest.mark.parametrize(
        ("records", "state", "note"),
        [
            ([], "starting", ""),
            ([exited(1, signal=9)], "killed", "SIGKILL"),
            ([{**exited(1, signal=9), "stopped": True}], "stopped", ""),
            ([observed(1, "hang"), {**exited(1, signal=9), "stopped": True}], "hung", "F1"),
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
            ([HANG], "hung", ""),
            ([HANG, {"event": "attempt.stopped", "attempt": 1, "killed": [0, 1]}], "hung", ""),
            ([exited(1, code=1), {"event": "death.unplanned", "rank": 1, "reason": "r"}], "failed", "unplanned"),
            ([exited(1, signal=9), starting(2)], "starting", ""),
            ([starting(2), exited(1, signal=9, attempt=1)], "starting", ""),
        ],
    )
    def test_how_they_end(self, records: list[dict[str, Any]], state: State, note: str) -> None:
        lane = leg_of(*records).lanes[1]
        assert (lane.state, lane.note) == (state, note)

    @pytest.mark.parametrize(("stage", "state"), [(stage, state) for state in STAGES for stage in STAGES[state].split()])
    def test_what_they_do(self, stage: str, state: State) -> None:
        assert leg_of(starting(2, 10), beats={0: beat(stage, 10)}).lanes[0].state == state

    def test_without_a_checkpoint_nothing_is_restored(self) -> None:
        assert leg_of(beats={0: beat("restored", 0)}).lanes[0].state == "starting"

    @pytest.mark.parametrize(("stage", "number", "done"), [("forward", 8, 7), ("after", 8, 8), ("checkpoint.write", 8, 8)])
    def test_a_beat_tells_the_step(self, stage: str, number: int, done: int) -> None:
        assert leg_of(beats={0: beat(stage, number)}).lanes[0].step == done

    def test_the_beat_of_another_machine_is_old(self) -> None:
        leg = leg_of(traces=[trace(1, 0, range(1, 51))], beats={0: beat("forward", 3, silent_s=900.0)})
        assert (leg.lanes[0].step, leg.lanes[0].silent_s) == (50, 0.0)

    def test_who_waits_for_others_is_not_silent(self) -> None:
        leg = leg_of(beats={rank: beat(stage, 3, silent_s=30.0) for rank, stage in enumerate(("forward", "backward"))})
        assert [lane.silent_s for lane in leg.lanes.values()] == [30.0, 0.0]

    def test_the_dead_have_no_beat(self) -> None:
        lane = leg_of(exited(0, signal=9), beats={0: beat("forward", 3, silent_s=30.0)}).lanes[0]
        assert (lane.state, lane.step, lane.silent_s) == ("killed", 2, 0.0)


class TestSteps:
    def test_lost_steps_and_restarts(self) -> None:
        first = [trace(1, 0, range(1, 8)), trace(1, 1, range(1, 7))]
        leg = leg_of(traces=first)
        assert (leg.step, leg.reached, leg.lost_steps, leg.restarts) == (6, 7, 0, 0)
        leg = leg_of(exited(1, signal=9), starting(2, 5), traces=first)
        assert (leg.step, leg.lost_steps, leg.restarts) == (5, 2, 1)
        # An attempt that did nothing loses nothing.
        leg = leg_of(exited(1, signal=9), starting(2, 5), starting(3, 5), traces=first)
        assert (leg.lost_steps, leg.restarts) == (2, 2)

    def test_what_a_script_went_on_from_is_lost_when_its_ranks_say_it(self) -> None:
        records = [{**starting(1), "by": "script"}, {**starting(2), "by": "script"}]
        assert leg_picture([STARTED, *records], trace(1, 0, range(1, 8))).lost_steps == 0

    def test_the_pace_outlives_its_attempt(self) -> None:
        first = trace(1, 0, range(1, 4), step_s=0.5)
        assert leg_of(starting(2), traces=[first]).step_s == 0.5
        assert leg_of(starting(2), traces=[first, trace(2, 0, range(1, 3), step_s=2.0)]).step_s == 2.0

    def test_checkpoints_that_were_set_aside(self) -> None:
        aside = {"event": "checkpoint.quarantined", "name": "step-00000010", "step": 10, "reason": "hash"}
        assert leg_of(aside).quarantined == (10,)


class TestFaults:
    """What is told of them before anybody has judged them."""

    FIRED: dict[str, Any] = {"event": "fault.requested", "fault": "F1", "attempt": 1, "rank": 1, "step": 7}  # noqa: RUF012

    def test_a_request_tells_that_it_fires(self) -> None:
        assert leg_of(self.FIRED).faults == {"F1": FaultSeen(state="fired", attempt=1, rank=1, step=7)}

    def test_withdrawn(self) -> None:
        assert leg_of(self.FIRED, {"event": "fault.withdrawn", "fault": "F1", "reason": "r"}).faults == {}


class TestRemaining:
    def run(self, name: str, *legs: LegPicture, faults: tuple[Fault, ...] = ()) -> RunPicture:
        picture = RunPicture(run_id="r", facts=RunFacts(max_steps=100, every_steps=10), faults=faults)
        for leg in legs:
            picture.legs[leg.name] = leg
        return picture

    def leg(self, name: str, done: int, *more: dict[str, Any]) -> LegPicture:
        traces = (trace(1, rank, range(done - 1, done + 1)) for rank in (0, 1))
        return leg_picture([STARTED, starting(1), *more], *traces, name=name)

    def test_at_the_pace_of_the_leg(self) -> None:
        assert self.run("chaos", self.leg("chaos", 60)).remaining_s() == pytest.approx(20.0)

    def test_after_the_reference_comes_the_chaos_leg(self) -> None:
        assert self.run("reference", self.leg("reference", 60)).remaining_s() == pytest.approx(20.0 + 50.0)

    def test_the_reference_lends_its_pace_and_its_end(self) -> None:
        reference = self.leg("reference", 60, {"event": "leg.finished", "outcome": "completed", "final_step": 60})
        picture = self.run("chaos", reference, leg_picture([STARTED]))
        picture.facts = RunFacts()
        assert picture.remaining_s() == pytest.approx(30.0)

    def test_unknown(self) -> None:
        assert self.run("chaos").remaining_s() is None
        assert self.run("chaos", leg_of()).remaining_s() is None
        nobody_knows_the_end = self.run("chaos", self.leg("chaos", 60))
        nobody_knows_the_end.facts = RunFacts()
        assert nobody_knows_the_end.remaining_s() is None

    def test_over(self) -> None:
        leg = self.leg("chaos", 60, {"event": "leg.finished", "outcome": "completed", "final_step": 60})
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

    @pytest.mark.parametrize("replaced", [True, False])
    def test_a_file_that_is_replaced_or_cut_to_less_begins_again(self, tmp_path: Path, replaced: bool) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"a\nb\n")
        tail = Tail(path)
        tail.lines()
        (tmp_path / "g").write_bytes(b"c\nd\ne\n")
        (tmp_path / "g").rename(path) if replaced else path.write_bytes(b"c\n")
        assert (tail.lines(), tail.restarts) == ([b"c", b"d", b"e"] if replaced else [b"c"], 1)

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


def write_trace(run: RunLayout, attempt: int, rank: int, steps: range) -> PlainTraceWriter:
    return begin_trace(run, "chaos", attempt, rank, steps, step_s=1.0)


def line(step: int) -> dict[str, Any]:
    return step_line(step, 100.0 + step)


def polled(run: RunLayout) -> RunFollower:
    follower = RunFollower(run)
    follower.poll()
    return follower


class TestFollower:
    def test_follows_the_files(self, run: RunLayout) -> None:
        follower = RunFollower(run)
        assert follower.poll() == []
        assert (follower.picture.began_s, follower.picture.facts.every_steps) == (5.0, 5)
        assert [fault.id for fault in follower.picture.faults] == ["F1"]
        tell(run, STARTED, starting(1))
        assert [told.event for told in follower.poll()] == ["leg.started", "attempt.starting"]
        for rank in (0, 1):
            write_trace(run, 1, rank, range(1, 4))
        assert follower.poll() == []
        leg = follower.picture.legs["chaos"]
        assert (leg.step, leg.damage) == (3, ())

    def test_faults_fire_when_their_marker_is_there(self, run: RunLayout) -> None:
        tell(run, STARTED, starting(1))
        follower = polled(run)
        assert write_marker(run.leg("chaos"), "F1", rank=1, attempt=1, pid=9, phase="step", step=7, ticks=1)
        (told,) = follower.poll()
        assert (told.leg, told.event, told.sentence) == ("chaos", "fault.requested", "F1 fired: rank 1, step 7")
        assert follower.picture.seen(follower.picture.faults[0]).state == "fired"
        assert follower.poll() == []
        (run.leg("chaos").faults / "F1.json").unlink()
        follower.poll()
        assert follower.picture.seen(follower.picture.faults[0]).state == "planned"

    def test_heartbeats(self, run: RunLayout) -> None:
        tell(run, STARTED, starting(1))
        heart = Heart()
        heart.open(run.leg("chaos").attempt(1).heartbeat(1))
        heart.beat("checkpoint.write", 5)
        assert [lane.state for lane in polled(run).picture.legs["chaos"].lanes.values()] == ["starting", "saving"]

    def test_a_fault_that_comes_to_the_plan(self, run: RunLayout) -> None:
        follower = polled(run)
        faults = (*follower.picture.faults, Fault(id="I1", rank=0, at_step=9, source="inject"))
        run.plan_json.write_text(json.dumps(FaultPlan(seed=1, faults=faults).to_json()))
        follower.poll()
        assert [fault.id for fault in follower.picture.faults] == ["F1", "I1"]

    def test_a_leg_that_is_begun_again(self, run: RunLayout) -> None:
        tell(run, STARTED, starting(1), exited(0, signal=9), leg="reference")
        follower = polled(run)
        run.reference.journal.unlink()
        tell(run, STARTED, starting(1), leg="reference")
        assert len(follower.poll()) == 2
        assert follower.picture.legs["reference"].lanes[0].state == "starting"

    def test_a_leg_that_another_is_put_in_the_place_of(self, run: RunLayout) -> None:
        end = {"event": "leg.finished", "outcome": "completed", "message": "m", "hint": None, "final_step": 3}
        tell(run, STARTED, end, leg="reference")
        follower = RunFollower(run)
        assert len(follower.poll()) == 2
        assert follower.picture.last_step == 3, "where the undisturbed run ended, the spec does not count any more"
        run.reference.journal.unlink()
        tell(run, STARTED, starting(1), {**end, "final_step": 4}, leg="reference")
        assert follower.poll() == []
        assert follower.picture.last_step == 4
        assert follower.picture.legs["reference"].final_step == 4

    @pytest.mark.parametrize("name", ["run_json", "plan_json"])
    @pytest.mark.parametrize("text", ["", "{", "[]", '{"spec": 7, "created_s": "x"}', "\x00"])
    def test_damaged_files_are_not_shown(self, run: RunLayout, name: str, text: str) -> None:
        getattr(run, name).write_text(text)
        tell(run, STARTED, starting(1))
        assert polled(run).picture.leg is not None

    def test_damaged_journals_and_traces_are_shown_as_far_as_they_go(self, run: RunLayout) -> None:
        tell(run, STARTED, starting(1))
        with run.leg("chaos").journal.open("ab") as file:
            file.write(b'\xff\x00\n[1]\n"x"\n' + b"[" * 5000 + b"\n" + encode(event(**exited(0, code=0))) + b'\n{"event":"to')
        write_trace(run, 1, 1, range(1, 3)).close()
        with run.leg("chaos").attempt(1).trace(1).open("ab") as file:
            file.write(b'\xff\n{"kind":"st')
        leg = polled(run).picture.legs["chaos"]
        assert [(lane.state, lane.step) for lane in leg.lanes.values()] == [("done", 0), ("training", 2)]
        assert [problem.rpartition("/")[2][:10] for problem in leg.damage] == ["journal.js", "rank-1.tra"]

    def test_of_long_traces_the_ends_are_read(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.records.trace_reader.ENDS_BYTES", 500)
        tell(run, STARTED, starting(1), starting(2, 50))
        for attempt, first in ((1, 1), (2, 51)):
            for rank in (0, 1):
                write_trace(run, attempt, rank, range(first, first + 400)).close()
        for name in ("step-00000105", "else"):
            (run.leg("chaos").checkpoints / name).mkdir(parents=True)
        leg = polled(run).picture.legs["chaos"]
        assert (leg.step, leg.lost_steps, leg.kept, leg.step_s) == (450, 350, (105,), pytest.approx(1.0))
        assert len(leg.history.attempts[0].traces[0].steps) < 140

    def test_of_many_ranks_a_look_reads_some_traces_and_those_of_struck_ranks(
        self, run: RunLayout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[tuple[int, int]] = []

        def read_too(path: Path, attempt: int, rank: int, problems: list[str]) -> RankTrace:
            read.append((attempt, rank))
            return read_ends(path, attempt, rank, problems)

        monkeypatch.setattr("chaosrun.report.follow.read_ends", read_too)
        ranks = range(200)
        tell(run, {**STARTED, "workers": len(ranks)}, starting(1), observed(7), starting(2, 5))
        for rank in ranks:
            write_trace(run, 1, rank, range(1, 8)).close()
            write_trace(run, 2, rank, range(6, 9)).close()
        for rank in range(100):
            heart = Heart()
            heart.open(run.leg("chaos").attempt(2).heartbeat(rank))
            heart.beat("fetch", 10)
        steps = [lane.step for lane in polled(run).picture.legs["chaos"].lanes.values()]
        assert steps == [9] * 100 + [8] * 100
        assert (1, 7) in read and 125 <= len([rank for attempt, rank in read if attempt == 2]) <= 126, "whose beats nobody sees"
        assert 50 <= len([rank for attempt, rank in read if attempt == 1]) <= 51
        tell(run, {"event": "leg.finished", "outcome": "completed", "message": "m", "hint": None, "final_step": 9})
        read.clear()
        follower = polled(run)
        leg = follower.picture.legs["chaos"]
        assert len(read) <= 2 * 51 and {lane.step for lane in leg.lanes.values()} == {9}
        assert (leg.reached, leg.lost_steps) == (8, 2)
        for _ in range(3):
            follower.poll()
        assert sorted(read) == [(attempt, rank) for attempt in (1, 2) for rank in ranks], "all in turn, each once"

    def test_nothing_is_read_twice(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        tell(run, STARTED, starting(1), starting(2))
        write_trace(run, 1, 0, range(1, 20)).close()
        writer, read = write_trace(run, 2, 0, range(1, 20)), []
        monkeypatch.setattr("chaosrun.report.follow.read_ends", lambda *args: (read.append(args[1]), read_ends(*args))[1])
        follower = polled(run)
        follower.poll()
        assert read == [1, 2]
        writer.put(**line(20))
        follower.poll()
        assert read == [1, 2, 2]
        # What an attempt did last is read when the next one has begun.
        writer.put(**line(21))
        tell(run, starting(3), starting(4))
        follower.poll()
        writer.put(**line(22))
        follower.poll()
        assert read == [1, 2, 2, 2]
        writer.close()

    def test_while_others_write(self, run: RunLayout) -> None:
        """Writers in other threads, in pieces that end anywhere: what was seen in the end is what was written."""
        tell(run, STARTED, starting(1))
        steps = 400
        for rank in (0, 1):
            write_trace(run, 1, rank, range(1, 1)).close()

        def write(rank: int) -> None:
            path = run.leg("chaos").attempt(1).trace(rank)
            elsewhere = RunLayout(run.path / "elsewhere")
            write_trace(elsewhere, 1, rank, range(1, steps + 1)).close()
            trace = elsewhere.leg("chaos").attempt(1).trace(rank)
            begin = path.stat().st_size
            whole = trace.read_bytes()
            with path.open("ab", buffering=0) as file:
                for start in range(begin, len(whole), 37):
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
        assert (leg.step, leg.damage) == (steps, ())
        assert seen == sorted(seen)


def calls_of(measured: Callable[[], Any]) -> int:
    """
    Functions that it calls, of Python and of C: a busy machine does not add to them.

    The fewest of five times: what the garbage collector calls in between (hypothesis asks it to) is not its own.
    """
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def once() -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            measured()
        finally:
            sys.setprofile(None)
        return calls

    return min(once() for _ in range(5))


def test_a_poll_costs_the_same_however_long_the_run_is(run: RunLayout) -> None:
    """40 times as many steps, and a poll that finds nothing new does no more."""
    tell(run, STARTED, starting(1))
    writer, follower = write_trace(run, 1, 0, range(1, 1)), RunFollower(run)

    def grow(steps: range) -> int:
        for number in steps:
            writer.put(**line(number))
        follower.poll()
        return calls_of(follower.poll)

    assert 0 < grow(range(1, 100)) == grow(range(100, 4000))
    writer.close()
