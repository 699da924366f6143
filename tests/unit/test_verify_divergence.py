"""Where the chaos leg first left the reference, and what it is said to be: each broken restore names its own cause."""

import json
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, copy_run, drop, edit_trace, only, put, write_run

from chaosrun.plan.faults import Fault
from chaosrun.records.layout import RunLayout
from chaosrun.verify.divergence import Divergence
from chaosrun.verify.verdict import judge


def diverging(run: RunLayout) -> Divergence:
    divergence = judge(run).divergence
    assert divergence is not None
    return divergence


@pytest.mark.parametrize(
    ("bugs", "step", "kind", "cause", "hint"),
    [
        (Bugs(keep_rng=False), 5, "rng", "RNG not restored", "freshly seeded"),
        (Bugs(keep_weights=False), 5, "weights", "weights not restored", "the initial ones"),
        (Bugs(weights_off=1e-12), 5, "weights", "weights not restored", "not those saved"),
        (Bugs(keep_optimizer=False), 5, "optimizer", "optimizer state not restored", "moments were not restored"),
        (Bugs(keep_scheduler=False), 5, "learning rate", "LR scheduler not restored", "learning rate of step 1"),
        (Bugs(keep_buffers=False), 5, "loss", "forward pass", "BatchNorm statistics"),
        (Bugs(keep_augmentation=False), 5, "batch", "batch contents", "sample_rng"),
        (Bugs(set_epoch=False), 9, "data order", "sampler epoch not set", "those of epoch 0 at the same place"),
        (Bugs(skip_off=1), 5, "data order", "1 batch skipped", "expected at step 5, batch 9 of epoch 0"),
        (Bugs(skip_off=-1), 5, "data order", "1 batch repeated", "expected at step 4, batch 7 of epoch 0"),
        (Bugs(skip_off=-3), 5, "data order", "3 batches repeated", "off by -3"),
        (Bugs(skip_off=2), 5, "data order", "2 batches skipped", "batch 0 of epoch 1"),
        (Bugs(skip_off=1, with_ids=False), 5, "batch", "1 batch skipped", "batch 9 of epoch 0"),
        (Bugs(set_epoch=False, with_ids=False), 9, "batch", "sampler epoch not set", "those of epoch 0"),
        (Bugs(batches_off=-2), 5, "position", "position not restored", "their count"),
        (Bugs(primed=False), 5, "gradient", "gradient reduction (bucket layout)", "another bucket layout"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_broken_restore_names_its_cause(tmp_path: Path, bugs: Bugs, step: int, kind: str, cause: str, hint: str) -> None:
    run = write_run(tmp_path, bugs=bugs, reference_bugs=Bugs(primed=bugs.primed, with_ids=bugs.with_ids))
    verdict = judge(run)
    divergence = diverging(run)
    assert (divergence.step, divergence.kind, divergence.cause) == (step, kind, cause)
    assert hint in divergence.hint
    assert verdict.status == "FAIL" and verdict.cause.startswith(cause)
    assert divergence.attempt == (3 if step == 9 else 2)


def test_exact_run_has_none(tmp_path: Path) -> None:
    assert judge(write_run(tmp_path)).divergence is None


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return write_run(tmp_path_factory.mktemp("exact"))


@pytest.fixture
def run(exact: RunLayout, tmp_path: Path) -> RunLayout:
    """An exact run, to be broken."""
    return copy_run(exact, tmp_path)


ORDER: list[tuple[str, dict[str, Any]]] = [
    ("data order", {"ids": [[1, 2], [3, 4]]}),
    ("batch", {"batch": ["a", "b"]}),
    ("position", {"batches": 3}),
    ("rng", {"rng": "0" * 16}),
    ("loss", {"loss": ["0x1p-3", "0x1p-3"]}),
    ("gradient", {"grad": "0" * 16}),
    ("learning rate", {"lr": ["0x1p-3"]}),
    ("optimizer", {"param": "0" * 16}),
]


@pytest.mark.parametrize("first", range(len(ORDER)), ids=[kind for kind, _ in ORDER])
def test_the_earliest_kind_of_a_step_is_named(run: RunLayout, first: int) -> None:
    kind, _ = ORDER[first]
    values = {key: value for _, change in ORDER[first:] for key, value in change.items()}
    edit_trace(run, "chaos", 2, 2, only("step", put(**values), step=7))
    divergence = diverging(run)
    assert (divergence.step, divergence.rank, divergence.attempt, divergence.kind) == (7, 2, 2, kind)


def test_restored_weights_come_before_the_loss(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 2, only("start", put(param="0" * 16)))
    edit_trace(run, "chaos", 2, 2, only("step", put(loss=["0x1p-3", "0x1p-3"]), step=5))
    assert (diverging(run).kind, diverging(run).rank, diverging(run).step) == ("weights", 2, 5)


def test_weights_of_another_checkpoint_are_recognised(run: RunLayout) -> None:
    path = run.leg("reference").attempt(1).trace(0)
    param = next(line for line in path.read_text().splitlines() if '"step":2,"epoch"' in line).split('"param":"')[1][:16]
    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("start", put(param=param)))
    assert diverging(run).cause == "weights of another step"
    assert "after step 2" in diverging(run).hint


def test_the_tensor_is_named(run: RunLayout) -> None:
    def change(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "grad": "0" * 16, "grads": line["grads"][:6] + "AA" + line["grads"][8:]}

    edit_trace(run, "chaos", 2, 0, only("step", change, step=8))
    assert (diverging(run).kind, diverging(run).tensor) == ("gradient", "block.weight")


def test_a_difference_that_was_rolled_back_is_found(run: RunLayout) -> None:
    edit_trace(run, "chaos", 3, 0, only("step", put(param="0" * 16), step=11))
    verdict = judge(run)
    assert verdict.status == "FAIL"
    assert verdict.divergence is not None
    assert (verdict.divergence.attempt, verdict.divergence.step) == (3, 11)
    assert [check.name for check in verdict.checks if check.status == "fail"] == ["rank_agreement", "replay_agreement"]


def test_a_bad_restore_of_an_attempt_that_made_no_step_is_found(tmp_path: Path) -> None:
    kills = [
        Fault(id="F1", rank=1, phase="step", at_step=6, source="faults.schedule[0]"),
        Fault(id="F2", rank=0, phase="restore.end", at_step=4, source="faults.schedule[1]"),
    ]
    run = write_run(tmp_path, kills=kills)
    assert judge(run).status == "PASS"
    edit_trace(run, "chaos", 2, 2, only("start", put(param="0" * 16)))
    assert (diverging(run).attempt, diverging(run).kind, diverging(run).rank) == (2, "weights", 2)
    assert judge(run).status == "FAIL"


def test_drifting_rank_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(drifting_rank=2), reference_bugs=Bugs())
    assert (diverging(run).kind, diverging(run).ranks) == ("weights", (2,))


def test_data_of_another_rank(run: RunLayout) -> None:
    lines = run.leg("reference").attempt(1).trace(0).read_text().splitlines()
    other = next(line for line in lines if '"step":7,"epoch"' in line)
    edit_trace(run, "chaos", 2, 1, only("step", put(ids=json.loads(other)["ids"]), step=7))
    assert diverging(run).cause == "data of another rank"
    assert "rank 0's of step 7" in diverging(run).hint


def test_order_that_the_reference_never_had(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", put(ids=[[900, 901], [902, 903]]), step=7))
    assert diverging(run).cause == "data order not restored"


def test_gradient_that_differs_on_one_rank_is_not_blamed_on_buckets(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("buckets", put(layout=[[0, 1, 2]])))
    edit_trace(run, "chaos", 2, 1, only("step", put(grad="0" * 16), step=5))
    assert diverging(run).cause == "gradient"
    assert "accumulated before the checkpoint" in diverging(run).hint


def test_rng_that_drifts_later_is_not_blamed_on_the_restore(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", put(rng="0" * 16), step=7))
    assert diverging(run).cause == "RNG drifted"


def test_missing_records_are_no_divergence(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", drop, step=7))
    verdict = judge(run)
    assert verdict.divergence is None
    assert (verdict.status, verdict.cause) == ("FAIL", "lineage: rank 1 lacks step 7")
