"""Random streams that were not brought back are the cause only of what may come of a draw."""

from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, Edit, edit_trace, finding, only, put
from script_legs import SCRIPT_KILLS, write_script_run
from test_verify_displacement import shuffle_from

from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import Verdict, judge
from tests.records import read_lines

ELSEWHERE = "1" * 16
BEGAN = 4


def streams_lost(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "found": {**line["found"], "step": None, "rng": []}}


def told(root: Path, step: int, change: Edit, *, draws: bool, **about: Any) -> Verdict:
    """Of a run whose second attempt lost its streams, and differs in `step`; `draws`: each step does, not only a loader."""
    run = write_script_run(root, kills=SCRIPT_KILLS[:1], **about)
    for rank in range(3):
        if not draws:
            at_rest(run, rank)
        edit_trace(run, "chaos", 2, rank, only("start", streams_lost))
        edit_trace(run, "chaos", 2, rank, only("step", put(rng=ELSEWHERE)))
        edit_trace(run, "chaos", 2, rank, only("step", change, step=step))
    return judge(run)


def at_rest(run: RunLayout, rank: int) -> None:
    for leg in ("reference", "chaos"):
        edit_trace(run, leg, 1, rank, only("step", lambda line: {**line, "rng": f"{line['step'] // 5 + 2:016x}"}))
        edit_trace(run, leg, 1, rank, only("step", lambda line: {**line, "epoch": line["step"] // 5}))


@pytest.mark.parametrize("draws", [False, True], ids=["its loader alone draws", "each step draws"])
def test_a_loader_that_draws_its_seed_as_an_epoch_begins_explains_no_loss(tmp_path: Path, draws: bool) -> None:
    verdict = told(tmp_path, BEGAN + 1, put(loss=["0x1p-3", "0x1p-4"]), draws=draws)
    assert (verdict.status, verdict.code) == ("FAIL", "rng_not_restored" if draws else "forward_pass"), verdict.cause
    assert draws or f"{verdict.hint}".startswith("all but the random streams was restored")


def test_an_order_that_is_drawn_as_an_epoch_begins_does_follow_them(tmp_path: Path) -> None:
    strange = put(batch=["2" * 16, "3" * 16], ids=None)
    assert told(tmp_path, BEGAN + 6, strange, draws=False).code == "rng_not_restored"


@pytest.mark.parametrize(
    ("stands", "code"), [([7], "sampler_epoch_not_set"), ([], "rng_not_restored"), ([0], "rng_not_restored")], ids=str
)
def test_streams_of_a_later_step_do_not_give_an_earlier_epochs_order_again(
    tmp_path: Path, stands: list[int], code: str
) -> None:
    """As of a loader that accelerate opens: it draws its seed, and the next pass has the epoch that nobody set."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for rank in range(3):
        trace = run.leg("reference").attempt(1).trace(rank)
        first = {line["step"]: line for line in read_lines(trace) if line["kind"] == "step"}

        def again(line: dict[str, Any], first: dict[int, Any] = first) -> dict[str, Any]:
            """The first epoch's batches once more, in its steps 1 to 5."""
            step = line["step"]
            return {**line, **({key: first[step - 5][key] for key in ("ids", "batch")} if 5 < step <= 10 else {})}

        edit_trace(run, "chaos", 2, rank, only("start", finding(step=None, rng=stands)))
        edit_trace(run, "chaos", 2, rank, only("step", put(rng=ELSEWHERE)))
        edit_trace(run, "chaos", 2, rank, only("step", again))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert ("the random streams are not where" in f"{verdict.hint}") is False


@pytest.mark.parametrize(("drawn", "code"), [(True, "rng_not_restored"), (False, "data_order_not_restored")])
def test_batches_of_no_step_are_drawn_from_streams_that_the_reference_draws_from(
    tmp_path: Path, drawn: bool, code: str
) -> None:
    """Else a sampler or a dataset with a stream of its own has lost it, and the loader that starts again has drawn its seed."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    strange = put(batch=["2" * 16, "3" * 16], ids=None, loss=["0x1p-3", "0x1p-4"], rng=ELSEWHERE)
    for rank in range(3):
        for leg in () if drawn else ("reference", "chaos"):
            edit_trace(run, leg, 1, rank, only("step", put(rng="2" * 16)))
        edit_trace(run, "chaos", 2, rank, only("start", streams_lost))
        edit_trace(run, "chaos", 2, rank, only("start", finding(data=[])))
        edit_trace(run, "chaos", 2, rank, only("step", strange))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause


@pytest.mark.parametrize("draws", [False, True], ids=["its loader alone draws", "each step draws"])
def test_batches_of_no_step_do_not_follow_streams_of_a_later_step_that_loaders_alone_draw_from(
    tmp_path: Path, draws: bool
) -> None:
    """As of a stream that lost its shuffle buffer: its loader, opened again, has drawn the seed of the next epoch's."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    strange = put(batch=["2" * 16, "3" * 16], ids=None, loss=["0x1p-3", "0x1p-4"], rng=ELSEWHERE)
    for rank in range(3):
        for leg in () if draws else ("reference", "chaos"):
            edit_trace(run, leg, 1, rank, only("step", lambda line: {**line, "rng": f"{(line['step'] - 1) // 5:016x}"}))
        found = {"step": None, "rng": [7], "data": []}
        edit_trace(
            run, "chaos", 2, rank, only("start", lambda line, found=found: {**line, "found": {**line["found"], **found}})
        )
        edit_trace(run, "chaos", 2, rank, only("step", strange))
    verdict, code = judge(run), "rng_of_another_step" if draws else "data_order_not_restored"
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"lr": ["0x1p-9"]}, "lr_scheduler_not_restored"),
        ({"settings": "2" * 16, "param": "3" * 16}, "optimizer_settings_not_restored"),
    ],
    ids=["learning rate", "settings"],
)
def test_rates_and_settings_of_the_optimizer_are_never_drawn(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    verdict = told(tmp_path, BEGAN + 2, put(**change), draws=True)
    assert verdict.code == code and "its own resume" in verdict.blame.reason, verdict.blame


@pytest.mark.parametrize("broken", [False, True], ids=["all of them", "the first ones"])
@pytest.mark.parametrize(("off", "kept", "told"), [(-2 * BEGAN, False, True), (-2 * BEGAN, True, False), (-2, False, False)])
def test_batches_that_come_again_where_the_streams_stand_may_be_drawn_from_them(
    tmp_path: Path, off: int, kept: bool, told: bool, broken: bool
) -> None:
    """As of a mixup by NumPy's stream over batches that are the same in each epoch; the later ones of samples that also depend
    on the weights, which were restored, come in no step of the reference."""
    bugs = Bugs(skip_off=off, keep_rng=kept, with_ids=False)
    run = write_script_run(tmp_path, bugs=bugs, kills=SCRIPT_KILLS[:1])
    if broken:
        shuffle_from(run, BEGAN + 2)
    verdict, code = judge(run), "data_order_not_restored" if broken else "batches_repeated"
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert ("the random streams match that step, too" in f"{verdict.hint}") == told, verdict.hint


def test_how_many_micro_batches_a_step_takes_is_never_drawn(tmp_path: Path) -> None:
    """A window's length that a restart lost, in the step that opens a loader, which draws its seed."""

    def shorter(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, **{name: line[name] and line[name][:1] for name in ("ids", "batch", "loss")}}

    verdict = told(tmp_path, BEGAN + 1, shorter, draws=True)
    assert (verdict.status, verdict.code) == ("FAIL", "accumulation_window"), verdict.cause


@pytest.mark.parametrize(("step", "code"), [(12, "rng_not_restored"), (13, "forward_pass")])
def test_streams_that_were_wrong_in_many_equal_steps_matter_to_none(tmp_path: Path, step: int, code: str) -> None:
    assert told(tmp_path, step, put(loss=["0x1p-3", "0x1p-4"]), draws=True, steps=16).code == code
