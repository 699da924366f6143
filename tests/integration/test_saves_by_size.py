"""Where a job does not say how it is saved, the size of its state decides: real drills, killed once."""

from pathlib import Path

import pytest

from chaosrun.records.order import ASYNC_FROM_BYTES
from chaosrun.records.trace_reader import read_trace
from tests.conftest import REPOSITORY, WarmDrills

JOB = REPOSITORY / "jobs" / "probe" / "job.yaml"
LAST = 20


@pytest.mark.ray
@pytest.mark.parametrize("megabytes", [40, 0])
def test_the_size_of_the_state_decides_where_nothing_else_does(warm_drills: WarmDrills, tmp_path: Path, megabytes: int) -> None:
    assert (megabytes * 1_000_000 >= ASYNC_FROM_BYTES) == bool(megabytes)
    told = [
        f"args=[--steps, {LAST}, --seed, 1, --frozen-megabytes, {megabytes}]",
        f"max_steps={LAST}",
        "checkpoint.every_steps=4",
        "faults.schedule=[{rank: 1, at_step: 12, phase: checkpoint.postcommit}]",
    ]
    result = warm_drills(JOB, root=tmp_path, overrides=told)
    verdict, leg = result.verdict, result.run.leg("chaos")
    assert verdict.status == "PASS", verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 12]
    for number, steps in ((1, [4, 8]), (2, [16, LAST])):
        for rank in (0, 1):
            saved = read_trace(leg.attempt(number).trace(rank), number, rank, []).checkpoints
            # Of the save in which it was killed there is a record, or none.
            pending = {record.step: record.pending for record in saved if record.step != 12}
            assert pending == dict.fromkeys(steps, bool(megabytes)), (number, rank)
