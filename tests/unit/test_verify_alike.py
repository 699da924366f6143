"""Records that are shown to be alike are compared no further: what alike means, and a single difference is found and named."""

from pathlib import Path

import pytest

from chaosrun.records.codec import changed
from chaosrun.records.traces import StepRecord
from chaosrun.verify.compare import FIELDS, alike
from chaosrun.verify.verdict import judge
from tests.benchmarks.records import write_run

NOT_COMPARED = {"step", "time_s", "items", "attempt", "rank"}
"""Its place, its time, and how many items its window counted: no field of a comparison."""
OTHER = {"ids": ((7, 8),), "batch": ("other",), "loss": ("0x1.8p+0",), "lr": ("0x1.8p+0",), "grads": b"othr", "params": b"othr"}


def record() -> StepRecord:
    words = {
        "rng": "r",
        "loss": ("0x1.0p+0",),
        "lr": ("0x1.0p-3",),
        "grad": "g",
        "grads": b"word",
        "param": "p",
        "params": b"word",
    }
    return StepRecord(step=1, epoch=0, batches=1, time_s=1.0, ids=((1, 2),), batch=("b",), **words)


def test_all_that_is_compared_is_looked_at() -> None:
    assert alike(record(), changed(record(), time_s=2.0, attempt=3))
    fields = {*StepRecord.__struct_fields__} - NOT_COMPARED
    assert {*FIELDS} - {"position"} <= fields
    for name in fields:
        value = OTHER.get(name, 5 if name in ("epoch", "batches") else "other")
        assert not alike(record(), changed(record(), **{name: value})), name


@pytest.mark.parametrize(("rank", "step"), [(0, 1), (2, 77), (1, 101), (1, 133), (2, 200)])
def test_a_single_difference_among_many_records_is_named(tmp_path: Path, rank: int, step: int) -> None:
    verdict = judge(write_run(tmp_path, 3, 200, differs=(rank, step), tensors=10))
    found = verdict.divergence
    assert verdict.status != "PASS" and found is not None
    # Killed after step 133 and gone on from step 100: what differs before that differs in the first attempt.
    attempt = 1 if step <= 133 else 2
    assert (found.step, found.ranks, found.attempt) == (step, (rank,), attempt)
    # Of other steps than those after a checkpoint nobody keeps the words of tensors.
    assert found.tensor == ("blocks.7.attention.weight" if step in (1, 101) else None)


def test_none_is_none(tmp_path: Path) -> None:
    assert judge(write_run(tmp_path, 3, 200, tensors=10)).status == "PASS"
