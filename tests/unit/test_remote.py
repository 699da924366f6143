"""What one process can learn of a run that another supervises, and do about it: by real locks, sockets and files."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaosrun import api, errors
from chaosrun.errors import InterruptedRunError, ResourcesError, RunTimeoutError, UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.codec import DamagedRecordError
from chaosrun.records.journal import Journal
from chaosrun.records.layout import RunLayout
from chaosrun.records.supervision import ToldError, read_supervision, supervision
from chaosrun.supervise import remote
from chaosrun.supervise.control import Answer, Command, Inject, NobodyListensError, control_directory, serve
from chaosrun.supervise.drill import lock_run
from tests.unit.events import event
from tests.unit.run_files import begin_trace, tell


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    run = RunLayout(tmp_path / "runs" / "small-1")
    run.path.mkdir(parents=True)
    run.run_json.write_text("{}")
    return run


class TestSupervision:
    def test_a_good_end_with_warnings(self, run: RunLayout) -> None:
        with supervision(run) as warnings:
            seen = read_supervision(run)
            assert seen is not None and (seen.pid, seen.ended_s, seen.error) == (os.getpid(), None, None)
            warnings.append("report.html was not written")
        seen = read_supervision(run)
        assert seen is not None and seen.ended_s is not None and seen.ended_s >= seen.began_s
        assert seen.error is None and seen.warnings == ("report.html was not written",)

    @pytest.mark.parametrize("name", [name for name, of in vars(errors).items() if isinstance(of, type)])
    def test_an_error_comes_back_as_what_it_was(self, run: RunLayout, name: str) -> None:
        error = getattr(errors, name)("no room", hint="make some")
        with pytest.raises(type(error)), supervision(run):
            raise error
        seen = read_supervision(run)
        assert seen is not None and seen.error is not None
        again = seen.error.again(run)
        assert (type(again), again.exit_code) == (type(error), error.exit_code)
        assert (again.message, again.hint) == ("no room", "make some")

    def test_an_error_of_a_module_keeps_its_exit_code(self, run: RunLayout) -> None:
        kinds = [*errors.ChaosrunError.__subclasses__()]
        for kind in kinds:
            kinds += kind.__subclasses__()
        assert {NobodyListensError, DamagedRecordError} <= {*kinds}
        for kind in kinds:
            if kind.__module__.partition(".")[0] == "chaosrun":
                again = ToldError.of(kind("no room"), run).again(run)
                assert isinstance(kind("no room"), type(again)) and again.exit_code == kind.exit_code, kind

    def test_an_interrupt_and_a_bug(self, run: RunLayout) -> None:
        interrupted = ToldError.of(KeyboardInterrupt(), run).again(run)
        assert interrupted.exit_code == 130 and f"chaosrun resume {run.run_id}" in (interrupted.hint or "")
        bug = ToldError.of(ZeroDivisionError("division by zero"), run).again(run)
        assert bug.exit_code == 1 and "this is a bug in chaosrun" in bug.message

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"pid": 1, "began_s": 1.0, "ended_s": null, "error": "x", "warnings": []}']
    )
    def test_a_damaged_file(self, run: RunLayout, text: str) -> None:
        assert read_supervision(run) is None
        run.supervisor_json.write_text(text)
        with pytest.raises(UsageError, match=r"supervisor\.json") as told:
            read_supervision(run)
        assert f"chaosrun resume {run.run_id}" in (told.value.hint or "")
        assert read_supervision(run, judged=True) is None


HOLD = """\
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(100)
"""


@contextmanager
def held_elsewhere(run: RunLayout) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the run's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


class TestWaiting:
    def test_for_nobody(self, run: RunLayout) -> None:
        assert remote.unsupervised(run, 0.0)

    def test_until_it_is_let_go(self, run: RunLayout) -> None:
        with held_elsewhere(run) as process:
            assert not remote.unsupervised(run, 0.05)
            threading.Timer(0.5, process.kill).start()
            began_s, worked_s = time.monotonic(), time.process_time()
            assert remote.unsupervised(run, 30.0)
            worked_s = time.process_time() - worked_s
            assert worked_s < (time.monotonic() - began_s) / 2, "who waits does not spin"

    def test_who_waits_is_in_nobodys_way(self, run: RunLayout) -> None:
        with lock_run(run):
            waiting = threading.Thread(target=remote.unsupervised, args=(run, 30.0))
            waiting.start()
        with lock_run(run):
            pass
        waiting.join(30)
        assert not waiting.is_alive()

    def test_in_vain(self, run: RunLayout) -> None:
        with held_elsewhere(run), pytest.raises(RunTimeoutError) as late:
            remote.wait(run, 0.05)
        assert late.value.exit_code == 124 and "it is still running" in (late.value.hint or "")

    def test_a_lock_goes_with_the_last_who_has_it(self, run: RunLayout) -> None:
        """As `chaosrun.supervise.process` hands it on: killed, its child holds the run while it lives."""
        with lock_run(run) as descriptor:
            process = subprocess.Popen(
                [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=(descriptor,)
            )
        assert not remote.unsupervised(run, 0.05)
        process.communicate()
        assert remote.unsupervised(run, 30.0)


class TestOutcome:
    def test_never_supervised(self, run: RunLayout) -> None:
        with pytest.raises(InterruptedRunError, match="nobody has supervised it"):
            remote.outcome(run)

    def test_an_error(self, run: RunLayout) -> None:
        with pytest.raises(ResourcesError), supervision(run):
            raise ResourcesError("no room for 3 workers", hint="ask for less")
        with pytest.raises(ResourcesError, match="no room for 3 workers") as again:
            remote.outcome(run)
        assert again.value.hint == "ask for less"

    @pytest.mark.parametrize("has_ended", [True, False])
    def test_an_interrupt_while_the_reports_were_written(
        self, run: RunLayout, monkeypatch: pytest.MonkeyPatch, has_ended: bool
    ) -> None:
        """The verdict is there, and says more than that."""
        monkeypatch.setattr("chaosrun.supervise.remote.judge", lambda run: "the verdict")
        with pytest.raises(KeyboardInterrupt), supervision(run) as warnings:
            run.verdict_json.write_text(json.dumps({"outcome": "completed" if has_ended else "interrupted"}))
            warnings.append("junit.xml was not written")
            raise KeyboardInterrupt
        if not has_ended:
            with pytest.raises(InterruptedRunError):
                remote.outcome(run)
            return
        told = ("junit.xml was not written", "its reports were not all written: interrupted")
        assert remote.outcome(run) == ("the verdict", told)

    def test_what_is_damaged_beside_a_verdict(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("chaosrun.supervise.remote.judge", lambda run: "the verdict")
        run.supervisor_json.write_text("{")
        run.verdict_json.write_text(json.dumps({"outcome": "completed"}))
        assert remote.outcome(run) == ("the verdict", ())
        run.verdict_json.write_text("{")
        with pytest.raises(UsageError, match=r"verdict\.json is damaged") as told:
            remote.outcome(run)
        assert f"chaosrun verify {run.run_id}" in (told.value.hint or "")

    def test_killed(self, run: RunLayout) -> None:
        """The one before it had ended with an error, and left a verdict that does not count."""
        with pytest.raises(ResourcesError), supervision(run):
            raise ResourcesError("no room")
        run.verdict_json.write_text(json.dumps({"outcome": "resources"}))
        kill = "import os, signal, sys; from pathlib import Path\n" + (
            "from chaosrun.records.layout import RunLayout; from chaosrun.records.supervision import supervision\n"
            "with supervision(RunLayout(Path(sys.argv[1]))): os.kill(os.getpid(), signal.SIGKILL)"
        )
        subprocess.run([sys.executable, "-c", kill, str(run.path)], check=False)
        with pytest.raises(InterruptedRunError, match=r"\(pid [0-9]+\) was killed") as killed:
            remote.outcome(run)
        assert f"chaosrun resume {run.run_id}" in (killed.value.hint or "")

    @pytest.mark.parametrize("half", [False, True])
    def test_removed_by_the_command_that_had_begun_it(
        self, run: RunLayout, monkeypatch: pytest.MonkeyPatch, half: bool
    ) -> None:
        """As a sweep does with its drills that pass: whoever waited for one is not told that it came to nothing."""
        run.verdict_json.write_text(json.dumps({"outcome": "completed"}))
        monkeypatch.setattr("chaosrun.supervise.remote.judge", lambda run: run.run_json.unlink())
        if not half:
            shutil.rmtree(run.path)
        with pytest.raises(UsageError, match="has ended and no longer exists"):
            remote.outcome(run)


class TestSpeaking:
    def test_to_nobody(self, run: RunLayout) -> None:
        with pytest.raises(UsageError, match="it was interrupted") as refused:
            remote.cancel(run)
        assert f"chaosrun resume {run.run_id}" in (refused.value.hint or "")
        run.verdict_json.write_text(json.dumps({"outcome": "completed"}))
        with pytest.raises(UsageError, match="it has ended") as refused:
            remote.inject(run, kind="kill", rank="1")
        assert f"chaosrun verify {run.run_id}" in (refused.value.hint or "")

    @pytest.mark.parametrize("predecessor_was_killed", [False, True])
    def test_to_one_that_has_no_socket_yet(self, run: RunLayout, predecessor_was_killed: bool) -> None:
        if predecessor_was_killed:
            # Its socket is there, and refuses.
            directory = control_directory(run)
            directory.mkdir(mode=0o700)
            (directory / "token").write_text("x")
            here = os.open(directory, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(f"/proc/self/fd/{here}/socket")
            os.close(here)
        heard: list[Command] = []

        def obey(command: Command) -> Answer:
            heard.append(command)
            return Answer(seed=4)

        def serve_late() -> None:
            time.sleep(0.3)
            with serve(run, obey, on_failure=print):
                over.wait(30)

        over = threading.Event()
        with held_elsewhere(run):
            thread = threading.Thread(target=serve_late)
            thread.start()
            try:
                asked = remote.inject(run, kind="kill", rank="1", settings=("grace=5s",), seed=4)
            finally:
                over.set()
                thread.join()
        assert asked == {"faults": [], "seed": 4}
        (command,) = heard
        assert msgspec.structs.replace(command, token="") == Inject(kind="kill", rank="1", settings=("grace=5s",), seed=4)

    def test_to_one_that_never_has_one(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote, "SOCKET_LIMIT_S", 0.1)
        with held_elsewhere(run), pytest.raises(UsageError, match="cannot be reached"):
            remote.cancel(run)

    def test_a_refusal_keeps_its_words(self, run: RunLayout) -> None:
        def refuse(command: object) -> Answer:
            raise UsageError("the reference leg is running", hint="wait")

        with (
            held_elsewhere(run),
            serve(run, refuse, on_failure=print),
            pytest.raises(UsageError, match=r"^the reference leg is running") as refused,
        ):
            remote.inject(run, kind="kill", rank="1")
        assert refused.value.hint == "wait"

    def test_a_run_that_does_not_end_in_time(self, run: RunLayout) -> None:
        with held_elsewhere(run), serve(run, lambda command: Answer(), on_failure=print):
            remote.cancel(run)
            with pytest.raises(RunTimeoutError, match="still being supervised"):
                remote.cancel(run, timeout_s=0.05)


def observed(fault: str, **more: Any) -> dict[str, Any]:
    seen = {"attempt": 1, "rank": 1, "pid": 4211, "how": "death", "signal": 9, "exit_code": None, "died_s": 1.0, "found": {}}
    return {"event": "fault.observed", "fault": fault, **seen, **more}


def requested(fault: str) -> dict[str, Any]:
    return {"event": "fault.requested", "fault": fault, "rank": 1, "step": None, "phase": None}


STARTED: list[dict[str, Any]] = [
    {"event": "attempt.starting", "attempt": 1},
    {"event": "attempt.started", "pids": {0: 4210, 1: 4211}},
]
DIED: dict[str, Any] = {"event": "worker.exited", "rank": 1, "pid": 4211, "signal": 9}


class TestLandings:
    """As the verdict will have it: `faults.landed` is asked."""

    @pytest.fixture(autouse=True)
    def planned(self, run: RunLayout) -> None:
        faults = (
            Fault(id="F1", rank=1, phase=None, after_s=1.0, source="s"),
            Fault(id="F2", kind="stop", rank=1, phase=None, after_s=1.0, source="s"),
        )
        run.plan_json.write_text(json.dumps(FaultPlan(seed=1, faults=faults).to_json()))

    def test_where_and_how(self, run: RunLayout) -> None:
        begin_trace(run, "chaos", 1, 1, range(1, 10), pid=4211).close()
        with open(run.leg("chaos").attempt(1).trace(1), "ab") as file:
            file.write(b"\xcc\xf4\xc4\x30\x84\xa4kind\xa2st")
        tell(run, *STARTED, requested("F1"), DIED, observed("F1"), {"event": "attempt.stopped"})
        (seen,) = api.landings(run, ["F1"], timeout_s=30)
        assert seen.is_certain and seen.sentence == "landed in attempt 1: rank 1 after step 9, pid 4211: SIGKILL"

    def test_not_yet(self, run: RunLayout) -> None:
        (seen,) = api.landings(run, ["F1"], timeout_s=0.0)
        assert not seen.is_certain and "not been seen" in seen.sentence
        tell(run, *STARTED, requested("F1"), observed("F2"))
        assert not api.landings(run, ["F1"], timeout_s=30)[0].is_certain, "nobody supervises it: it is not waited for"

    def test_never(self, run: RunLayout) -> None:
        no = observed("F2", how="note", found={"problem": "it was in state R"})
        tell(run, *STARTED, requested("F2"), no, {"event": "leg.finished", "outcome": "completed"})
        first, second = api.landings(run, ["F1", "F2"], timeout_s=30)
        assert first.problem == "the leg ended before it came (completed)"
        assert second.problem == "it was in state R" and not second.landed

    @pytest.mark.parametrize(
        ("kept", "problem"),
        [
            ((0, 1, 2, 3, 4), None),
            ((0, 1, 2, 4), "no exit of process 4211 by signal 9 was recorded"),
            ((0, 1, 3, 4), "it never fired"),
            ((0, 3, 2, 4), "process 4211 was struck, rank 1 of attempt 1 was process unknown"),
        ],
    )
    def test_what_the_verdict_does_not_accept_has_not_landed(self, run: RunLayout, kept: Any, problem: str | None) -> None:
        records = [*STARTED, requested("F1"), DIED, observed("F1")]
        tell(run, *(records[number] for number in kept))
        (seen,) = api.landings(run, ["F1"], timeout_s=0.0)
        assert seen.landed is (problem is None) and seen.problem is None, "nothing is certain while the leg goes on"
        tell(run, {"event": "leg.finished", "outcome": "completed"})
        (seen,) = api.landings(run, ["F1"], timeout_s=0.0)
        assert (seen.landed, seen.problem) == (problem is None, problem)

    def test_as_the_verdict_tells_it(self, run: RunLayout) -> None:
        hung = observed("F2", how="hang", signal=None, found={"rank": 1, "pid": 4211, "state": "T", "silent_s": 5.0})
        tell(run, *STARTED, requested("F2"), hung)
        (seen,) = api.landings(run, ["F2"], timeout_s=30)
        assert seen.evidence == "pid 4211: stopped (state T), no progress for 5 s"

    @pytest.mark.parametrize(
        "line",
        [
            "not json",
            "[]",
            "{}",
            '{"event": "fault.observed"}',
            '{"event": "fault.observed", "fault": "F1"}',
            '{"event": "fault.observed", "fault": "F1", "found": 3}',
            '{"event": "fault.observed", "fault": "F1", "attempt": "x"}',
            '{"event": "leg.finished"}',
        ],
    )
    def test_a_damaged_journal_is_no_bug_of_ours(self, run: RunLayout, line: str) -> None:
        run.leg("chaos").path.mkdir(parents=True, exist_ok=True)
        run.leg("chaos").journal.write_text(f"{line}\n")
        with pytest.raises(UsageError, match=r"the journal is damaged: .*journal"):
            api.landings(run, ["F1"], timeout_s=30)

    def test_while_the_run_goes_on(self, run: RunLayout) -> None:
        with lock_run(run):
            threading.Timer(0.2, tell, (run, *STARTED, requested("F1"), DIED, observed("F1"))).start()
            (seen,) = api.landings(run, ["F1"], timeout_s=30)
        assert seen.landed and seen.step is None and "before its first step" in seen.sentence


class TestMoments:
    """What `wait --until` and `inject --when` wait for."""

    @pytest.fixture
    def leg(self, run: RunLayout) -> Iterator[Journal]:
        journal = Journal(run.leg("chaos").journal)
        yield journal
        journal.close()

    @pytest.mark.parametrize(
        ("asked", "what"), [({}, "attempt 1"), ({"attempt": 2}, "attempt 2"), ({"step": 9}, "step 9")], ids=str
    )
    def test_not_before_it_has_come(self, run: RunLayout, leg: Journal, asked: dict[str, int], what: str) -> None:
        def go_on() -> None:
            leg.append(event("attempt.starting", attempt=1))
            begin_trace(run, "chaos", 1, 1, range(1, 10)).close()
            leg.append(event("attempt.starting", attempt=2, resume_step=4))

        with lock_run(run), supervision(run):
            begin_trace(run, "reference", 1, 1, range(1, 20)).close()  # another leg's
            with pytest.raises(RunTimeoutError, match=f"has not come to {what} of its chaos leg within 0.2 s"):
                api.wait_until(run, **asked, timeout_s=0.2)
            (later := threading.Timer(0.2, go_on)).start()
            api.wait_until(run, **asked, timeout_s=60)
            later.join()

    def test_a_former_supervisor_s_leg_takes_no_faults(self, run: RunLayout, leg: Journal) -> None:
        leg.append(event("attempt.starting", attempt=1))
        with lock_run(run), supervision(run):
            with pytest.raises(RunTimeoutError):
                api.wait_until(run, timeout_s=0.2)
            leg.append(event("attempt.starting", attempt=2))
            api.wait_until(run, timeout_s=60)

    def test_a_run_that_ends_first(self, run: RunLayout, leg: Journal) -> None:
        with suppress(ResourcesError), supervision(run):
            leg.append(event("attempt.starting", attempt=1))
            raise ResourcesError("no space is left")
        api.wait_until(run)  # it came, and is over
        with pytest.raises(ResourcesError, match="no space is left"):
            api.wait_until(run, step=3)


def test_flock_is_what_the_tests_say(run: RunLayout) -> None:
    # Two descriptors of one process are two holders.
    with lock_run(run), run.lock.open("a+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
