"""`chaosrun run` on placements that are kept: a rank is lost, and the restart is held against what was recorded before."""

from pathlib import Path

import pytest

from chaosrun.records.trace_reader import read_trace
from tests.conftest import WarmDrills
from tests.e2e.drills import STEPS, events, write_job

pytestmark = pytest.mark.ray

DIES = """\
if order.attempt == 1 and step == 5 and rank == 1:
    while not (Path(order.leg_path) / "checkpoints" / "step-00000003").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Of nobody's plan, as soon as there is a checkpoint."""
FORGETS = """\
if order.attempt == 2 and step == 4 and rank == 1:
    torch.manual_seed(99)
"""
"""Rank 1 goes on, after the first step of the second attempt, with other random numbers than it had before."""


@pytest.mark.parametrize("wrong", ["", FORGETS], ids=["right", "forgets"])
def test_a_run_that_is_saved_beside_the_training_loses_a_rank_and_is_judged(
    warm_drills: WarmDrills, tmp_path: Path, wrong: str
) -> None:
    job = write_job(tmp_path, DIES + wrong)
    result = warm_drills.production(job, root=tmp_path / "root", overrides=["checkpoint.mode=async"])
    leg, verdict = result.run.leg("run"), result.verdict
    first = read_trace(leg.attempt(1).trace(1), 1, 1, [])
    assert [(saved.step, saved.pending) for saved in first.checkpoints] == [(3, True)]
    assert [attempt.resumed_step for attempt in verdict.attempts][:2] == [0, 3]
    if wrong:
        (alarm,) = events(leg, "recovery.diverged")
        assert (alarm["attempt"], alarm["step"], alarm["rank"], alarm["quantity"]) == (2, 5, 1, "rng")
        assert verdict.status == "FAIL" and verdict.divergence is not None
        assert (verdict.divergence.step, verdict.divergence.ranks) == (5, (1,))
    else:
        (judged,) = events(leg, "recovery.agreed")
        assert (judged["attempt"], judged["steps"], judged["last"], judged["states"]) == (2, 2, 5, 2)
        assert (verdict.status, verdict.code, verdict.steps) == ("PASS", "recoveries_agree", STEPS)
