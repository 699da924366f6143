"""What a script's files of tensors hold is told entry by entry, executes nothing, and is compared at the end of a drill."""

import argparse
import gzip
import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from legs import MICRO_BATCHES, STEPS, edit_journal, edit_trace, only, put, write_run
from safetensors.torch import save_file
from script_legs import SCRIPT_KILLS, write_script_run
from torch.distributed import checkpoint

from chaosrun.records.history import read_leg
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.left import note_left, read_left
from chaosrun.records.tensor_files import contents, unnumbered
from chaosrun.supervise.drill import DrillExecution, LegRunner
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
        found.append(contents(path).entries)
    assert list(found[0]) == names and found[0] == found[1], found
    assert [name for name in names if found[2][name] != found[0][name]] == names[:1]


def test_numbers_texts_and_random_states_are_left_out(tmp_path: Path) -> None:
    more = {"args": argparse.Namespace(resume=True), "rng": torch.get_rng_state(), "numpy": numpy.random.get_state()}
    more |= {"launches": 2, "best": torch.tensor(0.5), "host": "a" * 40, "history": numpy.ones(9), "array": numpy.ones(9)}
    for write in (torch.save, in_the_older_form, plainly):
        write(state_of(1, **more), tmp_path / "all.pt")
        assert [*contents(tmp_path / "all.pt").entries] == ["average/weight", "moments", "array"]


@dataclass
class Progress:
    best: float = 0.25


@pytest.mark.parametrize("write", [torch.save, in_the_older_form, plainly])
def test_numbers_beside_tensors_are_figures(tmp_path: Path, write: Write) -> None:
    pcg = numpy.random.default_rng(1).bit_generator.state
    streams = {"numpy": numpy.random.get_state(), "python": random.getstate(), "pcg": pcg}
    places = {"sampler": {"cursor": 3}, "time_s": 1.5, "losses": [0.5] * 200, "ok": True}
    schedule = {"best": 1.5, "_step_count": 4}
    own = {"mean": numpy.float64(0.5), "kept": Progress(), "top": [1, 2.5], "schedule": schedule, "count": Counter(seen=7)}
    folder = LegLayout(tmp_path / "leg")
    folder.output.mkdir(parents=True)
    write(state_of(1, **streams, **places, **own), folder.output / "all.pt")
    note_left(folder)
    assert read_left(folder, []).figures["all.pt"] == {
        **{"mean": "0.5", "kept/best": "0.25", "top/0": "1", "top/1": "2.5"},
        **{"schedule/best": "1.5", "count/seen": "7"},
    }


@pytest.mark.parametrize(("value", "kept"), [(torch.tensor(0.5), "0.5"), (torch.tensor(3), "3"), (torch.tensor(True), None)])
def test_a_tensor_of_one_number_is_a_figure(tmp_path: Path, value: torch.Tensor, kept: str | None) -> None:
    torch.save(state_of(1, best=value), tmp_path / "all.pt")
    assert contents(tmp_path / "all.pt").numbers == ({"best": float(kept)} if kept else {})


def test_a_number_in_a_checkpoint_that_began_anew_is_a_warning(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    for leg, best in {"reference": 0.5, "chaos": 0.75}.items():
        folder = LegLayout(run.path / leg)
        folder.output.mkdir(parents=True, exist_ok=True)
        torch.save(state_of(1, best=best), folder.output / "last.pt")
        note_left(folder)
    verdict = judge(run)
    told = [warning for warning in verdict.warnings if "last.pt" in warning]
    assert (verdict.status, len(told)) == ("PASS", 1)
    assert told[0].startswith("last.pt: best is 0.75 after the restarts (reference: 0.5): ")


def run_that_left_files(tmp_path: Path) -> RunLayout:
    run = write_script_run(tmp_path)
    for leg in ("reference", "chaos"):
        run.leg(leg).output.mkdir(parents=True, exist_ok=True)
        torch.save(state_of(1, best=0.5), run.leg(leg).output / "last.pt")
    return run


def test_what_a_leg_left_is_noted_at_the_latest_when_the_run_is_resumed(tmp_path: Path) -> None:
    run = run_that_left_files(tmp_path)
    nobody: Any = SimpleNamespace(ray=None)
    drill = DrillExecution(run=run, root=tmp_path, legs=LegRunner(workers=nobody, on_record=lambda _: None))
    assert drill.execute().status == "PASS"
    assert all(read_left(run.leg(leg), []).files for leg in ("reference", "chaos"))


@pytest.mark.parametrize("lost", ["reference/journal.jsonl", "reference/left.json", "chaos/left.json"])
def test_a_lost_record_is_no_difference(tmp_path: Path, lost: str) -> None:
    run = run_that_left_files(tmp_path)
    for leg in ("reference", "chaos"):
        note_left(run.leg(leg))
    assert judge(run).status == "PASS"
    (run.path / lost).unlink()
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "records_damaged"), verdict.cause


def test_arrays_and_safetensors_have_digests(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "a.npz", ema=numpy.ones(5), step=numpy.int64(3))
    numpy.save(tmp_path / "a.npy", numpy.ones(5))
    save_file({"weight": torch.ones(5)}, tmp_path / "a.safetensors")
    assert [[*contents(tmp_path / name).entries] for name in ("a.npz", "a.npy", "a.safetensors")] == [["ema"], [""], ["weight"]]


def test_raw_numbers_are_one_entry_unless_they_are_metrics(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path / "leg")
    leg.work.mkdir(parents=True)
    for name in ("average.bin", "model.onnx", "losses.dat", "few.bin"):
        numpy.ones(1 if name == "few.bin" else 9).tofile(leg.work / name)
    torch.save(state_of(1), leg.work / "pytorch_model.bin")
    numpy.ones(9).tofile(tmp_path / "data.bin")
    (leg.work / "data.bin").symlink_to(tmp_path / "data.bin")
    note_left(leg)
    held = read_left(leg, []).files
    raw = {"average.bin": [""], "model.onnx": [""]}
    assert {name: [*each] for name, each in held.items()} == {**raw, "pytorch_model.bin": ["average/weight", "moments"]}
    assert held["average.bin"] == held["model.onnx"] and held["average.bin"][""][0] == 72


class Wicked:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_nothing_in_a_file_is_executed_and_what_is_torn_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (torch.save, in_the_older_form, compressed, plainly):
        write(state_of(1, wicked=Wicked()), path := tmp_path / "all.pt")
        assert [*contents(path).entries] == ["average/weight", "moments"] and not Path("executed").exists()
        path.write_bytes(path.read_bytes()[:300])
        assert contents(path).entries == {}


def test_text_is_not_read_nor_more_than_a_sane_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leg = LegLayout(tmp_path)
    (leg.work / "out").mkdir(parents=True)
    (leg.work / "out/log.json").write_text("{}")
    for number, name in enumerate(("out/old.pt", "out/new.pt")):
        torch.save(state_of(number), leg.work / name)
        os.utime(leg.work / name, (number, number))
    monkeypatch.setattr("chaosrun.records.left.MOST_BYTES", (leg.work / "out/new.pt").stat().st_size)
    note_left(leg)
    left = read_left(leg, [])
    assert ([*left.files], left.left_out) == (["out/new.pt"], ("out/old.pt",))


def test_a_link_holds_what_it_points_to_and_was_changed_when_it_was_made(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path)
    leg.work.mkdir(parents=True)
    torch.save(state_of(1), leg.work / "step-3.pt")
    os.utime(leg.work / "step-3.pt", (3, 3))
    (leg.work / "best.pt").symlink_to("step-3.pt")
    (leg.work / "torn.pt").symlink_to("step-4.pt")
    os.utime(leg.work / "best.pt", (5, 5), follow_symlinks=False)
    note_left(leg)
    left = read_left(leg, [])
    assert left.files["best.pt"] == left.files["step-3.pt"] and left.changed == {"best.pt": 5, "step-3.pt": 3}


def test_what_no_rank_says_that_it_wrote_is_found_below_the_outputs(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path)
    leg.attempt(1).path.mkdir(parents=True)
    leg.output.mkdir(parents=True)
    torch.save(state_of(1), leg.output / "best.pt")
    note_left(leg, attached=1)
    left = read_left(leg, [])
    assert ([*left.files], [*left.changed], left.ranks) == (["best.pt"], ["best.pt"], {})


LAST = "ckpt-12/model.pt"


def leave(run: RunLayout, leg: str, files: dict[str, Any], **more: Any) -> None:
    (run.path / leg / "left.json").write_text(json.dumps({"v": 1, "files": files, **more}))


def with_left(run: RunLayout, **files: dict[str, tuple[int, str]]) -> Verdict:
    for leg, held in files.items():
        leave(run, leg, {LAST: held})
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
    told = f"{LAST}: ema holds 24 bytes after the restarts, but 32 after every fault-free run"
    assert any(told in warning for warning in shrunk.warnings)
    assert with_left(run, reference={}, chaos=OTHER).status == "PASS"


def test_a_figure_for_people_that_began_anew_is_a_warning(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    figures = {"reference": {"mse": "0.5", "tokens": "7"}, "chaos": {"mse": "0.75", "tokens": "7", "more": "1"}}
    for leg, numbers in figures.items():
        folder = LegLayout(run.path / leg)
        (folder.work / "out").mkdir(parents=True)
        (folder.work / "out/all.json").write_text(json.dumps({name: json.loads(value) for name, value in numbers.items()}))
        (folder.work / "copy.json").symlink_to("out/all.json")
        note_left(folder)
        assert read_left(folder, []).figures == {"out/all.json": numbers}
    verdict = judge(run)
    told = [warning for warning in verdict.warnings if "all.json" in warning]
    assert (verdict.status, len(told)) == ("PASS", 1)
    assert told[0].startswith("out/all.json: mse is 0.75 after the restarts (reference: 0.5): ")
    os.utime(LegLayout(run.path / "chaos").work / "out/all.json", (1.0, 1.0))
    note_left(LegLayout(run.path / "chaos"))
    assert not any("all.json" in warning for warning in judge(run).warnings), "of an attempt that was killed"
    (run.path / "chaos" / "left.json").write_bytes((run.path / "reference" / "left.json").read_bytes())
    assert not any("all.json" in warning for warning in judge(run).warnings)


@pytest.mark.parametrize(
    ("reference", "chaos", "status", "words"),
    [
        (SEEN, SEEN, "pass", f"{LAST} as every fault-free run leaves it"),
        (SEEN, OTHER, "fail", f"{LAST}: ema"),
        ({}, SEEN, None, ""),
        (SEEN, LONGER, None, ""),
    ],
)
def test_a_check_says_which_files_were_compared(
    tmp_path: Path, reference: dict[str, Any], chaos: dict[str, Any], status: str | None, words: str
) -> None:
    verdict = with_left(write_script_run(tmp_path), reference=reference, chaos=chaos)
    found = [(check.status, words in check.summary) for check in verdict.checks if check.name == "final_files"]
    assert found == ([(status, True)] if status else [])
    assert [each.name for each in verdict.checks if each.status == "fail"] == (["final_files"] if status == "fail" else [])


@pytest.mark.parametrize("completed", [True, False])
def test_a_leg_that_never_came_to_its_end_has_no_difference_there(tmp_path: Path, completed: bool) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    leave(run, "reference", {LAST: SEEN})
    leave(run, "chaos", {})
    if not completed:
        ended = {"outcome": "user_error", "message": "rank 0 raised ValueError: checkpoint_0 already exists"}
        edit_journal(run, "chaos", only("leg.finished", put(**ended)))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "kept_state_not_restored" if completed else "never_came_back")
    assert (verdict.divergence is not None) == completed, verdict.divergence
    assert ("what decides when it is saved" in verdict.cause) == completed, "it is not told as state"


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
        leave(run, leg, {LAST: {"model/block.weight": (24, "bb" if attempt == 3 else "aa")}})
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert status == "PASS" or (verdict.code, verdict.divergence and verdict.divergence.rank) == ("kept_state_not_restored", 0)


@pytest.mark.parametrize(
    ("undisturbed", "restarted", "status", "warned"),
    [
        ((4, 8), (4, 8), "PASS", False),
        ((4, 8), (8, 10), "FAIL", False),  # a list of the best that was forgotten: other files are the best of what is left
        ((8, 10), (4, 8, 10), "PASS", True),  # older ones were not removed
        ((8, 10), (4, 8, 10), "FAIL", False),  # nor need that be said of one that fails for something else
    ],
)
def test_which_of_the_files_that_are_named_by_their_steps_lie_there_in_the_end(
    tmp_path: Path, undisturbed: tuple[int, ...], restarted: tuple[int, ...], status: str, warned: bool
) -> None:
    run = write_script_run(tmp_path)
    for leg, attempt, steps in (("reference", 1, undisturbed), ("chaos", 2, ()), ("chaos", 3, restarted)):
        with_saves(run.leg(leg).attempt(attempt).trace(0), tuple(range(6 if attempt == 2 else 2, 13, 2)), "top-{}.pt")
        if steps:
            leave(run, leg, {f"top-{step}.pt": SEEN for step in steps})
    if status == "FAIL" and undisturbed == (8, 10):
        edit_trace(run, "chaos", 3, 0, only("step", put(loss=["0x1.8p+1"] * MICRO_BATCHES), step=STEPS))
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert any("fault-free run has removed: top-4.pt;" in warning for warning in verdict.warnings) == warned


def test_what_a_restarted_run_saved_on_a_notice_is_nothing_that_an_undisturbed_one_has_removed(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    for leg, attempt, saved, held in (("reference", 1, (4, 8), (4, 8)), ("chaos", 2, (5,), ()), ("chaos", 3, (8,), (4, 5, 8))):
        for step in saved:
            with_saves(run.leg(leg).attempt(attempt).trace(0), (step,), f"top-{step}.pt")
        if held:
            leave(run, leg, {f"top-{step}.pt": SEEN for step in held})
    verdict = judge(run)
    assert verdict.status == "PASS", verdict.cause
    assert not any("fault-free run has removed" in warning for warning in verdict.warnings)


@pytest.mark.parametrize(("stays", "status"), [((5, 8), "PASS"), ((8,), "FAIL")])
def test_what_is_saved_on_a_notice_may_push_out_an_older_one(tmp_path: Path, stays: tuple[int, ...], status: str) -> None:
    run = write_script_run(tmp_path)
    for leg, attempt, saved, held in (("reference", 1, (4, 8), (4, 8)), ("chaos", 1, (4, 5), ()), ("chaos", 3, (8,), stays)):
        trace = run.leg(leg).attempt(attempt).trace(0)
        if leg == "chaos" and attempt == 1:
            write_lines(trace, [line for line in read_lines(trace) if line["kind"] != "step" or line["step"] <= 5])
        with_saves(trace, saved, "top-{}.pt")
        if held:
            leave(run, leg, {f"top-{step}.pt": SEEN for step in held})
    assert judge(run).status == status, judge(run).cause


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
        leave(run, leg, {LAST: OTHER if attempt == 3 else SEEN})
    verdict = judge(run)
    assert verdict.status == status, verdict.cause


@pytest.mark.parametrize(("of_second", "status"), [((), "PASS"), ((7, 8), "FAIL")])
def test_an_attempt_that_was_killed_counts_and_owes_nothing_at_its_last_step(
    tmp_path: Path, of_second: tuple[int, ...], status: str
) -> None:
    run = write_script_run(tmp_path)  # the second attempt goes on from step 4, and is killed at 9
    for leg, attempt, steps in (("reference", 1, (5,)), ("chaos", 2, of_second), ("chaos", 3, ())):
        with_saves(run.leg(leg).attempt(attempt).trace(0), steps)
        leave(run, leg, {LAST: {"block.weight": (24, "aa" if leg == "reference" else "bb")}})
    assert judge(run).status == status


@pytest.mark.parametrize(
    ("undisturbed", "again", "restarted", "status"),
    [
        (6, 6, 10, "FAIL"),  # a best loss was forgotten: the first evaluation after the start of step 8 is the best again
        (12, 12, 12, "FAIL"),  # what it is made of was lost
        (6, 7, 10, "PASS"),  # undisturbed, too, now at this step and now at that
        (10, 10, 11, "PASS"),  # every 10 steps, or 3 after a start: a rhythm, perhaps
        (0, 0, 8, "PASS"),  # before the first step of a process
        (6, 6, 5, "PASS"),  # by an attempt before the last: when else is not known
    ],
)
def test_of_a_file_whose_writer_is_not_seen_its_time_tells_of_the_last_save(
    tmp_path: Path, undisturbed: int, again: int, restarted: int, status: str
) -> None:
    """Another process has written it, or native code."""
    run = write_script_run(tmp_path)
    copytree(run.path / "reference", run.path / "confirm")
    for name, step in (("reference", undisturbed), ("confirm", again), ("chaos", restarted)):
        leg = read_leg(run.leg(name))
        attempt = next(each for each in reversed(leg.attempts) if each.start_of(0) <= step)
        start = attempt.starts[0]
        changed_s = start.time_s if step == start.position.step else attempt.traces[0].steps[step].time_s
        held = {"model/block.weight": (24, "bb" if name == "chaos" else "aa")}
        leave(run, name, {"best.pt": held}, changed={"best.pt": changed_s + 1e-4})
    verdict = judge(run)
    assert verdict.status == status, verdict.cause


AT, OF_RESTART = "run_20261127_0312", "run_20261127_0416"


@pytest.mark.parametrize("name", ["{}", "run-{}/files", "{}-58cc-4a21-b1c0-0e02b2c3d479"])
def test_a_folder_of_a_drawn_name_is_like_any_other_of_them(name: str) -> None:
    first, second = (f"{name.format(drawn)}/best.pt" for drawn in ("3f9c12ab", "c04d5ef7"))
    assert unnumbered(first) == unnumbered(second)
    assert unnumbered("run-a/best.pt") != unnumbered("run-b/best.pt") != unnumbered("run-b/last.pt")
    assert unnumbered("layer4b.pt") != unnumbered("layer4c.pt")


@pytest.mark.parametrize(
    ("again", "held", "status"),
    [
        ("run_20261127_0502", {OF_RESTART: "bb"}, "FAIL"),
        ("run_20261127_0502", {"run_20261127_0415": "aa", OF_RESTART: "bb"}, "FAIL"),  # the restart has begun one of its own
        ("run_20261127_0502", {"run_20261127_0415": "bb", OF_RESTART: "aa"}, "PASS"),
        (AT, {AT: "aa", OF_RESTART: "aa"}, "PASS"),
    ],
)
def test_files_in_folders_that_are_named_by_the_time_are_compared_by_the_last(
    tmp_path: Path, again: str, held: dict[str, str], status: str
) -> None:
    run = write_script_run(tmp_path)
    copytree(run.path / "reference", run.path / "confirm")
    for leg, attempt, folders in (("reference", 1, {AT: "aa"}), ("confirm", 1, {again: "aa"}), ("chaos", 3, held)):
        with_saves(run.leg(leg).attempt(attempt).trace(0), (12,), f"{[*folders][-1]}/best.pt")
        files = {f"{folder}/best.pt": {"weight": (24, digest)} for folder, digest in folders.items()}
        leave(run, leg, files, changed={path: number for number, path in enumerate(files)})
    verdict = judge(run)
    assert verdict.status == status, verdict.cause


@pytest.mark.parametrize(
    ("written", "saves", "status"), [(True, [], "FAIL"), (False, [[11, 1.0]], "FAIL"), (False, [[7, 1.0]], "PASS")]
)
def test_of_a_script_that_attached_what_it_saves_as_it_trains_is_compared(
    tmp_path: Path, written: bool, saves: list[list[float]], status: str
) -> None:
    run = write_run(tmp_path)
    for leg, held in (("reference", SEEN), ("chaos", OTHER)):
        about = {"ranks": {LAST: 0}} | ({} if written else {"saves": {LAST: [[11, 1.0]] if leg == "reference" else saves}})
        leave(run, leg, {LAST: held}, **about)
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert status == "PASS" or verdict.code == "result_differs"


@pytest.mark.parametrize(("digest", "status"), [("bb", "FAIL"), ("aa", "PASS")])
def test_of_a_script_that_attached_names_that_each_run_makes_anew_are_matched(tmp_path: Path, digest: str, status: str) -> None:
    """Undisturbed it saves after step 6, and again after the first evaluation of a restart."""
    run = write_run(tmp_path)
    for name, folder, held, step in (("reference", AT, "aa", 6), ("chaos", OF_RESTART, digest, 10)):
        leg, path = read_leg(run.leg(name)), f"{folder}/best.pt"
        time_s = leg.attempts[-1].traces[0].steps[step].time_s
        about = {"ranks": {path: 0}, "saves": {path: [[step, time_s]]}, "changed": {path: time_s}}
        leave(run, name, {path: {"block.weight": (24, held)}}, **about)
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
