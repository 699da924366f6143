"""A count of batches to skip is off only where all that is seen is a shifted stretch of the reference's order."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from legs import BATCHES_PER_EPOCH, Bugs, edit_ranks, edit_trace, only, put
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.records.layout import RunLayout
from chaosrun.verify import libraries
from chaosrun.verify.codes import Cause
from chaosrun.verify.ledger import _entries, _Entry, _name, _skips_again
from chaosrun.verify.ruling import _explains
from chaosrun.verify.verdict import judge

BEGAN = 8
"""So many batches of the first epoch were done."""


def shuffle_from(run: RunLayout, step: int) -> None:
    """From this step on the batches are no recorded ones, as of a buffer that is filled anew."""

    def strange(line: dict[str, Any]) -> dict[str, Any]:
        return line if line["step"] < step else {**line, "batch": [f"{line['step']}-{number}" for number in (0, 1)]}

    edit_ranks(run, "chaos", 2, only("step", strange))


def numbered_from(first: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Give each batch the next ids."""
    ids = itertools.count(first)
    return lambda line: {**line, "ids": [[next(ids) for _ in batch] for batch in line["ids"]]}


def test_a_later_epoch_may_come_of_the_count_of_all_steps_and_ends_earlier() -> None:
    first, later = (_Entry(step=5 * epoch + 2, epoch=epoch, index=1, key=()) for epoch in (1, 2))
    ahead, behind = _name(first, later, 5), _name(later, first, -5)
    assert (ahead.code, behind.code) == ("sampler_epoch_ahead", "sampler_epoch_not_set")
    assert "the global step count" in f"{ahead.hint}" and "the global step count" not in f"{behind.hint}"
    assert "the global step count" in f"{libraries.for_own_resume(ahead).hint}"
    again = _name(replace(first, index=1), replace(first, epoch=0, index=0), -6)
    assert (again.code, again.because) == ("batches_repeated", "at_first"), "of a short epoch before, too"
    one = SimpleNamespace(at=lambda rank, step: SimpleNamespace(batch=("a",)))
    drill: Any = SimpleNamespace(reference_lineage=one)
    for cause, steps, explained in ((ahead, -5, True), (ahead, -6, False), (ahead, 5, False), (behind, 5, False)):
        ended: Any = SimpleNamespace(cause=Cause.of("ended_at_another_step", step=15 + steps, expected=15, rank=0))
        assert _explains(cause, ended, drill) == explained
        assert _explains(cause.explained("each_pass"), ended, drill)


def test_a_batch_that_goes_through_several_modules_counts_once() -> None:
    """An encoder and a decoder that are called in turn, with the same batch, in each of two optimizers' steps."""
    ids = [(each // 4, each % 4) for each in range(8) for _ in range(2)]

    def step(number: int) -> Any:
        epoch, batch = ids[number]
        return SimpleNamespace(
            step=number + 1, epoch=epoch, batches=4 * batch + 2 * (number % 2 + 1), batch=("x", "y"), ids=([batch],) * 2
        )

    ledger = _entries([step(number) for number in range(16)], by_ids=True)
    assert [entry.index for entry in ledger] == [batch for _ in range(2) for batch in range(4) for _ in range(4)]
    back = _name(ledger[12], ledger[4], -8)
    assert (back.code, back.params["batches"], back.params["index"]) == ("batches_repeated", 2, 1)
    over = _name(ledger[16], ledger[12], -4)
    assert over.params["batches"] == 1, "over the end of an epoch"


@pytest.mark.parametrize(
    ("passes", "place"), [(True, 6), (True, 3), (False, 2)], ids=["where it went on", "elsewhere", "a stream counts its own"]
)
def test_a_later_pass_that_does_not_begin_at_its_beginning_is_told_as_that(passes: bool, place: int) -> None:
    where = [(number // 4, number % 4) if passes else (0, number) for number in range(12)]
    ledger = [_Entry(step=number + 1, epoch=epoch, index=index, key=(number,)) for number, (epoch, index) in enumerate(where)]
    seen = ledger[place : place + 2]
    assert _skips_again(ledger, 2, 4, place, seen)
    assert not _skips_again(ledger, 4, 4, place, seen), "it went on wrong"
    assert not _skips_again(ledger, 2, 4, 8, ledger[8:10]), "an epoch was left out"
    strange = replace(seen[0], key=("strange",))
    assert place == 3 or not _skips_again(ledger, 2, 4, place, [*seen[:1], strange, strange]), "another order"


def test_a_later_pass_that_skips_is_not_laid_to_streams_that_its_loader_drew_from_once_more(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(each_pass=True), kills=SCRIPT_KILLS[:1])
    edit_ranks(run, "chaos", 2, only("step", put(rng="0123456789abcdef")))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "batches_skipped"), verdict.cause
    assert "only in the pass in which the checkpoint was saved" in f"{verdict.hint}"


@pytest.mark.parametrize("counts", [True, False])
def test_another_optimizers_turn_is_told_before_the_data_that_it_took(tmp_path: Path, counts: bool) -> None:
    """A GAN's count of its own steps was lost; not where the data are those of another place."""
    run = write_script_run(tmp_path, bugs=Bugs() if counts else Bugs(skip_off=1, with_ids=False), kills=SCRIPT_KILLS[:1])
    if counts:
        shuffle_from(run, 6)
    edit_ranks(run, "reference", 1, only("step", put(stepped=["Adam 2 of 2"]), step=6 if counts else 5))
    edit_ranks(run, "chaos", 2, only("step", put(stepped=["Adam 1 of 2"]), step=6 if counts else 5))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "other_optimizer_stepped" if counts else "batches_skipped")
    assert not counts or "Adam 1 of 2 made the step, but Adam 2 of 2 did in the reference run" in f"{verdict.hint}"


@pytest.mark.parametrize(
    ("off", "broken_from", "code", "says"),
    [
        (1, None, "batches_skipped", "count of batches to skip on resume is off by 1, or what had been fetched ahead was lost"),
        (-2, None, "batches_repeated", "the count of batches to skip on resume is off by -2"),
        (BATCHES_PER_EPOCH - BEGAN, None, "batches_skipped", "the rest of the epoch before, 2 batches, was left out"),
        (-BEGAN, None, "batches_repeated", "8 batches repeated, as those already done were not skipped"),
        (-2, 6, "data_order_not_restored", "the batches start as at step 4, but then differ from those"),
    ],
    ids=["skips one", "repeats two", "rest of the epoch", "the epoch again", "broken off"],
)
def test_what_was_seen_tells_whether_a_count_was_off(
    tmp_path: Path, off: int, broken_from: int | None, code: str, says: str
) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=off, with_ids=False), kills=SCRIPT_KILLS[:1])
    if broken_from:
        shuffle_from(run, broken_from)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert says in f"{verdict.hint}"
    assert ("count of batches" in says) == ("count of batches" in f"{verdict.hint}")


def test_an_order_that_no_step_had_may_go_by_hashes(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(with_ids=False), kills=SCRIPT_KILLS[:1])
    shuffle_from(run, 5)
    for leg, seed in (("reference", "0"), ("chaos", "1")):
        path = run.leg(leg).environment
        path.write_text(json.dumps({**json.loads(path.read_text()), "python_hash_seed": seed, "hash_order": "data.py:58"}))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "data_order_not_restored"), verdict.cause
    assert f"{verdict.hint}".startswith("the script depends on hash(), or on the order of a set at data.py:58"), verdict.hint


def test_ids_count_for_nothing_where_the_script_cut_its_dataset_to_what_is_left(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=1), kills=SCRIPT_KILLS[:1])
    edit_ranks(run, "chaos", 2, only("step", numbered_from(0)))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "batches_skipped"), verdict.cause
    assert "off by 1" in f"{verdict.hint}"


def test_the_same_ids_with_the_contents_of_another_epoch_are_told_with_their_step(tmp_path: Path) -> None:
    """A dataset that a script orders anew for each epoch, and that a restart orders as for an earlier one."""
    run = write_script_run(tmp_path, bugs=Bugs(), kills=SCRIPT_KILLS[:1])
    for rank in range(3):
        contents: dict[int, Any] = {}

        def by_place(line: dict[str, Any], contents: dict[int, Any] = contents, epochs: int = 0) -> dict[str, Any]:
            batch = contents.setdefault(line["step"], line["batch"])
            earlier = contents[line["step"] - 5] if epochs and line["step"] > 5 else batch
            return {**line, "batch": earlier, "ids": [[line["batches"] - number] for number in (1, 0)]}

        edit_trace(run, "reference", 1, rank, only("step", by_place))
        edit_trace(run, "chaos", 1, rank, only("step", by_place))
        edit_trace(run, "chaos", 2, rank, only("step", partial(by_place, epochs=1)))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "batch_contents"), verdict.cause
    assert "the same samples have the contents of step 1, in epoch 0" in f"{verdict.hint}"


@pytest.mark.parametrize(
    ("change", "kind", "code", "micro_batch"),
    [
        (lambda batch: {"batch": [batch[0], "lost"]}, "batch", "data_order_not_restored", 1),
        (lambda batch: {"batch": ["again", "eval", batch[0], "lost"]}, "batch", "data_order_not_restored", 3),
        (lambda batch: {"batch": batch, "loss": ["0x1p-3", "0x1p-4"]}, "loss", "forward_pass", 0),
        (lambda batch: {"batch": batch}, None, None, None),
    ],
    ids=["another sample", "after one more", "another loss", "the same"],
)
@pytest.mark.parametrize("with_ids", [False, True])
def test_a_pass_before_a_step_that_only_one_run_made_is_no_other_order(
    tmp_path: Path, with_ids: bool, change: Any, kind: str | None, code: str | None, micro_batch: int | None
) -> None:
    """An evaluation with gradients before a save counts to the next step, and a restart does not make it again."""
    run = write_script_run(tmp_path, bugs=Bugs(with_ids=with_ids), kills=SCRIPT_KILLS[:1])

    def evaluated(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "batch": ["eval", *line["batch"]], "ids": line["ids"] and [[1], *line["ids"]]}

    def other(line: dict[str, Any]) -> dict[str, Any]:
        changed = {**line, **change(line["batch"])}
        more = len(changed["batch"]) - len(line["batch"])
        return {**changed, "ids": line["ids"] and [*([[1]] * more), *line["ids"]]}

    for rank in range(3):
        for leg in ("reference", "chaos"):
            edit_trace(run, leg, 1, rank, only("step", evaluated, step=5))
        if code:
            edit_trace(run, "chaos", 2, rank, only("step", other, step=5))
    verdict = judge(run)
    assert (verdict.status == "FAIL") == bool(code), verdict.cause
    found = verdict.divergence
    assert (found and (found.kind, found.micro_batch)) == (code and (kind, micro_batch)), found
    assert not code or verdict.code == ("batch_contents" if with_ids and kind == "batch" else code), verdict.cause


def test_samples_that_the_undisturbed_run_did_not_name_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    """`itertools.cycle` hands out kept batches, which the loader has not just drawn: after a restart it has."""
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-1), kills=SCRIPT_KILLS[:1])
    edit_ranks(run, "reference", 1, only("step", lambda line: {**line, "ids": None}))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "batches_repeated"), verdict.cause


@pytest.mark.parametrize(("starts", "told"), [((0, 4, 8), True), ((0, 0, 0), False)], ids=["shares", "numbers of their own"])
def test_ranks_that_number_their_own_share_are_not_told_to_shuffle_alike(
    tmp_path: Path, starts: tuple[int, ...], told: bool
) -> None:
    run = write_script_run(tmp_path)
    for rank, start in enumerate(starts):
        drawn = iter(range(start, 1000))

        def numbered(line: dict[str, Any], drawn: Any = drawn) -> dict[str, Any]:
            return {**line, "ids": [[next(drawn)] for _ in line["batch"]]}

        edit_trace(run, "reference", 1, rank, only("step", numbered))
    warned = [each for each in judge(run).warnings if "shuffle differently" in each]
    assert bool(warned) == told and not any("DataLoaderConfiguration" in each for each in warned)


def test_a_batch_that_several_steps_train_on_is_repeated_by_these_steps() -> None:
    first, second = (_Entry(step=step, epoch=0, index=3, key=("a",), number=3) for step in (7, 8))
    again = _name(second, first, -1)
    assert (again.code, again.params["batches"]) == ("batches_repeated", 1)
