"""Ctrl-C while following, on a real terminal, with a drill that only counts what it is told."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaosrun.supervise import interrupts
from tests.terminal import Terminal

FOLLOWER = """\
import os, signal, sys, threading, time
from chaosrun.supervise import interrupts
from chaosrun.records.layout import RunLayout

class SupervisorProcess:
    run = RunLayout(__import__("pathlib").Path("."))
    def __init__(self):
        self.told, self.over = [], threading.Event()
        self.reading, self.writing = os.pipe()
        self.may_detach = "ended" not in sys.argv
    def fileno(self):
        if "short" in sys.argv:  # it is being asked
            threading.Timer(1.0, self.end).start()
        return self.reading
    def wait(self):
        print("WAITING", flush=True)
        while not self.over.is_set():
            time.sleep(0.01)  # an interrupted wait of an Event may raise RuntimeError
    def interrupt(self):
        self.told.append("cancel")
        threading.Timer(0.2, self.end).start()
    def end(self):
        self.over.set()
        os.write(self.writing, b"{}\\n")
    def detach(self):
        self.told.append("detach")
        if not self.may_detach:
            self.end()
        return self.may_detach

process = SupervisorProcess()
if "deaf" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
assert interrupts.at_a_terminal()
print("RESULT", interrupts.follow(process, process.wait), process.told, flush=True)
"""


def eventually(condition: Callable[[], Any], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.01)


class Follower:
    def __init__(self, *arguments: str) -> None:
        self.terminal = Terminal(sys.executable, "-c", FOLLOWER, *arguments)
        self.expect("WAITING")

    def expect(self, words: str, times: int = 1) -> None:
        eventually(lambda: self.terminal.output.count(words) >= times, lambda: f"{words!r} in {self.terminal.output!r}")

    def asked(self, times: int = 1) -> None:
        self.terminal.type(b"\x03")
        self.expect("[d/c/g]", times)

    def modes(self) -> list[Any]:
        return self.terminal.modes()

    def result(self) -> str:
        self.expect("RESULT")
        assert self.terminal.wait() == 0
        return self.terminal.output.partition("RESULT ")[2].strip()


@pytest.fixture
def follow() -> Iterator[Callable[..., Follower]]:
    made: list[Follower] = []

    def start(*arguments: str) -> Follower:
        made.append(Follower(*arguments))
        return made[-1]

    yield start
    for follower in made:
        follower.terminal.close()


@pytest.mark.parametrize(
    ("drill", "answer", "result"),
    [
        ("", b"d", "True ['detach']"),
        ("", b"d\n", "True ['detach']"),
        ("", b" Detach \n", "True ['detach']"),
        # Whoever began the command had Ctrl-C ignored.
        ("deaf", b"d", "True ['detach']"),
        ("", b"c", "False ['cancel']"),
        ("", b"\x03", "False ['cancel']"),
        ("", b"\x04", "False ['cancel']"),
        # It ends while the question stands, or had ended before the answer came.
        ("short", b"", "False []"),
        ("ended", b"d\n", "False ['detach']"),
    ],
)
def test_what_an_answer_does(follow: Callable[..., Follower], drill: str, answer: bytes, result: str) -> None:
    follower = follow(*filter(None, [drill]))
    before = follower.modes()
    follower.asked()
    assert follower.modes() != before or drill == "short", "asked key by key"
    follower.terminal.type(answer)
    assert follower.result() == result
    assert ("cancelling" in follower.terminal.output) == ("cancel" in result)
    assert follower.modes() == before, "the terminal is as it was"


def test_go_on_and_what_is_no_answer(follow: Callable[..., Follower]) -> None:
    follower = follow()
    follower.asked()
    follower.terminal.type(b"p")
    follower.expect("[d/c/g]", times=2)
    follower.terminal.type(b"\x1b[D")  # an arrow, which has a D in it
    follower.expect("[d/c/g]", times=3)
    follower.terminal.type(b"g")
    follower.expect("WAITING", times=2)
    follower.asked(times=4)
    follower.terminal.type(b"d")
    assert follower.result() == "True ['detach']"


def test_the_question_fits_and_says_what_ctrl_c_does() -> None:
    lines = (interrupts.MEANWHILE + interrupts.QUESTION).splitlines()
    assert max(map(len, lines)) <= 79
    assert "Ctrl-C once more: end it" in interrupts.MEANWHILE


def test_sigterm_cancels(follow: Callable[..., Follower]) -> None:
    follower = follow()
    follower.terminal.process.terminate()
    assert follower.result() == "False ['cancel']"


def test_nobody_is_asked_without_a_terminal(tmp_path: Path) -> None:
    question = "from chaosrun.supervise.interrupts import at_a_terminal; print(at_a_terminal())"
    for stdin in (subprocess.DEVNULL, subprocess.PIPE):
        done = subprocess.run([sys.executable, "-c", question], stdin=stdin, capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"
    closed = subprocess.run(
        f"{sys.executable} -c '{question}' <&- 2>&-", shell=True, capture_output=True, text=True, check=True
    )
    assert closed.stdout == "False\n"
