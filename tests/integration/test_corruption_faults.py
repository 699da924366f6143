"""Silent corruption of a living rank's memory: it is named, with the place where it struck and where it was first seen."""

from pathlib import Path
from typing import Any

import pytest

from chaosrun.verify.verdict import Verdict

PROBE = Path(__file__).parents[2] / "jobs" / "probe" / "job.yaml"
STEPS = ("args=[--steps, '20', --seed, '1', --cpu]", "per_worker.gpu=0", "checkpoint.every_steps=5")


def drill(warm_drills: Any, tmp_path_factory: pytest.TempPathFactory, *faults: str) -> Verdict:
    """All drills of this file share their reference."""
    root = tmp_path_factory.getbasetemp() / "corruption"
    return warm_drills(PROBE, root=root, overrides=(*STEPS, f"faults.schedule=[{', '.join(faults)}]")).verdict


def evidence(verdict: Verdict) -> Any:
    return next(check.evidence for check in verdict.checks if check.name == "silent_corruption")


IN_A_MOMENT = "{kind: flip_bit, rank: 1, at_step: 12, state: moment, bit: 29}"
WEIGHT_OF_RANK_1 = "parameters of step 12, rank 1, 0.weight (parameters, rank_agreement)"


@pytest.mark.ray
@pytest.mark.parametrize(
    ("rank", "fault", "did", "seen"),
    [
        (
            1,
            "{kind: flip_bit, rank: 1, at_step: 12, tensor: 0.weight, bit: 30}",
            "flipped bit 30 of 0.weight[",
            WEIGHT_OF_RANK_1,
        ),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in (
                (
                    0,
                    "{kind: flip_bit, rank: 0, at_step: 12, state: gradient}",
                    "flipped bit ",
                    "gradients of step 12, rank 0, ",
                ),
                (1, "{kind: nan, rank: 1, at_step: 12}", "wrote NaN into the gradient of ", "gradients of step 12, rank 1"),
                (
                    1,
                    "{kind: flip_bit, rank: 1, phase: step, at_step: 22, bit: 31}",
                    "flipped bit 31 of ",
                    "weights of step 22, rank 1, ",
                ),
                (1, IN_A_MOMENT, "flipped bit 29 of exp_avg", "parameters of step 12, rank 1"),
            )
        ),
    ],
)
def test_it_is_named_where_it_struck_and_where_it_was_seen(
    warm_drills: Any, tmp_path_factory: pytest.TempPathFactory, rank: int, fault: str, did: str, seen: str
) -> None:
    verdict = drill(warm_drills, tmp_path_factory, fault)
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3), verdict.cause
    assert verdict.cause.startswith(f"silent corruption, as injected: F1 {did}")
    assert f"; first seen in {seen}" in verdict.cause
    injected = evidence(verdict)["injected"][0]
    assert injected["rank"] == rank and injected["before"] != injected["after"]
    # Nobody runs the job a second time to learn that it repeats itself, and nobody says that it does not.
    assert evidence(verdict)["prompt"]
    assert {check.name: check.status for check in verdict.checks}["reproducible"] == "pass"
    assert len(verdict.attempts) == 1


@pytest.mark.ray
def test_a_kill_that_heals_it_does_not_hide_it(warm_drills: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rolled back to a checkpoint of before, the run ends where the reference does; the tail cut off does not agree."""
    verdict = drill(warm_drills, tmp_path_factory, "{kind: diverge, rank: 1, at_step: 12}", "{rank: 0, at_step: 14}")
    assert verdict.status == "FAIL", verdict.cause
    assert verdict.cause.startswith("silent corruption, as injected: F1 shifted ")
    assert " on rank 1 at step 12; first seen in losses of step 13, rank 1 (losses); the replicas part" in verdict.cause
    checks = {check.name: check.status for check in verdict.checks}
    assert (checks["final_weights"], checks["parameters"], checks["replay_agreement"]) == ("pass", "pass", "fail")
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 10]


@pytest.mark.ray
def test_what_was_not_there_to_damage_is_no_corruption(warm_drills: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    verdict = drill(warm_drills, tmp_path_factory, "{kind: flip_bit, rank: 1, at_step: 3, tensor: 0.wieght}")
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6)
    assert "no parameter of a tensor called '0.wieght': did you mean 0.weight?" in verdict.cause
    assert [fault.landed for fault in verdict.faults] == [False]


@pytest.mark.ray
def test_a_wrong_recovery_beside_it_is_not_explained_by_it(warm_drills: Any, tmp_path: Path) -> None:
    """The loader begins again after the kill: no number of the model has a part in that."""
    faults = "faults.schedule=[{kind: flip_bit, rank: 1, at_step: 7, tensor: 0.weight, bit: 3}, {rank: 1, at_step: 14}]"
    verdict = warm_drills(PROBE, root=tmp_path, overrides=(*STEPS, "data.resume=plain", faults)).verdict
    assert verdict.status == "FAIL", verdict.cause
    assert "which no corruption explains; besides, F1 flipped bit 3 of 0.weight[" in verdict.cause
