"""What a script's files of tensors hold is told entry by entry, executes nothing, and is compared at the end of a drill."""

import argparse
import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from legs import edit_journal, only, put, write_run
from safetensors.torch import save_file
from script_legs import SCRIPT_KILLS, write_script_run
from torch.distributed import checkpoint

from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.left import note_left, read_left
from chaosrun.records.tensor_files import entries
from chaosrun.verify.verdict import Verdict, judge
from tests.records import read_lines, write_lines

Write = Callable[[Any, Path], None]


def plainly(state: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(state))


def distributed(state: Any, path: Path) -> None:
    checkpoint.save(state, checkpoint_id=path.with_name("folder"))
    (path.with_name("folder") / "__0_0.distcp").rename(path)


def in_the_older_form(state: Any, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def compressed(state: Any, path: Path) -> None:
    with gzip.GzipFile(path, "wb", mtime=path.stem == "0") as file:
        torch.save(state, cast(Any, file))


def scripted(state: Any, path: Path) -> None:
    model = torch.nn.Linear(2, 3, dtype=torch.float64)
    model.load_state_dict({"weight": state["average"]["weight"], "bias": torch.ones(3)})
    torch.jit.script(model).save(str(path))


WRITERS: dict[str, tuple[Write, list[str]]] = {
    "torch.save": (torch.save, ["average/weight", "moments"]),
    "torch.save of old": (in_the_older_form, ["average/weight", "moments"]),
    "gzip": (compressed, ["average/weight", "moments"]),
    "torch.jit": (scripted, ["weight", "bias"]),
    "pickle": (plainly, ["average/weight", "moments"]),
    "dcp": (distributed, ["part 0", "part 1"]),
}


def state_of(value: float, **more: Any) -> dict[str, Any]:
    return {"average": {"weight": torch.full((3, 2), value)}, "moments": torch.ones(7), **more}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", WRITERS)
def test_each_tensor_has_a_digest(tmp_path: Path, by: str) -> None:
    write, names = WRITERS[by]
    found = []
    for number, value in enumerate((1, 1, 2)):
        write(state_of(value), path := tmp_path / f"{number}.pt")
        found.append(entries(path))
    assert list(found[0]) == names and found[0] == found[1], found
    assert [name for name in names if found[2][name] != found[0][name]] == names[:1]


def test_numbers_texts_and_random_states_are_left_out(tmp_path: Path) -> None:
    more = {"args": argparse.Namespace(resume=True), "rng": torch.get_rng_state(), "numpy": numpy.random.get_state()}
    more |= {"launches": 2, "best": torch.tensor(0.5), "host": "a" * 40, "history": numpy.ones(9), "array": numpy.ones(9)}
    for write in (torch.save, in_the_older_form, plainly):
        write(state_of(1, **more), tmp_path / "all.pt")
        assert [*entries(tmp_path / "all.pt")] == ["average/weight", "moments", "array"]


def test_arrays_and_safetensors_have_digests(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "a.npz", ema=numpy.ones(5), step=numpy.int64(3))
    numpy.save(tmp_path / "a.npy", numpy.ones(5))
    save_file({"weight": torch.ones(5)}, tmp_path / "a.safetensors")
    assert [[*entries(tmp_path / name)] for name in ("a.npz", "a.npy", "a.safetensors")] == [["ema"], [""], ["weight"]]


class Wicked:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_nothing_in_a_file_is_executed_and_what_is_torn_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (torch.save, in_the_older_form, compressed, plainly):
        write(state_of(1, wicked=Wicked()), path := tmp_path / "all.pt")
        assert [*entries(path)] == ["average/weight", "moments"] and not Path("executed").exists()
        path.write_bytes(path.read_bytes()[:300])
        assert entries(path) == {}


def test_text_and_links_are_not_read_nor_more_than_a_sane_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leg = LegLayout(tmp_path)
    (leg.work / "out").mkdir(parents=True)
    (leg.work / "out/log.json").write_text("{}")
    (leg.work / "linked.pt").symlink_to("out/new.pt")
    for number, name in enumerate(("out/old.pt", "out/new.pt")):
        torch.save(state_of(number), leg.work / name)
        os.utime(leg.work / name, (number, number))
    monkeypatch.setattr("chaosrun.records.left.MOST_BYTES", (leg.work / "out/new.pt").stat().st_size)
    note_left(leg)
    left = read_left(leg, [])
    assert ([*left.files], left.left_out) == (["out/new.pt"], ("out/old.pt",))


LAST = "ckpt-12/model.pt"


def with_left(run: RunLayout, **files: dict[str, tuple[int, str]]) -> Verdict:
    for leg, held in files.items():
        (run.path / leg / "left.json").write_text(json.dumps({"v": 1, "files": {LAST: held}, "left_out": []}))
    return judge(run)


SEEN, OTHER, LONGER = {"ema": (24, "aa")}, {"ema": (24, "bb")}, {"ema": (32, "bb")}


def test_what_a_restart_left_otherwise_is_told_with_file_and_entry(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    assert with_left(run, reference=SEEN, chaos=SEEN).status == "PASS"
    verdict = with_left(run, reference=SEEN, chaos=OTHER)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "kept_state_not_restored", "yours"), verdict.cause
    assert f"{LAST}: ema" in verdict.cause
    grown = with_left(run, reference=SEEN, chaos=LONGER)
    assert grown.status == "PASS", "what is gathered is no state"
    assert not any("ema" in warning for warning in grown.warnings)
    shrunk = with_left(run, reference=LONGER, chaos=SEEN)
    assert shrunk.status == "PASS"
    told = f"{LAST}: ema holds 24 bytes after the restarts and 32 after every undisturbed run"
    assert any(told in warning for warning in shrunk.warnings)
    assert with_left(run, reference={}, chaos=OTHER).status == "PASS"


@pytest.mark.parametrize(
    ("reference", "chaos", "status", "words"),
    [
        (SEEN, SEEN, "pass", f"{LAST} as every undisturbed run leaves it"),
        (SEEN, OTHER, "fail", f"{LAST}: ema"),
        ({}, SEEN, "skip", "no file of tensors"),
    ],
)
def test_a_check_says_which_files_were_compared(
    tmp_path: Path, reference: dict[str, Any], chaos: dict[str, Any], status: str, words: str
) -> None:
    verdict = with_left(write_script_run(tmp_path), reference=reference, chaos=chaos)
    (check,) = (check for check in verdict.checks if check.name == "final_files")
    assert (check.status, words in check.summary) == (status, True), check.summary
    assert [each.name for each in verdict.checks if each.status == "fail"] == (["final_files"] if status == "fail" else [])


@pytest.mark.parametrize("completed", [True, False])
def test_a_leg_that_never_came_to_its_end_has_no_difference_there(tmp_path: Path, completed: bool) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    (run.path / "reference" / "left.json").write_text(json.dumps({"v": 1, "files": {LAST: SEEN}, "left_out": []}))
    (run.path / "chaos" / "left.json").write_text(json.dumps({"v": 1, "files": {}, "left_out": []}))
    if not completed:
        ended = {"outcome": "user_error", "message": "rank 0 raised ValueError: checkpoint_0 already exists"}
        edit_journal(run, "chaos", only("leg.finished", put(**ended)))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "kept_state_not_restored" if completed else "never_came_back")
    assert (verdict.divergence is not None) == completed, verdict.divergence


def test_without_a_second_leg_to_ask_nothing_is_said(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, spec={"verify": {"confirm": False}})
    assert with_left(run, reference=SEEN, chaos=OTHER).status == "PASS"


@pytest.mark.parametrize(
    ("undisturbed", "restarted", "status"),
    [
        ((2, 4), 11, "FAIL"),  # a best loss was forgotten: undisturbed, nothing was better any more
        ((1, 2), 9, "PASS"),  # in the first step after a start, of step 8
        ((4, 8), 11, "PASS"),  # a rhythm, perhaps of the clock
        ((2, 6, 8), 10, "FAIL"),  # evaluated every 2 steps, the best was forgotten: the first after the start is the best again
        ((3,), 11, "PASS"),  # once, so many steps after a start
        ((2, 3), (11,), "FAIL"),  # the same, but the first is not saved again
        ((2, 3), (10, 11), "PASS"),
        ((5, 10), (11,), "PASS"),  # every 5 steps
    ],
)
def test_what_undisturbed_ceased_to_be_saved_and_a_restart_saves_again_is_told(
    tmp_path: Path, undisturbed: tuple[int, ...], restarted: int | tuple[int, ...], status: str
) -> None:
    run, rightly = write_script_run(tmp_path), tuple(step for step in undisturbed if step > 4)
    again = (restarted,) if isinstance(restarted, int) else restarted
    for leg, attempt, steps in (("reference", 1, undisturbed), ("chaos", 2, rightly), ("chaos", 3, again)):
        with_saves(run.leg(leg).attempt(attempt).trace(0), steps)
        held = {"model/block.weight": (24, "bb" if attempt == 3 else "aa")}
        (run.leg(leg).path / "left.json").write_text(json.dumps({"v": 1, "files": {LAST: held}}))
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert status == "PASS" or (verdict.code, verdict.divergence and verdict.divergence.rank) == ("kept_state_not_restored", 0)


@pytest.mark.parametrize(
    ("undisturbed", "restarted", "status", "warned"),
    [
        ((4, 8), (4, 8), "PASS", False),
        ((4, 8), (8, 10), "FAIL", False),  # a list of the best that was forgotten: other files are the best of what is left
        ((8, 10), (4, 8, 10), "PASS", True),  # older ones were not removed
    ],
)
def test_which_of_the_files_that_are_named_by_their_steps_lie_there_in_the_end(
    tmp_path: Path, undisturbed: tuple[int, ...], restarted: tuple[int, ...], status: str, warned: bool
) -> None:
    run = write_script_run(tmp_path)
    for leg, attempt, steps in (("reference", 1, undisturbed), ("chaos", 2, ()), ("chaos", 3, restarted)):
        with_saves(run.leg(leg).attempt(attempt).trace(0), tuple(range(6 if attempt == 2 else 2, 13, 2)), "top-{}.pt")
        held = {f"top-{step}.pt": SEEN for step in steps}
        if steps:
            (run.leg(leg).path / "left.json").write_text(json.dumps({"v": 1, "files": held}))
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert any("undisturbed run has removed: top-4.pt;" in warning for warning in verdict.warnings) == warned


def with_saves(trace: Path, steps: tuple[int, ...], path: str = LAST) -> None:
    """These and no others."""
    lines = []
    for line in [line for line in read_lines(trace) if line["kind"] != "save"]:
        lines.append(line)
        if line["kind"] == "step" and line["step"] in steps:
            saved = {"kind": "save", "path": path.format(line["step"]), "how": "torch.save", "done": True}
            lines.append({**saved, "step": line["step"], "time_s": line["time_s"]})
    write_lines(trace, lines)


@pytest.mark.parametrize(
    ("undisturbed", "restarted", "status"),
    [
        (tuple(range(1, 13)), (), "FAIL"),  # a best loss came back too good
        ((4, 8), (), "PASS"),  # nothing was due any more
        ((11,), (), "PASS"),  # later after a start than the last attempt went on for
        ((3, 11), (11,), "FAIL"),
        ((2, 6, 10), (), "FAIL"),  # not for long, yet evaluated every 2 steps
        ((10,), (), "PASS"),
    ],
)
def test_what_a_restart_never_saves_again_is_told(
    tmp_path: Path, undisturbed: tuple[int, ...], restarted: tuple[int, ...], status: str
) -> None:
    run, rightly = write_script_run(tmp_path), tuple(step for step in undisturbed if step > 4)
    for leg, attempt, steps in (("reference", 1, undisturbed), ("chaos", 2, rightly), ("chaos", 3, restarted)):
        with_saves(run.leg(leg).attempt(attempt).trace(0), steps)
        (run.leg(leg).path / "left.json").write_text(json.dumps({"v": 1, "files": {LAST: OTHER if attempt == 3 else SEEN}}))
    verdict = judge(run)
    assert verdict.status == status, verdict.cause


@pytest.mark.parametrize(("of_second", "status"), [((), "PASS"), ((7, 8), "FAIL")])
def test_an_attempt_that_was_killed_counts_and_owes_nothing_at_its_last_step(
    tmp_path: Path, of_second: tuple[int, ...], status: str
) -> None:
    run = write_script_run(tmp_path)  # the second attempt goes on from step 4, and is killed at 9
    for leg, attempt, steps in (("reference", 1, (5,)), ("chaos", 2, of_second), ("chaos", 3, ())):
        with_saves(run.leg(leg).attempt(attempt).trace(0), steps)
        held = {"block.weight": (24, "aa" if leg == "reference" else "bb")}
        (run.leg(leg).path / "left.json").write_text(json.dumps({"v": 1, "files": {LAST: held}}))
    assert judge(run).status == status


@pytest.mark.parametrize(
    ("written", "saves", "status"), [(True, [], "FAIL"), (False, [[11, 1.0]], "FAIL"), (False, [[7, 1.0]], "PASS")]
)
def test_of_a_script_that_attached_what_it_saves_as_it_trains_is_compared(
    tmp_path: Path, written: bool, saves: list[list[float]], status: str
) -> None:
    run = write_run(tmp_path)
    for leg, held in (("reference", SEEN), ("chaos", OTHER)):
        about = {"ranks": {LAST: 0}} | ({} if written else {"saves": {LAST: [[11, 1.0]] if leg == "reference" else saves}})
        (run.leg(leg).path / "left.json").write_text(json.dumps({"v": 1, "files": {LAST: held}, **about}))
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert status == "PASS" or verdict.code == "result_differs"
