"""Which deaths prove which faults, and which do not."""

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault
from chaosrun.faults.landed import death_problem, fault_problem, note_problem
from chaosrun.faults.observed import Observation
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.layout import LegLayout
from chaosrun.report.landings import landing, read_landings
from tests.unit.events import event
from tests.unit.legs import write_run

LEFT = {"status": "preempted", "error": "Preempted: rank 1 was told to leave", "told": True}
RAISED = {"status": "raised", "error": "InjectedError: raised on purpose after step 4", "fault": "F1"}
WORKER = {"status": "raised", "error": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "}
UNEXPECTED = {"status": "raised", "error": "RuntimeError: DataLoader worker (pid(s) 12, 4711) exited unexpectedly"}
MEMORY = {"status": "raised", "error": "MemoryError: 256 MiB taken, then …", "fault": "F1"}


def problem(kind: Any, exit_code: int | None = None, by_signal: int | None = None, **found: Any) -> str | None:
    fault = Fault(id="F1", kind=kind, rank=1, at_step=4, source="faults.schedule[0]", options=found.pop("options", {}))
    seen = event("fault.observed", rank=1, pid=7, how="death", exit_code=exit_code, signal=by_signal, found=found)
    told = death_problem(Observation.of(fault, seen))
    return told and told.words


@pytest.mark.parametrize(
    ("kind", "exit_code", "by_signal", "found"),
    [
        ("kill", None, signal.SIGKILL, {}),
        ("segfault", None, signal.SIGSEGV, {}),
        ("abort", None, signal.SIGABRT, {}),
        ("preempt", 85, None, {"end": LEFT}),
        # Scripts that resume by themselves, and do at a notice what they like.
        ("preempt", 0, None, {"of_script": True, "end": LEFT}),
        ("preempt", 143, None, {"of_script": True, "end": LEFT}),
        ("preempt", 0, None, {"of_script": True}),
        ("preempt", None, signal.SIGTERM, {"of_script": True}),
        ("preempt", None, signal.SIGINT, {"of_script": True, "end": LEFT}),
        ("preempt", None, signal.SIGKILL, {"after_s": 2.01, "killed": False, "options": {"grace_s": 2.0}}),
        # A script with a handler of its own leaves as it likes; without one it dies of the notice.
        ("preempt", None, signal.SIGTERM, {"note": {"unhandled": True}}),
        ("exception", 4, None, {"end": RAISED}),
        ("exit", 0, None, {"end": None}),
        ("memory", 4, None, {"end": MEMORY}),
        ("loader_worker", 4, None, {"end": WORKER, "note": {"victim": 4711}}),
        ("loader_worker", 4, None, {"end": UNEXPECTED, "note": {"victim": 4711}}),
    ],
)
def test_a_death_of_the_right_kind_is_the_proof(kind: str, exit_code: int | None, by_signal: int | None, found: Any) -> None:
    assert problem(kind, exit_code, by_signal, **found) is None


@pytest.mark.parametrize(
    ("kind", "exit_code", "by_signal", "found", "words"),
    [
        ("kill", None, signal.SIGTERM, {}, "ended with signal 15"),
        ("kill", 137, None, {}, "ended with exit code 137"),
        ("segfault", None, signal.SIGKILL, {}, "ended with signal 9"),
        ("abort", None, signal.SIGSEGV, {}, "ended with signal 11"),
        ("preempt", None, signal.SIGTERM, {}, "ended with signal 15"),
        ("preempt", 85, None, {}, "left no error behind"),
        ("preempt", 85, None, {"end": {"status": "exited", "error": "UserScriptError: sys.exit(85)"}}, "another error"),
        ("preempt", 85, None, {"end": {**LEFT, "told": False}}, "another error"),
        ("preempt", 0, None, {"end": LEFT}, "ended with exit code 0"),
        ("preempt", 0, None, {"of_script": True, "end": {**LEFT, "told": False}}, "ended with exit code 0"),
        ("preempt", None, signal.SIGTERM, {"of_script": True, "killed": True}, "ended with signal 15"),
        ("preempt", None, signal.SIGSEGV, {"of_script": True}, "ended with signal 11"),
        (
            "preempt",
            None,
            signal.SIGKILL,
            {"of_script": True, "after_s": 1.9, "options": {"grace_s": 2.0}},
            "before its grace of 2 s",
        ),
        ("kill", 0, None, {"of_script": True, "end": LEFT}, "ended with exit code 0"),
        ("preempt", None, signal.SIGKILL, {"after_s": 1.9, "options": {"grace_s": 2.0}}, "before its grace of 2 s"),
        (
            "preempt",
            None,
            signal.SIGKILL,
            {"after_s": 2.1, "killed": True, "options": {"grace_s": 2.0}},
            "its attempt was over",
        ),
        ("exception", 4, None, {"end": {"status": "raised", "error": "RuntimeError: closed by peer"}}, "another error"),
        ("exception", 4, None, {"end": {**RAISED, "fault": "F12"}}, "another error"),
        ("exception", 4, None, {"end": None}, "left no error behind"),
        ("exception", 0, None, {"end": {"status": "returned", "error": None}}, "ended with exit code 0"),
        ("exception", None, signal.SIGKILL, {"end": RAISED}, "ended with signal 9"),
        ("exit", 0, None, {"end": {"status": "returned", "error": None}}, "left an end record (returned)"),
        ("exit", 1, None, {"end": None}, "ended with exit code 1"),
        ("memory", 4, None, {"end": {"status": "raised", "error": "MemoryError: "}}, "another error"),
        ("memory", None, signal.SIGKILL, {}, "ended with signal 9"),
        ("loader_worker", 4, None, {"end": WORKER, "note": {"victim": 471}}, "another error"),
        ("loader_worker", 4, None, {"end": WORKER, "note": None}, "the fault's record names no victim"),
        ("stop", None, signal.SIGKILL, {}, "does not show by a death"),
    ],
)
def test_another_death_is_not(kind: str, exit_code: int | None, by_signal: int | None, found: Any, words: str) -> None:
    assert words in (problem(kind, exit_code, by_signal, **found) or "")


PAUSED = {"state_stopped": "T", "state_before": "T", "state_after": "S", "stopped_s": 1.002}
SLOWED = {"steps": 4, "before_s": 0.02, "during_s": 0.061}


@pytest.mark.parametrize(
    ("told", "last", "by_signal", "heeded"),
    [
        (4, 7, None, True),
        (4, 24, None, False),
        (4, 24, signal.SIGTERM, False),
        (None, 24, None, False),
        # What ends its last steps on a notice in them has heeded it; and grace ran out after the training.
        (23, 24, None, True),
        (24, 24, None, True),
        (4, 24, signal.SIGKILL, True),
    ],
)
def test_a_script_that_trains_to_its_end_has_not_left_on_its_notice(
    tmp_path: Path, told: int | None, last: int, by_signal: int | None, heeded: bool
) -> None:
    """It ignored SIGTERM, or would have left later. Nothing was lost, and no restart had anything to go on with. While the leg
    runs, nobody says that its notice has landed before a later attempt is beyond its last step."""
    phase = None if told is None else "step"
    fault = Fault(
        id="F1", kind="preempt", rank=1, at_step=told, phase=phase, source="faults.schedule[0]", options={"grace_s": 1.0}
    )
    ended = {"rank": 1, "pid": 7, "attempt": 1, "exit_code": None if by_signal else 0, "signal": by_signal}
    found = {"of_script": True, "end": None if by_signal == signal.SIGKILL else LEFT, "after_s": 1.5}
    journal = (
        event("fault.requested", attempt=1, fault="F1", rank=1, step=told, phase=phase),
        event("fault.observed", fault="F1", how="death", found=found, **ended),
        event("leg.finished", outcome="completed", message="all ranks completed the training", final_step=24),
    )
    exits = (event("worker.exited", **ended, died_s=1.0),)
    trace: Any = SimpleNamespace(start=SimpleNamespace(pid=7), steps=SimpleNamespace(last=last), checkpoints=())
    about: Any = {"resume": None, "resume_step": 0, "unplanned": (), "stopped": None, "quarantined": (), "by": "script"}
    attempt = Attempt(number=1, pids={1: 7}, exits=exits, traces={1: trace}, **about)
    leg = LegHistory(name="chaos", layout=LegLayout(tmp_path), journal=journal, attempts=(attempt,))
    problem = fault_problem(fault, leg)
    assert (problem and problem.code) == (None if heeded else "trained_on")
    running = replace(leg, journal=journal[:-1])
    assert fault_problem(fault, running) is None and landing(fault, running).landed == (heeded and last == 24)
    beyond: Any = SimpleNamespace(steps=SimpleNamespace(last=last + 1))
    going_on = replace(attempt, number=2, traces={1: beyond})
    assert landing(fault, replace(running, attempts=(attempt, going_on))).landed


@pytest.mark.parametrize(
    ("kind", "options", "note", "words"),
    [
        ("pause", {"duration_s": 1.0}, PAUSED, None),
        ("pause", {"duration_s": 1.0}, {**PAUSED, "state_before": "S"}, "states T, S and S"),
        ("pause", {"duration_s": 1.0}, {**PAUSED, "state_after": "T"}, "states T, T and T"),
        ("pause", {"duration_s": 1.0}, {**PAUSED, "stopped_s": 0.9}, "for 0.9 s, not for 1 s"),
        ("pause", {"duration_s": 1.0}, {"final": True}, "states None"),
        ("slow", {"factor": 3.0, "steps": 4}, SLOWED, None),
        ("slow", {"factor": 3.0, "steps": 4}, {**SLOWED, "steps": 3}, "3 steps were stretched, not 4"),
        ("slow", {"factor": 3.0, "steps": 4}, {**SLOWED, "during_s": 0.05}, "not 3 times"),
        ("slow", {"factor": 3.0, "steps": 4}, {"steps": 4}, "steps took None s"),
    ],
)
def test_a_note_has_to_show_what_it_tells_of(kind: Any, options: Any, note: Any, words: str | None) -> None:
    fault = Fault(id="F1", kind=kind, rank=1, at_step=4, source="faults.schedule[0]", options=options)
    found = note_problem(Observation.of(fault, event("fault.observed", rank=1, pid=7, how="note", found=note)))
    assert (found is None) if words is None else (found is not None and words in found.words)


def test_a_journal_of_another_version_is_told_with_one_hint(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.leg("chaos").journal.write_bytes(b'{"v": 1, "event": "leg.started"}\n')
    with pytest.raises(UsageError, match=r"^the journal is damaged: .*reads version 2") as raised:
        read_landings(run, ["F1"])
    assert "hint" not in raised.value.message
