"""Records that are shown to be alike are compared no further: what alike means, and a single difference is found and named."""

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from chaosrun.errors import UsageError
from chaosrun.records.codec import changed
from chaosrun.records.history import Attempt, LegHistory, read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.traces import StepRecord
from chaosrun.verify.compare import FIELDS, alike, compare
from chaosrun.verify.lineage import lineage
from chaosrun.verify.verdict import judge
from tests.benchmarks.records import write_run

NOT_COMPARED = {"step", "time_s", "items", "fetched", "stepped", "attempt", "rank"}
"""Its place, its time, how many items its window counted, and what its inputs were made of: no field of a comparison."""
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
    assert gc.isenabled()


def test_of_blocks_that_are_alike_no_record_is_read(tmp_path: Path) -> None:
    for name, differs, read in (("equal", None, {}), ("other", (1, 150), {1: set(range(129, 201))})):
        run = write_run(tmp_path / name, 3, 200, differs=differs, tensors=10)
        expected, seen = (lineage(read_leg(run.leg(leg))) for leg in ("reference", "chaos"))
        found: dict[int, set[int]] = {}
        for span in (span for steps in seen.steps.values() for span in steps.spans):
            for left, right in expected.unlike(span):
                assert (left.rank, left.step) == (right.rank, right.step)
                found.setdefault(left.rank, set()).add(left.step)
        assert found == read


def test_garbage_is_collected_again_after_a_run_that_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        judge(RunLayout(tmp_path))
    assert gc.isenabled()
    gc.disable()
    try:
        judge(write_run(tmp_path, 2, 200, tensors=10))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_rank_costs_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """In lines that are executed, which does not depend on what else the machine does."""
    lines = {ranks: _lines(write_run(tmp_path / str(ranks), ranks, 40, tensors=2)) for ranks in (4, 20, 80)}
    more = [(lines[20] - lines[4]) / 16, (lines[80] - lines[20]) / 60]
    assert more[1] < 1.01 * more[0]


def _lines(run: RunLayout) -> int:
    executed = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal executed
        executed += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        judge(run)
    finally:
        sys.settrace(before)
    return executed


@pytest.mark.parametrize(
    ("by", "batch", "differs"),
    [("script", "b", False), ("script", "none", True), ("script", "other", True), ("chaosrun", "b", True)],
)
def test_samples_of_another_number_that_hold_the_same_are_the_same_to_a_script(by: Any, batch: str, differs: bool) -> None:
    """It may cut its dataset to what is left of the epoch, and count from there. Inputs that nobody saw show nothing."""
    about: dict[str, Any] = {"number": 2, "resume": None, "resume_step": 0, "pids": {}, "stopped": None, "traces": {}, "by": by}
    attempt = Attempt(**about, exits=(), unplanned=(), quarantined=())
    of_leg = LegHistory(name="chaos", layout=RunLayout(Path("run")).leg("chaos"), attempts=(attempt,))
    seen = changed(record(), ids=((0, 1),), batch=(batch,), attempt=2)
    expected = changed(record(), batch=("none",)) if batch == "none" else record()
    found = compare("ids", expected, seen, of_leg)
    assert (found is not None) is differs
    assert found is None or (found.field, found.expected, found.seen) == ("ids", (1, 2), (0, 1))
