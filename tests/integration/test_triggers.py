"""Every way to say when, with real workers: what is planned is what happens, to whom and in which attempt."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, WarmDrills, job_file
from tests.records import read_lines

pytestmark = pytest.mark.ray

PROBE = REPOSITORY / "jobs" / "probe" / "train.py"
JOB = f"""\
name: triggers
script: {PROBE}
workers: 2
seed: 1
checkpoint: {{every_steps: 5}}
recovery: {{hang_timeout: 30s}}
timeout: 300s
"""
DURING_RECOVERY = """\
args: [--steps, "20", --seed, "1"]
max_steps: 20
faults:
  schedule:
    - {rank: 0, phase: record, occurrence: 4}        # in the first attempt
    - {rank: all, at_step: 7}
    - {rank: all, phase: rendezvous, attempt: 3}
    - {rank: 0, phase: restore.begin, attempt: 4}
    - {rank: 1, phase: forward, attempt: 5}          # of its first step
    - {kind: pause, rank: 1, phase: fetch, at_step: 8, duration: 300ms}
    - {rank: 1, phase: fetch, at_step: 8}            # rank 0 waits for it in vain, at the point of the next entry
    - {at_once: 2, phase: reduce, at_step: 8}
    - {rank: 0, phase: fetch, at_step: 9}
    - {rank: 1, phase: optimizer, at_step: 12}
    - {rank: 1, phase: checkpoint.file, occurrence: 2}
"""
EXPECTED = [
    # Attempt, what it went on from, ranks that were struck, where, at which step.
    (1, None, {0}, "record", 4),
    (2, None, {0, 1}, "step", 7),
    (3, "step-00000005", {0, 1}, "rendezvous", 0),
    (4, "step-00000005", {0}, "restore.begin", 5),
    (5, "step-00000005", {1}, "forward", 6),
    (6, "step-00000005", {1}, "fetch", 8),
    (7, "step-00000005", {0, 1}, "reduce", 8),
    (8, "step-00000005", {0}, "fetch", 9),
    (9, "step-00000005", {1}, "optimizer", 12),
    (10, "step-00000010", {1}, "checkpoint.file", 20),
]
REPLAY = """\
args: [--steps, "44", --seed, "1", --step-seconds, "0.04"]
faults:
  replay: {trace: recorded.csv, compress: 1800}
"""
RECORDED = "0,0\n600,4\n900,3\n1800,2\n1860,4\n864000,0\n"
"""A node after half a second, another after one, the others when the training is long over."""


def test_faults_at_any_point_of_the_recovery_strike_as_planned(warm_drills: WarmDrills, tmp_path: Path) -> None:
    result = warm_drills(job_file(JOB + DURING_RECOVERY, tmp_path), root=tmp_path / "root")
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    journal = list(read_lines(result.run.leg("chaos").journal))
    requested = [record for record in journal if record["event"] == "fault.requested"]
    resumed = {record["attempt"]: record["resume"] for record in journal if record["event"] == "attempt.starting"}
    struck = {
        (attempt, resumed[attempt], phase, step): {
            record["rank"]
            for record in requested
            if (record["attempt"], record["phase"], record["step"]) == (attempt, phase, step)
        }
        for attempt, phase, step in [(record["attempt"], record["phase"], record["step"]) for record in requested]
    }
    assert struck == {(attempt, resume, phase, step): ranks for attempt, resume, ranks, phase, step in EXPECTED}
    assert sorted(resumed) == list(range(1, 12)) and resumed[11] == "step-00000015"
    assert not any(record["event"] == "death.unplanned" for record in journal)
    assert [path.name.partition(".")[2] for path in result.run.leg("chaos").faults.glob("*.unseen-*")] == ["json.unseen-1"]
    # Of ranks that are struck at once each has its own proof.
    observed = [record for record in journal if record["event"] == "fault.observed"]
    assert sorted(record["fault"] for record in observed) == sorted(record["fault"] for record in requested)


@pytest.mark.nightly
def test_a_recorded_trace_is_played_without_its_file(warm_drills: WarmDrills, tmp_path: Path) -> None:
    trace = tmp_path / "recorded.csv"
    trace.write_text(RECORDED)
    job = job_file(JOB + REPLAY, tmp_path)
    result = warm_drills(job, root=tmp_path / "root", on_event=lambda _: trace.unlink(missing_ok=True))
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert not trace.exists()
    landed = next(check for check in verdict.checks if check.name == "faults_landed")
    assert landed.status == "pass" and landed.summary.endswith("2 had not come when the training ended"), landed.summary
    fired = [record for record in read_lines(result.run.leg("chaos").journal) if record["event"] == "fault.requested"]
    assert [(record["phase"], record["step"]) for record in fired] == [(None, None)] * 2


MISSED = """\
args: [--steps, "40", --seed, "1", --step-seconds, "0.03"]
faults:
  schedule:
    - {rank: 0, at_step: 4}
    - {rank: 1, phase: checkpoint.postcommit, attempt: 1}
"""


def test_a_fault_that_can_no_longer_happen_ends_the_drill_at_once(warm_drills: WarmDrills, tmp_path: Path) -> None:
    """Attempt 1 was to come to its first checkpoint, and the other fault ends it before."""
    result = warm_drills(job_file(JOB + MISSED, tmp_path), root=tmp_path / "root")
    verdict = result.verdict
    assert (verdict.status, verdict.exit_code, verdict.outcome) == ("INCONCLUSIVE", 6, "fault_missed"), verdict.cause
    assert verdict.cause == (
        "chaos leg: F1 (SIGKILL rank 1 right after the commit of the first checkpoint it reaches in attempt 1) can no longer "
        "happen: F2 (SIGKILL rank 0 after step 4) ended attempt 1, and attempt 1 is over"
    )
    assert len(verdict.attempts) == 1


TOGETHER = """\
args: [--steps, "60", --seed, "1", --step-seconds, "0.03"]
faults: {schedule: [{rank: all, after: 1s}]}
"""


@pytest.mark.nightly
def test_several_ranks_struck_from_outside_die_in_one_attempt(warm_drills: WarmDrills, tmp_path: Path) -> None:
    """By day all ranks are struck at once at a point above, and a rank from outside in test_node_faults.py."""
    result = warm_drills(job_file(JOB + TOGETHER, tmp_path), root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause
    assert [(fault.attempt, fault.rank, fault.landed) for fault in result.verdict.faults] == [(1, 0, True), (1, 1, True)]


ALONE = """\
args: [--steps, "20", --seed, "1"]
max_steps: 20
faults: {schedule: [{rank: all, at_step: 13}]}
"""


@pytest.mark.nightly
def test_a_group_that_something_else_keeps_apart_strikes_together_later(warm_drills: WarmDrills, tmp_path: Path) -> None:
    """Rank 1 fails of itself where it should be struck, once: nothing is counted for a fault, and the failure is told."""
    script = tmp_path / "train.py"
    flag = tmp_path / "failed"
    fails = f"""        import os
        from chaosrun.protocol.context import current
        in_chaos = current().order.leg == "chaos"
        if in_chaos and (accelerator.process_index, run.position.step) == (1, 13) and not os.path.exists({str(flag)!r}):
            open({str(flag)!r}, "w").close()
            raise RuntimeError("a failure of its own")
"""
    source = PROBE.read_text()
    place = "        run.step(loss)\n"
    assert source.count(place) == 1
    script.write_text(source.replace(place, place + fails))
    job = (JOB + ALONE).replace(str(PROBE), str(script))
    result = warm_drills(job_file(job, tmp_path), root=tmp_path / "root")
    assert result.verdict.status == "PASS", result.verdict.cause
    assert {(fault.attempt, fault.landed) for fault in result.verdict.faults} == {(2, True)}
    journal = list(read_lines(result.run.leg("chaos").journal))
    assert [record["rank"] for record in journal if record["event"] == "death.unplanned"] == [1]
