"""What the records tell of how samples are loaded: warnings, and the hint of a difference in the contents of a batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, edit_trace, only, write_run
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import judge
from tests.records import read_lines, write_lines

Line = dict[str, Any]
Streams = dict[str, str]


def streams(python: int, numpy: int, torch: int) -> Streams:
    return {"python": f"{python:016x}", "numpy": f"{numpy:016x}", "torch": f"{torch:016x}"}


def insert(run: RunLayout, leg: str, rank: int, kind: str, **fields: Any) -> None:
    """A line of this kind after the first attempt's `start`."""
    path = run.leg(leg).attempt(1).trace(rank)
    start, *rest = read_lines(path)
    write_lines(path, [start, {"kind": kind, **fields}, *rest])


def test_an_epoch_that_a_source_was_not_told_is_not_the_scripts(tmp_path: Path) -> None:
    for own, code in ((None, "sampler_epoch_not_set"), ("Rotating", "source_keeps_its_place")):
        run = write_run(tmp_path / str(own), bugs=Bugs(set_epoch=False), reference_bugs=Bugs())
        source(run, "reference", 1, 1, own, **{"Told/epoch": "1"})
        source(run, "chaos", 3, 1, own, **{"Told/epoch": "0"})
        assert judge(run).code == code


def source(run: RunLayout, leg: str, attempt: int, epoch: int, own: str | None, **held: str) -> None:
    """What rank 0's data source held when the attempt opened an epoch."""
    path = run.leg(leg).attempt(attempt).trace(0)
    start, *rest = read_lines(path)
    write_lines(path, [start, {"kind": "source", "epoch": epoch, "own": own, "held": held}, *rest])


@pytest.mark.parametrize(
    ("bugs", "own", "passes", "code", "hint"),
    [
        (Bugs(set_epoch=False), "Rotating", "0", "source_keeps_its_place", "passes is 0 when epoch 1 starts after the"),
        (Bugs(set_epoch=False), "Rotating", "1", "source_keeps_its_place", "Rotating is never told its epoch"),
        (Bugs(set_epoch=False), None, "1", "sampler_epoch_not_set", "set_epoch"),
        (Bugs(skip_off=1), "Rotating", "1", "batches_skipped", "off by 1"),
        (Bugs(keep_augmentation=False), None, "0", "batch_contents", "passes of the script's dataset is 0 when epoch"),
        (Bugs(keep_augmentation=False), None, "1", "batch_contents", "sample_rng"),
    ],
)
def test_a_source_that_counts_its_own_passes_is_the_scripts(
    tmp_path: Path, bugs: Bugs, own: str | None, passes: str, code: str, hint: str
) -> None:
    # Of a run without sample ids contents and order are one: with them only the contents of a batch can differ alone.
    run = write_run(tmp_path, bugs=bugs, reference_bugs=Bugs())
    for epoch in (0, 1):
        source(run, "reference", 1, epoch, own, passes="1")
        for attempt in (2, 3):
            source(run, "chaos", attempt, epoch, own, passes=passes)
    verdict = judge(run)
    assert verdict.status == "FAIL" and verdict.divergence is not None
    assert verdict.code == code
    assert hint in (verdict.hint or "")
    assert code != "source_keeps_its_place" or "call set_epoch" not in f"{verdict.hint}"
    assert (verdict.blame.part == "script") == (code in ("source_keeps_its_place", "batch_contents"))


def test_a_source_that_keeps_other_state_is_not_told_that_it_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(set_epoch=False), reference_bugs=Bugs())
    source(run, "reference", 1, 1, "Curriculum", **{"Curriculum/losses": "list of 2: 0.5, 0.25"})
    source(run, "chaos", 3, 1, "Curriculum", **{"Curriculum/losses": "list of 2: 0.0, 0.0"})
    verdict = judge(run)
    assert (verdict.code, verdict.blame.part) == ("source_keeps_its_place", "script")
    assert "keeps state of its own: Curriculum/losses" in verdict.cause
    assert "run.register" in f"{verdict.hint}" and "counts" not in f"{verdict.cause} {verdict.hint}"


def test_of_a_source_with_state_that_came_back_the_array_that_it_is_made_of_is_named_first(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(set_epoch=False), reference_bugs=Bugs())
    for leg, attempt, one in (("reference", 1, "1"), ("chaos", 1, "1"), ("chaos", 3, "0")):
        source(run, leg, attempt, 1, "Curriculum", **{"Curriculum/losses": f"float32[2] {one * 16}"})
        path = run.leg(leg).attempt(attempt).trace(0)
        start, *rest = read_lines(path)
        values = [(step, {"pending": f"float32[2] {one * 15}{step}"}) for step in range(1, 30)]
        write_lines(path, [start, *({"kind": "holdings", "step": step, "values": each} for step, each in values), *rest])
    verdict = judge(run)
    assert verdict.code == "source_keeps_its_place", verdict.cause
    assert f"{verdict.hint}".startswith("when it resumed at step "), verdict.hint
    assert "the script had other contents of pending (float32[2])" in f"{verdict.hint}"


def workers(rank: int, epoch: int) -> list[Streams]:
    """Two loader workers, unlike each other and all others."""
    return [streams(*(1000 * epoch + 100 * rank + 10 * worker + stream for stream in (1, 2, 3))) for worker in (0, 1)]


def alike(run: RunLayout, seen: Callable[[int, int], list[Streams]]) -> tuple[str, ...]:
    for epoch in (1, 0):
        for rank in range(3):
            insert(run, "chaos", rank, "loader_workers", epoch=epoch, workers=seen(rank, epoch))
    verdict = judge(run)
    assert verdict.status == "PASS", verdict.cause
    return verdict.warnings


def test_loader_workers_with_streams_of_their_own_are_no_news(tmp_path: Path) -> None:
    assert alike(write_run(tmp_path), workers) == ()


def test_a_trace_without_them_is_read_as_before(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    insert(run, "chaos", 0, "loader_workers", epoch=0, workers=[None, streams(1, 2, 3)])
    assert judge(run).status == "PASS"


@pytest.mark.parametrize(
    ("seen", "warning"),
    [
        (
            lambda rank, epoch: [streams(1, 2, 3)] * 2,
            "loader workers 0 and 1 of rank 0 draw the same python and numpy and torch",
        ),
        (
            lambda rank, epoch: [{**worker, "numpy": "0" * 16} for worker in workers(rank, epoch)],
            "loader workers 0 and 1 of rank 0 draw the same numpy numbers: a worker_init_fn",
        ),
        # By worker, as `numpy.random.seed(worker_id)` does.
        (
            lambda rank, epoch: [{**worker, "numpy": f"{number:016x}"} for number, worker in enumerate(workers(rank, epoch))],
            "loader workers of ranks 0 and 1 draw the same numpy numbers",
        ),
        # By worker and rank: every epoch is like the first.
        (
            lambda rank, epoch: workers(rank, 0),
            "loader worker 0 of rank 0 draws the same python and numpy and torch numbers in epochs 0 and 1",
        ),
    ],
    ids=["all", "numpy", "ranks", "epochs"],
)
def test_loader_workers_that_draw_the_same(tmp_path: Path, seen: Callable[[int, int], list[Streams]], warning: str) -> None:
    (found,) = alike(write_run(tmp_path), seen)
    assert found.startswith(warning)


@pytest.mark.parametrize(
    ("items", "warned"),
    [("independent", False), ("draws", False), ("unknown", False), ("global_rng", True), ("never_repeats", True)],
)
def test_what_the_probe_saw_is_a_warning_or_nothing(tmp_path: Path, items: str, warned: bool) -> None:
    run = write_run(tmp_path)
    insert(run, "chaos", 0, "probe", items=items, detail="item 3 is like this")
    verdict = judge(run)
    assert verdict.status == "PASS"
    assert [("item 3 is like this" in warning, "sample_rng(index)" in warning) for warning in verdict.warnings] == (
        [(True, True)] if warned else []
    )


@pytest.mark.parametrize(("items", "told"), [("global_rng", True), ("independent", False)])
def test_a_difference_in_contents_is_explained_by_what_the_probe_saw(tmp_path: Path, items: str, told: bool) -> None:
    run = write_run(tmp_path, bugs=Bugs(keep_augmentation=False), reference_bugs=Bugs())
    # A reference from the cache or not: either leg may have it.
    insert(run, "reference", 0, "probe", items=items, detail="item 3 is like this")
    divergence = judge(run).divergence
    assert divergence is not None and divergence.cause == "batch contents"
    assert ("item 3 is like this" in divergence.hint) == told
    assert "sample_rng(index)" in divergence.hint


def test_an_unknown_finding_is_a_damaged_trace(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    insert(run, "chaos", 0, "probe", items="fine", detail="")
    verdict = judge(run)
    assert verdict.status != "PASS"
    assert any("items" in str(check.summary) + str(check.evidence) for check in verdict.checks if check.name == "records")


@pytest.mark.parametrize(
    ("fetched", "keeps_rng", "code"),
    [
        ("alike", True, "batch_contents"),
        ("otherwise", True, "data_order_not_restored"),
        ("unknown", True, "data_order_not_restored"),
        ("alike, but unknown at first", True, "batch_contents"),
        ("otherwise, and unknown at first", True, "data_order_not_restored"),
        ("alike", False, "rng_not_restored"),
    ],
)
def test_the_order_is_not_blamed_where_loaders_hand_out_the_same(
    tmp_path: Path, fetched: str, keeps_rng: bool, code: str
) -> None:
    """Of a script that makes its inputs of what a loader hands out, their samples are not known as such."""
    bugs = Bugs(keep_augmentation=False, with_ids=False, keep_rng=keeps_rng)
    run = write_script_run(tmp_path, bugs=bugs, kills=SCRIPT_KILLS[:1])

    def tell(line: Line, again: bool) -> Line:
        other = fetched.startswith("otherwise") and again
        unknown = again and (fetched == "unknown" or ("unknown at first" in fetched and line["step"] == 5))
        return {**line, "fetched": None if unknown else [[line["step"] + other], [7]]}

    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        for rank in range(3):
            edit_trace(run, leg, attempt, rank, only("step", lambda line, again=attempt > 1: tell(line, again)))  # type: ignore[misc]
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", code, "yours"), verdict.cause
    assert ("the loader handed out the same samples" in f"{verdict.hint}") == (code == "batch_contents"), verdict.hint


@pytest.mark.parametrize("changed", [range(5, 13), range(5, 6)])
def test_batches_of_another_size_are_told_as_such(tmp_path: Path, changed: range) -> None:
    """One alone may be the last of an epoch."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for rank in range(3):
        other = {"ids": [[1000, 1001, 1002], [1003, 1004, 1005]], "batch": ["0" * 16, "1" * 16]}
        edit_trace(
            run,
            "chaos",
            2,
            rank,
            only("step", lambda line: {**line, **(other if line["step"] in changed else {})}),  # noqa: B023
        )
    verdict = judge(run)
    assert (verdict.status, verdict.blame.whose) == ("FAIL", "yours"), verdict.cause
    told = "a batch has 3 samples where it had 2 in the reference run"
    assert (verdict.code == "batch_size_not_restored", told in f"{verdict.hint}") == (len(changed) > 1,) * 2, verdict.hint
