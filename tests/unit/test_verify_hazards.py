"""From a difference to a row of the catalogue: every cause that the verdict names has one, and an inspection knows better."""

from dataclasses import replace
from pathlib import Path

import pytest

import chaosrun.verify
from chaosrun.records.inspection import QUANTITIES
from chaosrun.verify import hazards
from chaosrun.verify.check import Divergence
from chaosrun.verify.code_differences import DIFFERENCE_ROWS
from chaosrun.verify.codes import TABLE, Cause
from chaosrun.verify.hazards import HAZARDS, hazard_of
from chaosrun.verify.inspection import QuantityDifference


@pytest.mark.parametrize("code", [code for code in DIFFERENCE_ROWS if "." not in code and code != "data_resume_inexact"])
def test_every_cause_of_a_difference_has_a_row(code: str) -> None:
    assert Cause(code).hazard in HAZARDS


DIVERGENCE = Divergence(step=9, ranks=(0, 1), attempt=2, kind="rng", reason=Cause("rng_not_restored"))
FINDING = QuantityDifference(
    quantity="rng",
    step=9,
    at_end=False,
    attempt=2,
    rank=0,
    ranks=(0, 1),
    micro_batch=0,
    tensor="torch",
    tensors=1,
    of=9,
    expected=None,
    seen=None,
    difference=None,
    problem=None,
    worst=None,
    worst_ulp=None,
)


@pytest.mark.parametrize(
    ("quantity", "tensor", "kind", "cause", "after_restore", "row"),
    [
        ("sample ids", "", "data order", "sampler_epoch_not_set", True, "D1"),
        ("sample ids", "", "data order", "sampler_epoch_not_set", False, "D3"),
        ("sample ids", "", "data order", "batches_skipped", True, "D8"),
        ("batch", "0", "batch", "batch_contents", True, "R5"),
        ("rng", "torch", "rng", "rng_not_restored", True, "R2"),
        ("rng", "torch", "rng", "rng_drifted", True, "R1"),
        ("rng", "torch", "rng", "rng_drifted", False, "R7"),
        ("rng", "numpy/1", "rng", "rng_drifted", True, "R7"),
        ("parameters before", "0.weight", "weights", "weights_of_another_step", True, "S6"),
        ("parameters before", "0.weight", "weights", "weights_drifted", False, "S11"),
        ("buffers", "1.running_mean", "loss", "forward_pass", True, "C7"),
        ("optimizer state", "0/state/0.weight/exp_avg", "optimizer", "optimizer_state_not_restored", True, "O3"),
        ("optimizer state", "0/state/0.weight/exp_avg", "optimizer", "optimizer_state_renamed", True, "O5"),
        ("optimizer state", "0/param_groups/0/betas/0", "optimizer", "optimizer_update", True, "O4"),
        ("optimizer state", "scaler/scale", "optimizer", "optimizer_update", True, "O7"),
        ("scheduler state", "0/last_epoch", "learning rate", "lr_scheduler_not_restored", True, "O10"),
        ("scheduler state", "0/last_epoch", "loss", "forward_pass", True, "O10"),
        ("registered state", "ema/shadow", "loss", "forward_pass", True, "O8"),
        ("loss", "", "loss", "forward_pass", True, "O8"),
        ("loss", "", "loss", "forward_pass", False, "K4"),
        ("local gradients", "0.weight", "gradient", "gradient", True, "K4"),
        ("local gradients", "0.weight", "gradient", "bucket_layout", True, "K4"),
        ("reduced gradients", "0.weight", "gradient", "bucket_layout", True, "C1"),
        ("reduced gradients", "0.weight", "gradient", "gradient", True, "G1"),
        ("reduced gradients", "0.weight", "gradient", "gradient", False, "C1"),
        ("learning rate", "group 0", "learning rate", "learning_rate", False, "O9"),
        ("learning rate", "group 0", "learning rate", "lr_scheduler_not_restored", True, "O10"),
        # What is undisturbed the same twice follows no clock and no chance.
        ("optimizer state", "0/param_groups/0/lr", "learning rate", "learning_rate", False, "O8"),
        ("parameters after", "0.weight", "optimizer", "optimizer_update", False, "O8"),
        ("parameters after", "0.weight", "optimizer", "optimizer_update", True, "O6"),
    ],
)
def test_an_inspection_knows_the_row(quantity: str, tensor: str, kind: str, cause: str, after_restore: bool, row: str) -> None:
    assert quantity in QUANTITIES
    finding = replace(FINDING, quantity=quantity, tensor=tensor)
    divergence = replace(DIVERGENCE, kind=kind, reason=Cause(cause))
    hazard = hazard_of(finding, divergence, after_restore=after_restore, repeats=True)
    assert hazard is not None and hazard.row == row
    assert hazard.link == f"docs/hazards.md#{row.lower()}"
    assert hazard.to_json() == {"row": row, "what": HAZARDS[row], "link": hazard.link}


@pytest.mark.parametrize(
    ("cause", "quantity", "row"),
    [
        ("optimizer_state_not_restored", "rng", "O3"),
        ("lr_scheduler_not_restored", "optimizer state", "O10"),
        ("batches_repeated", "parameters before", "D8"),
        # These name no more than where it showed.
        ("forward_pass", "rng", "R2"),
        ("gradient", "optimizer state", "O3"),
        ("bucket_layout", "local gradients", "K4"),
    ],
)
def test_a_cause_that_the_verdict_knows_is_not_contradicted(cause: str, quantity: str, row: str) -> None:
    divergence = replace(DIVERGENCE, kind="gradient", reason=Cause(cause))
    finding = replace(FINDING, quantity=quantity, tensor="0/state/0.weight/exp_avg")
    hazard = hazard_of(finding, divergence, after_restore=True, repeats=True)
    assert hazard is not None and hazard.row == row


@pytest.mark.parametrize(("quantity", "row"), [("loss", "K4"), ("rng", "R4")])
def test_a_job_that_does_not_repeat_itself_is_not_blamed_on_a_restore(quantity: str, row: str) -> None:
    finding = replace(FINDING, quantity=quantity)
    hazard = hazard_of(finding, DIVERGENCE, after_restore=False, repeats=False)
    assert hazard is not None and hazard.row == row


def test_every_quantity_has_a_row_of_its_own() -> None:
    for quantity in QUANTITIES:
        hazard = hazard_of(replace(FINDING, quantity=quantity), None, after_restore=False, repeats=True)
        assert hazard is not None


def test_without_a_finding_the_cause_decides() -> None:
    hazard = hazard_of(None, DIVERGENCE, after_restore=False, repeats=True)
    assert hazard is not None and hazard.row == "R2"
    for nothing in (None, replace(DIVERGENCE, reason=Cause("not_of_the_restore"))):
        assert hazard_of(None, nothing, after_restore=False, repeats=True) is None


def test_every_row_is_in_the_catalogue() -> None:
    catalogue = (Path(chaosrun.verify.__path__[0]).parents[1] / hazards.CATALOGUE).read_text()
    missing = [row for row in HAZARDS if f'<a id="{row.lower()}"></a>{row} ' not in catalogue]
    assert not missing


def test_every_row_can_be_reached() -> None:
    refined = {"D3", "G1", "O8", "R1", "R4"}
    rows = {row.hazard for row in TABLE.values() if row.hazard} | set(hazards._BY_QUANTITY.values()) | refined
    assert rows == set(HAZARDS)
