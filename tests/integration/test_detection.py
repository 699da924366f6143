"""Hangs are found, whoever hangs; the rank that stopped first is named, and where every rank was is in its log before any is
killed. And what another attempt is worth after deaths that nobody planned."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun.records.heartbeat import read_heartbeat
from chaosrun.records.layout import RunLayout
from chaosrun.supervise import hangs
from tests.conftest import REPOSITORY, WarmDrills
from tests.e2e.drills import events, kills, write_job
from tests.records import read_lines

pytestmark = pytest.mark.ray

PROBE = f"""\
name: detection
script: {REPOSITORY}/jobs/probe/train.py
args: [--samples, "340", --steps, "20"]
workers: 2
seed: 1
checkpoint: {{every_steps: 5}}
recovery: {{hang_timeout: 5s}}
"""


def probe_job(folder: Path, *faults: str) -> Path:
    job = folder / "job.yaml"
    job.write_text(PROBE + "faults:\n  schedule:\n" + "".join(f"    - {{{fault}}}\n" for fault in faults))
    return job


def declared(run: RunLayout) -> list[dict[str, Any]]:
    return events(run.leg("chaos"), "hang.declared")


def log(run: RunLayout, attempt: int, rank: int) -> str:
    return run.leg("chaos").attempt(attempt).log(rank).read_text()


def test_planned_hangs_and_a_stolen_port_cost_nothing_and_are_named_by_rank(warm_drills: WarmDrills, tmp_path: Path) -> None:
    job = probe_job(
        tmp_path,
        "kind: port_taken, rank: 0",
        "kind: stop, rank: 1, at_step: 7, phase: forward",
        "kind: no_arrival, rank: 1, attempt: 3",
    )
    result = warm_drills(job, root=tmp_path / "root", overrides=["recovery.max_restarts=0"])
    assert result.verdict.status == "PASS", result.verdict.cause
    assert [fault.landed for fault in result.verdict.faults] == [True] * 3
    stopped, absent = declared(result.run)
    assert [(hang["attempt"], hang["first"]) for hang in (stopped, absent)] == [(2, 1), (3, 1)]

    zero, one = stopped["ranks"]
    assert (one["step"], one["stage"], one["state"], one["stack"]) == (7, "forward", "T", [])
    assert (zero["step"], zero["stage"]) == (7, "backward")
    assert "_engine_run_backward" in zero["stack"][0]
    assert "_engine_run_backward" in log(result.run, 2, 0), "where the others were is in their logs"
    assert "no answer: the process is in state T" in log(result.run, 2, 1)
    assert "rank 1 stopped first, in the forward pass of step 7" in stopped["message"]
    assert stopped["message"].endswith("rank 0 waited for it in the gradient all-reduce of step 7")

    assert [seen["stage"] for seen in absent["ranks"]] == ["rendezvous", "started"]
    assert "init_process_group" in log(result.run, 3, 0)
    assert "no_arrival" in log(result.run, 3, 1)

    addresses = [record["address"] for record in events(result.run.leg("chaos"), "attempt.started")]
    assert "EADDRINUSE" in log(result.run, 1, 0)
    assert len(addresses) == 4 and addresses[0] != addresses[1]
    assert events(result.run.leg("chaos"), "death.unplanned") == []


SLOW = """\
if order.leg == "chaos" and order.attempt == 1 and rank == 1 and step == 7:
    while not (Path(order.leg_path) / "go-on").exists():
        time.sleep(0.01)
"""


def test_a_long_pause_of_the_script_is_no_hang_and_a_rank_stopped_from_outside_is_one(
    warm_drills: WarmDrills, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `hang_timeout`. Rank 1 pauses longer than steps are given while rank 0 waits for it; then rank 0 is stopped."""
    monkeypatch.setattr(hangs, "SHORTEST_HANG_S", 4.0)
    job = write_job(tmp_path, SLOW, kills(9), "recovery: {start_timeout: 100s}")
    paused_s: list[float] = []

    def stop_rank_zero(leg: Path, pid: int) -> None:
        heartbeat = leg / "attempts" / "001" / "rank-0.heartbeat"

        def has_waited() -> bool:
            beat = read_heartbeat(heartbeat)
            if beat is None or (beat.stage, beat.step) != ("backward", 8):
                return False
            return beat.silent_s > hangs.SHORTEST_HANG_S + 1.0

        wait_until(has_waited)
        os.kill(pid, signal.SIGSTOP)
        beat = read_heartbeat(heartbeat)
        assert beat is not None
        paused_s.append(beat.silent_s)
        (leg / "go-on").touch()

    threads: list[threading.Thread] = []

    def on_event(record: dict[str, Any]) -> None:
        if (record["leg"], record["event"], record.get("attempt")) == ("chaos", "attempt.started", 1):
            (leg,) = (tmp_path / "root" / "runs").glob("*/chaos")
            threads.append(threading.Thread(target=stop_rank_zero, args=(leg, record["pids"]["0"])))
            threads[0].start()

    result = warm_drills(job, root=tmp_path / "root", on_event=on_event)
    threads[0].join()
    assert result.verdict.status == "PASS", result.verdict.cause
    assert paused_s[0] > hangs.SHORTEST_HANG_S, "it waited longer than a step is given, and was left alone"
    (hang,) = declared(result.run)
    assert hang["first"] == 0
    assert hang["ranks"][0]["state"] == "T"
    assert "rank 0 stopped first, in the gradient all-reduce of step 8 (its process is stopped)" in hang["message"]
    (death,) = events(result.run.leg("chaos"), "death.unplanned")
    assert (death["rank"], death["step"], death["reason"]) == (0, 8, hang["message"])
    assert events(result.run.reference, "hang.declared") == []


DIES = """\
if order.leg == "chaos" and order.attempt in (2, 3) and rank == 1 and step == 7:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_checkpoint_that_two_attempts_died_from_is_quarantined_and_the_older_one_is_as_exact(
    warm_drills: WarmDrills, tmp_path: Path
) -> None:
    result = warm_drills(write_job(tmp_path, DIES, kills(8), "recovery: {backoff: 100ms}"), root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause
    assert [attempt.resumed_step for attempt in result.verdict.attempts] == [0, 6, 6, 3]
    (aside,) = events(result.run.leg("chaos"), "checkpoint.quarantined")
    assert aside["name"] == "step-00000006"
    assert aside["reason"].startswith("attempts 2 and 3 began from it and died without a newer checkpoint")
    assert Path(aside["moved_to"]).is_dir()
    assert len(events(result.run.leg("chaos"), "death.unplanned")) == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "first", "stage"),
    [
        # The other rank is inside the same all-reduce: the state of the process, or the stack, tells them apart.
        ("kind: stop, rank: 1, at_step: 7, phase: reduce", 1, "backward"),
        ("kind: hang, rank: 0, at_step: 7, phase: reduce", 0, "backward"),
        ("kind: hang, rank: 1, at_step: 7, phase: optimizer", 1, "optimizer"),
        # The other rank asks this one's store and cannot go on, one step further back than this one is.
        ("kind: stop, rank: 0, at_step: 8, phase: fetch", 0, "fetch"),
        ("kind: stop, rank: 1, at_step: 10, phase: checkpoint.file", 1, "checkpoint.write"),
        ("kind: stop, rank: 0, at_step: 10, phase: checkpoint.precommit", 0, "checkpoint.manifest"),
        ("kind: hang, rank: 0, at_step: 10, phase: checkpoint.postcommit", 0, "checkpoint.retention"),
        # The last step: the other rank is done with the training but for its last checkpoint.
        ("kind: stop, rank: 1, at_step: 22, phase: step", 1, "over"),
    ],
)
def test_who_stopped_first_is_told_wherever_it_is(
    warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory, fault: str, first: int, stage: str
) -> None:
    root = tmp_path_factory.getbasetemp() / "detection"
    root.mkdir(exist_ok=True)
    result = warm_drills(probe_job(root, fault), root=root)
    assert result.verdict.status == "PASS", result.verdict.cause
    assert [landing.landed for landing in result.verdict.faults] == [True]
    (hang,) = declared(result.run)
    assert hang["first"] == first
    assert hang["ranks"][first]["stage"] == stage


STOPS = """\
if order.leg == "chaos" and order.attempt == 1 and step == 7:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.nightly
def test_ranks_that_stop_at_once_are_named_together(warm_drills: WarmDrills, tmp_path: Path) -> None:
    result = warm_drills(write_job(tmp_path, STOPS, kills(9), "recovery: {hang_timeout: 5s}"), root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause
    (hang,) = declared(result.run)
    assert "ranks 0 and 1 stopped together, in the script, after step 7 (its process is stopped)" in hang["message"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("after", "found"),
    [
        # The last rank to leave never does; and one that has its own work to do after the training is left to it.
        ("if rank == 1: time.sleep(1000)", True),
        ("deadline = time.monotonic() + 12\nwhile rank == 1 and time.monotonic() < deadline: pass", False),
    ],
    ids=["sleeps", "works"],
)
def test_a_rank_that_hangs_after_the_others_have_finished_is_found(
    warm_drills: WarmDrills, tmp_path: Path, after: str, found: bool
) -> None:
    job = write_job(tmp_path, "", kills(9), "recovery: {hang_timeout: 5s, max_restarts: 0}")
    script = tmp_path / "train.py"
    only_here = f"if order.leg == 'chaos':\n    {after.replace(chr(10), chr(10) + '    ')}\n"
    script.write_text(script.read_text() + only_here)
    result = warm_drills(job, root=tmp_path / "root")
    journal = list(read_lines(result.run.leg("chaos").journal))
    hangs_seen = [record for record in journal if record["event"] == "hang.declared"]
    assert [(hang["first"], hang["ranks"][0]["stage"]) for hang in hangs_seen] == ([(1, "ended")] if found else [])
    assert result.verdict.outcome == ("recovery_failed" if found else "completed")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
