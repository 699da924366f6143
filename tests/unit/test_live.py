"""The live display and `status`: what they say of a journal and traces, and that they never disturb a run."""

import io
import json
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chaosrun.errors import ResourcesError, UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.journal import Journal
from chaosrun.records.layout import RunLayout
from chaosrun.records.markers import write_marker
from chaosrun.records.supervision import supervision
from chaosrun.records.trace import TornRecordError, TraceWriter
from chaosrun.report import live as live_module
from chaosrun.report import progress
from chaosrun.report.live import LiveProgress, Pace, Teller, is_live_terminal, plain_line
from chaosrun.report.progress import Landing, LegProgress, StepSeen, advance, last_step, sentence
from chaosrun.report.status import read_status, status_lines
from chaosrun.report.watch import watch
from tests.terminal import Grid
from tests.unit.events import event

CHAOS: list[dict[str, Any]] = [
    {"event": "leg.started", "leg": "chaos", "workers": 3, "supervisor_pid": 41},
    {"event": "placement.acquired", "nodes": {"a": {"ranks": [0, 1, 2]}}, "oversubscribed": True},
    {"event": "attempt.starting", "attempt": 1, "resume": None, "resume_step": 0, "armed": ["F1"]},
    {"event": "attempt.started", "attempt": 1, "pids": {"0": 11, "1": 12, "2": 13}, "address": "127.0.0.1"},
    {"event": "fault.requested", "fault": "F1", "attempt": 1, "rank": 1, "step": 17, "phase": "step"},
    {"event": "worker.exited", "attempt": 1, "rank": 1, "pid": 12, "exit_code": None, "signal": 9, "died_s": 5.0},
    {
        "event": "fault.observed",
        "fault": "F1",
        "attempt": 1,
        "rank": 1,
        "pid": 12,
        "how": "death",
        "found": None,
        "exit_code": None,
        "signal": 9,
        "died_s": 5.0,
    },
    {"event": "attempt.stopped", "attempt": 1, "reason": "fault F1", "killed": [0, 2]},
    {
        "event": "checkpoint.quarantined",
        "name": "step-00000015",
        "step": 15,
        "reason": "model.safetensors: hash",
        "moved_to": "q",
    },
    {"event": "attempt.starting", "attempt": 2, "resume": "step-00000010", "resume_step": 10, "armed": []},
]
FINISHED: dict[str, Any] = {"event": "leg.finished", "outcome": "completed", "message": "all ranks ended", "final_step": 90}


def fold(records: list[dict[str, Any]]) -> LegProgress:
    seen = LegProgress(leg="chaos")
    for number, record in enumerate(records):
        seen = advance(seen, {"time_s": float(number), **record})
    return seen


def write_journal(run: RunLayout, leg: str, records: list[dict[str, Any]], clock: Any = time.time) -> None:
    journal = Journal(run.leg(leg).journal, clock=clock)
    for record in records:
        journal.append(event(**record))
    journal.close()


def write_steps(run: RunLayout, leg: str, attempt: int, rank: int, steps: range, *, began_s: float = 100.0) -> None:
    writer = TraceWriter(run.leg(leg).attempt(attempt).trace(rank))
    writer.write("start", v=1)
    for step in steps:
        writer.write("step", step=step, time_s=began_s + step * 0.5, params="x" * 300)
    writer.close()


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "runs" / "bytelm-20260102-030405")
    layout.path.mkdir(parents=True)
    layout.run_json.write_text(json.dumps({"v": 1, "spec": {"name": "bytelm", "workers": 3, "max_steps": 90}}))
    faults = (Fault(id="F1", rank=1, at_step=17, source="a"), Fault(id="F2", rank=2, at_step=60, source="b"))
    layout.plan_json.write_text(json.dumps(FaultPlan(seed=7, faults=faults).to_json()))
    return layout


def test_fold_of_a_journal() -> None:
    seen = fold(CHAOS)
    assert (seen.workers, seen.supervisor_pid) == (3, 41)
    assert (seen.attempt, seen.resumed_from, seen.resumed_step) == (2, "step-00000010", 10)
    assert seen.landed == (Landing(fault="F1", attempt=1, rank=1, pid=12, how="death", signal=9, exit_code=None),)
    assert (seen.quarantined, seen.unplanned, seen.outcome) == (1, (), None)


def test_fault_observed_twice_counts_once() -> None:
    assert len(fold([*CHAOS, CHAOS[6]]).landed) == 1


def test_requested_is_not_landed() -> None:
    assert fold(CHAOS[:5]).landed == ()


def test_resumed_supervisor_takes_the_end_back() -> None:
    end = {"event": "leg.finished", "outcome": "interrupted", "message": "SIGTERM", "hint": "resume it", "final_step": None}
    assert fold([*CHAOS, end]).outcome == "interrupted"
    went_on = fold([*CHAOS, end, {"event": "supervisor.resumed", "supervisor_pid": 99}])
    assert (went_on.outcome, went_on.hint, went_on.supervisor_pid) == (None, None, 99)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (CHAOS[1], "3 ranks placed on 1 node; oversubscribed: more workers than cores"),
        (CHAOS[2], "attempt 1 starts from the beginning"),
        (CHAOS[4], "F1 fired: rank 1, step 17"),
        ({**CHAOS[4], "phase": "reduce"}, "F1 fired: rank 1, step 17, reduce"),
        (CHAOS[5], "attempt 1: rank 1 died of SIGKILL"),
        ({**CHAOS[5], "signal": None, "exit_code": None}, "attempt 1: rank 1 was lost with its node's fork server"),
        (CHAOS[6], "F1 landed: rank 1 died of SIGKILL (pid 12)"),
        (CHAOS[7], "attempt 1 stopped: fault F1; killed ranks 0, 2"),
        (CHAOS[8], "checkpoint step-00000015 quarantined: model.safetensors: hash"),
        (
            {"event": "death.unplanned", "rank": 0, "step": 7, "error": {"type": "ValueError", "message": "bad\nworse"}},
            "unplanned death of rank 0 at step 7: ValueError: bad",
        ),
        (
            {"event": "death.unplanned", "rank": 0, "step": None, "reason": "signal 11", "error": None},
            "unplanned death of rank 0: signal 11",
        ),
        (
            {"event": "leg.finished", "outcome": "completed", "message": "all ranks ended", "final_step": 90},
            "completed at step 90",
        ),
        (
            {"event": "leg.finished", "outcome": "user_error", "message": "train.py failed", "final_step": None},
            "user error: train.py failed",
        ),
        (
            {"event": "leg.finished", "outcome": "interrupted", "message": "interrupted", "final_step": 7},
            "interrupted, saved up to step 7",
        ),
        (
            {"event": "leg.finished", "outcome": "interrupted", "message": "interrupted", "final_step": 0},
            "interrupted",
        ),
        ({"event": "attempt.stopped", "attempt": 1, "killed": []}, "attempt 1 stopped"),
        (
            {"event": "death.unplanned", "rank": None, "step": None, "reason": "no progress for 300 s"},
            "attempt failed: no progress for 300 s",
        ),
        ({"event": "something.new"}, "something.new"),
    ],
)
def test_sentences(record: dict[str, Any], text: str) -> None:
    assert sentence(record) == text


class TestLastStep:
    def test_no_file_or_no_step_yet(self, tmp_path: Path) -> None:
        assert last_step(tmp_path / "none.jsonl") is None
        (tmp_path / "start.jsonl").write_text('{"kind":"start"}\n')
        assert last_step(tmp_path / "start.jsonl") is None

    @pytest.mark.parametrize("block", [7, 64, 1 << 16])
    def test_newest_whole_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
        monkeypatch.setattr(progress, "TAIL_BYTES", block)
        lines = [f'{{"kind":"step","step":{step},"time_s":{step}.5,"params":"{"x" * 40}"}}\n' for step in range(1, 9)]
        path = tmp_path / "t.jsonl"
        path.write_text('{"kind":"start"}\n' + "".join(lines) + '{"kind":"checkpoint","step":8}\n' + lines[0][:60])
        assert last_step(path) == StepSeen(step=8, time_s=8.5)

    @pytest.mark.parametrize("block", [7, 1 << 16])
    def test_only_a_torn_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
        monkeypatch.setattr(progress, "TAIL_BYTES", block)
        (tmp_path / "t.jsonl").write_text('{"kind":"step","step":1,"time')
        assert last_step(tmp_path / "t.jsonl") is None

    def test_damage_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_text('{"kind":"step"\n')
        with pytest.raises(TornRecordError, match=r"t\.jsonl"):
            last_step(tmp_path / "t.jsonl")


def stamped(records: list[dict[str, Any]], began_s: float = 1000.0) -> Iterator[float]:
    """A clock for a journal of these records, a second apart."""
    return iter([began_s + number for number in range(len(records) + 1)])


class Screenless(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestLines:
    """Without a terminal: one line an event, from the files."""

    def test_of_a_run_that_this_process_carries_out(self, run: RunLayout) -> None:
        stream, times = io.StringIO(), stamped(CHAOS)
        with LiveProgress(stream, terminal=False, run=run, clock=lambda: 1000.0) as live:
            write_journal(run, "chaos", CHAOS, clock=lambda: next(times))
            for record in CHAOS:
                live.on_event({"leg": "chaos", "seq": 1, **record})
        lines = stream.getvalue().splitlines()
        assert len(lines) == len(CHAOS)
        assert lines[6] == "[0:06] chaos: F1 landed: rank 1 died of SIGKILL (pid 12)"
        assert "\x1b" not in stream.getvalue()

    def test_what_was_there_before_is_not_told_again(self, run: RunLayout) -> None:
        write_journal(run, "chaos", CHAOS)
        stream = io.StringIO()
        with LiveProgress(stream, terminal=False, run=run):
            write_journal(run, "chaos", [{"event": "supervisor.resumed", "supervisor_pid": 7}])
        assert stream.getvalue() == "[0:00] chaos: a new supervisor took over (pid 7)\n"

    def test_what_is_in_no_file_is_told_from_the_event(self, run: RunLayout) -> None:
        stream = io.StringIO()
        with LiveProgress(stream, terminal=False, clock=lambda: 5.0) as live:
            live.on_event({"event": "run.created", "leg": None, "run": run.run_id, "path": str(run.path)})
            live.on_event({"event": "control.failed", "leg": None, "message": "no socket"})
        assert stream.getvalue().splitlines() == [
            f"[0:00] run: created in {run.path}",
            "[0:00] run: no socket: the run cannot be cancelled or struck from elsewhere",
        ]

    def test_one_run_after_the_other(self, run: RunLayout, tmp_path: Path) -> None:
        stream = io.StringIO()
        second = RunLayout(tmp_path / "runs" / "second")
        with LiveProgress(stream, terminal=False) as live:
            for layout, step in ((run, 90), (second, 91)):
                live.on_event({"event": "run.created", "leg": None, "run": layout.run_id, "path": str(layout.path)})
                write_journal(layout, "chaos", [{**FINISHED, "final_step": step}])
        told = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
        assert told == [
            f"run: created in {run.path}",
            "chaos: completed at step 90",
            f"run: created in {second.path}",
            "chaos: completed at step 91",
        ]

    def test_a_fault_fires_when_its_marker_says_so(self, run: RunLayout) -> None:
        stream, leg = io.StringIO(), run.leg("chaos")
        times = stamped(CHAOS)
        with LiveProgress(stream, terminal=False, run=run, clock=lambda: 1000.0):
            write_journal(run, "chaos", CHAOS[:4], clock=lambda: next(times))
            assert write_marker(leg, "F1", rank=1, attempt=1, pid=12, phase="step", step=17, start_ticks=1)
            marker = leg.faults / "F1.json"
            marker.write_text(json.dumps({**json.loads(marker.read_text()), "time_s": 1003.5}))
            until(lambda: "fired" in stream.getvalue())
            fired = {**CHAOS[4], "requested_s": 1003.5}
            write_journal(run, "chaos", [CHAOS[5], fired, *CHAOS[6:8]], clock=lambda: 1061.0)
        told = [line for line in stream.getvalue().splitlines() if "F1" in line]
        assert told == [
            "[0:03] chaos: F1 fired: rank 1, step 17",
            "[1:01] chaos: F1 landed: rank 1 died of SIGKILL (pid 12)",
            "[1:01] chaos: attempt 1 stopped: fault F1; killed ranks 0, 2",
        ]

    def test_what_happened_first_is_told_first(self) -> None:
        died, fired = {**CHAOS[5], "time_s": 9.0, "died_s": 8.9}, {**CHAOS[4], "time_s": 9.1, "requested_s": 8.5}
        told = Teller().new([("chaos", died), ("chaos", fired)])
        assert [record["event"] for record in told] == ["fault.requested", "worker.exited"]

    def test_a_withdrawn_fault_may_fire_again(self) -> None:
        fired, withdrawn = ("chaos", {**CHAOS[4], "time_s": 1.0}), ("chaos", {"event": "fault.withdrawn", "fault": "F1"})
        assert len(Teller().new([fired, fired])) == 1
        assert len(Teller().new([fired, withdrawn, fired])) == 3

    def test_control_characters_do_not_reach_the_stream(self, run: RunLayout) -> None:
        stream = io.StringIO()
        error = {"type": "E", "message": "a\x1b[2Jb\u202ec\x9b31m"}
        record = {"event": "death.unplanned", "attempt": 1, "rank": 0, "step": 1, "reason": "r", "error": error}
        with LiveProgress(stream, terminal=False, run=run):
            write_journal(run, "chaos", [record])
        assert stream.getvalue().rstrip("\n").isprintable()
        assert "ab c 31m" in stream.getvalue()

    @pytest.mark.parametrize("terminal", [False, True])
    @pytest.mark.parametrize("gone", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed file")])
    def test_a_reader_that_goes_away_ends_only_the_display(self, gone: Exception, terminal: bool) -> None:
        class Gone(io.StringIO):
            writes = 0

            def write(self, s: str) -> int:
                self.writes += 1
                raise gone

        stream = Gone()
        with LiveProgress(stream, terminal=terminal) as live:
            live.on_event({"event": "control.failed", "leg": None, "message": "no socket"})
            live.on_event({"event": "control.failed", "leg": None, "message": "no socket"})
        assert stream.writes == 1


def test_ten_times_a_second_at_most() -> None:
    assert live_module.REDRAW_S >= 0.1


class TestPicture:
    """On a terminal: what is seen there, after each frame."""

    @pytest.fixture(autouse=True)
    def fast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.live.REDRAW_S", 0.01)
        monkeypatch.setattr("chaosrun.report.watch.REDRAW_S", 0.01)

    def screen(self, stream: io.StringIO, columns: int = 100, rows: int = 30) -> str:
        return Grid(columns, rows).feed(stream.getvalue()).text

    def test_of_a_drill(self, run: RunLayout) -> None:
        write_steps(run, "chaos", 1, 0, range(1, 18))
        stream = Screenless()
        with LiveProgress(stream, terminal=True, size=lambda _: (100, 30)) as live:
            live.on_event({"event": "run.created", "leg": None, "run": run.run_id, "path": str(run.path)})
            write_journal(run, "chaos", CHAOS[:7])
            until(lambda: "rank 0      attempt 1 17 training" in self.screen(stream))
            until(lambda: "rank 1      attempt 1  0 killed F1" in self.screen(stream))
        assert self.screen(stream).strip() == ""
        assert not Grid(100, 30).feed(stream.getvalue()).is_cursor_hidden

    def test_what_nobody_asked_for_keeps_its_line(self, run: RunLayout) -> None:
        stream = Screenless()
        record = {"event": "death.unplanned", "attempt": 1, "rank": 2, "step": 7, "reason": "exit code 1"}
        with LiveProgress(stream, terminal=True, run=run, size=lambda _: (100, 30)) as live:
            write_journal(run, "chaos", [*CHAOS[:4], record])
            until(lambda: "restarts" in self.screen(stream))
            live.on_event({"event": "control.failed", "leg": None, "message": "no socket"})
        assert self.screen(stream).strip().splitlines() == [
            "[0:00] chaos: unplanned death of rank 2 at step 7: exit code 1",
            "[0:00] run: no socket: the run cannot be cancelled or struck from elsewhere",
        ]

    def test_the_replays_of_a_diagnosis(self, run: RunLayout) -> None:
        write_journal(run, "chaos", [*CHAOS, FINISHED])
        write_steps(run, "diagnosis/chaos", 1, 0, range(5, 8))
        stream = Screenless()
        with LiveProgress(stream, terminal=True, run=run, size=lambda _: (100, 30)) as live:
            write_journal(run, "diagnosis/chaos", CHAOS[:4])
            live.on_event({**CHAOS[0], "leg": "diagnosis/chaos", "seq": 1})
            until(lambda: "diagnosis/chaos, attempt 1" in self.screen(stream))
            until(lambda: "rank 0      attempt 1  7 training" in self.screen(stream))

    def test_is_drawn_at_most_as_often_as_said(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.live.REDRAW_S", 0.2)
        stream, number = Screenless(), 0
        began_s = time.monotonic()
        with LiveProgress(stream, terminal=True, run=run, size=lambda _: (100, 30)) as live:
            while time.monotonic() - began_s < 0.5 or not stream.getvalue():
                number += 1
                write_journal(run, "chaos", [{"event": "supervisor.resumed"}])
                live.on_event({"leg": "chaos", "event": "supervisor.resumed", "supervisor_pid": 1, "seq": number})
                time.sleep(0.002)
        took_s = time.monotonic() - began_s
        # The first one at once, and one that erases.
        assert 1 < Grid(100, 30).feed(stream.getvalue()).frames <= took_s / 0.2 + 2

    def test_the_pace(self) -> None:
        now_s, frames = 50.0, []
        pace = Pace(0.2, clock=lambda: now_s)
        for _ in range(3000):
            if pace.left_s() <= 0:
                frames.append(now_s)
                now_s += 0.05  # drawing takes its time
                pace.shown()
            now_s += 0.001
        assert frames[0] == 50.0
        assert all(later - earlier >= 0.25 for earlier, later in pairwise(frames))
        assert len(frames) > 10

    def test_a_damaged_trace_shows_no_step(self, run: RunLayout) -> None:
        path = run.leg("chaos").attempt(1).trace(0)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"garbage\n\xff\xfe\x00\n[1]\n{\n")
        stream = Screenless()
        with LiveProgress(stream, terminal=True, run=run, size=lambda _: (100, 30)):
            write_journal(run, "chaos", CHAOS[:4])
            until(lambda: "rank 0      attempt 1  0 starting" in self.screen(stream))


def test_a_bug_of_ours_ends_the_display_and_nothing_else(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, asked = Screenless(), iter([False, False, True])
    write_journal(run, "chaos", CHAOS)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("division by\x1b zero")

    monkeypatch.setattr("chaosrun.report.live.draw", broken)
    watch(run, stream=stream, terminal=True, ended=lambda: next(asked))
    assert next(asked, None) is None
    assert stream.getvalue().startswith(
        "warning: this is a bug in chaosrun: the live view ended (ZeroDivisionError: division by  zero"
    )
    assert stream.getvalue().count("warning") == 1


class TestWatch:
    """`watch`: the same from another process."""

    def test_lines(self, run: RunLayout) -> None:
        stream, asked = io.StringIO(), iter([False, False, True])
        write_journal(run, "chaos", CHAOS)

        def ended() -> bool:
            over = next(asked)
            if over:
                # Written before the end, read after it.
                write_journal(run, "chaos", [FINISHED])
            return over

        watch(run, stream=stream, terminal=False, ended=ended)
        assert len(stream.getvalue().splitlines()) == len(CHAOS) + 1
        assert stream.getvalue().endswith("chaos: completed at step 90\n")

    def test_the_same_lines_as_of_the_process_that_carries_it_out(self, run: RunLayout) -> None:
        run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_text()), "created_s": 1000.0}))
        own, times = io.StringIO(), stamped(CHAOS)
        with LiveProgress(own, terminal=False, run=run, clock=lambda: 1000.0):
            write_journal(run, "chaos", CHAOS, clock=lambda: next(times))
        others = io.StringIO()
        watch(run, stream=others, terminal=False, ended=lambda: True)
        assert others.getvalue() == own.getvalue() != ""

    def test_a_cached_reference_is_told_as_that(self, run: RunLayout) -> None:
        info = {**json.loads(run.run_json.read_text()), "reference": {"mode": "auto", "source": "/elsewhere"}}
        run.run_json.write_text(json.dumps(info))
        write_journal(run, "reference", [CHAOS[0], FINISHED], clock=lambda: 5.0)
        stream = io.StringIO()
        watch(run, stream=stream, terminal=False, ended=lambda: True)
        assert stream.getvalue().endswith("reference: taken from the cache: this job has been run undisturbed before\n")
        assert len(stream.getvalue().splitlines()) == 1

    def test_an_interrupt_passes_and_leaves_the_terminal_as_it_was(self, run: RunLayout) -> None:
        write_journal(run, "chaos", CHAOS)
        stream = Screenless()

        def ended() -> bool:
            if "restarts" in stream.getvalue():
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            watch(run, stream=stream, terminal=True, ended=ended)
        seen = Grid(80, 24).feed(stream.getvalue())
        assert (seen.text.strip(), seen.is_cursor_hidden) == ("", False)

    def test_a_closed_stream_only_ends_the_display(self, run: RunLayout) -> None:
        stream, asked = io.StringIO(), iter([False, False, False, True])
        stream.close()
        watch(run, stream=stream, terminal=False, ended=lambda: next(asked))
        assert next(asked, None) is None


def test_dumb_terminals_get_plain_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert is_live_terminal(Terminal(), {"TERM": "xterm"})
    assert not is_live_terminal(Terminal(), {"TERM": "dumb"})
    assert not is_live_terminal(Terminal(), {})
    assert not is_live_terminal(io.StringIO(), {"TERM": "xterm"})


def test_plain_line_of_a_run_without_a_leg() -> None:
    assert plain_line({"event": "run.created", "run": "r", "path": "/x"}, elapsed_s=61) == "[1:01] run: created in /x"


class TestStatus:
    def test_running(self, run: RunLayout) -> None:
        write_journal(run, "reference", [CHAOS[0], FINISHED])
        write_journal(run, "chaos", CHAOS)
        for rank, last in enumerate((14, 13, 14)):
            write_steps(run, "chaos", 2, rank, range(11, last + 1))
        status = read_status(run, supervised=True)
        assert status.state == "running"
        lines = status_lines(status, now_s=time.time() + 2)
        assert lines[0] == "run bytelm-20260102-030405  bytelm, 3 workers"
        assert any(re.fullmatch("  state      running, about .* to go", line) for line in lines)
        assert "             next F2: SIGKILL rank 2 after step 60" in lines
        assert "             1 restart, 0 steps lost" in lines
        assert "  chaos      attempt 2, from step-00000010 (step 10)" in lines
        assert "             step 13 of 90 (ahead: rank 0 at 14, rank 2 at 14)" in lines
        assert "             faults landed 1 of 2 (F1)" in lines
        assert "             1 checkpoint quarantined" in lines
        value = json.loads(json.dumps(status.to_json()))
        assert (value["state"], value["legs"][1]["step"], value["legs"][1]["ranks"]["1"]) == ("running", 13, 13)

    def test_the_undisturbed_run_tells_where_a_leg_ends(self, run: RunLayout) -> None:
        write_journal(run, "reference", [*CHAOS[:4], {**FINISHED, "final_step": 81}])
        write_journal(run, "chaos", CHAOS[:4])
        write_steps(run, "chaos", 1, 0, range(1, 2))
        lines = status_lines(read_status(run, supervised=True), now_s=time.time())
        assert "             step 1 of 81" in lines

    def test_supervisor_gone(self, run: RunLayout) -> None:
        write_journal(run, "chaos", CHAOS)
        status = read_status(run, supervised=False)
        assert status.state == "interrupted"
        assert status_lines(status, now_s=0)[-1].startswith(f"  go on      chaosrun resume {run.run_id}")

    def test_interrupted_with_a_verdict_that_says_so(self, run: RunLayout) -> None:
        write_journal(run, "chaos", [*CHAOS, {**FINISHED, "outcome": "interrupted", "message": "interrupted"}])
        run.verdict_json.write_text(json.dumps({"v": 1, "status": "INCONCLUSIVE", "cause": "interrupted"}))
        assert read_status(run, supervised=False).state == "interrupted"
        assert read_status(run, supervised=True).state == "running"

    def test_not_started(self, tmp_path: Path) -> None:
        status = read_status(RunLayout(tmp_path), supervised=False)
        assert (status.state, status.legs, status.facts.faults) == ("not started", (), None)

    def test_what_its_supervisor_ended_with_is_told(self, run: RunLayout) -> None:
        with pytest.raises(ResourcesError), supervision(run):
            raise ResourcesError("no Ray cluster answers at 10.0.0.1:6379", hint="is it up?")
        status = read_status(run, supervised=False)
        lines = status_lines(status, now_s=0)
        assert lines[-2:] == ["  error      no Ray cluster answers at 10.0.0.1:6379", "  hint       is it up?"]
        assert status.to_json()["error"]["exit_code"] == ResourcesError.exit_code
        assert read_status(run, supervised=True).to_json()["error"] is None

    def test_judged(self, run: RunLayout) -> None:
        write_journal(run, "chaos", [*CHAOS, FINISHED])
        run.verdict_json.write_text(json.dumps({"v": 1, "status": "FAIL", "cause": "the sampler's epoch was not set"}))
        status = read_status(run, supervised=False)
        assert "  state      finished: FAIL, the sampler's epoch was not set" in status_lines(status, now_s=0)

    def test_damaged_journal_is_reported(self, run: RunLayout) -> None:
        write_journal(run, "chaos", CHAOS[:3])
        with run.leg("chaos").journal.open("a") as file:
            file.write("garbage\n{}\n")
        status = read_status(run, supervised=False)
        assert status.legs[0].progress.attempt == 1
        assert "journal.jsonl:4" in status.damaged[0]

    def test_record_without_its_fields_is_reported(self, run: RunLayout) -> None:
        write_journal(run, "chaos", CHAOS[:3])
        with run.leg("chaos").journal.open("a") as file:
            file.write('{"v":2,"seq":4,"time_s":1.0,"event":"fault.observed","fault":"F1"}\n')
        assert "a record lacks 'attempt'" in read_status(run, supervised=False).damaged[0]

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_damaged_run_json_is_a_clear_error(self, run: RunLayout, text: str) -> None:
        run.run_json.write_text(text)
        with pytest.raises(UsageError, match="is damaged"):
            read_status(run, supervised=False)


def until(condition: Any, *, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "nothing was drawn in time"
        time.sleep(0.005)
