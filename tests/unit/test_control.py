"""The control socket: who is let in, what is answered, and that nothing said to it can do harm."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from chaosrun import processes
from chaosrun.errors import ChaosrunError, InterruptedRunError, ResourcesError, RunTimeoutError, UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.supervise import control
from chaosrun.supervise.control import (
    MESSAGE_LIMIT_BYTES,
    Answer,
    Cancel,
    Command,
    ControlServer,
    Inject,
    NobodyListensError,
    Ping,
    control_directory,
    request,
    serve,
)
from chaosrun.supervise.interrupts import Interrupts, OneOfMany


class Served:
    """A server, and what it was asked to do."""

    def __init__(self, run: RunLayout) -> None:
        self.run = run
        self.cancelled = threading.Event()
        self.server = ControlServer(run, self._obey)

    def _obey(self, command: Command) -> Answer:
        if isinstance(command, Cancel):
            self.cancelled.set()
        return Answer(pid=os.getpid() if isinstance(command, Ping) else None)

    def connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(60)
        with control._short(control_directory(self.run)) as short:
            connection.connect(f"{short}/socket")
        return connection

    def send(self, data: bytes) -> bytes:
        """What is answered to these bytes; nothing when the server hangs up."""
        with self.connected() as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: connection.recv(4096), b""))
            except (BrokenPipeError, ConnectionResetError):
                return b""

    @property
    def token(self) -> str:
        return (control_directory(self.run) / "token").read_text()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(RunLayout(tmp_path))
    yield served
    served.server.close()


def test_ping_and_cancel(served: Served) -> None:
    assert request(served.run, Ping()).pid == os.getpid()
    assert not served.cancelled.is_set()
    assert request(served.run, Cancel()) == Answer()
    assert served.cancelled.is_set()


def test_the_directory_is_the_users_alone(served: Served) -> None:
    directory = control_directory(served.run)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in directory.iterdir()} == {"socket": 0o600, "token": 0o600}


def test_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        served = Served(RunLayout(tmp_path))
    finally:
        os.umask(former)
    test_the_directory_is_the_users_alone(served)
    served.server.close()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"command": "cancel"}, "wrong token"),
        ({"command": "cancel", "token": ""}, "wrong token"),
        ({"command": "cancel", "token": "0" * 64}, "wrong token"),
        ({"command": "cancel", "token": ["0" * 64]}, "Expected `str`, got `array` - at `$.token`"),
        ({"command": "cancel", "token": "\ud800"}, "refused"),
        ({"command": "explode", "token": None}, "Invalid value 'explode' - at `$.command`"),
        ({"command": {}, "token": None}, "Expected `str`"),
        ({"token": None}, "missing required field `command`"),
        ([], "Expected `object`, got `array`"),
        (None, "Expected `object`, got `null`"),
        *(
            ({"command": "inject", "token": None, "kind": "kill", "rank": "1", **about}, "Expected `")
            for about in (
                *({"kind": None}, {"kind": ["kill"]}, {"rank": 1}, {"seed": "x"}, {"seed": True}),
                *({"settings": "grace=5s"}, {"settings": [1]}),
            )
        ),
    ],
)
def test_what_is_refused(served: Served, message: Any, words: str) -> None:
    if isinstance(message, dict) and message.get("token", "") is None:
        message = {**message, "token": served.token}
    answer = json.loads(served.send(json.dumps(message).encode() + b"\n"))
    assert words in answer["error"]
    assert not served.cancelled.is_set()


@pytest.mark.parametrize(
    ("raised", "words", "code"),
    [
        (KeyError("rank"), "this is a bug in chaosrun: KeyError: 'rank'", 1),
        (PermissionError(errno.EACCES, "Permission denied", "plan.json"), "plan.json: Permission denied", 7),
        (OSError(errno.ENOSPC, "No space left on device"), "{run}: No space left on device", 7),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files", 7),
        (RunTimeoutError("too late"), "too late", 124),
        (NobodyListensError("no such rank"), "no such rank", 2),
    ],
)
def test_whatever_a_command_raises_is_told_and_the_next_one_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch, raised: Exception, words: str, code: int
) -> None:
    def fails(command: Command) -> Answer:
        raise raised

    with monkeypatch.context() as patched:
        patched.setattr(served.server, "_obey", fails)
        patched.setattr(sys, "stderr", closed := StringIO())
        closed.close()
        with pytest.raises(ChaosrunError, match=re.escape(words.format(run=served.run.path))) as told:
            request(served.run, Cancel())
    assert told.value.exit_code == code
    assert request(served.run, Ping()).pid == os.getpid()


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"{", b"\xff\xfe\n", b"ping\n", b"[" * 50_000 + b"\n", b"x" * (MESSAGE_LIMIT_BYTES + 1), b"\0" * 100]
)
def test_bytes_that_are_no_message(served: Served, data: bytes) -> None:
    answer = served.send(data)
    assert answer == b"" or json.loads(answer)["error"]
    assert request(served.run, Ping()).pid == os.getpid()


def test_a_client_that_says_nothing_holds_nobody_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PATIENCE_S", 0.1)
    with served.connected():
        time.sleep(0.05)
        monkeypatch.undo()
        assert request(served.run, Ping())
    with served.connected():
        time.sleep(0.05)
        # Nor is the end of the run.
        closing = threading.Thread(target=served.server.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    served.server = Served(served.run).server


def test_what_a_stopped_supervisor_was_told_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PATIENCE_S", 0.3)
    run = RunLayout(tmp_path)
    serving = """
import sys, threading
from pathlib import Path
from chaosrun.records.layout import RunLayout
from chaosrun.supervise.control import Answer, Cancel, ControlServer
def obey(command):
    print(type(command).__name__, flush=True)
    return Answer()
server = ControlServer(RunLayout(Path(sys.argv[1])), obey)
print("ready", flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", serving, str(tmp_path)], **pipes)
    try:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with pytest.raises(UsageError, match="taken back, unless it had begun") as refused:
            request(run, Cancel())
        hint = f"{refused.value.hint}"
        assert f"kill -CONT {process.pid}" in hint and "chaosrun status" in hint and "say it again" in hint
        monkeypatch.setattr(control, "peer", lambda connection: (0, os.geteuid()))  # of another pid namespace
        with pytest.raises(UsageError, match="taken back") as refused:
            request(run, Cancel())
        assert "kill" not in f"{refused.value.hint}" and "chaosrun status" in f"{refused.value.hint}"
        process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(control, "PATIENCE_S", 60.0)
        request(run, Ping())
        assert process.communicate()[0] == "Ping\n"
    finally:
        process.kill()
        process.wait()


def test_a_stopped_supervisor_for_which_too_many_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunLayout(tmp_path)
    directory = control_directory(run)
    directory.mkdir(mode=0o700)
    (directory / "token").write_text("x")
    ended: dict[str, Any] = {"ended_s": None, "error": None, "warnings": []}
    run.supervisor_json.write_text(json.dumps({"v": 1, "pid": 7, "began_s": 1.0, **ended}))
    monkeypatch.setattr(control, "where_stopped", lambda pid: f"stopped {pid}")
    with socket.socket(socket.AF_UNIX) as deaf, ExitStack() as stack, control._short(directory) as short:
        deaf.bind(f"{short}/socket")
        deaf.listen(0)
        with suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(f"{short}/socket")
        with pytest.raises(UsageError, match="too many commands wait") as refused:
            request(run, Cancel())
    assert refused.value.hint == "stopped 7; then say it again"


@pytest.mark.parametrize(("state", "told"), [("T", True), ("t", False), ("S", False), (None, False)])
def test_who_can_be_let_go_on(monkeypatch: pytest.MonkeyPatch, state: str | None, told: bool) -> None:
    """What a debugger holds (t) does not go on by SIGCONT."""
    monkeypatch.setattr(processes, "cpu_and_state", lambda pid: (0.0, state))
    assert (processes.where_stopped(7) == "its process is stopped: `kill -CONT 7` lets it go on") == told


def test_a_text_that_utf_8_cannot_hold_ends_neither_side(tmp_path: Path) -> None:
    run, heard = RunLayout(tmp_path), list[str]()

    def obey(command: Command) -> Answer:
        heard.append(command.kind if isinstance(command, Inject) else "")
        raise UsageError("no such file: \udcff", hint="\udcff")

    with serve(run, obey, on_failure=print):
        for _ in range(2):
            with pytest.raises(UsageError, match=r"no such file: \\udcff"):
                request(run, Inject(kind="kill\udcff", rank="1"))
    assert heard == ["kill\\udcff"] * 2


def test_another_user_is_not_listened_to(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.geteuid()
    monkeypatch.setattr(control, "peer", lambda connection: (os.getpid(), real + 1))
    message = json.dumps({"token": served.token, "command": "cancel"}).encode() + b"\n"
    assert served.send(message) == b""
    assert not served.cancelled.is_set()
    with pytest.raises(UsageError, match="served by another user"):
        request(served.run, Cancel())


def test_the_kernel_says_who_calls() -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    assert [control.peer(end) for end in ends] == [(os.getpid(), os.getuid())] * 2
    for end in ends:
        end.close()


def test_a_directory_that_others_may_write_is_not_trusted(served: Served) -> None:
    directory = control_directory(served.run)
    directory.chmod(0o770)
    with pytest.raises(UsageError, match="of this user alone"):
        request(served.run, Ping())
    directory.chmod(0o700)
    moved = directory.rename(directory.with_name("elsewhere"))
    directory.symlink_to(moved)
    with pytest.raises(UsageError, match="of this user alone"):
        request(served.run, Ping())


def test_what_a_killed_supervisor_left_is_in_nobodys_way(tmp_path: Path) -> None:
    run = RunLayout(tmp_path)
    directory = control_directory(run)
    directory.mkdir(mode=0o700)
    (directory / "token").write_text("old")
    dead = socket.socket(socket.AF_UNIX)
    with control._short(directory) as short:
        dead.bind(f"{short}/socket")
    dead.close()
    with pytest.raises(UsageError, match="is not being supervised"):
        request(run, Ping())
    served = Served(run)
    assert request(run, Ping())
    served.server.close()


def test_a_link_in_its_place_leads_nowhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "token").write_text("mine")
    run = RunLayout(tmp_path / "run")
    run.path.mkdir()
    control_directory(run).symlink_to(elsewhere)
    served = Served(run)
    served.server.close()
    assert (elsewhere / "token").read_text() == "mine"


def test_a_path_of_any_length(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a" * 60] * 5)
    deep.mkdir(parents=True)
    served = Served(RunLayout(deep))
    assert request(served.run, Ping()).pid == os.getpid()
    served.server.close()
    assert list(deep.iterdir()) == []
    with pytest.raises(UsageError, match="is not being supervised"):
        request(served.run, Ping())


def test_a_run_goes_on_where_there_can_be_no_socket(tmp_path: Path) -> None:
    control_directory(RunLayout(tmp_path)).write_text("a file in the way")
    said: list[str] = []
    with serve(RunLayout(tmp_path), lambda command: Answer(), on_failure=said.append):
        pass
    assert len(said) == 1 and "no control socket" in said[0]


def test_a_file_system_that_became_read_only_does_not_hide_why_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(directory))

    with pytest.raises(ResourcesError), serve(RunLayout(tmp_path), lambda command: Answer(), on_failure=print):
        monkeypatch.setattr(control, "_clear", refuse)
        raise ResourcesError("the run's own files cannot be written")


def test_a_cancel_is_a_sigint_to_the_main_thread() -> None:
    with pytest.raises(Exception, match="interrupted"), Interrupts() as interrupts:
        threading.Thread(target=interrupts.request).start()
        time.sleep(120)
        raise AssertionError("the signal did not come")


class Working:
    """Stands for a leg's supervisor."""

    is_waiting_for_places = False

    def __init__(self) -> None:
        self.interrupted = 0

    def interrupt(self) -> None:
        self.interrupted += 1


def test_a_cancel_ends_one_drill_of_many_alone() -> None:
    told: list[Any] = []
    mine, other = Working(), Working()
    one, another = OneOfMany(told.append), OneOfMany(told.append)
    with one, another:
        one.watch(mine)
        another.watch(other)
        one.request()
        one.request()
        assert told == [mine, other], "whoever takes the signals knows all of them"
        assert (mine.interrupted, other.interrupted) == (1, 0)
        one.watch(None)
    # Its next leg does not begin, and that is no Ctrl-C.
    with pytest.raises(InterruptedRunError), one:
        one.watch(Working())


HANGUP = """\
import os, signal, sys, time
from chaosrun.errors import InterruptedRunError
from chaosrun.supervise.interrupts import Interrupts
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
try:
    with Interrupts():
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)
except InterruptedRunError:
    print("interrupted")
else:
    print("went on")
assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
"""


@pytest.mark.parametrize(("how", "said"), [("plainly", "interrupted"), ("nohup", "went on")])
def test_a_closed_terminal_is_an_interrupt_unless_somebody_has_seen_to_it(how: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", HANGUP, how], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


STUCK = """\
import os, sys, threading, time
from pathlib import Path
from chaosrun.supervise import process
from chaosrun.supervise.interrupts import Interrupts

pipes = process.SupervisorPipes()
process.SupervisorPipes = lambda: pipes

def stuck(run, address, listener):
    with Interrupts() as interrupts:
        with interrupts.postponed():
            pipes.tell(process.Supervising())
            if sys.argv[1] == "socket":
                for after in (0.1, 0.5):
                    threading.Timer(after, interrupts.request).start()
            time.sleep(float(sys.argv[2]))
            pipes.tell(process.Recorded(record={}))
        interrupts.check()

process.main(stuck)
"""


@pytest.mark.parametrize(
    ("how", "lasts_s", "waited"), [("twice", 300.0, False), ("socket", 300.0, False), ("once and away", 1.0, True)]
)
def test_a_start_that_hangs_is_ended_by_a_second_cancel(tmp_path: Path, how: str, lasts_s: float, waited: bool) -> None:
    """By a second one alone: that whoever sent the first has gone is none."""
    command = [sys.executable, "-c", STUCK, how, str(lasts_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"say": "task", "run": str(tmp_path), "root": "", "address": None}) + "\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline()) == {"say": "supervising"}
    for pause_s in {"twice": (1.0, 1.0), "once and away": (0.3,), "socket": ()}[how]:
        process.stdin.write('{"say": "cancel"}\n')
        process.stdin.flush()
        time.sleep(pause_s)
    if how == "socket":
        process.wait(60)
    out, _ = process.communicate(timeout=60)
    told = [json.loads(line) for line in out.splitlines()]
    assert told[-1]["error"]["kind"] == "InterruptedRunError"
    assert ({"say": "recorded", "record": {}} in told) == waited
