"""How a picture looks at any size, and that the terminal it is drawn on is left as it was."""

import io
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chaosrun.faults.fault import Fault
from chaosrun.records.heartbeat import Heartbeat
from chaosrun.report.draw import draw
from chaosrun.report.facts import RunFacts
from chaosrun.report.output import LeavingStream
from chaosrun.report.picture import FaultSeen, RunPicture
from tests.terminal import Terminal
from tests.unit.events import leg_picture, trace
from tests.unit.run_files import tell, write_info

REQUESTED = {"event": "fault.requested", "fault": "F1", "attempt": 1, "rank": 1, "step": 30, "phase": "reduce"}
RECORDS: list[dict[str, Any]] = [
    {"event": "attempt.starting", "attempt": 1},
    {"event": "worker.exited", "rank": 1, "signal": 9, "died_s": 30.0},
    REQUESTED,
    {"event": "fault.observed", "rank": 1, "pid": 7, "signal": 9},
    {"event": "checkpoint.quarantined", "name": "step-00000030", "step": 30, "reason": "r"},
    {"event": "attempt.starting", "attempt": 2, "resume": "step-00000020", "resume_step": 20, "time_s": 90.0},
]


def picture(
    ranks: int = 3,
    *,
    of: int | None = 80,
    more: Sequence[dict[str, Any]] = (),
    beats: Mapping[int, Heartbeat] | None = None,
    damage: tuple[str, ...] = (),
) -> RunPicture:
    """A chaos leg in its second attempt: one fault has landed, one is to come, one checkpoint was no good."""
    faults = (Fault(id="F1", rank=1, at_step=30, phase="reduce", source="a"), Fault(id="F2", rank=0, at_step=60, source="b"))
    traces = [trace(1, rank, range(1, 31)) for rank in range(ranks)]
    traces += [trace(2, rank, range(21, 46)) for rank in range(ranks)]
    records = [{"event": "leg.started", "workers": ranks}, *RECORDS, *more]
    seen = {"F1": FaultSeen(state="landed", attempt=1, rank=1, step=30)}
    leg = leg_picture(records, *traces, beats=beats, faults=seen, kept=(20, 40), damage=damage)
    facts = RunFacts(max_steps=of, every_steps=10, created_s=10.0)
    return RunPicture(run_id="small-1", facts=facts, faults=faults, legs={"chaos": leg})


def text(run: RunPicture, width: int = 100, height: int = 40) -> str:
    return "\n".join(part.plain.rstrip() for part in draw(run, now_s=100.0, width=width, height=height))


def test_a_page() -> None:
    page = """\
        chaos, attempt 2  1:30  eta 18 s  small-1
        legs        ▶ chaos
        steps       45 of 80  2/s              ━━━━━━━━━━━━━━━━━━━━━━━━┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
        last        attempt 2 starts from step-00000020, 10 s ago
        faults      1 of 2 landed              ┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈●┈┈┈┈┈┈┈┈┈┈┈┈┈┈○┈┈┈┈┈┈┈┈┈┈
        checkpoints 2, last 40, 1 quarantined  ┈┈┈┈┈┈┈┈┈┈▪┈┈┈┈x┈┈┈┈▪┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
        restarts    1, 10 steps lost
        rank 0      step 45 training
        rank 1      step 45 training
        rank 2      step 45 training
        F1          ● landed  attempt 1: SIGKILL rank 1 inside the gradient all-reduce
                              of step 30
        F2          ○ planned SIGKILL rank 0 after step 60"""
    assert text(picture(), 80) == textwrap.dedent(page)


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_fits(ranks: int) -> None:
    run = picture(ranks)
    for width in (1, 10, 20, 30, 59, 60, 79, 80, 200):
        for height in (1, 2, 3, 5, 8, 12, 24, 60):
            lines = draw(run, now_s=100.0, width=width, height=height)
            assert 0 < len(lines) <= height
            assert max(part.cell_len for part in lines) <= width


def test_many_ranks_are_summed_up() -> None:
    ended = {"event": "hang.declared", "attempt": 2, "first": 40, "message": "m"}
    lanes = [part for part in text(picture(64, more=[ended])).splitlines() if "rank" in part[:12]]
    assert lanes[0].startswith("rank 0")
    assert "rank 40     step 45 hung" in lanes
    assert lanes[-1] == "+53 ranks   step 45: 53 training"


def test_many_faults_are_shown_around_now() -> None:
    run = picture()
    run.faults = tuple(Fault(id=f"F{number}", rank=0, at_step=number, source="s") for number in range(1, 31))
    seen = {f"F{number}": FaultSeen(state="fired", attempt=1, step=number) for number in range(1, 11)}
    run.legs["chaos"] = replace(run.legs["chaos"], faults=seen)
    page = text(run).splitlines()
    listed = [part.split()[0] for part in page if part.startswith("F") and part[1].isdigit()]
    assert "F10" in listed and "F11" in listed
    assert f"… {30 - len(listed)} more faults" in page[-1]


@pytest.mark.parametrize(
    ("state", "line"),
    [("fired", "F2          ◐ fired   attempt 2, step 61: SIGKILL rank 0 after step 60"), ("missed", "F2          ◇ missed")],
)
def test_states_of_faults(state: Any, line: str) -> None:
    run = picture()
    seen = FaultSeen(state=state, attempt=2, rank=0, step=61)
    run.legs["chaos"] = replace(run.legs["chaos"], faults={"F2": seen})
    assert line in text(run)


def test_an_end_that_nobody_knows() -> None:
    """No bar as if the end were known, nor places of faults and checkpoints; while it is drawn again and again, a spinner."""
    run = picture(of=None)
    page = text(run).splitlines()
    assert "steps       45  2/s" in page and "eta" not in page[0]
    assert "faults      1 of 2 landed" in page and "checkpoints 2, last 40, 1 quarantined" in page
    turns = [draw(run, now_s=100.0 + number / 5, width=80, live=True)[2].plain for number in range(5)]
    assert len(set(turns)) == 4 and turns[0] == turns[4] and turns[0].startswith("steps       45  2/s  ")
    known = draw(picture(), now_s=100.0, width=80, live=True)[2].plain
    assert known == draw(picture(), now_s=100.1, width=80, live=True)[2].plain and "━" in known


def test_before_there_is_anything() -> None:
    assert text(RunPicture(run_id="small-1", resumed_s=97.0)) == "0:03  small-1\nlast        waiting for the first leg"


def test_silence_is_shown() -> None:
    beat = Heartbeat(count=1, step=46, stage="forward", silent_s=75.0, first={}, longest={})
    assert "rank 2      step 45 silent 1m15s" in text(picture(beats={2: beat}))


def test_damage_is_said() -> None:
    assert "last        /run/journal.jsonl: line 7: no JSON" in text(picture(damage=("/run/journal.jsonl: line 7: no JSON",)))


def test_a_cached_reference_is_told() -> None:
    run = picture()
    run.legs = {"reference": leg_picture([{"event": "leg.finished", "final_step": 80}], name="reference"), **run.legs}
    run.facts = RunFacts(max_steps=80, reference_source="/elsewhere")
    assert "✓ reference 80 steps, from the cache   ▶ chaos" in text(run)
    run.facts = RunFacts(max_steps=80, reference_source="/elsewhere", reference_run="small-1")
    assert "✓ reference 80 steps, from run small-1   ▶ chaos" in text(run)


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x1b]0;title\x07", "\r\n", "\x9b31m", "\u202e", "\x00", "\x7f", "\ud800"])
def test_names_cannot_command_the_terminal(evil: str) -> None:
    run = picture(more=[{"event": "leg.finished", "outcome": "user_error", "message": f"because{evil}"}])
    run.run_id = f"small{evil}1"
    run.faults = (Fault(id=f"F{evil}1", rank=0, at_step=3, source="s"),)
    run.legs["chaos"].lanes[0].end("failed", f"because{evil}")
    assert all(part.isprintable() for part in text(run).split("\n"))


def test_without_unicode() -> None:
    file = io.BytesIO()
    stream = io.TextIOWrapper(file, encoding="ascii")
    LeavingStream(stream).write(text(picture()))
    page = file.getvalue().decode()
    assert "45 of 80  2/s              =====" in page and "F1          @ landed" in page and "?" not in page


def test_colours_say_nothing_alone() -> None:
    """Without colours the page is the same text; with them, states have their own."""
    lines = draw(picture(), now_s=100.0, width=100, height=40)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    for part in lines:
        console.print(part, no_wrap=True, crop=True)
    coloured = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "\x1b[32mtraining" in coloured
    assert {"planned", "landed"} <= set(text(picture()).split())


SHOWN = """\
import os, sys, time
sys.path[:0] = [{tests!r}]
from chaosrun.report.live import Display, LiveProgress, is_live_terminal, watch
from chaosrun.records.layout import RunLayout
from pathlib import Path

run = RunLayout(Path({run!r}))
{body}
"""
WATCH = "watch(run, stream=sys.stderr, terminal=is_live_terminal(sys.stderr, os.environ), ended=Path({stop!r}).exists)"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The files of a run that goes on."""
    from chaosrun.records.layout import RunLayout

    run = RunLayout(tmp_path / "runs" / "small-1")
    run.path.mkdir(parents=True)
    write_info(run, created_s=time.time(), spec={"name": "small", "workers": 2, "max_steps": 9})
    tell(run, {"event": "leg.started", "leg": "chaos", "workers": 2}, {"event": "attempt.starting", "attempt": 1})
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
        body = "with LiveProgress(Display(sys.stderr, terminal=True), run):\n"
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
        until(lambda: "last " in terminal.grid.text and "rank 0 " not in terminal.grid.text, lambda: terminal.output)
        terminal.resize(90, 40)
        until(lambda: "rank 0 " in terminal.grid.text, lambda: terminal.output)

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
