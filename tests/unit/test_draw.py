"""How a picture looks at any size, and that the terminal it is drawn on is left as it was."""

import io
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chaosrun.faults.fault import Fault
from chaosrun.records.layout import LegLayout
from chaosrun.report.draw import ASCII, draw, sparkline
from chaosrun.report.facts import RunFacts
from chaosrun.report.picture import FaultSeen, LegPicture, RunPicture, TraceLine
from tests.terminal import Terminal
from tests.unit.events import event, history
from tests.unit.run_files import write_info

REQUESTED = {"event": "fault.requested", "fault": "F1", "attempt": 1, "rank": 1, "step": 30, "phase": "reduce"}
RECORDS: list[dict[str, Any]] = [
    {"event": "attempt.starting", "attempt": 1},
    {"event": "worker.exited", "rank": 1, "signal": 9, "died_s": 30.0},
    REQUESTED,
    {"event": "fault.observed", "rank": 1, "pid": 7, "signal": 9},
    {"event": "checkpoint.quarantined", "name": "step-00000030", "step": 30, "reason": "r"},
    {"event": "attempt.starting", "attempt": 2, "resume": "step-00000020", "resume_step": 20, "time_s": 90.0},
]


def picture(ranks: int = 3, *, steps: int = 45, of: int | None = 80, more: Sequence[dict[str, Any]] = ()) -> RunPicture:
    """A chaos leg in its second attempt: one fault has landed, one is to come, one checkpoint was no good."""
    faults = (
        Fault(id="F1", rank=1, at_step=30, phase="reduce", source="a"),
        Fault(id="F2", rank=0, at_step=60, source="b"),
    )
    facts = RunFacts(max_steps=of, every_steps=10, created_s=10.0)
    leg, run = LegPicture("chaos", LegLayout(Path("chaos"))), RunPicture(run_id="small-1", facts=facts, faults=faults)
    records = [{"event": "leg.started", "workers": ranks}, *RECORDS, *more]
    for told, attempt, done in ((2, 1, range(1, 31)), (len(records), 2, range(21, steps + 1))):
        leg.take_history(history(*records[:told]))
        for number in done:
            for rank in range(ranks):
                leg.take_trace(attempt, rank, line(number))
    leg.faults["F1"].state = "landed"
    run.legs["chaos"] = leg
    return run


def line(step: int) -> TraceLine:
    return TraceLine(kind="step", step=step, time_s=30.25 + step * 0.5, loss=((4.0 / step).hex(),))


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
        F1          ● landed  attempt 1: SIGKILL rank 1 inside the gradient all-reduce
                              of step 30
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
    assert "64 ranks    step 45: 1 hung, 63 training" in page


def test_many_faults_are_shown_around_now() -> None:
    run = picture()
    run.faults = tuple(Fault(id=f"F{number}", rank=0, at_step=number, source="s") for number in range(1, 31))
    run.legs["chaos"].faults = {f"F{number}": FaultSeen(state="fired", attempt=1, step=number) for number in range(1, 11)}
    page = text(run, 100, 18).splitlines()
    listed = [part.split()[0] for part in page if part.startswith("F") and part[1].isdigit()]
    assert "F10" in listed and "F11" in listed
    assert f"… {30 - len(listed)} more faults" in "\n".join(page)


def test_states_of_faults() -> None:
    run = picture()
    seen = run.legs["chaos"].faults["F2"] = FaultSeen(state="fired", attempt=2, rank=0, step=61)
    assert "F2          ◐ fired   attempt 2, step 61: SIGKILL rank 0 after step 60" in text(run)
    seen.state = "missed"
    assert "F2          ◇ missed" in text(run)


def test_an_end_that_nobody_knows() -> None:
    """No bar as if the end were known: a sign that turns, and the rate."""
    run = picture(of=None, steps=45)
    run.faults = ()
    page = [part.rstrip() for part in text(run).splitlines()]
    assert "steps       ⠋ 45  2/s" in page and "rank 0      attempt 2 45 training" in page
    assert "eta" not in page[0]


def test_before_there_is_anything() -> None:
    assert text(RunPicture(run_id="small-1", resumed_s=97.0)) == "small-1  0:03\nlast        waiting for Ray and its workers"


def test_silence_is_shown() -> None:
    from chaosrun.records.heartbeat import Heartbeat

    run = picture()
    beat = Heartbeat(count=1, step=46, stage="forward", silent_s=75.0, first={}, longest={})
    run.legs["chaos"].take_beat(2, beat)
    assert "rank 2      attempt 2 45 silent 1m15s" in text(run)


def test_damage_is_said() -> None:
    run = picture()
    run.legs["chaos"].damage[Path("/run/journal.jsonl")] = "line 7: not a JSON record"
    assert "last        chaos: journal.jsonl: line 7: not a JSON record" in text(run)


def test_a_cached_reference_is_told() -> None:
    run = picture()
    reference = LegPicture("reference", LegLayout(Path("reference")))
    reference.take_history(history({"event": "leg.finished", "final_step": 80}))
    run.legs = {"reference": reference, **run.legs}
    run.facts = RunFacts(max_steps=80, reference_source="/elsewhere")
    assert "✓ reference 80 steps, from the cache   ▶ chaos" in text(run)


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x1b]0;title\x07", "\r\n", "\x9b31m", "\u202e", "\x00", "\x7f", "\ud800"])
def test_names_cannot_command_the_terminal(evil: str) -> None:
    run = picture(more=[{"event": "leg.finished", "outcome": "user_error", "message": f"because{evil}"}])
    run.run_id = f"small{evil}1"
    run.faults = (Fault(id=f"F{evil}1", rank=0, at_step=3, source="s"),)
    leg = run.legs["chaos"]
    leg.lanes[0].end("failed", f"because{evil}")
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


SHOWN = """\
import os, sys, time
sys.path[:0] = [{tests!r}]
from chaosrun.report.live import LiveProgress, is_live_terminal, watch
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
    write_info(run, created_s=time.time(), spec={"name": "small", "workers": 2, "max_steps": 9})
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
