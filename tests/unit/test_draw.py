"""How a picture looks at any size, and that the terminal it is drawn on is left as it was."""

import io
import json
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chaosrun.faults.fault import Fault
from chaosrun.report.draw import ASCII, draw, sparkline
from chaosrun.report.facts import RunFacts
from chaosrun.report.picture import LegPicture, RunPicture
from chaosrun.report.screen import Screen
from tests.terminal import Grid, Terminal
from tests.unit.events import event


def picture(ranks: int = 3, *, steps: int = 45, of: int | None = 80) -> RunPicture:
    """A chaos leg in its second attempt: one fault has landed, one is to come, one checkpoint was no good."""
    faults = (
        Fault(id="F1", rank=1, at_step=30, phase="reduce", source="a"),
        Fault(id="F2", rank=0, at_step=60, source="b"),
    )
    leg, run = LegPicture("chaos"), RunPicture(run_id="small-1", facts=RunFacts(max_steps=of), faults=faults, every_steps=10)
    landed = {"fault": "F1", "attempt": 1, "rank": 1, "pid": 7, "how": "death", "signal": 9, "exit_code": None}
    records: list[dict[str, Any]] = [
        {"event": "leg.started", "workers": ranks, "supervisor_pid": 1},
        {"event": "attempt.starting", "attempt": 1, "resume": None, "resume_step": 0},
        {"event": "worker.exited", "attempt": 1, "rank": 1, "exit_code": None, "signal": 9, "died_s": 30.0},
        {"event": "fault.requested", "fault": "F1", "attempt": 1, "rank": 1, "step": 30, "phase": "reduce", "requested_s": 1.0},
        {"event": "fault.observed", **landed},
        {"event": "checkpoint.quarantined", "name": "step-00000030", "step": 30, "reason": "r"},
        {"event": "attempt.starting", "attempt": 2, "resume": "step-00000020", "resume_step": 20},
    ]
    for record in records[:2]:
        leg.take_record({"time_s": 90.0, **record})
    for number in range(1, 31):
        for rank in range(ranks):
            leg.take_trace(1, rank, line(number))
    for record in records[2:]:
        leg.take_record({"time_s": 90.0, **record})
    for number in range(21, steps + 1):
        for rank in range(ranks):
            leg.take_trace(2, rank, line(number))
    run.legs["chaos"], run.began_s = leg, 10.0
    return run


def line(step: int) -> dict[str, Any]:
    return {"kind": "step", "step": step, "time_s": 30.25 + step * 0.5, "loss": [(4.0 / step).hex()]}


def text(run: RunPicture, width: int = 100, height: int = 40, **more: Any) -> str:
    return "\n".join(part.plain for part in draw(run, now_s=100.0, width=width, height=height, **more))


def test_a_page() -> None:
    assert [part.rstrip() for part in text(picture(), 80).splitlines()] == textwrap.dedent(
        """\
        small-1  chaos, attempt 2  1:30  eta 28 s
        legs        ▶ chaos
        steps       45 of 80  2/s                ━━━━━━━━━━━━━━━━━━━━━━┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
        loss        0.088889                     █▄▃▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁
        faults      1 of 2 landed                ┈┈┈┈┈┈┈┈┈┈┈┈┈┈●┈┈┈┈┈┈┈┈┈┈┈┈┈┈○┈┈┈┈┈┈┈┈┈
        checkpoints 1, last 20, 1 quarantined    ┈┈┈┈┈┈┈┈┈▪┈┈┈┈x┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
        rank 0      attempt 2 45 training        ━━━━━━━━━━━━━━━━━━━━━━┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
        rank 1      attempt 2 45 training        ━━━━━━━━━━━━━━━━━━━━━━┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
        rank 2      attempt 2 45 training        ━━━━━━━━━━━━━━━━━━━━━━┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
        F1          ● landed  attempt 1: SIGKILL rank 1 inside the gradient all-reduce …
        F2          ○ planned SIGKILL rank 0 after step 60
        restarts    1, 10 steps lost, recovery 11 s
        last        attempt 2 starts from step-00000020, 10 s ago"""
    ).splitlines()


def test_narrow() -> None:
    page = text(picture(), 60)
    assert "rank 1      #2 45 training" in page
    assert "checkpoints 1, last 20, 1 bad" in page
    assert max(map(len, page.splitlines())) == 60


def test_a_long_name_gives_way_to_what_changes() -> None:
    run = picture()
    run.run_id = "a-model-with-a-long-name-20260102-030405"
    rest = "  chaos, attempt 2  1:30  eta 28 s"
    for width, name in ((100, run.run_id), (60, run.run_id[:25] + "…"), (50, run.run_id[:15] + "…")):
        assert text(run, width).splitlines()[0] == name + rest
    assert text(run, 50, signs=ASCII).splitlines()[0] == run.run_id[:13] + "..." + rest


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_fits(ranks: int) -> None:
    run = picture(ranks)
    for width in (1, 10, 20, 30, 59, 60, 79, 80, 200):
        for height in (1, 2, 3, 5, 8, 12, 24, 60):
            lines = draw(run, now_s=100.0, width=width, height=height)
            assert 0 < len(lines) <= height
            assert max(part.cell_len for part in lines) <= width


def test_what_is_given_up_first_on_a_short_terminal() -> None:
    shown = [{part[:11].rstrip() for part in text(picture(), 100, height).splitlines()} for height in range(2, 14)]
    assert shown[0] == {"small-1  ch", "steps"}
    assert "last" in shown[1]
    for fewer, more in pairwise(shown):
        assert {part for part in fewer if not part.endswith("ranks")} <= more
    assert {"rank 0", "rank 2", "F1", "F2", "checkpoints", "restarts"} <= shown[-1]


def test_many_ranks_are_summed_up() -> None:
    run = picture(64)
    leg = run.legs["chaos"]
    leg.lanes[40].end("hung")
    leg.take_trace(2, 3, line(46))
    page = text(run, 100, 14).splitlines()
    lanes = [part for part in page if "rank" in part[:12]]
    assert lanes[0].startswith("rank 0")
    assert any(part.startswith("rank 40     attempt 2 45 hung") for part in lanes)
    summed = lanes[-1].split()
    assert summed[0] == f"+{64 - len(lanes) + 1}"
    assert "training" in lanes[-1]
    assert len(page) == 14


def test_all_ranks_in_one_line() -> None:
    run = picture(64)
    run.legs["chaos"].lanes[40].end("hung")
    page = text(run, 100, 6)
    assert "64 ranks    step 45: 63 training, 1 hung" in page


def test_many_faults_are_shown_around_now() -> None:
    run = picture()
    run.faults = tuple(Fault(id=f"F{number}", rank=0, at_step=number, source="s") for number in range(1, 31))
    for number in range(1, 11):
        about = {"attempt": 1, "rank": 0, "step": number, "time_s": 1.0}
        run.legs["chaos"].take_marker(f"F{number}", about)
    page = text(run, 100, 18).splitlines()
    listed = [part.split()[0] for part in page if part.startswith("F") and part[1].isdigit()]
    assert "F10" in listed and "F11" in listed
    assert f"… {30 - len(listed)} more faults" in "\n".join(page)


def test_states_of_faults() -> None:
    run = picture()
    leg = run.legs["chaos"]
    leg.take_marker("F2", {"attempt": 2, "rank": 0, "step": 61, "time_s": 1.0})
    assert "F2          ◐ fired   attempt 2, step 61: SIGKILL rank 0 after step 60" in text(run)
    found = {"problem": "it went on"}
    about = {"fault": "F2", "attempt": 2, "rank": 0, "pid": 7, "how": "note", "found": found}
    leg.take_record({"event": "fault.observed", **about})
    assert "F2          ◇ missed" in text(run)


def test_an_end_that_nobody_knows() -> None:
    run = picture(of=None, steps=45)
    run.faults = ()
    page = text(run)
    assert "steps       45  2/s" in page
    bar = next(part for part in page.splitlines() if part.startswith("steps")).split()[-1]
    assert 0 < bar.count("┈") < bar.count("━")
    assert "eta" not in page


def test_before_there_is_anything() -> None:
    assert text(RunPicture(run_id="small-1", began_s=97.0)) == "small-1  0:03\nlast        waiting for Ray and its workers"


def test_silence_is_shown() -> None:
    from chaosrun.records.heartbeat import Heartbeat

    run = picture()
    beat = Heartbeat(count=1, step=46, stage="forward", silent_s=75.0, first={}, longest={})
    run.legs["chaos"].take_beat(2, beat)
    assert "rank 2      attempt 2 45 silent 1m15s" in text(run)


def test_damage_is_said() -> None:
    run = picture()
    run.legs["chaos"].take_record({"event": "hang.declared"})
    assert "last        chaos: a record is not what it should be (KeyError: 'first')" in text(run)


def test_a_cached_reference_is_told() -> None:
    run = picture()
    reference = LegPicture("reference")
    reference.take_record({"event": "leg.finished", "outcome": "completed", "final_step": 80})
    run.legs = {"reference": reference, **run.legs}
    run.facts = RunFacts(max_steps=80, reference_source="/elsewhere")
    assert "✓ reference 80 steps, from the cache   ▶ chaos" in text(run)


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x1b]0;title\x07", "\r\n", "\x9b31m", "\u202e", "\x00", "\x7f", "\ud800"])
def test_names_cannot_command_the_terminal(evil: str) -> None:
    run = picture()
    run.run_id = f"small{evil}1"
    run.faults = (Fault(id=f"F{evil}1", rank=0, at_step=3, source="s"),)
    leg = run.legs["chaos"]
    leg.lanes[0].end("failed", f"because{evil}")
    leg.take_record({"event": f"new{evil}", "time_s": 1.0})
    leg.damage = f"bad{evil}"
    assert all(part.isprintable() for part in text(run).split("\n"))


def test_without_unicode() -> None:
    page = text(picture(), signs=ASCII)
    assert page.isascii()
    assert "steps       45 of 80" in page


def test_colours_say_nothing_alone() -> None:
    """Without colours the page is the same text; with them, states have their own."""
    lines = draw(picture(), now_s=100.0, width=100, height=40)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    for part in lines:
        console.print(part, no_wrap=True, crop=True)
    coloured = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "\x1b[32mtraining" in coloured
    assert {"planned", "landed"} <= set(text(picture()).split())


@pytest.mark.parametrize(
    ("losses", "width", "expected"),
    [
        ({}, 5, ""),
        ({1: 1.0}, 4, "▁"),
        ({1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}, 4, "█▆▃▁"),
        ({step: 2.0 if step <= 4 else 1.0 for step in range(1, 9)}, 4, "██▁▁"),
        ({3: 1.0, 4: 2.0}, 4, "  ▁█"),
        ({1: 1.0, 2: 2.0}, 4, "▁▁██"),
        ({1: 1.0, 2: float("nan"), 3: float("inf"), 4: 2.0}, 4, "▁!!█"),
        ({1: float("nan")}, 4, "!"),
        ({1: 1.0, 2: 1.0}, 2, "▁▁"),
    ],
)
def test_sparkline(losses: dict[int, float], width: int, expected: str) -> None:
    last = max(losses, default=1) if len(losses) != 1 else 4
    assert sparkline(losses, last, width) == expected


def test_ten_thousand_steps_fit_a_line() -> None:
    losses = {step: 1.0 / step for step in range(1, 10_001)}
    assert len(sparkline(losses, 10_000, 60)) == 60


class TestScreen:
    """Frames on a terminal, by a terminal that refuses sequences which it does not know."""

    def grid(self, stream: io.StringIO, columns: int = 20, rows: int = 10) -> Grid:
        return Grid(columns, rows).feed(stream.getvalue())

    def show(self, screen: Screen, *lines: str, columns: int = 20, above: str = "") -> None:
        screen.draw(lines, [len(part) for part in lines], columns=columns, above=above)

    def test_frames_take_each_others_place(self) -> None:
        stream = io.StringIO("before\r\n")
        stream.seek(0, io.SEEK_END)
        screen = Screen(stream)
        self.show(screen, "one", "two", "three")
        self.show(screen, "four")
        assert self.grid(stream).text == "before\nfour"
        self.show(screen, "five", "six", above="stays\n")
        assert self.grid(stream).text == "before\nstays\nfive\nsix"
        self.show(screen)
        assert self.grid(stream).text == "before\nstays\n"
        assert not self.grid(stream).is_cursor_hidden

    def test_a_frame_that_is_the_same_is_not_written(self) -> None:
        stream = io.StringIO()
        screen = Screen(stream)
        self.show(screen, "one")
        written = stream.getvalue()
        self.show(screen, "one")
        assert stream.getvalue() == written

    def test_no_frame_begins_by_erasing(self) -> None:
        """What flickers is what is blank before it is drawn again."""
        stream = io.StringIO()
        screen = Screen(stream)
        self.show(screen, "one", "two")
        self.show(screen, "one", "six")
        second = stream.getvalue().split("\x1b[?25l")[2]
        assert second.index("one") < second.index("\x1b[K")
        assert second.index("six") < second.index("\x1b[J")

    def test_each_frame_hides_the_cursor_for_itself_alone(self) -> None:
        stream = io.StringIO()
        screen = Screen(stream)
        for number in range(5):
            self.show(screen, str(number))
        frames = stream.getvalue().split("\x1b[?25l")[1:]
        assert len(frames) == 5
        assert all(frame.endswith("\x1b[?25h") for frame in frames)

    def test_a_terminal_that_became_narrower(self) -> None:
        """It has wrapped the lines: the frame takes as many rows as it did then."""
        stream = io.StringIO()
        screen = Screen(stream)
        self.show(screen, "x" * 15, "y" * 15, columns=20)
        wrapped = Grid(10, 10).feed("before\r\n" + "x" * 10 + "\r\n" + "x" * 5 + "\r\n" + "y" * 10 + "\r\n" + "y" * 5)
        stream.truncate(0)
        stream.seek(0)
        self.show(screen, "x" * 9, "y" * 9, columns=10)
        assert wrapped.feed(stream.getvalue()).text == "before\n" + "x" * 9 + "\n" + "y" * 9

    def test_a_stream_that_lacks_a_character(self) -> None:
        raw = io.BytesIO()
        screen = Screen(io.TextIOWrapper(raw, encoding="ascii", newline=""))
        self.show(screen, "naïve")
        assert (screen.is_gone, b"na?ve" in raw.getvalue()) == (False, True)

    def test_the_grid_refuses_what_it_does_not_know(self) -> None:
        with pytest.raises(AssertionError):
            Grid(20, 10).feed("\x1b[2J")


SHOWN = """\
import os, sys, time
sys.path[:0] = [{tests!r}]
from chaosrun.report.live import LiveProgress, is_live_terminal
from chaosrun.report.watch import watch
from chaosrun.records.layout import RunLayout
from pathlib import Path

run = RunLayout(Path({run!r}))
{body}
"""
WATCH = (
    "watch(run, stream=sys.stderr, terminal=is_live_terminal(sys.stderr, os.environ), ended=lambda: Path({stop!r}).exists())"
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The files of a run that goes on."""
    from chaosrun.records.journal import Journal
    from chaosrun.records.layout import RunLayout

    run = RunLayout(tmp_path / "runs" / "small-1")
    run.path.mkdir(parents=True)
    run.run_json.write_text(json.dumps({"created_s": time.time(), "spec": {"name": "small", "workers": 2, "max_steps": 9}}))
    journal = Journal(run.leg("chaos").journal)
    journal.append(event("leg.started", leg="chaos", workers=2, supervisor_pid=1))
    journal.append(event("attempt.starting", attempt=1, resume=None, resume_step=0, armed=[]))
    journal.close()
    return run.path


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def until(condition: Any, what: Any = None, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, what() if what else "not in time"
        time.sleep(0.02)


class TestTerminal:
    """A process of its own in a pty."""

    def open(self, terminals: list[Terminal], small: Path, body: str, **more: Any) -> Terminal:
        script = SHOWN.format(tests=str(Path(__file__).parents[2]), run=str(small), body=body)
        terminal = Terminal(sys.executable, "-c", script, **more)
        terminals.append(terminal)
        return terminal

    def watching(self, terminals: list[Terminal], small: Path, **more: Any) -> Terminal:
        terminal = self.open(terminals, small, WATCH.format(stop=str(small / "stop")), **more)
        if more.get("environment", {}).get("TERM") != "dumb":
            until(lambda: "rank 1" in terminal.grid.text, lambda: terminal.output)
        return terminal

    def test_the_end_leaves_nothing(self, terminals: list[Terminal], small: Path) -> None:
        terminal = self.watching(terminals, small)
        assert "\x1b[33mstarting" in terminal.output
        (small / "stop").touch()
        assert terminal.wait() == 0
        assert (terminal.grid.text.strip(), terminal.grid.is_cursor_hidden) == ("", False)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
    def test_signals_leave_the_cursor(self, terminals: list[Terminal], small: Path, number: signal.Signals) -> None:
        terminal = self.watching(terminals, small)
        os.kill(terminal.process.pid, number)
        code = terminal.wait()
        assert code != 0
        assert not terminal.grid.is_cursor_hidden

    def test_an_exception_leaves_the_cursor_and_no_picture(self, terminals: list[Terminal], small: Path) -> None:
        body = "with LiveProgress(sys.stderr, terminal=True, run=run):\n"
        body += f"    while not Path({str(small / 'stop')!r}).exists(): time.sleep(0.01)\n    raise ValueError('mine')"
        terminal = self.open(terminals, small, body)
        until(lambda: "rank 1" in terminal.output, lambda: terminal.output)
        (small / "stop").touch()
        assert terminal.wait() == 1
        assert terminal.grid.text.startswith("Traceback")
        assert not terminal.grid.is_cursor_hidden

    def test_another_size(self, terminals: list[Terminal], small: Path) -> None:
        terminal = self.watching(terminals, small)
        terminal.resize(60, 5)
        until(lambda: "2 ranks " in terminal.output, lambda: terminal.output)
        terminal.resize(90, 40)
        until(lambda: terminal.output.rpartition("2 ranks ")[2].count("rank 0 ") > 0, lambda: terminal.output)

    def test_no_colour(self, terminals: list[Terminal], small: Path) -> None:
        terminal = self.watching(terminals, small, environment={"NO_COLOR": "1"})
        assert not re.search(r"\x1b\[[0-9;]*m", terminal.output)

    def test_a_dumb_terminal_gets_lines(self, terminals: list[Terminal], small: Path) -> None:
        terminal = self.watching(terminals, small, environment={"TERM": "dumb"})
        until(lambda: "attempt 1 starts" in terminal.output, lambda: terminal.output)
        assert "\x1b" not in terminal.output

    def test_not_unicode(self, terminals: list[Terminal], small: Path) -> None:
        terminal = self.watching(terminals, small, environment={"PYTHONIOENCODING": "ascii"})
        assert terminal.output.isascii()

    def test_a_terminal_that_goes_away(self, terminals: list[Terminal], small: Path, tmp_path: Path) -> None:
        """Its process gets SIGHUP, as any does; one that ignores it goes on to the end."""
        body = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + WATCH.format(stop=str(small / "stop"))
        body += f"\nPath({str(tmp_path / 'done')!r}).touch()"
        terminal = self.open(terminals, small, body)
        until(lambda: "rank 1" in terminal.grid.text, lambda: terminal.output)
        terminal.hang_up()
        time.sleep(0.5)
        (small / "stop").touch()
        until((tmp_path / "done").exists)
