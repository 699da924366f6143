"""Losses of runs beside each other: what a step's loss is, how far two runs lie apart, and the command that says so."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api, cli
from chaosrun.errors import UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.verify.trajectory import LossDifference, Trajectory, compare_trajectories, trajectory
from tests.records import read_lines
from tests.unit.legs import STEPS, Edit, copy_run, edit_journal, edit_ranks, edit_trace, only, put, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return write_run(tmp_path_factory.mktemp("trajectory"), created_s=0, overrides=["workers=3"], job="job.yaml")


@pytest.fixture
def edited(run: RunLayout, tmp_path: Path) -> RunLayout:
    """A copy to be changed."""
    return copy_run(run, tmp_path)


def recorded(run: RunLayout, rank: int, step: int) -> list[float]:
    lines = read_lines(run.reference.attempt(1).trace(rank))
    return [float.fromhex(loss) for line in lines if line["kind"] == "step" and line["step"] == step for loss in line["loss"]]


def edit_every_rank(run: RunLayout, edit: Edit) -> None:
    edit_ranks(run, "reference", 1, edit)


def test_without_items_a_steps_loss_is_the_mean_over_ranks_and_micro_batches(run: RunLayout) -> None:
    found = trajectory(run)
    assert (found.workers, len(found.losses)) == (3, STEPS)
    values = [loss for rank in range(3) for loss in recorded(run, rank, 5)]
    assert len(values) == 6
    assert found.losses[4] == pytest.approx(sum(values) / 6, rel=1e-15)


def test_with_items_it_is_the_sum(edited: RunLayout) -> None:
    edit_every_rank(edited, only("step", put(items=17)))
    values = [loss for rank in range(3) for loss in recorded(edited, rank, 5)]
    assert trajectory(edited).losses[4] == pytest.approx(sum(values), rel=1e-15)


def test_the_leg_under_faults_has_the_same_losses(run: RunLayout) -> None:
    # Steps that a restart rolled back count once.
    assert trajectory(run, "chaos") == trajectory(run)


def test_ranks_that_counted_differently(edited: RunLayout) -> None:
    edit_every_rank(edited, only("step", put(items=17)))
    edit_trace(edited, "reference", 1, 2, only("step", put(items=18), step=3))
    with pytest.raises(UsageError, match=r"at step 3 its ranks counted \{17, 18\} items"):
        trajectory(edited)


@pytest.mark.parametrize("items", [0, -1, 1.5, "many"])
def test_items_that_are_no_count_are_a_damaged_record(edited: RunLayout, items: Any) -> None:
    edit_trace(edited, "reference", 1, 0, only("step", put(items=items), step=3))
    with pytest.raises(UsageError, match=r"cannot be compared: .*items"):
        trajectory(edited)


def test_a_leg_that_did_not_complete(edited: RunLayout) -> None:
    edit_journal(edited, "reference", only("leg.finished", put(outcome="user_error")))
    with pytest.raises(UsageError, match=r"reference leg of run run did not complete \(user_error\)") as caught:
        trajectory(edited)
    assert f"`chaosrun status {run_argument(edited)}`" in str(caught.value.hint)


def test_a_leg_that_still_runs(edited: RunLayout) -> None:
    edit_journal(edited, "reference", only("leg.finished", lambda line: None))
    with pytest.raises(UsageError, match="it has not ended"):
        trajectory(edited)


def test_a_step_that_one_rank_lacks(edited: RunLayout) -> None:
    edit_trace(edited, "reference", 1, 1, only("step", lambda line: None, step=STEPS))
    with pytest.raises(UsageError, match="not every rank recorded every step"):
        trajectory(edited)


def test_no_such_leg(run: RunLayout) -> None:
    with pytest.raises(UsageError, match="has no confirm leg"):
        trajectory(run, "confirm")


def losses(*values: float) -> Trajectory:
    return Trajectory(workers=1, losses=values)


def difference(first: Trajectory, seen: Trajectory, atol: float = 0.1) -> LossDifference:
    return compare_trajectories(first, seen, atol=atol)


def test_a_difference() -> None:
    found = difference(losses(3.0, 2.0, 1.0, 0.5), losses(3.0, 2.0625, 1.25, 0.25))
    assert (found.largest, found.mean, found.first_beyond, found.within) == (0.25, 0.140625, 3, False)
    assert (found.expected, found.seen, found.steps, found.lengths) == (1.0, 1.25, 4, (4, 4))


def test_the_tolerance_itself_is_within() -> None:
    assert difference(losses(1.0), losses(1.25), atol=0.25).within
    assert not difference(losses(1.0), losses(1.25), atol=0.2499).within
    assert difference(losses(1.0), losses(1.0), atol=0.0).within


def test_trajectories_of_other_lengths_are_never_within() -> None:
    found = difference(losses(1.0, 2.0), losses(1.0, 2.0, 3.0))
    assert (found.steps, found.lengths, found.first_beyond, found.expected, found.seen) == (2, (2, 3), 3, None, 3.0)
    assert (found.largest, found.within) == (0.0, False)


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
def test_what_is_no_number(wild: float) -> None:
    assert difference(losses(wild), losses(wild)).within
    found = difference(losses(1.0, wild), losses(1.0, 2.0))
    assert (found.first_beyond, found.largest) == (2, math.inf)
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (told["largest"], told["first_beyond"], told["within"]) == (None, 2, False)


@pytest.fixture
def root(run: RunLayout, tmp_path: Path) -> Path:
    """Three runs: `first`, one whose losses are a little larger from step 4 on, one that stopped early."""
    for name in ("first", "near", "cut"):
        copy_run(run, tmp_path / name)
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / name / "run").rename(tmp_path / "runs" / name)

    def larger(line: dict[str, Any]) -> dict[str, Any]:
        more = [(float.fromhex(loss) + (1e-6 if line["step"] >= 4 else 0.0)).hex() for loss in line["loss"]]
        return {**line, "loss": more}

    edit_every_rank(RunLayout(tmp_path / "runs" / "near"), only("step", larger))
    edit_every_rank(RunLayout(tmp_path / "runs" / "cut"), only("step", lambda line: None, step=STEPS))
    return tmp_path


def compare(root: Path, *words: str) -> int:
    return cli.main(["compare", *words, "--root", str(root)])


def test_the_command_within_the_tolerance(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(root, "first", "near") == 0
    text = capsys.readouterr().out
    assert text.startswith("Losses without faults, beside those of first\n")
    assert "WITHIN    1e-05 at every step: 1 run" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "near 3 12 1e-06 7.5e-07 never" in lines
    assert "near workers=3" in lines, "what tells runs of one job apart"


def test_the_command_beyond_the_tolerance(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(root, "first", "near", "cut", "--atol", "1e-7", "-o", "json") == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["v"], told["first"], told["leg"], told["atol"], told["within"]) == (1, "first", "reference", 1e-7, False)
    assert [(entry["run"], entry["first_beyond"], entry["lengths"]) for entry in told["runs"]] == [
        ("first", None, [STEPS, STEPS]),
        ("near", 4, [STEPS, STEPS]),
        ("cut", STEPS, [STEPS, STEPS - 1]),
    ]
    assert compare(root, "first", "near", "cut", "--atol", "1e-7") == 3
    text = capsys.readouterr().out
    assert "step 4: " in text and f"step {STEPS}: missing" in text
    assert "BEYOND    2 of 2 runs by more than 1e-07" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["first"], "nothing to compare a single run with"),
        (["first", "near", "--atol", "-1"], "a tolerance of -1.0 is not valid"),
        (["first", "near", "--atol", "nan"], "a tolerance of nan is not valid"),
        (["first", "nowhere"], "no run 'nowhere'"),
        (["first", "near", "--leg", "confirm"], "confirm"),
        ([], "RUN"),
    ],
)
def test_wrong_usage(root: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(root, *words) == 2
    assert message in capsys.readouterr().err


def test_the_functions_default_is_the_commands(root: Path) -> None:
    runs = [api.find_run(name, root) for name in ("first", "near")]
    assert api.compare(runs).atol == 1e-5
