"""How a diagnosis reads: the replays, one line a quantity, the first that differs, and what it most likely is."""

from dataclasses import replace
from pathlib import Path

import pytest

from chaosrun.records.layout import RunLayout
from chaosrun.report.diagnosis import render_diagnosis
from chaosrun.report.output import rendered
from chaosrun.verify.diagnosis import Diagnosis, Replay
from chaosrun.verify.hazards import HAZARDS, Hazard
from chaosrun.verify.inspection import InspectionComparison, QuantityComparison, QuantityDifference
from chaosrun.verify.ulp import TensorDifference

RUN = RunLayout(Path(".chaosrun/runs/bytelm-20260102-030405"))
DIFFERENCE = TensorDifference(
    dtype="float32",
    shape=(32, 16),
    elements=512,
    differing=95,
    index=(3, 14),
    expected="-0x1.8a99880000000p-12",
    seen="-0x1.8a99800000000p-12",
    ulp=4,
    max_ulp=32,
    max_distance=None,
    not_finite=0,
)
FINDING = QuantityDifference(
    quantity="reduced gradients",
    step=9,
    at_end=False,
    attempt=2,
    rank=0,
    ranks=(0, 1, 2),
    micro_batch=None,
    tensor="0.weight",
    tensors=4,
    of=4,
    expected=None,
    seen=None,
    difference=DIFFERENCE,
    problem=None,
    worst="2.bias",
    worst_ulp=77,
)


def quantity(name: str, finding: QuantityDifference | None = None, micro_batch: int | None = None) -> QuantityComparison:
    return QuantityComparison(quantity=name, micro_batch=micro_batch, compared=12, finding=finding)  # pyright: ignore


DIAGNOSIS = Diagnosis(
    run_id=RUN.run_id,
    divergence=None,
    replay=Replay(
        start=None,
        why="no checkpoint older than step 8 was kept (checkpoint.keep)",
        steps=10,
        attempts=2,
        faults=("SIGKILL rank 1 after step 10",),
        changed=(),
    ),
    reproduced=True,
    account="the replay differs where the run did, in the same bits",
    comparison=InspectionComparison(
        moments=5,
        quantities=(
            *(quantity("batch", micro_batch=number) for number in range(4)),
            *(quantity("local gradients", micro_batch=number) for number in range(4)),
            quantity("reduced gradients", FINDING),
            quantity("parameters after", replace(FINDING, quantity="parameters after", worst_ulp=1)),
        ),
    ),
    hazard=Hazard(row="C1", what=HAZARDS["C1"]),
    hint="prime the buckets",
)


def text(diagnosis: Diagnosis, width: int = 100) -> str:
    return rendered(render_diagnosis(diagnosis, RUN), width=width, colour=False)


def finding(**changes: object) -> Diagnosis:
    found = replace(FINDING, **changes)  # pyright: ignore[reportArgumentType]
    return replace(DIAGNOSIS, comparison=InspectionComparison(moments=1, quantities=(quantity(found.quantity, found),)))


def test_the_whole_page() -> None:
    assert (
        text(DIAGNOSIS)
        == f"""\
run bytelm-20260102-030405

Replays
    from the beginning: no checkpoint older than step 8 was kept (checkpoint.keep)
    without faults, to step 10
    with faults, 2 attempts: SIGKILL rank 1 after step 10

Step 9, attempt 2 of the replay
  quantity           values         on ranks  largest
  batch              48 equal
  local gradients    48 equal
  reduced gradients  4 of 4 differ  0, 1, 2   77 ULP
  parameters after   4 of 4 differ  0, 1, 2   1 ULP

What differs first
  quantity  reduced gradients
  where     in step 9, ranks 0, 1, 2
  tensor    0.weight
  elements  95 of 512 differ
  expected  -0.000376319629 (-0x1.8a99880000000p-12) at [3, 14]
  seen      -0.000376319513 (-0x1.8a99800000000p-12) at [3, 14]
  distance  4 ULP there; at most 32 ULP in this tensor; 77 ULP in 2.bias

SHOWN     reduced gradients first (step 9, rank 0, 0.weight); the replay differs where the run did,
          in the same bits
hazard    C1: {HAZARDS["C1"]} (docs/hazards.md#c1)
hint      prime the buckets
inspect   chaosrun verify bytelm-20260102-030405
"""
    )


def test_not_shown_again() -> None:
    shown = text(
        replace(DIAGNOSIS, reproduced=False, account="it does not repeat itself", comparison=InspectionComparison(moments=5))
    )
    assert "NOT SHOWN  it does not repeat itself" in shown
    assert "What differs first" not in shown
    assert replace(DIAGNOSIS, reproduced=False).exit_code == 6


def test_shown_again_in_no_quantity() -> None:
    shown = text(replace(DIAGNOSIS, comparison=InspectionComparison(moments=5)), width=200)
    assert "in the same bits; every quantity of the steps around it is equal" in shown
    assert "every quantity" not in text(replace(DIAGNOSIS, comparison=InspectionComparison(moments=0)), width=200)


def test_one_micro_batch_that_differs_is_told_from_the_others() -> None:
    first = replace(FINDING, quantity="loss", micro_batch=1, tensor="")
    comparison = InspectionComparison(moments=1, quantities=(quantity("loss", None, 0), quantity("loss", first, 1)))
    shown = text(replace(DIAGNOSIS, comparison=comparison))
    assert "loss, micro-batch 0  12 equal" in shown
    assert "loss, micro-batch 1  4 of 4 differ" in shown
    assert "where     in step 9, ranks 0, 1, 2, micro-batch 1" in shown
    assert "tensor" not in shown.split("What differs first")[1].split("SHOWN")[0].replace("in this tensor", "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"problem": "the chaos leg does not have it", "difference": None}, "the chaos leg does not have it"),
        ({"quantity": "sample ids", "difference": None, "expected": "[1, 2]", "seen": "[3, 4]"}, "seen      [3, 4]"),
        ({"quantity": "rng", "tensor": "torch"}, "stream    torch"),
        ({"quantity": "parameters before", "at_end": True}, "where     after step 9"),
        ({"ranks": (0,)}, "in step 9, rank 0"),
        ({"difference": replace(DIFFERENCE, not_finite=2, ulp=None)}, "NaN or infinity in 2 pairs"),
        ({"difference": replace(DIFFERENCE, ulp=None, max_ulp=None, max_distance=5), "worst_ulp": None}, "distance  at most 5"),
    ],
)
def test_what_is_said_of_a_finding(changes: dict[str, object], said: str) -> None:
    assert said in text(finding(**changes))


def test_a_replay_from_a_checkpoint_and_changed_files() -> None:
    replay = replace(DIAGNOSIS.replay, start="step-00000006", why="the newest", faults=(), changed=("/job/train.py",))
    shown = text(replace(DIAGNOSIS, replay=replay))
    assert "from step-00000006: the newest" in shown
    assert "no fault came before the difference" in shown
    assert "/job/train.py is not as it was in the run" in shown


@pytest.mark.parametrize("width", [40, 80, 120])
def test_fits_the_terminal(width: int) -> None:
    lines = text(DIAGNOSIS, width).splitlines()
    assert max(len(line) for line in lines if not line.startswith(("run ", "inspect "))) <= width
