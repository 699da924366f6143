"""`logs` and `status -w`: what they print while a run goes on, whatever lies in its files, and that they end with it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaosrun import cli
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.layout import RunLayout
from chaosrun.report.escapes import harmless
from chaosrun.report.follow import RunFollower
from chaosrun.report.html.page import environment
from chaosrun.report.logs import LogFollower, last_written
from chaosrun.supervise.drill import lock_run
from tests.terminal import Terminal
from tests.unit import run_files
from tests.unit.run_files import begin_trace, write_info

COMMAND = Path(sys.executable).with_name("chaosrun")
tell = partial(run_files.tell, clock=lambda: 1000.0)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "root" / "runs" / "small-1")
    layout.path.mkdir(parents=True)
    plan = FaultPlan(seed=1, faults=(Fault(id="F1", rank=1, at_step=7, source="s"),))
    write_info(layout, plan, spec={"name": "small", "workers": 2, "max_steps": 9})
    return layout


def write(run: RunLayout, leg: str, attempt: int, rank: int, data: bytes) -> None:
    path = run.leg(leg).attempt(attempt).log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def tell_at_once(run: RunLayout, leg: str, *records: dict[str, Any]) -> None:
    """The journal is there with all of them, or is not there."""
    elsewhere = RunLayout(run.path.with_name("elsewhere"))
    tell(elsewhere, *records, leg=leg)
    run.leg(leg).path.mkdir(parents=True, exist_ok=True)
    elsewhere.leg(leg).journal.rename(run.leg(leg).journal)
    shutil.rmtree(elsewhere.path)


def test_what_a_launcher_printed_comes_first(run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "chaos", 1, 0, b"a rank\n")
    run.leg("chaos").attempt(1).launcher_log(0).write_bytes(b"no module named x\n")
    where = ["--root", str(run.path.parents[1]), "--quiet"]
    assert cli.main(["logs", "latest", *where]) == 0
    heads = ["==> chaos, attempt 1, launcher of node 0 <==", "==> chaos, attempt 1, rank 0 <=="]
    assert capsys.readouterr().out.splitlines() == [heads[0], "no module named x", heads[1], "a rank"]
    assert cli.main(["logs", "latest", "--rank", "0", *where]) == 0
    assert capsys.readouterr().out == "a rank\n"
    run.leg("chaos").attempt(1).log(0).unlink()
    assert cli.main(["logs", "latest", "-f", *where]) == 0
    assert capsys.readouterr().out == "chaos/1/launcher-0 | no module named x\n"
    assert cli.main(["logs", "latest", "--rank", "0", *where]) == 2
    assert "see what the command printed" in capsys.readouterr().err


class TestFollower:
    def follow(self, run: RunLayout, **asked: Any) -> LogFollower:
        return LogFollower(run, **{"leg": None, "attempt": None, "rank": None, **asked})

    def lines(self, follower: LogFollower) -> list[str]:
        return [f"{line.log.origin} {line.text}" for line in follower.poll()]

    def test_from_the_last_attempt_on(self, run: RunLayout) -> None:
        write(run, "reference", 1, 0, b"old\n")
        write(run, "chaos", 1, 0, b"old\n")
        write(run, "chaos", 2, 0, b"a\nb")
        write(run, "chaos", 2, 1, b"c\n")
        follower = self.follow(run)
        assert self.lines(follower) == ["chaos/2/0 a", "chaos/2/1 c"]
        write(run, "chaos", 2, 0, b"b\n")
        write(run, "chaos", 3, 1, b"d\n")
        write(run, "confirm", 1, 1, b"e\n")
        assert self.lines(follower) == ["chaos/2/0 bb", "chaos/3/1 d", "confirm/1/1 e"]
        assert self.lines(follower) == []

    def test_before_there_is_anything(self, run: RunLayout) -> None:
        follower = self.follow(run)
        assert (self.lines(follower), follower.has_found) == ([], False)
        write(run, "reference", 1, 0, b"first\n")
        assert (self.lines(follower), follower.has_found) == (["reference/1/0 first"], True)

    def test_one_rank(self, run: RunLayout) -> None:
        follower = self.follow(run, rank=1)
        for attempt in (1, 2):
            for rank in (0, 1):
                write(run, "chaos", attempt, rank, b"x\n")
        assert self.lines(follower) == ["chaos/1/1 x", "chaos/2/1 x"]

    def test_what_is_asked_for_is_complete_when_something_later_has_begun(self, run: RunLayout) -> None:
        write(run, "reference", 1, 0, b"x\n")
        first, leg = self.follow(run, attempt=1), self.follow(run, leg="reference")
        assert not first.is_complete and not leg.is_complete
        write(run, "reference", 2, 0, b"y\n")
        assert (self.lines(first), first.is_complete) == (["reference/1/0 x"], True)
        over_before = self.follow(run, attempt=1)
        assert (self.lines(over_before), over_before.is_complete) == (["reference/1/0 x"], True)
        assert (self.lines(leg), leg.is_complete) == (["reference/1/0 x", "reference/2/0 y"], False)
        write(run, "chaos", 1, 0, b"z\n")
        assert (self.lines(leg), leg.is_complete) == ([], True)

    def test_the_last_line_needs_no_newline(self, run: RunLayout) -> None:
        follower = self.follow(run)
        write(run, "chaos", 1, 0, b"half")
        assert self.lines(follower) == []
        assert [line.text for line in follower.over()] == ["half"]

    def test_a_character_that_comes_in_two_parts(self, run: RunLayout) -> None:
        follower = self.follow(run)
        whole, lines = "naïve ∂\n".encode(), []
        for position in range(len(whole)):
            write(run, "chaos", 1, 0, whole[position : position + 1])
            lines = self.lines(follower)
        assert lines == ["chaos/1/0 naïve ∂"]

    @pytest.mark.parametrize(
        ("written", "lines"),
        [(b"a\xe2\x88\nb\xff\xfe\x00\n", ["a\ufffd", "b\ufffd\ufffd\x00"]), (b"\r 1%\r 2%\r100%\ndone\r\n", ["100%", "done"])],
    )
    def test_whatever_bytes_it_holds(self, run: RunLayout, written: bytes, lines: list[str]) -> None:
        write(run, "chaos", 1, 0, written)
        assert [line.text for line in self.follow(run).poll()] == lines

    def test_a_log_that_is_begun_again(self, run: RunLayout) -> None:
        write(run, "chaos", 1, 0, b"one\n")
        follower = self.follow(run)
        self.lines(follower)
        run.leg("chaos").attempt(1).log(0).write_bytes(b"2\n")
        assert self.lines(follower) == ["chaos/1/0 2"]

    def test_what_is_no_log(self, run: RunLayout) -> None:
        write(run, "chaos", 1, 0, b"one\n")
        folder = run.leg("chaos").attempt(1).path
        (folder / "rank-x.log").write_bytes(b"no\n")
        (folder / "rank-7.log").mkdir()
        assert self.lines(self.follow(run)) == ["chaos/1/0 one"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("plain\ttext é ∂", "plain\ttext é ∂"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b]0;t\x07", "␛]0;t␇"),
        ("a\x00b\x9bc\u202ed\x7f", "a␀b\ufffdc\ufffdd\ufffd"),
    ],
)
def test_harmless(line: str, expected: str) -> None:
    assert harmless(line) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10\u00a0000 co\u00adoperate 👩\u200d🔬\n\t", "10\u00a0000 co\u00adoperate 👩\u200d🔬\n\t"),
        ("\x1b[31mred\x1b[0m a\x00b\x9bc\udcffd", "red a␀b\ufffdc\ufffdd"),
    ],
)
def test_a_page_shows_what_a_browser_can(text: str, expected: str) -> None:
    assert environment().from_string("{{ text }}").render(text=text) == expected


def test_last_written() -> None:
    assert [last_written(line) for line in ("a", "a\r", "a\rb", "\r", "")] == ["a", "a", "b", "", ""]


class TestEvents:
    RECORDS: tuple[dict[str, Any], ...] = (
        {"event": "leg.started", "leg": "chaos", "workers": 2, "supervisor_pid": 41},
        {"event": "attempt.starting", "attempt": 1, "resume": None, "resume_step": 0, "armed": []},
        {"event": "fault.requested", "fault": "F1", "attempt": 1, "rank": 1, "step": 7, "phase": "step", "requested_s": 1042.5},
    )

    @pytest.mark.parametrize(
        ("asked", "events"),
        [
            (["--leg", "chaos"], ["fault.requested", "leg.started", "attempt.starting"]),
            (["--leg", "reference"], []),
            (["--rank", "1"], ["fault.requested"]),
            (["--rank", "0"], []),
            (["--attempt", "1"], ["fault.requested", "attempt.starting"]),
            (["--attempt", "2"], []),
        ],
    )
    def test_those_that_are_asked_for(
        self, run: RunLayout, asked: list[str], events: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        tell(run, *self.RECORDS, clock=lambda: 1050.0)
        where = ["--root", str(run.path.parents[1])]
        assert cli.main(["logs", "latest", "--events", "-o", "json", *asked, *where]) == 0
        told = json.loads(capsys.readouterr().out)["events"]
        assert [entry["record"]["event"] for entry in told] == events


class Followed:
    """A command that follows a run, and what it has printed."""

    def __init__(self, run: RunLayout, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [str(COMMAND), *arguments, "--root", str(run.path.parents[1])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.out = ""

    def until(self, condition: Callable[[str], bool]) -> None:
        deadline_s = time.monotonic() + 120
        while not condition(self._read()):
            assert time.monotonic() < deadline_s, self.out
            assert self._process.poll() is None, self.out + (self._process.communicate()[1] or "")
            time.sleep(0.02)

    def _read(self) -> str:
        assert self._process.stdout is not None
        block = os.read(self._process.stdout.fileno(), 1 << 16) if _readable(self._process.stdout.fileno()) else b""
        self.out += block.decode()
        return self.out

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close_output(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        code = self._process.wait(30)
        assert self._process.stdout is not None and self._process.stderr is not None
        if not self._process.stdout.closed:
            os.set_blocking(self._process.stdout.fileno(), True)
            self.out += self._process.stdout.read()
        return code, self._process.stderr.read()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _readable(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0)[0])


@contextmanager
def following(run: RunLayout, *arguments: str) -> Iterator[Followed]:
    followed = Followed(run, *arguments)
    try:
        yield followed
    finally:
        followed.kill()


class TestCommands:
    """The commands beside a run that this process "supervises": it holds its lock."""

    def test_logs_until_the_run_ends(self, run: RunLayout) -> None:
        write(run, "reference", 1, 0, b"hello\n")
        with following(run, "logs", "latest", "-f") as followed:
            with lock_run(run):
                followed.until(lambda out: out == "reference/1/0 | hello\n")
                write(run, "chaos", 1, 1, b"one\ntw")
                followed.until(lambda out: out.endswith("chaos/1/1 | one\n"))
                write(run, "chaos", 2, 0, b"three\n")
            assert followed.end() == (0, "")
        assert sorted(followed.out.splitlines()[2:]) == ["chaos/1/1 | tw", "chaos/2/0 | three"]

    def test_of_a_run_that_has_ended(self, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        write(run, "chaos", 1, 0, b"hello\n\xff\n")
        where = ["--root", str(run.path.parents[1])]
        assert cli.main(["logs", "latest", "-f", "-o", "json", "--rank", "0", "--attempt", "1", *where]) == 0
        about = {"v": 1, "leg": "chaos", "attempt": 1, "rank": 0}
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
            {**about, "line": "hello"},
            {**about, "line": "\ufffd"},
        ]
        # A single log needs no prefix.
        assert cli.main(["logs", "latest", "-f", "--rank", "0", "--attempt", "1", *where]) == 0
        assert capsys.readouterr().out == "hello\n\ufffd\n"
        assert cli.main(["logs", "latest", "-f", "--rank", "7", *where]) == 2
        assert "has no rank 7" in capsys.readouterr().err
        assert cli.main(["status", "latest", "-w", *where]) == 0
        assert "state       not started" in capsys.readouterr().out

    def test_all_of_a_run_that_has_ended(self, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
            write(run, leg, attempt, 0, f"{leg} {attempt}\n".encode())
        where = ["--root", str(run.path.parents[1])]
        assert cli.main(["logs", "latest", "-f", *where]) == 0
        every = ["reference/1/0 | reference 1", "chaos/1/0 | chaos 1", "chaos/2/0 | chaos 2"]
        assert capsys.readouterr().out.splitlines() == every
        assert cli.main(["logs", "latest", "-f", "--leg", "chaos", *where]) == 0
        assert capsys.readouterr().out.splitlines() == every[1:]

    def test_says_which_attempt_of_which_leg_is_shown(self, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        write(run, "chaos", 1, 0, b"first\n")
        where = ["--root", str(run.path.parents[1])]
        assert cli.main(["logs", "latest", *where]) == 0
        assert capsys.readouterr() == ("first\n", ""), "there are no others"
        write(run, "reference", 1, 0, b"undisturbed\n")
        write(run, "chaos", 2, 0, b"second\n")
        assert cli.main(["logs", "latest", *where]) == 0
        told = "this is attempt 2 of the chaos leg; --attempt, --leg and -f show others"
        assert capsys.readouterr() == ("second\n", f"{told}\n")
        for more in (["--quiet"], ["--attempt", "2"], ["-o", "json"]):
            assert cli.main(["logs", "latest", *more, *where]) == 0
            assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("command", ["list", "status latest", "logs latest"])
    def test_paths_in_json_hold_anywhere(
        self, run: RunLayout, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(run, "chaos", 1, 0, b"hello\n")
        monkeypatch.chdir(run.path.parents[2])
        assert cli.main([*command.split(), "-o", "json", "--root", "root"]) == 0
        found = re.findall(r'"path": ?"(.*?)"', capsys.readouterr().out)
        assert found and all(os.path.isabs(path) and os.path.exists(path) for path in found)

    def test_events_of_a_run_that_has_ended(self, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        tell(run, *TestEvents.RECORDS, clock=lambda: 1050.0)
        where = ["--root", str(run.path.parents[1])]
        assert cli.main(["logs", "latest", "--events", "-o", "json", *where]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["v"], told["run"]) == (1, "small-1")
        assert [event["sentence"] for event in told["events"]] == [
            # It fires before it is written down, and before what was written in the same moment.
            "F1 fired: rank 1, step 7",
            "started, 2 workers",
            "attempt 1 starts from the beginning",
        ]
        assert cli.main(["logs", "latest", "--events", *where]) == 0
        clock = time.strftime("%H:%M:%S", time.localtime(1042.5))
        assert capsys.readouterr().out.startswith(f"{clock} [0:42] chaos: F1 fired: rank 1, step 7\n")
        assert cli.main(["logs", "latest", "--events", "-f", "-o", "json", *where]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert lines == [{"v": 1, **event} for event in told["events"]]

    def test_events_until_the_run_ends(self, run: RunLayout) -> None:
        with following(run, "logs", "latest", "--events", "-f") as followed:
            with lock_run(run):
                tell(run, *TestEvents.RECORDS[:2])
                followed.until(lambda out: "attempt 1 starts from the beginning" in out)
                tell(run, TestEvents.RECORDS[2])
            assert followed.end() == (0, "")
        assert followed.out.splitlines()[2].endswith("[0:42] chaos: F1 fired: rank 1, step 7")

    def test_where_a_script_goes_on_from_is_told_when_it_is_known(self, run: RunLayout) -> None:
        starting = {"event": "attempt.starting", "resume": None, "resume_step": 0, "armed": [], "by": "script"}
        tell(run, TestEvents.RECORDS[0], {**starting, "attempt": 1}, {**starting, "attempt": 2}, clock=lambda: 1050.0)
        follower = RunFollower(run)
        told = [told.sentence for told in follower.poll_events()]
        assert told[-1] == "attempt 2 starts: the script looks for a checkpoint of its own"
        begin_trace(run, "chaos", 2, 0, range(21, 23)).close()
        assert [told.sentence for told in follower.poll_events()] == ["attempt 2 resumes from step 20"]
        assert follower.poll_events() == []

    def test_ctrl_c_only_leaves(self, run: RunLayout) -> None:
        write(run, "chaos", 1, 0, b"hello\n")
        with lock_run(run), following(run, "logs", "latest", "-f") as followed:
            followed.until(lambda out: "hello" in out)
            followed.signal(signal.SIGINT)
            assert followed.end() == (130, "")

    def test_a_reader_that_goes_away_ends_it(self, run: RunLayout) -> None:
        write(run, "chaos", 1, 0, b"hello\n")
        with lock_run(run), following(run, "logs", "latest", "-f") as followed:
            followed.until(lambda out: "hello" in out)
            followed.close_output()
            write(run, "chaos", 1, 0, b"more\n")
            assert followed.end()[0] == 0

    def test_status_as_json_whenever_something_changes(self, run: RunLayout) -> None:
        with following(run, "status", "latest", "-w", "-o", "json") as followed:
            with lock_run(run):
                followed.until(lambda out: out.count("\n") == 1)
                # All at once: a look between two of them would make one state more.
                tell_at_once(run, "chaos", *TestEvents.RECORDS)
                followed.until(lambda out: out.count("\n") == 2)
                # Nothing new, nothing said.
                time.sleep(0.5)
                followed.until(lambda out: out.count("\n") == 2)
            assert followed.end() == (0, "")
        states = [json.loads(line) for line in followed.out.splitlines()]
        assert [state["state"] for state in states] == ["running", "running", "interrupted"]
        assert [fault["state"] for fault in states[1]["schedule"]] == ["fired"]

    def test_status_on_a_terminal(self, run: RunLayout) -> None:
        tell(run, *TestEvents.RECORDS)
        with lock_run(run):
            terminal = Terminal(COMMAND, "status", "latest", "-w", "--root", run.path.parents[1])
            deadline_s = time.monotonic() + 120
            while "rank 1 " not in terminal.grid.text:
                assert time.monotonic() < deadline_s, terminal.output
                time.sleep(0.02)
        assert terminal.wait() == 0
        terminal.close()
        # The picture has made room for the account of how it ended.
        assert terminal.grid.text.startswith("run small-1  small, 2 workers\nstate       interrupted\n")
        assert not terminal.grid.is_cursor_hidden

    def test_logs_on_a_terminal_cannot_command_it(self, run: RunLayout) -> None:
        write(run, "chaos", 1, 0, b"\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m\n")
        for more in ([], ["-f"]):
            terminal = Terminal(COMMAND, "logs", "latest", "--rank", "0", *more, "--root", run.path.parents[1])
            assert terminal.wait() == 0
            terminal.close()
            assert "\x1b" not in terminal.output
            assert "␛]0;title␇red" in terminal.output

    def test_nor_does_what_a_run_says_of_its_end(self, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        evil = "\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m"
        error = {"type": "ValueError", "message": evil, "traceback": f"Traceback\nValueError: {evil}"}
        died = {"event": "death.unplanned", "attempt": 1, "rank": 0, "step": None, "reason": evil, "error": error}
        ended = {"event": "leg.finished", "outcome": "user_error", "message": evil, "hint": evil}
        tell(run, {"event": "leg.started", "workers": 2, "supervisor_pid": 1}, died, ended, leg="reference")
        assert cli.main(["status", "latest", "--root", str(run.path.parents[1])]) == 0
        told = capsys.readouterr().out
        assert "last        user error:  ]0;title red," in told and "hint        ␛]0;title␇red" in told
        assert not {"\x1b", "\x07"} & set(told)
