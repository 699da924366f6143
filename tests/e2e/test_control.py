"""A drill that is not held by one terminal: detached, followed, waited for, struck, cancelled and gone on with; and one that
nobody holds any more."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaosrun import api
from chaosrun.faults.fault import FaultPlan
from chaosrun.plan.injection import injected
from chaosrun.processes import identify, is_alive, send_signal
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RunLayout
from chaosrun.records.supervision import read_supervision
from chaosrun.spec.model import JobSpec
from tests.e2e.drills import COMMAND, Shell, events, eventually, finish, head_below, reached, write_job
from tests.terminal import Terminal

SLOW = "time.sleep(0.15)"
CTRL_C = b"\x03"
CTRL_D = b"\x04"


@contextmanager
def open_terminal(shell: Shell, *arguments: str | Path) -> Iterator[Terminal]:
    environment = {"TMPDIR": str(shell.temporary), "CHAOSRUN_ROOT": str(shell.root)}
    terminal = Terminal(COMMAND, *arguments, environment=environment, cwd=shell.folder)
    try:
        yield terminal
    finally:
        terminal.close()


def ask(terminal: Terminal, answer: bytes, *, times: int = 1) -> None:
    """Ctrl-C, and the answer to the question that comes."""
    terminal.type(CTRL_C)
    eventually(lambda: terminal.output.count("[d/c/g]") >= times, what=lambda: terminal.output)
    terminal.type(answer)


def slow_job(shell: Shell, *more: str) -> Path:
    return write_job(shell.folder, SLOW, *more)


def trains(shell: Shell, leg: str = "reference", attempt: int = 1, step: int = 2) -> RunLayout:
    run = shell.run_begun()
    eventually(lambda: reached(run.leg(leg), attempt, step), what=lambda: run.supervisor_log.read_text())
    return run


def held_job(shell: Shell) -> Path:
    """Each leg waits at its fourth step for a file that is called like it."""
    trouble = f"while step >= 4 and not Path({str(shell.folder)!r}, f'go-{{order.leg}}').exists(): time.sleep(0.02)"
    return write_job(shell.folder, trouble, "recovery: {hang_timeout: 300s}")


@pytest.mark.timeout(900)
def test_a_drill_is_left_followed_struck_cancelled_and_gone_on_with(shell: Shell) -> None:
    job = held_job(shell)
    with open_terminal(shell, "submit", job) as terminal:
        run = trains(shell)
        ask(terminal, b"g")
        asked = len(terminal.output)
        eventually(lambda: "rank 0" in terminal.output[asked:], what=lambda: terminal.output)
        ask(terminal, b"d", times=2)
        assert terminal.wait() == 0
        assert f"run {run.run_id} continues by itself" in terminal.output
        assert f"chaosrun cancel {run.run_id}" in terminal.output

    # An undisturbed leg is not struck.
    refused = shell.call("inject", "latest", "--rank", "1")
    assert refused.returncode == 2 and "must stay without faults" in refused.stderr
    late = shell.call("wait", "latest", "--timeout", "1")
    assert late.returncode == 124 and "it is still running" in late.stderr

    waiting = shell.start("wait", run.run_id)
    early = shell.call("wait", "latest", "--until", "chaos", "--timeout", "1")
    assert early.returncode == 124 and "has not come to attempt 1 of its chaos leg" in early.stderr
    striking = shell.start("inject", "latest", "--kind", "kill", "--rank", "1", "--when", "step=4")
    (shell.folder / "go-reference").touch()
    struck = finish(striking)
    assert struck.returncode == 0, struck.stderr
    assert "F1  landed in attempt 1: rank 1 after step 4, pid" in struck.stdout and "SIGKILL" in struck.stdout
    planned = json.loads(run.plan_json.read_text())["faults"]
    assert [(fault["id"], fault["source"], fault["phase"]) for fault in planned] == [("F1", "inject", None)]

    cancelled = shell.call("cancel", "latest", "--root", shell.root)
    assert cancelled.returncode == 0, cancelled.stderr
    assert f"chaosrun resume {run.run_id}\n" in cancelled.stdout
    done = finish(waiting)
    assert done.returncode == 130 and "interrupted in the chaos leg" in done.stderr
    again = shell.call("cancel", "latest")
    assert again.returncode == 2 and f"chaosrun resume {run.run_id}" in again.stderr

    # And again, by a command that waits for nobody.
    detached = shell.run("resume", "--detach", "latest", "-o", "json")
    told = json.loads(detached.stdout)
    assert detached.returncode == 0 and told["run"] == run.run_id
    busy = shell.call("resume", "latest")
    assert busy.returncode == 2 and "is being supervised by process" in busy.stderr
    (shell.folder / "go-chaos").touch()
    verdict = shell.call("wait", "latest")
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr + run.supervisor_log.read_text()
    assert "faults    1 of 1 landed" in verdict.stdout and "PASS" in verdict.stdout
    assert "faults.schedule=[{rank: 1, after:" in verdict.stdout
    order = [record["event"] for record in events_of_fault(run, "F1")]
    assert order == ["fault.injected", "fault.requested", "fault.observed"]
    assert shell.call("wait", "latest", "--until", "attempt=2").returncode == 0
    never = shell.call("wait", "latest", "--until", "attempt=9")
    assert never.returncode == 2 and "has ended (PASS), and never came to attempt 9" in never.stderr
    over = shell.call("inject", "latest", "--rank", "1")
    assert over.returncode == 2 and "it has ended" in over.stderr

    # One that was granted and of which nothing was ever seen takes the PASS away.
    plan = FaultPlan.from_json(json.loads(run.plan_json.read_text()))
    unseen = dataclasses.replace(plan.faults[0], id="F2")
    write_durably(run.plan_json, json.dumps(dataclasses.replace(plan, faults=(*plan.faults, unseen)).to_json()).encode())
    judged = api.verify(run)
    assert judged.status == "INCONCLUSIVE" and "F2: it never fired" in judged.cause


def events_of_fault(run: RunLayout, fault: str) -> list[dict[str, object]]:
    chaos = run.leg("chaos")
    names = ("fault.injected", "fault.requested", "fault.observed", "fault.withdrawn")
    return sorted((r for name in names for r in events(chaos, name) if r["fault"] == fault), key=lambda r: r["seq"])


def test_bad_input_is_told_before_anything_is_detached(shell: Shell) -> None:
    job = shell.folder / "job.yaml"
    job.write_text("name: x\nscript: nowhere.py\nwrokers: 2\n")
    told = shell.call("submit", "--detach", job)
    assert told.returncode == 2 and f"{job}:3:1" in told.stderr
    assert not (shell.root / "runs").exists()


def until_gone(shell: Shell, run: RunLayout) -> None:
    eventually(lambda: not shell.left_behind(), timeout_s=60, what=shell.left_behind)
    seen = read_supervision(run)
    assert seen is not None and seen.ended_s is not None
    assert seen.error is not None and seen.error.kind == "InterruptedRunError"


@pytest.mark.nightly
@pytest.mark.parametrize("answer", [b"c", CTRL_C, CTRL_D], ids=["cancel", "Ctrl-C again", "end of input"])
def test_a_question_that_ends_the_drill(shell: Shell, answer: bytes) -> None:
    with open_terminal(shell, "submit", slow_job(shell)) as terminal:
        run = trains(shell)
        ask(terminal, answer)
        assert terminal.wait() == 130
        assert f"chaosrun resume {run.run_id}" in terminal.output
    assert shell.left_behind() == []


def hang_up(terminal: Terminal) -> None:
    terminal.hang_up()


def kill(terminal: Terminal) -> None:
    terminal.process.kill()


def sigterm(terminal: Terminal) -> None:
    terminal.process.terminate()


@pytest.mark.nightly
@pytest.mark.parametrize("end", [hang_up, kill, sigterm])
def test_a_drill_whose_follower_goes_is_cancelled(shell: Shell, end: Callable[[Terminal], None]) -> None:
    with open_terminal(shell, "submit", slow_job(shell)) as terminal:
        run = trains(shell)
        end(terminal)
        code = terminal.wait()
        assert code == (130 if end is sigterm else -signal.SIGHUP if end is hang_up else -signal.SIGKILL)
        until_gone(shell, run)


@pytest.mark.nightly
def test_a_drill_is_cancelled_when_its_follower_goes_before_it_trains(shell: Shell) -> None:
    with open_terminal(shell, "submit", slow_job(shell)) as terminal:
        run = shell.run_begun()
        kill(terminal)
        terminal.wait()
    eventually(lambda: not shell.left_behind(), timeout_s=60, what=shell.left_behind)
    assert not run.verdict_json.exists()


@pytest.mark.nightly
def test_who_waits_is_told_of_a_killed_supervisor(shell: Shell) -> None:
    assert shell.run("submit", "--detach", slow_job(shell)).returncode == 0
    run = trains(shell)
    waiting = shell.start("wait", "latest")
    seen = read_supervision(run)
    assert seen is not None
    supervisor = identify(seen.pid)
    assert supervisor is not None and is_alive(supervisor)
    os.kill(seen.pid, signal.SIGKILL)
    done = finish(waiting)
    assert done.returncode == 130
    assert f"(pid {seen.pid}) was killed" in done.stderr and f"chaosrun resume {run.run_id}" in done.stderr
    # The same for who asks afterwards.
    assert shell.run("wait", "latest").returncode == 130
    assert shell.run("inject", "latest", "--rank", "1").returncode == 2


@pytest.mark.nightly
def test_an_error_without_a_verdict_reaches_who_waits(shell: Shell) -> None:
    assert shell.run("submit", "--detach", slow_job(shell)).returncode == 0
    run = trains(shell)
    waiting = shell.start("wait", "latest")
    seen = read_supervision(run)
    assert seen is not None
    send_signal(eventually(lambda: head_below(seen.pid)), signal.SIGKILL)
    done = finish(waiting)
    assert done.returncode == 7 and done.stderr.startswith("error: "), done.stderr


@pytest.mark.nightly
def test_a_fault_that_was_granted_strikes_under_the_next_supervisor(shell: Shell) -> None:
    """Between plan.json and the strike the supervisor is killed: as far as anybody can see, that is where this one is."""
    assert shell.run("submit", "--detach", slow_job(shell)).returncode == 0
    run = trains(shell, "chaos", step=4)
    seen = read_supervision(run)
    assert seen is not None
    os.kill(seen.pid, signal.SIGKILL)
    assert shell.run("wait", "latest").returncode == 130
    plan = FaultPlan.from_json(json.loads(run.plan_json.read_text()))
    spec = JobSpec.model_validate(json.loads(run.run_json.read_text())["spec"])
    granted = injected(spec, plan, kind="kill", rank="0", settings=[], seed=0, after_s=0.5)
    write_durably(run.plan_json, json.dumps(dataclasses.replace(plan, faults=granted).to_json()).encode())
    done = shell.run("resume", "latest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults    1 of 1 landed" in done.stdout
    assert events(run.leg("chaos"), "fault.observed")[0]["attempt"] == 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_supervisor_that_is_kept_takes_its_own_end_as_an_injection(shell: Shell) -> None:
    job = slow_job(shell, "faults: {schedule: [{rank: 1, kind: supervisor, at_step: 3}]}")
    assert shell.run("submit", "--detach", job).returncode == 0
    waiting = shell.start("wait", "latest")
    run = trains(shell, "chaos", attempt=2, step=4)
    struck = shell.run("inject", "latest", "--kind", "supervisor", "--rank", "0")
    assert struck.returncode == 0, struck.stdout + struck.stderr
    assert "seen by the next supervisor" in struck.stdout
    done = finish(waiting)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults    2 of 2 landed" in done.stdout
    assert len(events(run.leg("chaos"), "supervisor.resumed")) == 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_kinds_and_ranks_in_one_drill(shell: Shell) -> None:
    job = write_job(shell.folder, "time.sleep(1.5 if order.leg == 'chaos' else 0.02)", "recovery: {hang_timeout: 15s}")
    assert shell.run("submit", "--detach", job).returncode == 0
    run = trains(shell, "chaos", step=1)
    for number, arguments in enumerate(
        (
            ("--kind", "preempt", "--rank", "random", "--seed", "5", "--set", "grace=20s"),
            ("--kind", "pause", "--rank", "0", "--set", "duration=500ms"),
            ("--kind", "kill", "--rank", "all"),
            ("--kind", "stop", "--rank", "1"),
            ("--kind", "node", "--rank", "0"),
        ),
        start=1,
    ):
        done = shell.run("inject", "latest", *arguments, "-o", "json")
        told = json.loads(done.stdout)
        assert done.returncode == 0, f"{number}: {done.stdout}{done.stderr}"
        assert all(fault["landed"] for fault in told["faults"])
    verdict = shell.run("wait", "latest")
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert "faults    6 of 6 landed" in verdict.stdout
    assert [record["fault"] for record in events(run.leg("chaos"), "fault.injected")] == [f"F{n}" for n in range(1, 7)]
