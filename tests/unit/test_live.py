"""The live display and `status`: what they say of a journal and traces, and that they never disturb a run."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from chaosrun.errors import UsageError
from chaosrun.records.journal import Journal
from chaosrun.records.layout import RunLayout
from chaosrun.records.trace import TornRecordError, TraceWriter
from chaosrun.report import progress
from chaosrun.report.live import Display, LiveProgress, is_live_terminal, live_line, plain_line, remaining_s
from chaosrun.report.progress import Landing, LegProgress, StepSeen, advance, last_step, sentence, span
from chaosrun.report.status import read_status, status_lines

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
        journal.append(record["event"], **{key: value for key, value in record.items() if key != "event"})
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
    layout.plan_json.write_text(json.dumps({"version": 1, "seed": 7, "faults": [{"id": "F1"}, {"id": "F2"}]}))
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
            "interrupted at step 7",
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.184, "0.18 s"), (4.21, "4.2 s"), (9.97, "10 s"), (37.4, "37 s"), (59.7, "1m00s"), (125, "2m05s"), (11_220, "3h07m")],
)
def test_span(seconds: float, text: str) -> None:
    assert span(seconds) == text


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


class TestLine:
    display = Display(
        leg=fold(CHAOS[:7]),
        faults=3,
        steps=90,
        first=StepSeen(step=11, time_s=100.0),
        newest=StepSeen(step=51, time_s=110.0),
    )

    def test_says_where_and_how_long(self) -> None:
        line = live_line(self.display, elapsed_s=72.9, width=200)
        assert line == "[1:12]  chaos  attempt 1  step 51/90  eta 9.8 s  faults 1/3  F1 landed: rank 1 died of SIGKILL (pid 12)"

    @pytest.mark.parametrize("width", [20, 40, 79])
    def test_is_cut_to_the_terminal(self, width: int) -> None:
        line = live_line(self.display, elapsed_s=0, width=width)
        assert len(line) == width
        assert line.endswith("...")

    def test_control_characters_do_not_reach_the_terminal(self) -> None:
        record = {
            "event": "death.unplanned",
            "attempt": 1,
            "rank": 0,
            "step": 1,
            "reason": "r",
            "error": {"type": "E", "message": "a\x1b[2Jb\tc"},
        }
        line = live_line(Display(leg=fold([record])), elapsed_s=0, width=200)
        assert line.isprintable()

    def test_no_rate_no_eta(self) -> None:
        same = StepSeen(step=11, time_s=100.0)
        assert remaining_s(Display(steps=90, first=same, newest=same)) is None
        assert remaining_s(Display(first=same, newest=StepSeen(step=12, time_s=101.0))) is None

    def test_reference_shows_no_faults(self) -> None:
        assert "faults" not in live_line(Display(leg=LegProgress(leg="reference"), faults=3), elapsed_s=0, width=99)


class TestLiveProgress:
    def test_plain_lines_without_a_terminal(self, run: RunLayout) -> None:
        stream = io.StringIO()
        with LiveProgress(stream, terminal=False, run=run, clock=lambda: 0.0) as live:
            for record in CHAOS:
                live.on_event({"leg": "chaos", "time_s": 1.0, **record})
        lines = stream.getvalue().splitlines()
        assert len(lines) == len(CHAOS)
        assert lines[6] == "[0:00] chaos: F1 landed: rank 1 died of SIGKILL (pid 12)"
        assert "\x1b" not in stream.getvalue()

    def test_one_line_on_a_terminal(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.live.REDRAW_S", 0.01)
        write_steps(run, "chaos", 1, 0, range(1, 18))
        stream = io.StringIO()
        with LiveProgress(stream, terminal=True, width=lambda: 80) as live:
            live.on_event({"event": "run.created", "run": run.run_id, "path": str(run.path)})
            for record in CHAOS[:7]:
                live.on_event({"leg": "chaos", "time_s": 1.0, **record})
            _until(lambda: "step 17/90" in stream.getvalue())
        assert "\n" not in stream.getvalue()
        assert stream.getvalue().endswith("\r\x1b[2K")
        drawn = [line for line in stream.getvalue().split("\r\x1b[2K") if line]
        assert max(map(len, drawn)) < 80
        assert drawn[-1].endswith("chaos  attempt 1  step 17/90  faults 1/2  F1 landed: rank 1 died of ...")

    def test_redraws_at_most_five_times_a_second(self) -> None:
        drawn: list[str] = []

        class Counting(io.StringIO):
            def write(self, s: str) -> int:
                drawn.append(s)
                return len(s)

        with LiveProgress(Counting(), terminal=True) as live:
            began_s = time.monotonic()
            number = 0
            while time.monotonic() - began_s < 0.5:
                number += 1
                live.on_event({"leg": "chaos", "event": f"e{number}", "time_s": 0.0})
                time.sleep(0.002)
        assert number > 20
        assert len(drawn) <= 5

    def test_unplanned_death_keeps_its_line(self) -> None:
        stream = io.StringIO()
        record = {"event": "death.unplanned", "leg": "chaos", "attempt": 1, "rank": 2, "step": 7, "reason": "exit code 1"}
        with LiveProgress(stream, terminal=True) as live:
            live.on_event(record)
        assert "chaos: unplanned death of rank 2 at step 7: exit code 1\n" in stream.getvalue()

    def test_new_attempt_forgets_the_old_steps(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.live.REDRAW_S", 0.01)
        write_steps(run, "chaos", 1, 0, range(1, 18))
        stream = io.StringIO()
        with LiveProgress(stream, terminal=True, run=run, width=lambda: 200) as live:
            for record in CHAOS[:7]:
                live.on_event({"leg": "chaos", "time_s": 1.0, **record})
            _until(lambda: "step 17" in stream.getvalue())
            live.on_event({"leg": "chaos", "time_s": 1.0, **CHAOS[9]})
            _until(lambda: "attempt 2" in stream.getvalue())
        assert "attempt 2  faults" in stream.getvalue()

    def test_the_reference_tells_the_last_step(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.live.REDRAW_S", 0.01)
        run.run_json.write_text(json.dumps({"spec": {"name": "x", "workers": 1, "max_steps": None}}))
        write_steps(run, "chaos", 1, 0, range(1, 18))
        stream = io.StringIO()
        with LiveProgress(stream, terminal=True, run=run) as live:
            live.on_event({"leg": "reference", **FINISHED, "final_step": 33, "time_s": 0.0})
            live.on_event({"leg": "chaos", "time_s": 0.0, **CHAOS[2]})
            _until(lambda: "step 17/33" in stream.getvalue())

    def test_a_cached_reference_tells_it_too(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.live.REDRAW_S", 0.01)
        run.run_json.write_text(json.dumps({"spec": {"name": "x", "workers": 1, "max_steps": None}}))
        write_journal(run, "reference", [CHAOS[0], {**FINISHED, "final_step": 33}])
        write_steps(run, "chaos", 1, 0, range(1, 18))
        stream = io.StringIO()
        with LiveProgress(stream, terminal=True, run=run) as live:
            live.on_event({"leg": "reference", "event": "reference.cached", "source": "x", "time_s": 0.0})
            live.on_event({"leg": "chaos", "time_s": 0.0, **CHAOS[2]})
            _until(lambda: "step 17/33" in stream.getvalue())

    @pytest.mark.parametrize("gone", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed file")])
    def test_a_reader_that_goes_away_ends_only_the_display(self, gone: Exception) -> None:
        class Gone(io.StringIO):
            writes = 0

            def write(self, s: str) -> int:
                self.writes += 1
                raise gone

        stream = Gone()
        with LiveProgress(stream, terminal=False) as live:
            live.on_event({"leg": "chaos", "time_s": 1.0, **CHAOS[0]})
            live.on_event({"leg": "chaos", "time_s": 1.0, **CHAOS[1]})
        assert stream.writes == 1

    def test_damaged_trace_shows_no_step(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.live.REDRAW_S", 0.01)
        path = run.leg("chaos").attempt(1).trace(0)
        path.parent.mkdir(parents=True)
        path.write_text("garbage\n")
        stream = io.StringIO()
        with LiveProgress(stream, terminal=True, run=run) as live:
            live.on_event({"leg": "chaos", "time_s": 1.0, **CHAOS[2]})
            _until(lambda: "attempt 1" in stream.getvalue())
        assert "step " not in stream.getvalue()


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
        assert "  state      running" in lines
        assert "  chaos      attempt 2, from step-00000010 (step 10)" in lines
        assert "             step 13 of 90 (ahead: rank 0 at 14, rank 2 at 14)" in lines
        assert "             faults landed 1 of 2 (F1)" in lines
        assert "             1 checkpoint quarantined" in lines
        value = json.loads(json.dumps(status.to_json()))
        assert (value["state"], value["legs"][1]["step"], value["legs"][1]["ranks"]["1"]) == ("running", 13, 13)

    def test_supervisor_gone(self, run: RunLayout) -> None:
        write_journal(run, "chaos", CHAOS)
        status = read_status(run, supervised=False)
        assert status.state == "interrupted"
        assert status_lines(status, now_s=0)[-1] == f"  go on      chaosrun resume {run.run_id}"

    def test_interrupted_with_a_verdict_that_says_so(self, run: RunLayout) -> None:
        write_journal(run, "chaos", [*CHAOS, {**FINISHED, "outcome": "interrupted", "message": "interrupted"}])
        run.verdict_json.write_text(json.dumps({"v": 1, "status": "INCONCLUSIVE", "cause": "interrupted"}))
        assert read_status(run, supervised=False).state == "interrupted"
        assert read_status(run, supervised=True).state == "running"

    def test_not_started(self, tmp_path: Path) -> None:
        status = read_status(RunLayout(tmp_path), supervised=False)
        assert (status.state, status.legs, status.facts.faults) == ("not started", (), None)

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
        write_journal(run, "chaos", [*CHAOS[:3], {"event": "fault.observed", "fault": "F1"}])
        assert "a record lacks 'attempt'" in read_status(run, supervised=False).damaged[0]

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_damaged_run_json_is_a_clear_error(self, run: RunLayout, text: str) -> None:
        run.run_json.write_text(text)
        with pytest.raises(UsageError, match="is damaged"):
            read_status(run, supervised=False)


def _until(condition: Any, *, limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "nothing was drawn in time"
        time.sleep(0.005)
