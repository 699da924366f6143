"""A script's plain values where a restart went on: those that are not the undisturbed run's are named."""

from pathlib import Path
from typing import Any

import pytest
from legs import KILLS, Bugs, edit_trace, finding, only, put, write_run
from script_legs import SCRIPT_KILLS, Habits, write_script_run

from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import judge
from tests.records import read_lines, write_lines

BEGAN = 4
"""The step at which the second attempt goes on."""


def tell(run: RunLayout, first: dict[str, str], *later: dict[str, str]) -> None:
    """What the reference, the first attempt under faults, and the second held at step 5; and at the beginning."""
    for (leg, attempt), values in zip((("reference", 1), ("chaos", 1), ("chaos", 2)), later, strict=True):
        for rank in range(3):
            path = run.leg(leg).attempt(attempt).trace(rank)
            start, *rest = read_lines(path)
            held = [(1, first), (5, values)] if attempt == 1 else [(5, values)]
            write_lines(path, [start, *({"kind": "holdings", "step": step, "values": each} for step, each in held), *rest])


@pytest.mark.parametrize(
    ("reference", "again", "restarted", "told"),
    [
        ({"best": "0.5", "n": "9"}, {"best": "0.5"}, {"best": "inf", "n": "9"}, "the script had best = inf (reference: 0.5), "),
        # A save on notice, where the reference saves nothing.
        ({}, {"best": "0.5"}, {"best": "inf"}, "the script had best = inf (reference: 0.5), "),
        ({"best": "0.5"}, {"best": "0.5"}, {"best": "0.5"}, ""),
        ({"best": "0.5"}, {"best": "0.6"}, {"best": "0.7"}, ""),
        ({"begun": "0"}, {"begun": "0"}, {"begun": "4"}, ""),
        ({"salt": "0.25"}, {"salt": "0.25"}, {"salt": "0.75"}, "the script had salt = 0.75 (reference: 0.25), which"),
        ({"best": "0.5"}, {"best": "0.5"}, {"late": "1"}, ""),
        ({"i": "4", "n": "9"}, {"i": "4", "n": "9"}, {"i": "0", "n": "0"}, "n = 0 (reference: 9), i = 0 (reference: 4)"),
        ({"_": "4", "n": "9"}, {"_": "4", "n": "9"}, {"_": "0", "n": "0"}, "n = 0 (reference: 9), _ = 0 (reference: 4)"),
        ({"s/_scale": "tensor 4.0"}, {}, {"s/_scale": "None"}, ""),
        ({"flag": "False"}, {"flag": "False"}, {"flag": "None"}, ""),
        ({"a": f"float64[2] {'1' * 16}"}, {"a": f"float64[2] {'1' * 16}"}, {"a": f"float64[2] {'2' * 16}"}, ""),
        ({"s/_step_count": "4"}, {"s/_step_count": "4"}, {"s/_step_count": "1"}, ""),
        ({"s/_last_lr": "0.3", "s/last_epoch": "4"},) * 2 + ({"s/_last_lr": "0.5", "s/last_epoch": "4"}, ""),
        (
            {"n": "9", "self/n": "9", "self/best": "9"},
            {"n": "9", "self/n": "9", "self/best": "9"},
            {"n": "0", "self/n": "0", "self/best": "0"},
            "the script had n = 0 (reference: 9), self/best = 0 (reference: 9), which",
        ),
        (
            {"ema/shadow": "weights a", "n": "9"},
            {"ema/shadow": "weights a", "n": "9"},
            {"ema/shadow": "weights b", "n": "0"},
            "the script had ema/shadow = weights b (reference: weights a), n = 0 (reference: 9), ",
        ),
        (
            {"e/_saved": "list of 1", "e/state/n": "9"},
            {"e/_saved": "list of 1", "e/state/n": "9"},
            {"e/_saved": "list of 0", "e/state/n": "0"},
            "the script had e/state/n = 0 (reference: 9), e/_saved = list of 0 (reference: list of 1), ",
        ),
        (
            {"e/_it/taken/0": "5", "e/state/best/n": "9"},
            {"e/_it/taken/0": "5", "e/state/best/n": "9"},
            {"e/_it/taken/0": "7", "e/state/best/n": "0"},
            "the script had e/state/best/n = 0 (reference: 9), e/_it/taken/0 = 7 (reference: 5), ",
        ),
    ],
    ids=[
        *("lost", "saved on notice", "there", "wanders", "never changes", "drawn once", "not there yet", "rounds last"),
        *(
            "unnamed rounds",
            "an unused scaler",
            "found out later",
            "an array, of other samples",
            "of no effect",
            "a rate that is computed anew",
            "a copy of it",
            "weights first",
            "private last",
            "held by what is private last",
        ),
    ],
)
@pytest.mark.parametrize("attached", [True, False])
def test_values_that_did_not_come_back_are_named(
    tmp_path: Path, attached: bool, reference: dict[str, str], again: dict[str, str], restarted: dict[str, str], told: str
) -> None:
    bugs = Bugs(keep_augmentation=False)
    write, kill = (write_run, KILLS[:1]) if attached else (write_script_run, SCRIPT_KILLS[:1])
    run = write(tmp_path, bugs=bugs, kills=kill)
    held = {
        "best": "1.0",
        "begun": "0",
        "salt": "0.25",
        "n": "1",
        "self/n": "1",
        "self/best": "1",
        "i": "0",
        "_": "0",
        "e/_saved": "list of 0",
        "e/state/n": "0",
        "e/_it/taken/0": "1",
        "e/state/best/n": "0",
        "s/_scale": "tensor 8.0",
        "s/_step_count": "0",
        "s/_last_lr": "0.5",
        "s/last_epoch": "0",
        "a": f"float64[2] {'0' * 16}",
        "flag": "None",
        "ema/shadow": "weights b",
    }
    tell(run, held, reference, again, restarted)
    hint = f"{judge(run).hint}"
    assert told in hint and ("the script had" in hint) == bool(told), hint


def test_of_a_gradient_the_values_of_a_rank_that_shares_in_it_are_told(tmp_path: Path) -> None:
    """Rank 0's came back alone, as where only it saves."""
    run = write_run(tmp_path, kills=KILLS[:1])
    tell(run, {"beta": "1.0"}, {"beta": "0.5"}, {"beta": "0.5"}, {"beta": "0.75"})
    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("step", put(grad="0" * 16), step=5))
    edit_trace(run, "chaos", 2, 0, only("holdings", put(values={"beta": "0.5"})))
    verdict = judge(run)
    assert verdict.code == "gradient" and "the script had beta = 0.75 (reference: 0.5) on rank 1, which" in f"{verdict.hint}"


@pytest.mark.parametrize(("items", "told"), [("global_rng", False), ("independent", True)])
def test_values_are_not_told_before_what_the_probe_has_seen(tmp_path: Path, items: str, told: bool) -> None:
    run = write_run(tmp_path, kills=KILLS[:1])
    tell(run, {"best": "1.0"}, {"best": "0.5"}, {"best": "0.5"}, {"best": "inf"})
    probed = {"kind": "probe", "items": items, "detail": "item 3 depends"}
    edit_trace(run, "chaos", 1, 0, lambda line: {**line, **probed} if line["kind"] == "buckets" else line)
    edit_trace(run, "chaos", 2, 0, only("step", put(batch=["0" * 16, "1" * 16]), step=5))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "batch_contents"), verdict.cause
    assert ("best = inf" in f"{verdict.hint}") == told, verdict.hint


@pytest.mark.parametrize("skip_off", [0, -1])
def test_of_other_data_weights_are_told_last(tmp_path: Path, skip_off: int) -> None:
    """They may be the batch's own, where that is an object of a library."""
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=skip_off, keep_augmentation=bool(skip_off)), kills=SCRIPT_KILLS[:1])
    held = {"batch/x": "weights a", "n": "9"}
    tell(run, {"batch/x": "weights c", "n": "1"}, held, held, {"batch/x": "weights b", "n": "0"})
    verdict = judge(run)
    told = ["batch/x = weights b (reference: weights a)", "n = 0 (reference: 9)"]
    assert (verdict.code == "batches_repeated") == bool(skip_off), verdict.cause
    assert f"the script had {', '.join(told[::-1] if skip_off else told)}, which" in f"{verdict.hint}", verdict.hint


@pytest.mark.parametrize(
    ("first", "held", "seen", "told"),
    [
        (f"list of 8: text {'1' * 16}", f"list of 8: text {'2' * 16}", f"list of 8: text {'3' * 16}", False),
        (f"list of 9: text {'1' * 16}", f"list of 8: text {'2' * 16}", f"list of 9: text {'1' * 16}", True),
        (f"list of 1: text {'1' * 16}", f"list of 1: text {'2' * 16}", "list()", False),
        ("list of 2: 1, 2", "list of 2: 3, 4", "list of 2: 1, 2", True),
        (f"text {'1' * 16}", f"text {'2' * 16}", f"text {'1' * 16}", True),
    ],
    ids=["as many, others at each step", "files left to read", "of a batch of one", "numbers", "a single text"],
)
def test_of_other_data_texts_of_the_batch_are_not_told(tmp_path: Path, first: str, held: str, seen: str, told: bool) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-1), kills=SCRIPT_KILLS[:1])
    tell(run, {"names": first}, {"names": held}, {"names": held}, {"names": seen})
    verdict = judge(run)
    assert verdict.code == "batches_repeated", verdict.cause
    assert (f"the script had names = {seen} (reference: {held}), which" in f"{verdict.hint}") == told, verdict.hint


@pytest.mark.parametrize("place", ["0", "4", None], ids=["lost", "there", "unknown"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_batches_are_drawn_again_where_the_place_in_the_data_was_restored(
    tmp_path: Path, with_ids: bool, place: str | None
) -> None:
    """Batches and streams of the beginning: of a script that draws its batches, or that lost its place in them, too."""
    bugs = Bugs(skip_off=-2 * BEGAN, keep_rng=False, with_ids=with_ids)
    run = write_script_run(tmp_path, bugs=bugs, kills=SCRIPT_KILLS[:1])
    if place is not None:
        tell(run, {"place": "0"}, {"place": "4"}, {"place": "4"}, {"place": place})
    verdict = judge(run)
    drawn = place == "4" and not with_ids
    assert verdict.code == ("rng_not_restored" if drawn else "batches_repeated"), verdict.cause
    assert ("the streams were seeded again" in f"{verdict.hint}") == drawn, verdict.hint
    assert ("the script had place = 0 (reference: 4), which" in f"{verdict.hint}") == (place == "0"), verdict.hint


@pytest.mark.parametrize(("rng", "code"), [([], "rng_not_restored"), ([3], "rng_of_another_step")])
@pytest.mark.parametrize("same_data", [False, True])
def test_values_are_told_where_restored_streams_may_have_been_drawn_from_otherwise(
    tmp_path: Path, rng: list[int], code: str, same_data: bool
) -> None:
    """As of a replay buffer that was lost: how many samples it holds decides which are drawn."""
    run = write_script_run(tmp_path, bugs=Bugs(with_ids=False), kills=SCRIPT_KILLS[:1])
    first, saved = {"size": "0", "t/_logged": "dict of 0"}, {"size": "4", "t/_logged": "dict of 2"}
    tell(run, first, saved, saved, {**first, "size": "1"})
    found = {"rng": rng, "step": None, **({} if same_data else {"data": []})}
    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("start", finding(**found)))
        other = only("step", lambda line: {**line, "rng": "o", "loss": ["0x1p-9"], **({} if same_data else {"batch": ["o"]})})
        edit_trace(run, "chaos", 2, rank, other)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert ("the script had size = 1 (reference: 4), " in f"{verdict.hint}") == (not same_data), verdict.hint
    assert ("t/_logged" in f"{verdict.hint}") == (not same_data and code == "rng_of_another_step"), verdict.hint


@pytest.mark.parametrize(("seen", "told"), [("1", True), ("3", False)], ids=["begun anew", "of another step"])
def test_an_array_that_decides_the_order_is_told_where_it_began_anew(tmp_path: Path, seen: str, told: bool) -> None:
    """As the difficulties that a curriculum's sampler has learnt; another array may be a batch."""
    run = write_script_run(tmp_path, bugs=Bugs(with_ids=False), kills=SCRIPT_KILLS[:1])
    tell(run, *({"s/hard": f"float32[2] {digit * 16}"} for digit in ("1", "2", "2", seen)))
    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("start", finding(data=[], step=None)))
        edit_trace(run, "chaos", 2, rank, only("step", put(batch=["o"], loss=["0x1p-9"])))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "data_order_not_restored"), verdict.cause
    assert ("the script had other contents of s/hard (float32[2]), which" in f"{verdict.hint}") == told, verdict.hint


@pytest.mark.parametrize("keep_rng", [True, False], ids=["streams restored", "streams of the beginning"])
def test_a_private_list_is_not_told_beside_streams_that_began_anew(tmp_path: Path, keep_rng: bool) -> None:
    """As Lightning's _logged_metrics, of which a restart that lost its random streams has none yet."""
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-2 * BEGAN, keep_rng=keep_rng), kills=SCRIPT_KILLS[:1])
    held, late = {"t/_logged": "dict of 0", "seen": "0"}, {"t/_logged": "dict of 2", "seen": "4"}
    tell(run, held, late, late, held)
    hint = f"{judge(run).hint}"
    assert ("t/_logged = dict of 0" in hint, "seen = 0 (reference: 4)" in hint) == (keep_rng, True), hint


def test_of_another_ranks_data_the_values_are_told(tmp_path: Path) -> None:
    """As of a place in the data that one rank saved and all have loaded."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    tell(run, {"place": "0"}, {"place": "4"}, {"place": "4"}, {"place": "3"})
    lines = read_lines(run.leg("reference").attempt(1).trace(0))
    other = next(line for line in lines if line["kind"] == "step" and line["step"] == BEGAN + 1)
    edit_trace(run, "chaos", 2, 1, only("step", put(ids=other["ids"], batch=other["batch"]), step=BEGAN + 1))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "data_of_another_rank"), verdict.cause
    assert "the script had place = 3 (reference: 4), which" in f"{verdict.hint}", verdict.hint
    assert "each has its own" in f"{verdict.hint}"


@pytest.mark.parametrize(("later", "told"), [("tuple[2] a", False), ("tuple[2] b", True)], ids=["made again", "lost"])
def test_what_is_none_until_its_first_use_is_told_if_it_then_differs(tmp_path: Path, later: str, told: bool) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_augmentation=False), kills=SCRIPT_KILLS[:1])
    tell(run, {"table": "None"}, {"table": "tuple[2] a"}, {"table": "tuple[2] a"}, {"table": "None"})
    for rank in range(3):
        path = run.leg("chaos").attempt(2).trace(rank)
        start, held, *rest = read_lines(path)
        write_lines(path, [start, held, {"kind": "holdings", "step": 7, "values": {"table": later}}, *rest])
    assert ("table = None (reference: tuple[2] a)" in f"{judge(run).hint}") == told


def test_values_lost_where_the_loss_is_right_are_told_last(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    tell(run, {"a": "0", "z": "0"}, {"a": "4", "z": "4"}, {"a": "4", "z": "4"}, {"a": "0", "z": "4"})
    edit_trace(run, "chaos", 2, 1, only("holdings", put(values={"a": "0", "z": "0"})))
    edit_trace(run, "chaos", 2, 1, only("step", put(loss=["0x1.1p-3"]), step=BEGAN + 1))
    hint = f"{judge(run).hint}"
    assert "the script had z = 0 (reference: 4), a = 0 (reference: 4), which" in hint, hint


@pytest.mark.parametrize(
    ("reference", "restarted", "told"),
    [
        ({5: "0.5", 7: "0.5", 9: "0.5"}, {7: "0.5", 9: "0.5"}, False),
        ({5: "0.5", 7: "0.5", 9: "0.5"}, {7: "0.7", 9: "0.7"}, True),
        ({5: "0.5", 7: "0.6", 9: "0.7"}, {7: "0.8", 9: "0.9"}, False),
        ({3: "2", 5: "3", 7: "4", 9: "5"}, {7: "2", 9: "3"}, True),
    ],
    ids=["made again", "made otherwise", "made in each step", "counted anew"],
)
def test_what_is_made_at_its_first_use_is_told_if_it_is_then_otherwise(
    tmp_path: Path, reference: dict[int, str], restarted: dict[int, str], told: bool
) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_augmentation=False), kills=SCRIPT_KILLS[:1])
    legs = (("reference", 1, {1: "", **reference}), ("chaos", 1, {1: "", 5: reference[5]}), ("chaos", 2, {5: "", **restarted}))
    for leg, attempt, by_step in legs:
        values = {at: {"n": "1", **({"ws/first": text} if text else {})} for at, text in by_step.items()}
        for path in (run.leg(leg).attempt(attempt).trace(rank) for rank in range(3)):
            start, *rest = read_lines(path)
            held = ({"kind": "holdings", "step": at, "values": each} for at, each in values.items())
            write_lines(path, [start, *held, *rest])
    assert (f"ws/first = not there (reference: {reference[5]})" in f"{judge(run).hint}") == told


def test_arrays_are_told_after_numbers_which_they_may_come_from(tmp_path: Path) -> None:
    run = write_run(tmp_path, kills=KILLS[:1])
    first, right, lost = ({"a": f"float32[2] {digit * 16}", "b/n": digit} for digit in "123")
    tell(run, first, right, right, lost)
    edit_trace(run, "chaos", 2, 1, only("step", put(grad="0" * 16), step=6))
    assert "the script had b/n = 3 (reference: 2), other contents of a (float32[2]), which" in f"{judge(run).hint}"


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,)], ids=["on all ranks", "on one"])
def test_a_factor_of_the_losses_that_the_script_keeps_is_named(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    tell(run, {"scale": "8.0"}, {"scale": "16.0"}, {"scale": "16.0"}, {"scale": "8.0"})
    for rank in ranks:

        def halved(line: dict[str, Any]) -> dict[str, Any]:
            return {**line, "loss": [(float.fromhex(loss) / 2).hex() for loss in line["loss"]]}

        edit_trace(run, "chaos", 2, rank, only("step", halved, step=5))
    verdict = judge(run)
    assert verdict.code == "grad_scaler_not_restored", verdict.cause
    assert "the script had scale = 8.0 (reference: 16.0), which" in f"{verdict.hint}"


@pytest.mark.parametrize(
    ("expected", "seen", "ranks", "rescaled"),
    [
        (0.7, 0.35, (1,), True),
        (0.7, -0.7, (0, 1, 2), False),
        (0.7, -1.4, (0, 1, 2), False),
        (2.0, 1.0, (1,), False),
        (12.0, 6.0, (1,), False),
        (2.0, 1.0, (0, 1), True),
    ],
)
def test_a_loss_that_another_scale_does_not_explain_is_not_laid_to_one(
    tmp_path: Path, expected: float, seen: float, ranks: tuple[int, ...], rescaled: bool
) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for rank in range(3):
        for leg in ("reference", "chaos"):
            edit_trace(run, leg, 1, rank, only("step", put(loss=[expected.hex()]), step=5))
        here = seen if rank in ranks else expected
        edit_trace(run, "chaos", 2, rank, only("step", put(loss=[here.hex()]), step=5))
    verdict = judge(run)
    assert verdict.status == "FAIL"
    assert (verdict.code == "grad_scaler_not_restored") == rescaled, verdict.cause


def test_values_are_told_of_settings_that_drift(tmp_path: Path) -> None:
    run = write_run(tmp_path, kills=KILLS[:1])
    tell(run, {"n": "1"}, {"n": "5"}, {"n": "5"}, {"n": "0"})
    edit_trace(run, "chaos", 2, 1, only("step", put(param="0" * 16, settings="0" * 16), step=6))
    verdict = judge(run)
    assert verdict.cause.startswith("optimizer settings drifted") and "the script had n = 0 (reference: 5)" in f"{verdict.hint}"


@pytest.mark.parametrize(("counted", "told"), [("0", True), ("4", False)])
def test_of_what_is_saved_otherwise_values_are_told(tmp_path: Path, counted: str, told: bool) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    tell(run, {"steps": "0"}, {"steps": "4"}, {"steps": "4"}, {"steps": counted})
    edit = lambda line: {**line, "held": {**line["held"], "average": "0" * 16} if line.get("held") else {}}  # noqa: E731
    edit_trace(run, "chaos", 2, 0, only("save", edit))
    verdict = judge(run)
    assert verdict.code == "kept_state_not_restored", verdict.cause
    assert ("the script had steps = 0 (reference: 4), which the restart" in f"{verdict.hint}") == told, verdict.hint


@pytest.mark.parametrize("value", ["3", "0"], ids=["as saved", "otherwise"])
def test_a_value_that_was_saved_before_its_update_is_told_as_that(tmp_path: Path, value: str) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_augmentation=False), kills=SCRIPT_KILLS[:1])
    tell(run, {"self/steps": "0"}, {"self/steps": "4"}, {"self/steps": "4"}, {"self/steps": value})
    edit = lambda line: {**line, "held": {**line["held"], "steps": "3"} if line.get("held") else {}}  # noqa: E731
    edit_trace(run, "chaos", 1, 0, only("save", edit))
    why = "just as its checkpoint holds it" if value == "3" else "which the restart did not restore"
    assert f"the script had self/steps = {value} (reference: 4), {why}" in f"{judge(run).hint}"


@pytest.mark.parametrize(("counted", "told"), [("0", True), ("2", False)])
def test_of_an_end_at_another_step_values_and_the_first_difference_are_told(tmp_path: Path, counted: str, told: bool) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_rng=False), habits=Habits(ends_at=8), kills=SCRIPT_KILLS[:1])
    tell(run, {"patience": "0"}, {"patience": "2"}, {"patience": "2"}, {"patience": counted})
    verdict = judge(run)
    assert verdict.code == "ended_at_another_step" and verdict.divergence is not None
    assert ("the script had patience = 0 (reference: 2), which the restart" in f"{verdict.hint}") == told
    assert f"{verdict.divergence.reason.hint}".endswith(f"{verdict.hint}".partition("Of the first difference: ")[2])
    assert f"{verdict.hint}".count("patience =") == told


SCHEDULER = {"sched/_last_lr": "list of 1: 0.1", "scaler/_growth_factor": "2.0"}


@pytest.mark.parametrize(
    ("path", "restarted", "told"),
    [
        ("sched/last_epoch", "1", True),
        ("scaler/_growth_tracker", "1", True),
        ("sched/last_epoch", "4", False),
        ("seen/last_epoch", "1", False),
        ("sched/_step_count", "1", False),
    ],
)
@pytest.mark.parametrize("attached", [True, False])
def test_a_schedule_that_stands_otherwise_to_the_end_is_warned_of(
    tmp_path: Path, attached: bool, path: str, restarted: str, told: bool
) -> None:
    """Whether or not the rate changes within the drill, and in no checkpoint of the script's; at a single look, too."""
    write, kill = (write_run, KILLS[:1]) if attached else (write_script_run, SCRIPT_KILLS[:1])
    run = write(tmp_path, kills=kill)
    tell(run, {**SCHEDULER, path: "0"}, {path: "4"}, {path: "4"}, {**SCHEDULER, path: restarted})
    verdict = judge(run)
    assert verdict.status == "PASS"
    warned = [each for each in verdict.warnings if f"{path} = {restarted} (reference: 4) at step 5 of attempt 2" in each]
    assert bool(warned) == told


@pytest.mark.parametrize(
    ("path", "first", "last", "told"),
    [
        ("best", "inf", "inf", True),
        ("best", "0.5", "inf", False),
        ("best", "inf", "0.2", False),
        ("still", "inf", "inf", False),
        ("wanders", "inf", "inf", False),
        ("meter/i", "inf", "inf", False),
        ("ema/shadow", "weights b", "weights b", True),
        ("first", "4", "4", False),
        ("count", "0", "4", True),
        ("gone", "inf", "", False),
    ],
    ids=[
        *("lost", "there at first", "found again", "never changes", "wanders", "of a loop", "weights"),
        *("the step that it resumed at", "as large by now", "no longer found"),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("attached", [True, False])
def test_a_value_that_differs_to_the_end_is_warned_of(
    tmp_path: Path, attached: bool, fails: bool, path: str, first: str, last: str, told: bool
) -> None:
    write, kill = (write_run, KILLS[:1]) if attached else (write_script_run, SCRIPT_KILLS[:1])
    run = write(tmp_path, kills=kill, bugs=Bugs(keep_augmentation=not fails))
    changes = path != "still"
    tell(run, {path: "0.9"}, {path: "0.5" if changes else "0.9"}, {path: "0.6" if path == "wanders" else "0.5"}, {path: first})
    for leg, value in (("reference", "0.2" if changes else "0.9"), ("chaos", last)):
        trace = run.leg(leg).attempt(1 if leg == "reference" else 2).trace(0)
        start, *rest = read_lines(trace)
        held = [line for line in rest if line["kind"] == "holdings"]
        others = [line for line in rest if line["kind"] != "holdings"]
        write_lines(trace, [start, *held, {"kind": "holdings", "step": 9, "values": {path: value}}, *others])
    verdict = judge(run)
    warned = [
        each for each in verdict.warnings if each.startswith(f"not restored by the restart: {path} = {last} (reference: ")
    ]
    assert (verdict.status == "FAIL") == fails and bool(warned) == (told and not fails), verdict.warnings


@pytest.mark.parametrize(("second", "third", "told"), [("inf", "inf", True), ("0.2", "inf", False), ("inf", "0.2", False)])
def test_of_a_single_look_earlier_restarts_are_asked(tmp_path: Path, second: str, third: str, told: bool) -> None:
    """The last restart came so late that its values were looked at once."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:2])
    looks = {
        ("reference", 1): {1: "0.9", 5: "0.5", 9: "0.2"},
        ("chaos", 1): {1: "0.9", 5: "0.5", 9: "0.2"},
        ("chaos", 2): {5: "inf", 9: second},
        ("chaos", 3): {9: third},
    }
    for (leg, attempt), values in looks.items():
        trace = run.leg(leg).attempt(attempt).trace(0)
        start, *rest = read_lines(trace)
        held = [{"kind": "holdings", "step": step, "values": {"best": value}} for step, value in values.items()]
        write_lines(trace, [start, *held, *rest])
    verdict = judge(run)
    assert verdict.status == "PASS", verdict.cause
    assert bool([each for each in verdict.warnings if "best = inf (reference: 0.2) at step 9 of attempt 3" in each]) == told
