"""The live display and `status`: what they say of a journal and traces, and that they never disturb a run."""

import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from chaosrun import processes
from chaosrun.errors import ResourcesError, UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.events import JournalEvent, NodePlace, NotPreloaded, RaisedError
from chaosrun.records.layout import RunLayout
from chaosrun.records.markers import write_marker
from chaosrun.records.supervision import supervision
from chaosrun.report import live as live_module
from chaosrun.report.follow import RunFollower
from chaosrun.report.live import Display, LiveProgress, is_live_terminal, watch
from chaosrun.report.sentences import EventText, folded, sentence
from chaosrun.report.status import read_status, status_lines
from tests.terminal import Grid
from tests.unit.events import event
from tests.unit.run_files import begin_trace, tell, write_info

# Events are shown by a thread, whose errors would be no more than warnings.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

CHAOS: list[dict[str, Any]] = [
    {"event": "leg.started", "leg": "chaos", "workers": 3, "supervisor_pid": 41},
    {"event": "placement.acquired", "nodes": {"a": NodePlace(ranks=(0, 1, 2))}, "oversubscribed": True},
    {"event": "attempt.starting", "attempt": 1, "resume": None, "resume_step": 0, "armed": ["F1"]},
    {"event": "attempt.started", "attempt": 1, "pids": {0: 11, 1: 12, 2: 13}, "address": "127.0.0.1"},
    {"event": "fault.requested", "fault": "F1", "attempt": 1, "rank": 1, "step": 17, "phase": "step"},
    {"event": "worker.exited", "attempt": 1, "rank": 1, "pid": 12, "exit_code": None, "signal": 9, "died_s": 5.0},
    {"event": "fault.observed", "attempt": 1, "rank": 1, "pid": 12, "how": "death", "signal": 9, "died_s": 5.0},
    {"event": "attempt.stopped", "attempt": 1, "reason": "fault F1", "killed": [0, 2]},
    {"event": "checkpoint.quarantined", "name": "step-00000015", "step": 15, "reason": "model.safetensors: hash"},
    {"event": "attempt.starting", "attempt": 2, "resume": "step-00000010", "resume_step": 10, "armed": []},
]
FINISHED: dict[str, Any] = {"event": "leg.finished", "outcome": "completed", "message": "all ranks ended", "final_step": 90}
ENDED: dict[str, Any] = {"event": "leg.finished", "message": "interrupted", "outcome": "interrupted"}
RAISED = RaisedError(type="ValueError", message="bad\nworse")


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "runs" / "bytelm-20260102-030405")
    layout.path.mkdir(parents=True)
    faults = (Fault(id="F1", rank=1, at_step=17, source="a"), Fault(id="F2", rank=2, at_step=60, source="b"))
    write_info(layout, FaultPlan(seed=7, faults=faults), spec={"name": "bytelm", "workers": 3, "max_steps": 90})
    return layout


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (CHAOS[1], "3 ranks placed on 1 node; oversubscribed: more workers than cores"),
        (
            {**CHAOS[1], "gpus_too_few": 1},
            "3 ranks placed on 1 node; oversubscribed: more workers than cores; without GPUs: 1 GPU for 3 ranks "
            "(per_worker.gpu: auto)",
        ),
        (
            {**CHAOS[1], "not_preloaded": (NotPreloaded(module="own.data", threads=("beats",), import_s=1.5),)},
            "3 ranks placed on 1 node; oversubscribed: more workers than cores; own.data is not preloaded, for its import "
            "starts 1 thread (beats), which a fork would lose: each restart imports it again, 1.5 s",
        ),
        (CHAOS[2], "attempt 1 starts from the beginning"),
        ({**CHAOS[2], "by": "script"}, "attempt 1 starts from the beginning"),
        ({**CHAOS[2], "by": "script", "attempt": 2}, "attempt 2 starts: the script looks for a checkpoint of its own"),
        (CHAOS[4], "F1 fired: rank 1, step 17"),
        ({**CHAOS[4], "phase": "reduce"}, "F1 fired: rank 1, step 17, reduce"),
        (CHAOS[5], "attempt 1: rank 1 died of SIGKILL"),
        ({**CHAOS[5], "stopped": True}, "attempt 1: rank 1 was stopped with its attempt"),
        ({**CHAOS[5], "signal": None, "exit_code": 85}, "attempt 1: rank 1 left on notice: exited with code 85"),
        ({**CHAOS[5], "signal": None, "exit_code": 1}, "attempt 1: rank 1 exited with code 1"),
        ({**CHAOS[5], "signal": None}, "attempt 1: rank 1 was lost with its node's fork server"),
        (CHAOS[6], "F1 seen: rank 1 died of SIGKILL (pid 12)"),
        ({**CHAOS[6], "found": {"problem": "it went on"}}, "F1 did not happen as planned: it went on"),
        (CHAOS[7], "attempt 1 stopped; stopped ranks 0 and 2"),
        ({"event": "attempt.stopped", "attempt": 1}, "attempt 1 stopped"),
        (CHAOS[8], "checkpoint step-00000015 quarantined: model.safetensors: hash"),
        ({"event": "death.unplanned", "step": 7, "error": RAISED}, "unplanned death of rank 0 at step 7: ValueError: bad"),
        ({"event": "death.unplanned", "reason": "rank 0 was lost at step 7"}, "unplanned: rank 0 was lost at step 7"),
        ({"event": "death.unplanned", "rank": None, "reason": "no progress"}, "attempt failed: no progress"),
        (FINISHED, "completed at step 90"),
        ({**ENDED, "outcome": "user_error", "message": "train.py failed"}, "user error: train.py failed"),
        ({**ENDED, "final_step": 7}, "interrupted, saved up to step 7"),
        ({**ENDED, "final_step": 7, "by": "script"}, "interrupted after step 7"),
        ({**FINISHED, "by": "script"}, "completed at step 90"),
        (ENDED, "interrupted"),
    ],
)
def test_sentences(record: dict[str, Any], text: str) -> None:
    assert sentence(event(**record)) == text


def test_ranks_that_are_stopped_are_told_in_the_line_of_their_attempt() -> None:
    stream = io.StringIO()
    display = Display(stream, terminal=False, began_s=0.0)
    for record in (CHAOS[5], {**CHAOS[5], "stopped": True}, CHAOS[7]):
        display.say(EventText.of("chaos", event(**record)))
    first, second = stream.getvalue().splitlines()
    assert "rank 1 died of SIGKILL" in first and "stopped ranks 0 and 2" in second


def test_many_ranks_that_end_in_the_same_way_share_a_line() -> None:
    stopped = [{**CHAOS[5], "rank": rank, "stopped": True} for rank in range(100)]
    done = [{**CHAOS[5], "rank": rank, "signal": None, "exit_code": 0} for rank in (0, 1, 2, *range(4, 20))]
    records = [CHAOS[5], *stopped, CHAOS[7], *done, {**done[0], "attempt": 2}]
    told = list(folded(EventText.of("chaos", event(**record)) for record in records))
    assert [entry.sentence for entry in told] == [
        "attempt 1: rank 1 died of SIGKILL",
        "attempt 1: ranks 0-99 were stopped with their attempt",
        "attempt 1 stopped; stopped ranks 0 and 2",
        "attempt 1: ranks 0-2 and 4-19 ended",
        "attempt 2: rank 0 ended",
    ]
    assert list(folded(told[:1] * 4)) == told[:1] * 4


def test_every_event_has_its_sentence() -> None:
    for kind in get_args(JournalEvent):
        assert sentence(event(str(kind.__struct_config__.tag))) is not None


def stamped(records: list[dict[str, Any]], began_s: float = 1000.0) -> Iterator[float]:
    """A clock for a journal of these records, a second apart."""
    return iter([began_s + number for number in range(len(records) + 1)])


class Screenless(io.StringIO):
    def isatty(self) -> bool:
        return True


def showing(
    stream: io.StringIO, *, run: RunLayout | None = None, clock: Callable[[], float] = time.time, **how: Any
) -> LiveProgress:
    return LiveProgress(Display(stream, began_s=clock(), clock=clock, **how), run)


def on_screen(stream: io.StringIO) -> Grid:
    """What a terminal that begins each line at its left then shows."""
    return Grid(100, 30).feed(stream.getvalue().replace("\n", "\r\n"))


class TestLines:
    """Without a terminal: one line an event, from the files."""

    def test_of_a_run_that_this_process_carries_out(self, run: RunLayout) -> None:
        stream, times = io.StringIO(), stamped(CHAOS)
        with showing(stream, terminal=False, run=run, clock=lambda: 1000.0) as live:
            tell(run, *CHAOS, clock=lambda: next(times))
            for record in CHAOS:
                live.on_event({"leg": "chaos", "seq": 1, **record})
        lines = stream.getvalue().splitlines()
        assert len(lines) == len(CHAOS)
        assert lines[6] == "[0:06] chaos: F1 seen: rank 1 died of SIGKILL (pid 12)"
        assert "\x1b" not in stream.getvalue()

    def test_what_was_there_before_is_not_told_again(self, run: RunLayout) -> None:
        tell(run, *CHAOS)
        stream = io.StringIO()
        with showing(stream, terminal=False, run=run):
            tell(run, {"event": "supervisor.resumed", "supervisor_pid": 7})
        assert stream.getvalue() == "[0:00] chaos: a new supervisor took over (pid 7)\n"

    def test_what_is_in_no_file_is_told_from_the_event(self, run: RunLayout) -> None:
        stream = io.StringIO()
        with showing(stream, terminal=False, clock=lambda: 5.0) as live:
            live.on_event({"event": "run.created", "leg": None, "run": run.run_id, "path": str(run.path)})
            live.on_event({"event": "control.failed", "leg": None, "message": "no socket"})
        assert stream.getvalue().splitlines() == [
            f"[0:00] run: created in {run.path}",
            "[0:00] run: no socket: the run cannot be cancelled or get faults from elsewhere",
        ]

    def test_one_run_after_the_other(self, run: RunLayout, tmp_path: Path) -> None:
        stream = io.StringIO()
        second = RunLayout(tmp_path / "runs" / "second")
        with showing(stream, terminal=False) as live:
            for layout, step in ((run, 90), (second, 91)):
                live.on_event({"event": "run.created", "leg": None, "run": layout.run_id, "path": str(layout.path)})
                tell(layout, {**FINISHED, "final_step": step})
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
        with showing(stream, terminal=False, run=run, clock=lambda: 1000.0):
            tell(run, *CHAOS[:4], clock=lambda: next(times))
            assert write_marker(leg, "F1", rank=1, attempt=1, pid=12, phase="step", step=17, ticks=1)
            marker = leg.faults / "F1.json"
            marker.write_text(json.dumps({**json.loads(marker.read_text()), "time_s": 1003.5}))
            until(lambda: "fired" in stream.getvalue())
            fired = {**CHAOS[4], "requested_s": 1003.5}
            tell(run, CHAOS[5], fired, *CHAOS[6:8], clock=lambda: 1061.0)
        told = [line for line in stream.getvalue().splitlines() if "F1" in line]
        assert told == ["[0:03] chaos: F1 fired: rank 1, step 17", "[1:01] chaos: F1 seen: rank 1 died of SIGKILL (pid 12)"]
        assert "[1:01] chaos: attempt 1 stopped; stopped ranks 0 and 2" in stream.getvalue()

    def test_what_happened_first_is_told_first(self, run: RunLayout) -> None:
        died, fired = {**CHAOS[5], "died_s": 8.9}, {**CHAOS[4], "requested_s": 8.5}
        tell(run, died, fired, clock=lambda: 9.0)
        assert [told.event for told in RunFollower(run).poll()] == ["fault.requested", "worker.exited"]

    def test_a_withdrawn_fault_may_fire_again(self, run: RunLayout) -> None:
        follower, withdrawn = RunFollower(run), {"event": "fault.withdrawn", "fault": "F1"}
        tell(run, CHAOS[4], CHAOS[4])
        assert len(follower.poll()) == 1
        tell(run, withdrawn, CHAOS[4])
        assert len(follower.poll()) == 2

    def test_control_characters_do_not_reach_the_stream(self, run: RunLayout) -> None:
        stream = io.StringIO()
        error = RaisedError(type="E", message="a\x1b[2Jb\u202ec\x9b31m")
        record = {"event": "death.unplanned", "attempt": 1, "rank": 0, "step": 1, "reason": "r", "error": error}
        with showing(stream, terminal=False, run=run):
            tell(run, record)
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
        with showing(stream, terminal=terminal) as live:
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

    def screen(self, stream: io.StringIO) -> str:
        return on_screen(stream).text

    def test_of_a_drill(self, run: RunLayout) -> None:
        begin_trace(run, "chaos", 1, 0, range(1, 18)).close()
        stream = Screenless()
        with showing(stream, terminal=True, size=lambda _: (100, 30)) as live:
            live.on_event({"event": "run.created", "leg": None, "run": run.run_id, "path": str(run.path)})
            tell(run, *CHAOS[:7])
            until(lambda: "rank 0      step 17 training" in self.screen(stream))
            until(lambda: "rank 1      step 0 killed F1" in self.screen(stream))
        assert self.screen(stream).strip() == ""
        assert not on_screen(stream).is_cursor_hidden

    def test_what_nobody_asked_for_keeps_its_line(self, run: RunLayout) -> None:
        stream = Screenless()
        record = {"event": "death.unplanned", "attempt": 1, "rank": 2, "step": 7, "reason": "rank 2 left"}
        with showing(stream, terminal=True, run=run, size=lambda _: (100, 30)) as live:
            tell(run, *CHAOS[:4], record)
            until(lambda: "restarts" in self.screen(stream))
            live.on_event({"event": "control.failed", "leg": None, "message": "no socket"})
        assert self.screen(stream).strip().splitlines() == [
            "[0:00] chaos: unplanned: rank 2 left",
            "[0:00] run: no socket: the run cannot be cancelled or get faults from elsewhere",
        ]

    def test_the_replays_of_a_diagnosis(self, run: RunLayout) -> None:
        tell(run, *CHAOS, FINISHED)
        begin_trace(run, "diagnosis/chaos", 1, 0, range(5, 8)).close()
        stream = Screenless()
        with showing(stream, terminal=True, run=run, size=lambda _: (100, 30)) as live:
            tell(run, *CHAOS[:4], leg="diagnosis/chaos")
            live.on_event({**CHAOS[0], "leg": "diagnosis/chaos", "seq": 1})
            until(lambda: "diagnosis/chaos, attempt 1" in self.screen(stream))
            until(lambda: "rank 0      step 7 training" in self.screen(stream))

    def test_the_second_replay_does_not_tell_the_first_again(self, run: RunLayout) -> None:
        stream = io.StringIO()
        legs = ("diagnosis/reference", "diagnosis/chaos")
        with showing(stream, terminal=False, run=run) as live:
            for leg in legs:
                tell(run, CHAOS[0], leg=leg)
                live.on_event({**CHAOS[0], "leg": leg, "seq": 1})
                until(lambda leg=leg: f"{leg}: started" in stream.getvalue())
        assert [stream.getvalue().count(f"{leg}: started") for leg in legs] == [1, 1]

    def test_is_drawn_at_most_as_often_as_said(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.report.live.REDRAW_S", 0.2)
        stream, number = Screenless(), 0
        began_s = time.monotonic()
        with showing(stream, terminal=True, run=run, size=lambda _: (100, 30)) as live:
            while time.monotonic() - began_s < 0.5 or not stream.getvalue():
                number += 1
                tell(run, {"event": "supervisor.resumed"})
                live.on_event({"leg": "chaos", "event": "supervisor.resumed", "supervisor_pid": 1, "seq": number})
                time.sleep(0.002)
        took_s = time.monotonic() - began_s
        # The first one at once, and one that erases.
        assert 1 < stream.getvalue().count(run.run_id) <= took_s / 0.2 + 2

    def test_a_damaged_trace_shows_no_step(self, run: RunLayout) -> None:
        path = run.leg("chaos").attempt(1).trace(0)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"garbage\n\xff\xfe\x00\n[1]\n{\n")
        stream = Screenless()
        with showing(stream, terminal=True, run=run, size=lambda _: (100, 30)):
            tell(run, *CHAOS[:4])
            until(lambda: "rank 0      step 0 starting" in self.screen(stream))


def test_a_bug_of_ours_ends_the_display_and_nothing_else(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, asked = Screenless(), iter([False, False, True])
    tell(run, *CHAOS)

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
        tell(run, *CHAOS)

        def ended() -> bool:
            over = next(asked)
            if over:
                # Written before the end, read after it.
                tell(run, FINISHED)
            return over

        watch(run, stream=stream, terminal=False, ended=ended)
        assert len(stream.getvalue().splitlines()) == len(CHAOS) + 1
        assert stream.getvalue().endswith("chaos: completed at step 90\n")

    def test_the_same_lines_as_of_the_process_that_carries_it_out(self, run: RunLayout) -> None:
        own, times = io.StringIO(), stamped(CHAOS)
        # What is read at once is told in the order in which it happened.
        dated = [{**each, "died_s": 1000.0 + at} if "died_s" in each else each for at, each in enumerate(CHAOS)]
        with showing(own, terminal=False, run=run, clock=lambda: 1000.0):
            tell(run, *dated, clock=lambda: next(times))
        others = io.StringIO()
        watch(run, stream=others, terminal=False, ended=lambda: True)
        assert others.getvalue() == own.getvalue() != ""

    @pytest.mark.parametrize(
        ("mode", "said"),
        [
            ("auto", "the cache: the reference run of an earlier drill of this job"),
            ("/root/runs/order-20261126-224547", "run order-20261126-224547"),
        ],
    )
    def test_a_reference_that_is_taken_is_told_as_that(self, run: RunLayout, mode: str, said: str) -> None:
        write_info(run, source="/elsewhere", reference=mode)
        tell(run, CHAOS[0], FINISHED, leg="reference", clock=lambda: 5.0)
        stream = io.StringIO()
        watch(run, stream=stream, terminal=False, ended=lambda: True)
        assert stream.getvalue().endswith(f"reference: taken from {said}\n")
        assert len(stream.getvalue().splitlines()) == 1

    def test_an_interrupt_passes_and_leaves_the_terminal_as_it_was(self, run: RunLayout) -> None:
        tell(run, *CHAOS)
        stream = Screenless()

        def ended() -> bool:
            if "restarts" in stream.getvalue():
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            watch(run, stream=stream, terminal=True, ended=ended)
        seen = on_screen(stream)
        assert (seen.text.strip(), seen.is_cursor_hidden) == ("", False)

    def test_a_closed_stream_only_ends_the_display(self, run: RunLayout) -> None:
        stream, asked = io.StringIO(), iter([False, False, False, True])
        stream.close()
        tell(run, *CHAOS)
        watch(run, stream=stream, terminal=False, ended=lambda: next(asked))
        assert next(asked, None) is None


def test_dumb_terminals_get_plain_lines() -> None:
    assert is_live_terminal(Screenless(), {"TERM": "xterm"})
    assert not is_live_terminal(Screenless(), {"TERM": "dumb"})
    assert not is_live_terminal(Screenless(), {})
    assert not is_live_terminal(io.StringIO(), {"TERM": "xterm"})


class TestStatus:
    def test_running(self, run: RunLayout) -> None:
        tell(run, CHAOS[0], FINISHED, leg="reference")
        tell(run, *CHAOS)
        begin_trace(run, "chaos", 1, 1, range(1, 18)).close()
        for rank, last in enumerate((14, 13, 14)):
            begin_trace(run, "chaos", 2, rank, range(11, last + 1)).close()
        status = read_status(run, supervised=True)
        assert status.state == "running"
        lines = status_lines(status, now_s=time.time() + 2)
        assert lines[0] == "run bytelm-20260102-030405  bytelm, 3 workers"
        assert lines[2] == "legs        ✓ reference 90 steps   ▶ chaos"
        assert any(re.match("steps       13 of 90  2/s +━", line) for line in lines)
        assert any(line.startswith("faults      1 of 2 landed  ") for line in lines)
        assert "restarts    1, 7 steps lost" in lines
        assert lines[8:10] == ["rank 0      step 14 training", "rank 1      step 13 training"]
        assert "F2          ○ planned SIGKILL rank 2 after step 60" in lines
        assert re.fullmatch("state       running, about .* to go", lines[1])
        value = json.loads(json.dumps(status.to_json()))
        assert (value["state"], value["legs"][1]["step"], value["legs"][1]["ranks"]["1"]) == ("running", 13, 13)

    def test_the_undisturbed_run_tells_where_a_leg_ends(self, run: RunLayout) -> None:
        tell(run, *CHAOS[:4], {**FINISHED, "final_step": 81}, leg="reference")
        tell(run, *CHAOS[:4])
        begin_trace(run, "chaos", 1, 0, range(1, 2)).close()
        lines = status_lines(read_status(run, supervised=True), now_s=time.time())
        assert any(line.startswith("steps       0 of 81 ") for line in lines)

    def test_supervisor_gone(self, run: RunLayout) -> None:
        tell(run, *CHAOS)
        begin_trace(run, "chaos", 2, 0, range(7, 15)).close()
        status = read_status(run, supervised=False)
        lines = status_lines(status, now_s=0)
        assert status.state == "interrupted"
        assert lines[-1].startswith(f"resume      chaosrun resume {run.run_id}")
        assert "rank 0      step 14 stopped" in lines and not any("training" in line for line in lines)

    def test_no_rank_trains_while_the_next_supervisor_starts(self, run: RunLayout) -> None:
        tell(run, *CHAOS)
        begin_trace(run, "chaos", 2, 0, range(7, 15)).close()
        with supervision(run):
            starting = status_lines(read_status(run, supervised=True), now_s=0)
            tell(run, {"event": "supervisor.resumed", "supervisor_pid": 7})
            resumed = status_lines(read_status(run, supervised=True), now_s=0)
        assert "rank 0      step 14 stopped" in starting and "rank 0      step 14 training" in resumed

    def test_interrupted_with_a_verdict_that_says_so(self, run: RunLayout) -> None:
        tell(run, *CHAOS, {**FINISHED, "outcome": "interrupted", "message": "interrupted"})
        run.verdict_json.write_text(json.dumps({"v": 1, "status": "INCONCLUSIVE", "cause": "interrupted"}))
        assert read_status(run, supervised=False).state == "interrupted"
        assert read_status(run, supervised=True).state == "running"

    def test_a_leg_that_can_go_on_is_interrupted_in_one_word(self, run: RunLayout) -> None:
        tell(run, *CHAOS, {**FINISHED, "outcome": "resources", "message": "the disk is full"})
        lines = status_lines(read_status(run, supervised=False), now_s=0)
        assert lines[1:3] == ["state       interrupted", "legs        ◇ chaos interrupted"]

    def test_a_supervisor_that_is_stopped_is_told_so(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        tell(run, *CHAOS)
        with supervision(run):
            monkeypatch.setattr(processes, "cpu_and_state", lambda pid: (0.0, "T" if pid == os.getpid() else "S"))
            stopped = status_lines(read_status(run, supervised=True), now_s=0)
        assert stopped[1] == f"state       running, but its process is stopped: `kill -CONT {os.getpid()}` lets it go on"
        assert "is stopped" not in "".join(status_lines(read_status(run, supervised=False), now_s=0))

    def test_not_started(self, tmp_path: Path) -> None:
        status = read_status(RunLayout(tmp_path), supervised=False)
        assert (status.state, status.legs, status.facts.faults) == ("not started", (), None)

    def test_what_its_supervisor_ended_with_is_told(self, run: RunLayout) -> None:
        with pytest.raises(ResourcesError), supervision(run):
            raise ResourcesError("no Ray cluster answers at 10.0.0.1:6379", hint="is it up?")
        status = read_status(run, supervised=False)
        lines = status_lines(status, now_s=0)
        assert lines[-2:] == ["error       no Ray cluster answers at 10.0.0.1:6379", "hint        is it up?"]
        assert status.to_json()["error"]["exit_code"] == ResourcesError.exit_code
        assert read_status(run, supervised=True).to_json()["error"] is None

    def test_a_resume_that_would_end_in_the_same_way_is_not_advised(self, run: RunLayout) -> None:
        tell(run, *CHAOS)
        with pytest.raises(UsageError), supervision(run):
            raise UsageError("step 99 is never reached", hint="plan it earlier")
        lines = status_lines(read_status(run, supervised=False), now_s=0)
        assert lines[-2:] == ["error       step 99 is never reached", "hint        plan it earlier"]

    def test_judged(self, run: RunLayout) -> None:
        tell(run, *CHAOS, FINISHED)
        run.verdict_json.write_text(json.dumps({"v": 1, "status": "FAIL", "cause": "the sampler's epoch was not set"}))
        status = read_status(run, supervised=False)
        assert "state       finished: FAIL, the sampler's epoch was not set" in status_lines(status, now_s=0)
        run.supervisor_json.write_text("{")  # which says less than the verdict
        assert read_status(run, supervised=False).error is None

    def test_damaged_journal_is_reported(self, run: RunLayout) -> None:
        tell(run, *CHAOS[:3])
        with run.leg("chaos").journal.open("a") as file:
            file.write("garbage\n{}\n")
        status = read_status(run, supervised=False)
        assert status.legs[0].attempt == 1
        assert "journal.jsonl: line 4: not a JSON record" in status.damaged[0]

    def test_a_fault_that_the_verdict_would_not_accept_has_not_landed(self, run: RunLayout) -> None:
        """Its rank recorded a step after the one that it was to die at."""
        tell(run, *CHAOS, {**FINISHED, "outcome": "user_error"})
        begin_trace(run, "chaos", 1, 1, range(1, 19)).close()
        status = read_status(run, supervised=False).to_json()
        assert status["legs"][0]["landed"] == [] and status["schedule"][0]["state"] == "missed"

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
