"""Faults of a process, with the real thing: each is seen to happen in its own way, and the job comes back exactly."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from chaosrun.processes import ProcessIdentity, identify
from chaosrun.records.trace_reader import read_trace
from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills, job_file
from tests.integration.ranks import eventually
from tests.records import read_lines

PROBE = Path(__file__).parents[2] / "jobs" / "probe" / "train.py"
OWN = Path(__file__).parent / "process" / "train.py"
JOB = """\
name: process
script: {script}
args: [{args}]
workers: {workers}
seed: 1
max_steps: {steps}
checkpoint: {{every_steps: 5}}
recovery: {{hang_timeout: 10s}}
faults:
  schedule:
{faults}
timeout: 300s
"""


def write_job(
    folder: Path, faults: list[str], *, script: Path = PROBE, args: str = "", workers: int = 2, steps: int = 22
) -> Path:
    schedule = "\n".join(f"    - {{{fault}}}" for fault in faults)
    return job_file(JOB.format(script=script, args=args, workers=workers, steps=steps, faults=schedule), folder)


def found(run: Any) -> dict[str, dict[str, Any]]:
    """What was seen of each fault."""
    journal = read_lines(run.leg("chaos").journal)
    return {record["fault"]: record for record in journal if record["event"] == "fault.observed"}


def landed(verdict: Verdict) -> list[bool]:
    return [fault.landed for fault in verdict.faults]


@pytest.mark.ray
def test_every_kind_that_ends_or_disturbs_a_process_in_one_drill(warm_drills: WarmDrills, tmp_path: Path) -> None:
    faults = [
        "kind: preempt, rank: 1, at_step: 2",
        "kind: pause, rank: 0, at_step: 5, duration: 200ms",
        "kind: segfault, rank: 0, at_step: 7, phase: reduce",
        "kind: exception, rank: 1, at_step: 9, phase: reduce",
        "kind: exit, rank: 0, at_step: 11",
        "kind: memory, rank: 1, at_step: 13, mebibytes: 32",
        "kind: loader_worker, rank: 0, at_step: 15, phase: forward",
        "kind: slow, rank: 1, at_step: 17, steps: 3, factor: 2",
        "kind: abort, rank: 1, at_step: 22, phase: reduce",
    ]
    result = warm_drills(write_job(tmp_path, faults, args='--steps, "22", --loader-workers, "1"'), root=tmp_path / "root")
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert landed(verdict) == [True] * 9
    # The notice came after step 2, both ranks left after step 3, at which no checkpoint was due, and nothing was lost.
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 3, 5, 5, 10, 10, 10, 20]
    assert verdict.attempts[0].lost_steps == 0
    ends = [attempt.ended_by.partition(" ")[0] for attempt in verdict.attempts]
    assert ends == ["F1", "F3", "F4", "F5", "F6", "F7", "F9", "completed"]

    seen = found(result.run)
    leg = result.run.leg("chaos")
    assert [(seen[f]["exit_code"], seen[f]["signal"]) for f in ("F1", "F3", "F4", "F5", "F6", "F7", "F9")] == [
        (85, None),
        (None, signal.SIGSEGV),
        (4, None),
        (0, None),
        (4, None),
        (4, None),
        (None, signal.SIGABRT),
    ]
    ends = [json.loads(leg.attempt(1).end(rank).read_text()) for rank in (0, 1)]
    assert [(end["status"], end["completed"], end["step"], end["told"]) for end in ends] == [("preempted", False, 3, 1)] * 2
    assert ends[1]["error"]["message"].startswith("rank 1 was told to leave")
    assert ends[0]["error"]["message"].startswith("rank 0 left with rank 1")
    # Nobody had to kill the rank that was not told.
    assert [(r["exit_code"], r["signal"]) for r in read_lines(leg.journal) if r["event"] == "worker.exited"][:2] == [
        (85, None)
    ] * 2

    pause = seen["F2"]["found"]
    assert (pause["state_stopped"], pause["state_before"]) == ("T", "T")
    assert pause["state_after"] != "T"
    assert pause["stopped_s"] >= 0.2
    assert "Segmentation fault" in (text := leg.attempt(2).log(0).read_text())
    assert "in segfault" in text and "train.py" in text
    assert seen["F4"]["found"]["end"]["error"].startswith("InjectedError: fault F4: ")
    assert seen["F5"]["found"]["end"] is None
    assert "MiB taken, then the limit" in seen["F6"]["found"]["end"]["error"]
    assert str(seen["F7"]["found"]["note"]["victim"]) in seen["F7"]["found"]["end"]["error"]
    slow = seen["F8"]["found"]
    assert (slow["steps"], slow["during_s"] >= 2 * slow["before_s"]) == (3, True)


@pytest.mark.ray
def test_what_did_not_happen_is_not_taken_for_a_fault(warm_drills: WarmDrills, tmp_path: Path) -> None:
    faults = ["kind: exception, rank: 1, at_step: 3, phase: forward", "kind: loader_worker, rank: 0, at_step: 4"]
    job = write_job(tmp_path, faults, script=OWN, args="--variant, swallow", steps=12)
    result = warm_drills(job, root=tmp_path / "root")
    verdict = result.verdict
    assert (verdict.status, landed(verdict)) == ("INCONCLUSIVE", [False, False])
    assert [fault.problem for fault in verdict.faults] == [
        "it was requested, but no record shows that it happened",
        "rank 0 has no live loader worker at this point",
    ]
    assert "swallowed: fault F1" in result.run.leg("chaos").attempt(1).log(1).read_text()
    # It went on all the same, and exactly.
    assert [check.name for check in verdict.checks if check.status in ("fail", "inconclusive")] == ["faults_landed"]


@pytest.mark.ray
def test_an_attempt_that_ends_before_a_fault_was_seen_ends_the_drill(warm_drills: WarmDrills, tmp_path: Path) -> None:
    faults = ["kind: exception, rank: 1, at_step: 3, phase: forward", "rank: 1, at_step: 6"]
    job = write_job(tmp_path, faults, script=OWN, args="--variant, swallow", steps=12)
    verdict = warm_drills(job, root=tmp_path / "root").verdict
    assert (verdict.status, verdict.outcome, landed(verdict)) == ("INCONCLUSIVE", "fault_missed", [False, True])
    assert "F1" in verdict.headline and "F2" in verdict.headline


@pytest.mark.ray
def test_a_script_that_takes_its_notice_itself_is_told_so(warm_drills: WarmDrills, tmp_path: Path) -> None:
    job = write_job(tmp_path, ["kind: preempt, rank: 1, at_step: 7"], script=OWN, args="--variant, own-exit", steps=12)
    verdict = warm_drills(job, root=tmp_path / "root").verdict
    assert (verdict.status, verdict.outcome, landed(verdict)) == ("INCONCLUSIVE", "fault_missed", [False])
    assert verdict.reason.code == "notice_taken" and verdict.blame.part == "script"


@pytest.mark.ray
def test_a_script_with_a_handler_of_its_own_is_killed_when_grace_runs_out(warm_drills: WarmDrills, tmp_path: Path) -> None:
    faults = ["kind: preempt, rank: 1, at_step: 7, phase: forward, grace: 300ms"]
    job = write_job(tmp_path, faults, script=OWN, args="--variant, own-handler", steps=12)
    result = warm_drills(job, root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause
    seen = found(result.run)["F1"]
    assert (seen["exit_code"], seen["signal"], seen["found"]["killed"]) == (None, signal.SIGKILL, False)
    assert seen["found"]["after_s"] >= 0.3
    assert "SIGTERM: this script takes its time" in result.run.leg("chaos").attempt(1).log(1).read_text()


class Preempter:
    """Sends SIGTERM to rank 1 of the first chaos attempt, when it has done a few steps."""

    def __init__(self) -> None:
        self.run: Path | None = None
        self.helper: ProcessIdentity | None = None

    def __call__(self, record: dict[str, Any]) -> None:
        if (record["leg"], record["event"], record.get("attempt")) == ("chaos", "attempt.started", 1):
            victim = identify(int(record["pids"]["1"]))
            assert victim is not None
            threading.Thread(target=self._preempt, args=(victim,), daemon=True).start()

    def _preempt(self, victim: ProcessIdentity) -> None:
        assert self.run is not None
        leg = next(self.run.glob("runs/*/chaos"))
        trace = leg / "attempts" / "001" / "rank-1.trace"
        eventually(lambda: trace.exists() and len(read_trace(trace, 1, 1, []).steps) >= 2)
        os.kill(victim.pid, signal.SIGTERM)
        (leg / "notice-sent").touch()


@pytest.mark.ray
def test_a_preemption_that_nobody_planned_costs_nothing(warm_drills: WarmDrills, tmp_path: Path) -> None:
    preempter = Preempter()
    preempter.run = tmp_path / "root"
    job = write_job(tmp_path, ["rank: 0, at_step: 18"], script=OWN, args="--variant, cleanup", steps=20)
    result = warm_drills(job, root=tmp_path / "root", on_event=preempter)
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    first, second, _third = verdict.attempts
    assert (first.lost_steps, second.resumed_step) == (0, first.last_step)
    journal = list(read_lines(result.run.leg("chaos").journal))
    (death,) = [record for record in journal if record["event"] == "death.unplanned"]
    assert death["reason"] == (
        f"rank 1 was told to leave (SIGTERM): all ranks took a checkpoint after step {first.last_step} and left"
    )
    assert {(r["exit_code"], r["signal"]) for r in journal if r["event"] == "worker.exited" and r["attempt"] == 1} == {
        (85, None)
    }
    # The script's own cleaning up was done.
    assert "cleaned up" in result.run.leg("chaos").attempt(1).log(0).read_text()


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 3])
def test_a_notice_at_every_phase_of_a_step(warm_drills: WarmDrills, tmp_path: Path, workers: int) -> None:
    phases = ["fetch", "forward", "reduce", "optimizer", "record", "step"]
    if workers == 1:
        phases.remove("reduce")
    steps = {phase: 6 * number + 2 for number, phase in enumerate(phases)}
    rank = workers - 1
    faults = [f"kind: preempt, rank: {rank}, at_step: {step}, phase: {phase}" for phase, step in steps.items()]
    job = write_job(tmp_path, faults, args='--steps, "40", --accumulation, "2", --samples, "1000"', workers=workers, steps=40)
    verdict = warm_drills(job, root=tmp_path / "root").verdict
    assert verdict.status == "PASS", verdict.cause
    # One step further with the others; a rank alone leaves at once. Nothing is lost.
    left = [step + (workers > 1) for step in steps.values()]
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, *left]
    assert [attempt.lost_steps for attempt in verdict.attempts] == [0] * (len(left) + 1)


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["exception", "exit", "segfault", "abort", "memory", "loader_worker"])
def test_a_kind_at_every_phase(warm_drills: WarmDrills, tmp_path: Path, kind: str) -> None:
    options = ", mebibytes: 32" if kind == "memory" else ""
    training = ["fetch", "forward", "reduce", "optimizer", "record", "step"]
    faults = [f"kind: {kind}, rank: 1, at_step: {2 * n + 6}, phase: {phase}{options}" for n, phase in enumerate(training)]
    if kind != "loader_worker":
        saving = ["begin", "file", "precommit", "postcommit", "retention"]
        faults += [
            f"kind: {kind}, rank: 0, at_step: {20 + 5 * n}, phase: checkpoint.{at}{options}" for n, at in enumerate(saving)
        ]
        faults += [
            f"kind: {kind}, rank: 1, phase: {phase}, attempt: {n}{options}"
            for n, phase in enumerate(["restore.begin", "restore.end", "rendezvous"], 3)
        ]
    job = write_job(tmp_path, faults, args='--steps, "44", --samples, "1000", --loader-workers, "2"', steps=44)
    verdict = warm_drills(job, root=tmp_path / "root").verdict
    assert verdict.status == "PASS", verdict.cause
    assert all(landed(verdict))


@pytest.mark.ray
@pytest.mark.nightly
def test_a_rank_that_does_not_come_to_its_end_is_not_waited_for(warm_drills: WarmDrills, tmp_path: Path) -> None:
    faults = ["kind: preempt, rank: 1, at_step: 7"]
    result = warm_drills(write_job(tmp_path, faults, script=OWN, args="--variant, linger", steps=12), root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause
    exits = [record for record in read_lines(result.run.leg("chaos").journal) if record["event"] == "worker.exited"]
    assert [(exit["rank"], exit["exit_code"], exit["signal"]) for exit in exits[:2]] == [(1, 85, None), (0, None, 9)]


@pytest.mark.ray
@pytest.mark.nightly
def test_a_persistent_loader_worker_is_found_in_a_later_epoch(warm_drills: WarmDrills, tmp_path: Path) -> None:
    faults = ["kind: loader_worker, rank: 1, at_step: 17, phase: optimizer"]
    args = '--steps, "20", --samples, "64", --loader-workers, "2", --persistent'  # 4 steps an epoch
    result = warm_drills(write_job(tmp_path, faults, args=args, steps=20), root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause


@pytest.mark.ray
def test_two_ranks_are_told_at_once(warm_drills: WarmDrills, tmp_path: Path) -> None:
    faults = ["kind: preempt, rank: all, at_step: 7", "kind: preempt, rank: random, at_once: 2, at_step: 13, phase: forward"]
    job = write_job(tmp_path, faults, workers=3)
    verdict = warm_drills(job, root=tmp_path / "root").verdict
    assert verdict.status == "PASS", verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 8, 14]
