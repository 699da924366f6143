"""The second undisturbed run: when it is wanted, and what it clears or blames."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, drop, edit_journal, edit_trace, only, put, write_run

from chaosrun.records.layout import RunLayout
from chaosrun.spec.model import JobSpec
from chaosrun.verify.confirm import undisturbed_difference, worth_confirming
from chaosrun.verify.verdict import judge

SPEC = JobSpec.model_validate({"name": "toy", "script": "train.py", "workers": 3})


def confirm(run: RunLayout) -> str | None:
    return undisturbed_difference(run.leg("reference"), run.leg("confirm"), SPEC)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """A run with a second undisturbed leg, equal to the first."""
    run = write_run(tmp_path)
    shutil.copytree(run.leg("reference").path, run.leg("confirm").path)
    return run


def test_two_equal_undisturbed_legs_clear_the_job(run: RunLayout) -> None:
    assert confirm(run) is None


def test_unprimed_buckets_are_not_called_irreproducible(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(primed=False))
    shutil.copytree(run.leg("reference").path, run.leg("confirm").path)
    assert judge(run).status == "FAIL"
    assert confirm(run) is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (only("step", put(grad="0" * 16), step=9), "gradient at step 9, rank 1"),
        (only("step", drop, step=9), "lineage: rank 1 lacks step 9"),
        (only("step", put(rng=None), step=9), "records: "),
        (only("end", drop), "completed: the confirm leg has no end record of rank 1"),
        (only("end", put(position={"epoch": 0, "batches": 0, "step": 12})), "final_position"),
    ],
)
def test_a_difference_is_named(run: RunLayout, edit: Any, words: str) -> None:
    edit_trace(run, "confirm", 1, 1, edit)
    difference = confirm(run)
    assert difference is not None and words in difference


def test_confirming_is_for_differences_between_complete_legs(tmp_path: Path, run: RunLayout) -> None:
    assert not worth_confirming(judge(run))
    assert worth_confirming(judge(write_run(tmp_path / "inexact", bugs=Bugs(keep_rng=False), reference_bugs=Bugs())))
    assert worth_confirming(judge(write_run(tmp_path / "random", bugs=Bugs(random_script=True))))
    edit_journal(run, "chaos", only("leg.finished", put(outcome="user_error")))
    assert not worth_confirming(judge(run))


def test_a_restore_found_inexact_is_asked_for_its_premise(tmp_path: Path) -> None:
    """A job that differs before any fault cannot have its restore blamed, whatever the restore found."""
    for name, bugs, status in (("random", Bugs(random_script=True), "INCONCLUSIVE"), ("sound", Bugs(), "FAIL")):
        run = write_run(tmp_path / name, bugs=bugs)
        edit_journal(run, "chaos", only("leg.finished", put(outcome="inexact_restore", message="rank 0: optimizer is not")))
        verdict = judge(run)
        assert (verdict.status, verdict.code) == (
            ("INCONCLUSIVE", "job_not_repeatable") if status == "INCONCLUSIVE" else ("FAIL", "state_changed_on_load")
        )
        assert worth_confirming(verdict) == (status == "INCONCLUSIVE")


def test_an_undisturbed_leg_with_another_parameter_order_is_named_so(run: RunLayout) -> None:
    edit_trace(run, "confirm", 1, 1, only("start", put(tensors=["block.weight", "embed.weight", "head.bias"], param="0" * 16)))
    difference = confirm(run)
    assert difference is not None and difference.startswith("the script's parameter order: parameter 0 is block.weight")
