"""A script that saves and resumes by itself: evidence shows where its restarts went on, and each broken resume has its "
"cause."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from legs import MICRO_BATCHES, TENSORS, Bugs, Edit, drop, edit_journal, edit_ranks, edit_trace, finding, only, put, words
from script_legs import SCRIPT_KILLS, Habits, write_script_run

from chaosrun.faults.fault import Fault
from chaosrun.observe.contents import content_digest
from chaosrun.observe.fingerprint import digests
from chaosrun.records.layout import RunLayout
from chaosrun.records.traces import SaveRecord
from chaosrun.verify import corruption
from chaosrun.verify.check import CheckResult
from chaosrun.verify.codes import Cause
from chaosrun.verify.own_saves import named_since, renames_in
from chaosrun.verify.verdict import Verdict, judge
from tests.records import read_lines, write_lines
from tests.unit.events import event


def check_of(verdict: Verdict, name: str) -> CheckResult:
    return next(check for check in verdict.checks if check.name == name)


def test_a_script_that_resumes_exactly_passes(tmp_path: Path) -> None:
    verdict = judge(write_script_run(tmp_path))
    assert (verdict.status, verdict.code, verdict.exact, verdict.resume_by) == ("PASS", "exact", True, "script"), verdict.cause
    assert verdict.cause.endswith("saved and resumed by the script")
    assert "attempt 2 from step 4, attempt 3 from step 8" in check_of(verdict, "resume_evidence").summary
    assert [each.resumed_from for each in verdict.attempts] == [
        None,
        "step 4 (its own checkpoint)",
        "step 8 (its own checkpoint)",
    ]
    assert [each.lost_steps for each in verdict.attempts] == [2, 1, 0]
    names = {check.name for check in verdict.checks}
    assert not names & {"resume_points", "checkpointed_state", "final_checkpoint", "final_position", "final_registered"}


def test_before_the_first_fault_nothing_was_restored(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    edit_trace(run, "chaos", 1, 1, only("start", put(found={"step": None, "weights": [0], "rng": []})))
    edit_trace(run, "chaos", 1, 1, only("step", put(lr=["0x1p-3"])))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "job_not_repeatable")
    assert verdict.divergence is not None and verdict.divergence.attempt == 1
    assert verdict.divergence.cause == verdict.cause and "restored" not in verdict.divergence.hint


@pytest.mark.parametrize(
    ("bugs", "habits", "kind", "code", "stood"),
    [
        (Bugs(keep_optimizer=False), Habits(), "optimizer", "optimizer_state_not_restored", "the optimizer of step 0"),
        (Bugs(keep_rng=False), Habits(), "rng", "rng_not_restored", "RNG of step 0"),
        (Bugs(keep_scheduler=False), Habits(), "learning rate", "lr_scheduler_not_restored", "learning rates of step 0"),
        (Bugs(keep_weights=False), Habits(), "weights", "weights_not_restored", "weights of step 0, the optimizer of step 4"),
        (Bugs(weights_off=1e-12), Habits(), "weights", "weights_not_restored", "weights of no step, the optimizer of step 4"),
        (Bugs(skip_off=2), Habits(), "data order", "batches_skipped", "the data of step 5"),
        (Bugs(skip_off=-2), Habits(), "data order", "batches_repeated", "the data of step 3"),
        (Bugs(set_epoch=False), Habits(), "data order", "sampler_epoch_not_set", "the data of step 3"),
        (Bugs(), Habits(weights_late=True), "weights", "weights_of_another_step", "weights of step 5, the optimizer of step 4"),
        (
            Bugs(),
            Habits(optimizer_from=1),
            "optimizer",
            "optimizer_state_of_another_step",
            "weights of step 8, the optimizer of step 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_agrees_with_no_step_says_what_it_is_nearest_to(
    tmp_path: Path, bugs: Bugs, habits: Habits, kind: str, code: str, stood: str
) -> None:
    verdict = judge(write_script_run(tmp_path, bugs=bugs, habits=habits))
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert verdict.divergence is not None and verdict.divergence.kind == kind
    assert stood in verdict.cause
    assert stood in check_of(verdict, "resume_evidence").summary
    assert (verdict.blame.whose, verdict.blame.part) == ("yours", "script"), verdict.blame
    assert "run.register" not in f"{verdict.hint}" and "chaosrun" not in verdict.blame.reason


def test_a_new_optimizer_is_new_though_an_attempt_before_began_with_a_new_one_at_a_nearer_step(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_optimizer=False))
    for rank in range(3):
        twice = only("start", lambda line: {**line, "found": {**line["found"], "optimizer": [0, 3]}})
        edit_trace(run, "chaos", 2, rank, twice)
    verdict = judge(run)
    assert verdict.code == "optimizer_state_not_restored" and "the optimizer of step 0" in verdict.cause, verdict.cause


@pytest.mark.parametrize(
    ("began", "rank", "name", "code"),
    [
        ("b" * 16, 0, "norm.mean", "buffers_not_restored"),
        ("a" * 16, 0, "norm.mean", "forward_pass"),
        ("b" * 16, 0, "scratch", "forward_pass"),  # the same at the end: computed anew by each pass
        ("a" * 16, 1, "norm.mean", "forward_pass"),  # rank 0's, which DDP hands out
    ],
)
def test_buffers_that_a_restart_begins_without_are_named(tmp_path: Path, began: str, rank: int, name: str, code: str) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_buffers=False))
    traces = [run.leg("chaos").attempt(1).trace(saver) for saver in (0, 1)]
    saves = [line for line in read_lines(traces[0]) if line["kind"] == "save"]
    write_lines(traces[1], [*read_lines(traces[1]), *({**line, "buffers": {name: "c" * 16}} for line in saves)])
    edit_trace(run, "chaos", 1, 0, only("save", put(buffers={name: "a" * 16}), step=4))
    edit_trace(run, "chaos", 2, rank, only("start", put(buffers={name: began})))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", code, "yours"), verdict.cause
    assert (f"other buffers than the run had when it saved ({name})" in f"{verdict.hint}") == (code == "buffers_not_restored")


def test_a_loss_that_nothing_saved_explains_may_come_of_another_ranks_buffers(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_buffers=False))
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        edit_trace(run, leg, attempt, 0, only("save", put(held={})))
    verdict = judge(run)
    assert verdict.code == "forward_pass" and "or its buffers are another rank's" in f"{verdict.hint}", verdict.hint


def test_buffers_that_only_the_backward_pass_shows_are_named(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_buffers=False))
    for rank in range(3):
        reference = read_lines(run.leg("reference").attempt(1).trace(rank))
        loss = next(line["loss"] for line in reference if line["kind"] == "step" and line["step"] == 5)
        edit_trace(run, "chaos", 2, rank, only("step", put(loss=loss, grad="0" * 16), step=5))
    edit_trace(run, "chaos", 1, 0, only("save", put(buffers={"norm.mean": "a" * 16}), step=4))
    edit_trace(run, "chaos", 2, 0, only("start", put(buffers={"norm.mean": "b" * 16})))
    verdict = judge(run)
    assert verdict.divergence is not None and verdict.divergence.kind == "gradient", verdict.divergence
    assert verdict.code == "buffers_not_restored" and "(norm.mean)" in f"{verdict.hint}"


@pytest.mark.parametrize(("began", "code"), [("a" * 16, "buffers_drifted"), ("b" * 16, "buffers_not_restored")])
def test_buffers_that_came_back_and_end_otherwise_have_drifted(tmp_path: Path, began: str, code: str) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    edit_trace(run, "chaos", 1, 0, only("save", put(buffers={"norm.mean": "a" * 16}), step=4))
    edit_trace(run, "chaos", 2, 0, only("start", put(buffers={"norm.mean": began})))
    other = only("end", lambda line: {**line, "digests": {**line["digests"], "buffers": {"norm.mean": "c" * 16}}})
    edit_trace(run, "chaos", 2, 0, other)
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", code, "yours"), verdict.cause
    assert "on rank 0" in f"{verdict.hint}"
    assert ("other buffers than the run had when it saved (norm.mean)" in f"{verdict.hint}") == (code == "buffers_not_restored")


@pytest.mark.parametrize(
    ("path", "aside", "streams", "code"),
    [
        ("step=3.ckpt", True, 4, "saved_while_training"),
        ("last.ckpt", True, 4, "batches_repeated"),
        ("last.ckpt", True, 3, "saved_while_training"),
        ("last.ckpt", False, 3, "batches_repeated"),
        ("step=3-of-4.ckpt", True, 4, "batches_repeated"),
        ("step=3.ckpt", False, 4, "batches_repeated"),
    ],
)
def test_what_another_thread_saved_too_late_holds_a_later_steps_tensors(
    tmp_path: Path, path: str, aside: bool, streams: int, code: str
) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-2))
    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("start", lambda line: {**line, "found": {**line["found"], "rng": [streams]}}))
    edit_trace(run, "chaos", 1, 0, only("save", put(path=path, aside=aside)))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.part) == ("FAIL", code, "script"), verdict.cause
    assert verdict.divergence is not None
    assert ("the save of step 3 holds tensors of step 4" in verdict.cause) == (code == "saved_while_training")


@pytest.mark.parametrize("path", ["step_2/__0_1.distcp", "last.ckpt"])
def test_a_restart_whose_data_begin_anew_read_no_save_that_came_too_late(tmp_path: Path, path: str) -> None:
    """DCP writes in another thread, and calls its files after ranks; a checkpoint of step 0 is none."""
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-2))
    anew = {"data": [0], "rng": [0]}
    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("start", lambda line: {**line, "found": {**line["found"], **anew}}))
    edit_trace(run, "chaos", 1, 0, only("save", put(path=path, aside=True)))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "batches_repeated"), verdict.cause


@pytest.mark.parametrize("later", [0, 1], ids=["at once", "after a step"])
def test_what_another_thread_saved_too_late_is_called_what_it_was_renamed_to(tmp_path: Path, later: int) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-2))
    for leg in ("reference", "chaos"):
        path = run.leg(leg).attempt(1).trace(0)
        lines = [{**line, "path": "7.tmp", "aside": True} if line["kind"] == "save" else line for line in read_lines(path)]
        saved = next(line for line in reversed(lines) if line["kind"] == "save" and line["step"] == 4 and line["done"])
        rename = {"how": "rename", "path": "step=3.ckpt", "before": "7.tmp", "step": 4 + later, "held": {}}
        write_lines(path, [*lines, {**saved, **rename}])
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "saved_while_training"), verdict.cause
    assert "step=3.ckpt" in verdict.cause + f"{verdict.hint}" and "7.tmp" not in verdict.cause + f"{verdict.hint}", verdict.hint


def test_what_a_restart_builds_anew_is_told_beside_the_first(tmp_path: Path) -> None:
    bugs = Bugs(keep_optimizer=False, keep_rng=False, keep_scheduler=False, skip_off=-2)
    verdict = judge(write_script_run(tmp_path, bugs=bugs))
    assert verdict.code == "optimizer_state_not_restored"
    told = "weights of step 4, the optimizer of step 0, the data of step 3, learning rates of step 0, RNG of step 0"
    assert told in verdict.cause
    assert "also wrong: the data of step 3, learning rates of step 0, RNG of step 0" in f"{verdict.hint}"


HEAD, WHOLE = "AdamW 1 of 2", "AdamW 2 of 2"
LOST, NEW, RIGHT, OTHER = ("1" * 16, "2" * 16, "3" * 16, "4" * 16)
WHAT_THE_HEAD_KEEPS = torch.arange(4.0)


def _loses_the_optimizer_of_a_phase_that_is_over(run: RunLayout) -> None:
    """The optimizer of the whole net makes every step; a restart brings it back alone."""
    keeps = {"0/weight/exp_avg": digests({"": WHAT_THE_HEAD_KEEPS})[""]}

    def edit(leg: str, attempt: int, rank: int, *edits: Edit) -> None:
        for each in (only("step", put(stepped=(WHOLE,))), *edits):
            edit_trace(run, leg, attempt, rank, each)

    def ending(head: str, more: dict[str, str]) -> Edit:
        def end(line: dict[str, Any]) -> dict[str, Any]:
            digests = {**line["digests"], "optimizer": {**line["digests"]["optimizer"], **more}}
            return {**line, "digests": digests, "optimizers": {HEAD: head, WHOLE: RIGHT}}

        return only("end", end)

    def start(line: dict[str, Any]) -> dict[str, Any]:
        found = {**line["found"], "step": None, "optimizer": []}
        return {**line, "state": OTHER, "optimizers": {HEAD: NEW, WHOLE: RIGHT}, "found": found}

    for rank in range(3):
        edit("reference", 1, rank, ending(LOST, keeps))
        edit("chaos", 1, rank)
        edit("chaos", 2, rank, only("start", start), only("step", put(state=OTHER)), ending(NEW, {}))
    edit_trace(run, "reference", 1, 0, only("save", put(optimizers={HEAD: LOST, WHOLE: RIGHT}), step=4))


def test_state_of_an_optimizer_that_makes_no_step_any_more_is_a_warning(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    _loses_the_optimizer_of_a_phase_that_is_over(run)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("PASS", "exact"), verdict.cause
    told = f"the state of {HEAD} was not restored (attempt 2), but no step depended on it"
    assert [warning for warning in verdict.warnings if told in warning], verdict.warnings


@pytest.mark.parametrize(
    ("leg", "attempt", "edit"),
    [
        ("reference", 1, only("step", put(stepped=(HEAD,)), step=12)),
        ("reference", 1, only("step", put(stepped=(HEAD, WHOLE)), step=5)),
        ("chaos", 2, only("step", put(stepped=(HEAD,)), step=12)),
        ("reference", 1, only("step", put(stepped=()), step=9)),
        ("reference", 1, only("end", put(optimizers={HEAD: LOST, WHOLE: OTHER}))),
        ("reference", 1, only("end", put(optimizers={}))),
        ("chaos", 2, only("end", put(optimizers={WHOLE: RIGHT}))),
        ("chaos", 2, only("end", put(optimizers={HEAD: OTHER, WHOLE: RIGHT}))),
        ("chaos", 2, only("start", lambda line: {**line, "optimizers": {HEAD: NEW, WHOLE: OTHER}})),
        ("chaos", 1, only("save", put(held={"head": content_digest(WHAT_THE_HEAD_KEEPS)}), step=4)),
    ],
    ids=["later", "at-once", "after-the-restart", "not-told", "other", "old-trace", "gone", "moves", "began", "was-saved"],
)
def test_state_of_an_optimizer_is_missed_unless_all_shows_that_it_does_not_count(
    tmp_path: Path, leg: str, attempt: int, edit: Edit
) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    _loses_the_optimizer_of_a_phase_that_is_over(run)
    edit_trace(run, leg, attempt, 0, edit)
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "optimizer_state_not_restored", "yours")
    assert not any("no step depended on it" in warning for warning in verdict.warnings)


def test_to_begin_again_although_a_checkpoint_was_there_is_a_cause_of_its_own(tmp_path: Path) -> None:
    verdict = judge(write_script_run(tmp_path, bugs=Bugs(start_over=True)))
    assert (verdict.status, verdict.code) == ("FAIL", "began_again"), verdict.cause
    assert "although a checkpoint existed: attempt 2 passed over that of step 4 (ckpt-4/model.pt)" in verdict.cause
    assert [each.passed_over for each in verdict.attempts] == [None, 4, 8]
    assert verdict.divergence is None, "its numbers are right: it trained all over again"


@pytest.mark.parametrize(
    ("path", "read"), [("ckpt-4/model.pt", True), ("ckpt-4/optimizer.pt", False), ("best/other.pt", False)]
)
def test_to_begin_again_after_reading_the_checkpoint_is_not_told_as_passing_it_over(
    tmp_path: Path, path: str, read: bool
) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(start_over=True), kills=SCRIPT_KILLS[:1])
    leg = run.leg("chaos")
    opened = {"path": str(leg.output.absolute() / path), "left_by": "", "changed_s": 0.0, "attempt": 2, "rank": 0}
    leg.attempt(2).opened(0).write_text(f"{json.dumps(opened)}\n")
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "began_again", "yours"), verdict.cause
    assert ("although it read a checkpoint: attempt 2 opened that of step 4" in verdict.cause) == read, verdict.cause
    assert ("look for its newest complete checkpoint" in f"{verdict.hint}") != read, verdict.hint
    assert verdict.blame.likely == read


@pytest.mark.parametrize(
    ("saves", "cut_off"),
    [([False], True), ([False, True], False), ([False, True, False], True)],
    ids=["cut off", "completed", "overwritten"],
)
def test_to_begin_again_after_reading_a_file_whose_save_was_cut_off_is_told(
    tmp_path: Path, saves: list[bool], cut_off: bool
) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(start_over=True), kills=SCRIPT_KILLS[:1])
    leg = run.leg("chaos")
    before = list(read_lines(trace := leg.attempt(1).trace(0)))
    saved = {"kind": "save", "path": "ckpt-6/model.pt", "how": "torch.save", "step": 6, "time_s": before[-1]["time_s"]}
    write_lines(trace, [*before, *({**saved, "done": done} for done in saves)])
    opened = {"path": str(leg.output.absolute() / saved["path"]), "left_by": "", "changed_s": 0.0, "attempt": 2, "rank": 0}
    leg.attempt(2).opened(0).write_text(f"{json.dumps(opened)}\n")
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "began_again", "yours"), verdict.cause
    assert ("ckpt-6/model.pt was opened, whose save a kill had cut off" in f"{verdict.hint}") == cut_off, verdict.hint


@pytest.mark.parametrize(("at_step", "told"), [(11, False), (12, True)], ids=["before the last step", "after it"])
def test_a_restart_that_has_no_step_to_train_is_told(tmp_path: Path, at_step: int, told: bool) -> None:
    verdict = judge(write_script_run(tmp_path, kills=(replace(SCRIPT_KILLS[0], at_step=at_step),)))
    assert verdict.status == "PASS", verdict.cause
    assert any("no step was trained after a restart" in warning for warning in verdict.warnings) == told, verdict.warnings


@pytest.mark.parametrize("also", [{}, {"rng": [], "step": None}], ids=["all", "other streams"])
def test_to_begin_again_before_the_first_save_is_right_with_learning_rates_of_many_steps(
    tmp_path: Path, also: dict[str, Any]
) -> None:
    kill = replace(SCRIPT_KILLS[0], at_step=3)
    run = write_script_run(tmp_path, kills=(kill,), spec={"verify": {"confirm": False}})
    for rank in range(3):
        constant = only("start", finding(rates=[0, 1, 2, 3, 4, 5, 6, 7], **also))
        edit_trace(run, "chaos", 2, rank, constant)
    verdict = judge(run)
    assert verdict.status == "PASS", verdict.cause


@pytest.mark.parametrize("at_step", [3, 6], ids=["beginning", "checkpoint"])
@pytest.mark.parametrize(("used", "status"), [(1.0, "PASS"), (0.5, "FAIL")], ids=["right", "wrong"])
def test_rates_that_are_set_by_hand_before_each_step_are_judged_by_the_first(
    tmp_path: Path, at_step: int, used: float, status: str
) -> None:
    """A restart begins with those that the optimizer was built with, which are a later step's, and steps with its own."""
    kill = replace(SCRIPT_KILLS[0], at_step=at_step)
    run = write_script_run(tmp_path, kills=(kill,), spec={"verify": {"confirm": False}})

    def built(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "scheduled": False, "found": {**line["found"], "step": None, "rates": [8, 9, 10]}}

    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("start", built))
        if used != 1.0:
            change = only("step", lambda line: {**line, "lr": [(used * float.fromhex(rate)).hex() for rate in line["lr"]]})
            edit_trace(run, "chaos", 2, rank, change)
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert status == "PASS" or verdict.code.startswith("lr_scheduler"), verdict.cause


def test_right_rates_are_not_told_beside_what_is_wrong(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_optimizer=False), kills=SCRIPT_KILLS[:1])
    edit_ranks(run, "chaos", 2, only("start", finding(rates=[8])))
    verdict = judge(run)
    assert verdict.code == "optimizer_state_not_restored" and "learning rates of step 4" in verdict.cause, verdict.cause


def test_an_older_checkpoint_is_not_the_newest(tmp_path: Path) -> None:
    verdict = judge(write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True)))
    assert (verdict.status, verdict.code) == ("FAIL", "checkpoint_passed_over"), verdict.cause
    assert "attempt 3 resumed from step 4 and passed over the complete checkpoint of step 8" in verdict.cause


def test_a_checkpoint_is_called_what_the_script_has_renamed_it_to(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    trace = run.leg("chaos").attempt(2).trace(0)

    def beside(line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["kind"] != "save" or "model" not in line["path"]:
            return [] if line["kind"] == "save" else [line]
        rename = {**line, "how": "rename", "path": f"step-{line['step']}.pt", "before": "ckpt/tmp", "held": {}}
        return [{**line, "path": "ckpt/tmp"}, *([rename] if line["done"] else [])]

    write_lines(trace, [each for line in read_lines(trace) for each in beside(line)])
    for leg in ("chaos", "reference"):
        first = run.leg(leg).attempt(1).trace(0)
        write_lines(first, [each for line in read_lines(first) for each in beside(line)])
    verdict = judge(run)
    assert "passed over the complete checkpoint of step 8 (step-8.pt)" in verdict.cause


def test_a_rename_to_the_beginning_of_a_checkpoints_name_is_not_that_checkpoint(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        path = run.leg(leg).attempt(attempt).trace(0)
        lines = list(read_lines(path))
        link = {"how": "rename", "path": "ck", "before": "ck.new", "held": {}}
        more = [[line, {**line, **link}] if line["kind"] == "save" and line["done"] else [line] for line in lines]
        write_lines(path, [each for some in more for each in some])
    assert "passed over the complete checkpoint of step 8 (ckpt-8/" in judge(run).cause


def test_a_link_that_leads_to_the_first_checkpoint_forever_hides_no_newer_one(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    trace = run.leg("chaos").attempt(1).trace(0)
    lines = list(read_lines(trace))
    place = next(number for number, line in enumerate(lines) if line["kind"] == "save")
    link = {**lines[place], "how": "rename", "path": "latest", "before": "latest.new", "held": {}}
    write_lines(trace, [*lines[:place], link, *lines[place:]])
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "checkpoint_passed_over"), verdict.cause


@pytest.mark.parametrize(("named", "code"), [(False, "exact"), (True, "checkpoint_passed_over")])
def test_a_save_beside_the_training_is_there_once_the_script_has_named_it(tmp_path: Path, named: bool, code: str) -> None:
    """As with `async_save`, where `latest` is moved to a checkpoint when the next one is begun."""
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2), ("chaos", 3)):
        trace = run.leg(leg).attempt(attempt).trace(0)
        lines: list[dict[str, Any]] = []
        for line in read_lines(trace):
            save = line["kind"] == "save"
            note = {**line, "how": "rename", "path": "latest", "before": "latest.new", "held": {}, "done": True}
            if save and lines[-1]["kind"] != "save" and any(each["kind"] == "save" for each in lines):
                lines.append(note)
            lines.append({**line, "aside": True} if save else line)
            if save and named and (leg, attempt, line["done"], line["path"]) == ("chaos", 2, True, "ckpt-8/optimizer.pt"):
                lines.append({**note, "time_s": line["time_s"] + 1e-3})
        write_lines(trace, lines)
    verdict = judge(run)
    assert verdict.code == code, verdict.cause


ATTEMPTS = (("reference", 1), ("chaos", 1), ("chaos", 2), ("chaos", 3))


@pytest.mark.parametrize(("whole", "code"), [(True, "checkpoint_passed_over"), (False, "exact")])
def test_what_another_thread_writes_belongs_to_the_save_of_its_folder(tmp_path: Path, whole: bool, code: str) -> None:
    """The model is saved at once, the optimizer's state beside the training: without it, it is no whole checkpoint."""
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    for leg, attempt in ATTEMPTS:

        def later(line: dict[str, Any], killed: bool = (leg, attempt) == ("chaos", 2)) -> dict[str, Any] | None:
            if "optimizer" not in line["path"]:
                return line
            return None if killed and not whole else {**line, "step": line["step"] + 1, "aside": True}

        edit_trace(run, leg, attempt, 0, only("save", later))
    verdict = judge(run)
    assert verdict.code == code, verdict.cause


def test_a_file_that_is_saved_once_in_a_folder_of_all_takes_no_checkpoints_in(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    for leg, attempt in ATTEMPTS:
        trace, lines = run.leg(leg).attempt(attempt).trace(0), list[dict[str, Any]]()
        for line in read_lines(trace):
            if line["kind"] == "save":
                folder, name = line["path"].split("/")
                line |= {"path": f"all/{name}-{folder}", "aside": True}
            lines.append(line)
            if line["kind"] == "step" and line["step"] == 1:
                once = {"kind": "save", "path": "all/settings.pt", "how": "torch.save", "step": 1, "time_s": line["time_s"]}
                lines += [{**once, "done": False}, {**once, "done": True}]
        write_lines(trace, lines)
    verdict = judge(run)
    assert verdict.code == "checkpoint_passed_over", verdict.cause


def test_shards_are_no_replicas(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    attempts = [("reference", 1), ("chaos", 1), ("chaos", 2), ("chaos", 3)]
    for leg, attempt in attempts:
        # What rank 1 holds is another thing, in both legs alike.
        own = lambda line: {**line, "param": line["param"][::-1]} if "param" in line else line  # noqa: E731
        edit_trace(run, leg, attempt, 1, own)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "replicas_drift")
    for leg, attempt in attempts:
        for rank in (0, 1, 2):
            edit_trace(run, leg, attempt, rank, only("start", put(sharded=True)))
    verdict = judge(run)
    assert (verdict.status, check_of(verdict, "rank_agreement").status) == ("PASS", "skip"), verdict.cause


def test_a_file_that_is_no_checkpoint_may_be_passed_over(tmp_path: Path) -> None:
    assert judge(write_script_run(tmp_path, habits=Habits(exports_at=5))).code == "exact"


@pytest.mark.parametrize(
    ("best", "code"),
    [
        ({"weights/0.weight": "a" * 16, "metric": "0.25"}, "checkpoint_passed_over"),
        ({"weights/0.weight": "a" * 16, "weights/0.bias": "b" * 16, "state/0/exp_avg": "c" * 16}, "checkpoint_passed_over"),
        ({"average/0.weight": "d" * 16}, "exact"),
        ({}, "exact"),
    ],
)
def test_a_copy_beside_a_checkpoint_is_no_part_of_it(tmp_path: Path, best: dict[str, str], code: str) -> None:
    """Of the best weights, or of the whole checkpoint: the next checkpoint has none. Of what is in no other file, it is one."""
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    whole = {"weights/0.weight": "a" * 16, "weights/0.bias": "b" * 16, "state/0/exp_avg": "c" * 16}
    for leg, attempt in ATTEMPTS:
        trace, lines = run.leg(leg).attempt(attempt).trace(0), list[dict[str, Any]]()
        for line in read_lines(trace):
            if line["kind"] != "save":
                lines.append(line)
            elif "optimizer" not in line["path"]:
                lines.append({**line, "held": {} if line["done"] else whole})
                if line["step"] == 4:
                    lines.append({**line, "path": "best.pt", "held": {} if line["done"] else best})
        write_lines(trace, lines)
    verdict = judge(run)
    assert verdict.code == code, verdict.cause


@pytest.mark.parametrize("as_much", [True, False])
def test_a_newer_file_of_another_name_that_holds_as_much_is_warned_of(tmp_path: Path, as_much: bool) -> None:
    """Two files by turns, perhaps, of which a restart always takes one; or an export."""
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    whole = {"weights/0.weight": "a" * 16, "step": "4"}

    def by_turns(line: dict[str, Any]) -> dict[str, Any] | None:
        if "optimizer" in line["path"]:
            return None
        is_second = line["step"] // 4 % 2 == 0
        held = whole if as_much or not is_second else {"weights/0.weight": "a" * 16}
        return {**line, "path": "b.pt" if is_second else "a.pt", "held": {} if line["done"] else held}

    for leg, attempt in ATTEMPTS:
        edit_trace(run, leg, attempt, 0, only("save", by_turns))
    verdict = judge(run)
    assert verdict.code == "exact", verdict.cause
    told = [warning for warning in verdict.warnings if "holds as much" in warning]
    assert bool(told) == as_much, verdict.warnings


def test_a_save_that_was_cut_short_may_be_passed_over(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(start_over=True), kills=SCRIPT_KILLS[:1])
    # Its last file was begun and not done.
    last = only("save", lambda line: None if line["done"] and line["path"] == "ckpt-4/optimizer.pt" else line)
    edit_trace(run, "chaos", 1, 0, last)
    assert judge(run).status == "PASS"


def test_a_save_in_the_background_is_of_the_step_it_was_begun_after(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    # Gone on from step 4; its files were complete when step 5 was done. Rank 0 saves.
    edit_trace(run, "chaos", 1, 0, only("save", lambda line: {**line, "step": line["step"] + 1}))
    assert judge(run).status == "PASS"


def test_batches_that_account_for_another_end_are_the_cause(tmp_path: Path) -> None:
    """A step more than undisturbed, of as many batches as were repeated; one that ends earlier has another cause."""
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-MICRO_BATCHES), kills=SCRIPT_KILLS[:1])
    edit_ranks(run, "chaos", 2, only("end", lambda line: {**line, "step": line["step"] + 1}))
    assert judge(run).code == "batches_repeated"
    edit_ranks(run, "chaos", 2, only("end", lambda line: {**line, "step": line["step"] - 2}))
    assert judge(run).code == "ended_at_another_step"


@pytest.mark.parametrize(("saved", "named"), [({"Adam": "a", "SGD": "b"}, True), ({"Adam": "c", "SGD": "b"}, False)])
def test_the_one_of_several_optimizers_that_was_not_restored_is_named(
    tmp_path: Path, saved: dict[str, str], named: bool
) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_optimizer=False))
    edit_trace(run, "chaos", 1, 0, only("save", put(optimizers=saved), step=4))
    edit_trace(run, "chaos", 2, 0, only("start", put(optimizers={"Adam": "a", "SGD": "-"})))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "optimizer_state_not_restored"), verdict.cause
    assert ("the optimizer SGD started with another state" in f"{verdict.hint}") == named, verdict.hint


def test_what_is_wrong_is_of_one_step_where_it_may_be(tmp_path: Path) -> None:
    """As in a script that loads weights alone: its first batch, of one sample, comes again in a later epoch."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    found = {"step": None, "optimizer": [0], "data": [0, 5], "rates": [0, 1, 2, 3], "rng": []}
    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("start", finding(**found)))
        edit_trace(run, "chaos", 2, rank, only("step", lambda line: {**line, "lr": ["0x1p-9"], "state": "other"}))
        other = only("step", lambda line: {**line, "batch": [f"other {each}" for each in line["batch"]]})
        edit_trace(run, "chaos", 2, rank, other)
    summary = check_of(judge(run), "resume_evidence").summary
    assert "the optimizer of step 0, the data of step 0, learning rates of step 0, RNG of no step" in summary, summary


def test_weights_that_a_load_passed_over_are_named(tmp_path: Path) -> None:
    """As transformers' Trainer does with a tensor that its library renames when it saves."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    began = next(line for line in read_lines(run.leg("reference").attempt(1).trace(0)) if line["kind"] == "start")

    def passed_over(line: dict[str, Any]) -> dict[str, Any]:
        first, held = (base64.b64decode(each["params"]) for each in (began, line))
        found = {**line["found"], "step": None, "weights": []}
        return {**line, "found": found, "param": "other", "params": base64.b64encode(first[:4] + held[4:]).decode()}

    edit_ranks(run, "chaos", 2, only("start", passed_over))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "weights_not_restored"), verdict.cause
    assert f"are those of step 4: {began['tensors'][0]}: not in the checkpoint" in f"{verdict.hint}", verdict.hint


def test_streams_that_came_back_on_some_ranks_are_told_by_rank(tmp_path: Path) -> None:
    """As where rank 0 alone calls accelerate's save_state."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for rank in (1, 2):
        edit_trace(run, "chaos", 2, rank, only("start", finding(step=None, rng=[])))
        edit_trace(run, "chaos", 2, rank, only("step", put(rng="other", loss=["0x1p-9"])))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "rng_not_restored"), verdict.cause
    assert "were restored on rank 0, not on ranks 1 and 2" in f"{verdict.hint}", verdict.hint


@pytest.mark.parametrize(
    ("lost", "ranks", "told"),
    [
        ({"optimizer": [0]}, (1, 2), "not saved, or not loaded; rank 0 began with the right one: load it on every rank (DDP"),
        ({"optimizer": [0]}, (2,), "; ranks 0 and 1 began with the right one: load it on every rank (DDP"),
        ({"optimizer": [0]}, (0, 1, 2), "not saved, or not loaded"),
    ],
    ids=["rank 0 alone", "all but one", "none"],
)
def test_state_that_some_ranks_restored_is_to_be_loaded_on_all(
    tmp_path: Path, lost: dict[str, Any], ranks: tuple[int, ...], told: str
) -> None:
    """As where rank 0 alone loads: DDP makes the weights equal, and nothing else."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for rank in ranks:
        edit_trace(run, "chaos", 2, rank, only("start", finding(step=None, **lost)))
        edit_trace(run, "chaos", 2, rank, only("step", put(state="other")))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "optimizer_state_not_restored"), verdict.cause
    assert told in f"{verdict.hint}" and ("right one" in f"{verdict.hint}") == ("right one" in told), verdict.hint


def test_learning_rates_are_not_what_ddp_hands_on(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for rank in (1, 2):
        edit_trace(run, "chaos", 2, rank, only("start", finding(step=None, rates=[0])))
        edit_trace(run, "chaos", 2, rank, only("step", put(lr=["0x1p-9"])))
    hint = f"{judge(run).hint}"
    assert "rank 0 began with the right one: load it on every rank" in hint and "DDP" not in hint, hint


@pytest.mark.parametrize("later", [(), ("numpy",)], ids=["restored by the last restart", "by none"])
def test_streams_that_no_restart_restores_are_named(tmp_path: Path, later: tuple[str, ...]) -> None:
    run = write_script_run(tmp_path)
    for rank in range(3):
        lost = only("start", finding(step=None, rng=[]))
        for attempt in (2, 3)[: 1 + len(later)]:
            edit_trace(run, "chaos", attempt, rank, lost)
            edit_trace(run, "chaos", attempt, rank, only("step", put(rng="other", loss=["0x1p-9"])))
        for leg, value in (("reference", "1"), ("chaos", "2")):
            end = only("end", lambda line, value=value: {**line, "digests": {**line["digests"], "rng": {"numpy": value * 16}}})
            edit_trace(run, leg, 1 if leg == "reference" else 3, rank, end)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "rng_not_restored"), verdict.cause
    assert ("the random streams (numpy) match no step" in f"{verdict.hint}") == bool(later), verdict.hint


@pytest.mark.parametrize(("streams", "code"), [({}, "batch_contents"), ({"rng": [0], "step": None}, "rng_not_restored")])
def test_other_contents_of_the_same_samples_are_put_down_to_streams_that_were_not_restored(
    tmp_path: Path, streams: dict[str, Any], code: str
) -> None:
    """As a random crop has it in a script that seeds its streams when it begins, and restores all else."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for rank in range(3):
        other = only("step", lambda line: {**line, "batch": [f"other {each}" for each in line["batch"]]})
        edit_trace(run, "chaos", 2, rank, other)
        edit_trace(run, "chaos", 2, rank, only("start", finding(data=[], **streams)))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert ("seeded again, not restored; also wrong: the data of no step" in f"{verdict.hint}") == bool(streams), verdict.hint


@pytest.mark.parametrize(
    ("tensors", "loss", "streams", "status", "code"),
    [
        ("t", None, {}, "PASS", "exact"),
        ("u", None, {}, "FAIL", "data_order_not_restored"),
        ("t", "0x1.8p+3", {}, "FAIL", "batch_contents"),
        ("t", "0x0p+0", {}, "FAIL", "batch_contents"),
        ("t", "0x1.8p+3", {"rng": []}, "FAIL", "rng_not_restored"),
    ],
)
def test_inputs_beside_the_tensors_that_have_no_effect_fail_nothing(
    tmp_path: Path, tensors: str, loss: str | None, streams: dict[str, Any], status: str, code: str
) -> None:
    """As a list of losses that is handed to the model and never read. A loss of zero shows nothing."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])

    def given(leg: str, attempt: int, log: str, tensors: str, loss: str | None) -> None:
        def step(line: dict[str, Any]) -> dict[str, Any]:
            losses = {} if loss is None else {"loss": [loss] * MICRO_BATCHES}
            batch = [f"{log}{line['step']}/{tensors}{line['step']}"] * MICRO_BATCHES
            return {**line, **losses, "ids": None, "batch": batch}

        edit_ranks(run, leg, attempt, only("step", step))

    for leg in ("reference", "chaos"):
        given(leg, 1, "a", "t", loss if loss == "0x0p+0" else None)
    given("chaos", 2, "b", tensors, loss)
    for rank in range(3):
        other = only("start", finding(step=None, data=[], **streams))
        edit_trace(run, "chaos", 2, rank, other)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == (status, code), verdict.cause
    assert code != "batch_contents" or "besides its tensors was not restored" in verdict.cause
    assert any("besides its tensors" in warning for warning in verdict.warnings) == (status == "PASS")


def test_data_of_no_step_have_a_cause_and_a_hint(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])

    def strange(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "ids": None, "batch": [f"{digest:x>16}" for digest in map(str, range(len(line["batch"])))]}

    edit_ranks(run, "chaos", 2, only("step", strange))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "data_order_not_restored")
    assert "no recorded step began with this batch" in f"{verdict.hint}"


def test_what_no_step_reads_is_held_against_what_was_saved_undisturbed(tmp_path: Path) -> None:
    """A clock that is saved with it tells nothing: it already differed before the fault."""
    verdict = judge(write_script_run(tmp_path, bugs=Bugs(keep_registered=False), kills=SCRIPT_KILLS[:1]))
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "kept_state_not_restored", "yours"), verdict.cause
    assert "average (first difference: step 8, rank 0, attempt 2, average)" in verdict.cause
    assert "ckpt-8/model.pt is saved after step 8" in f"{verdict.hint}"


@pytest.mark.parametrize(("gone", "status"), [(2, "FAIL"), (None, "PASS")], ids=["state", "a count of starts"])
def test_a_number_that_counts_starts_is_no_state(tmp_path: Path, gone: int | None, status: str) -> None:
    """One that counts something else is not the same in all that an attempt saves."""
    run = write_script_run(tmp_path)
    for leg, attempts in (("reference", (1,)), ("chaos", (1, 2, 3))):
        for attempt in attempts:

            def counted(line: dict[str, Any], attempt: int = attempt) -> dict[str, Any]:
                value = attempt if gone is None else attempt + line["step"] // 4
                return {**line, "held": {**line["held"], "starts": str(value)} if line.get("held") else {}}

            edit_trace(run, leg, attempt, 0, only("save", counted))
    assert judge(run).status == status


def test_state_that_begins_after_the_first_kill_is_compared(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    for leg, attempt, value in (("reference", 1, "0" * 16), ("chaos", 3, "1" * 16)):

        def late(line: dict[str, Any], value: str = value) -> dict[str, Any]:
            held = line.get("held") or {}
            return {**line, "held": {**held, "swa": value} if held and line["step"] >= 12 else held}

        edit_trace(run, leg, attempt, 0, only("save", late))
    verdict = judge(run)
    assert verdict.code == "kept_state_not_restored" and "step 12, rank 0, attempt 3, swa" in verdict.cause, verdict.cause


def test_a_count_of_steps_that_is_off_shows_where_it_saves(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])

    def earlier(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "step": line["step"] - 1, "held": {**line["held"], "average": "0" * 16} if line.get("held") else {}}

    edit_trace(run, "chaos", 2, 0, only("save", earlier))
    verdict = judge(run)
    assert verdict.code == "kept_state_not_restored", verdict.cause
    assert "ckpt-8/model.pt is saved after step 7 (reference: after step 8)" in f"{verdict.hint}"
    assert "what decides when it is saved was not restored: ckpt-8/model.pt" in verdict.cause
    (check,) = (check for check in verdict.checks if check.name == "own_checkpoints")
    assert check.summary == "what decides when it is saved was not restored: ckpt-8/model.pt"


def test_one_that_removed_its_newest_checkpoint_is_told_so(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True), kills=LATER)
    assert judge(run).code == "checkpoint_passed_over"
    trace = run.leg("chaos").attempt(1).trace(0)
    lines = list(read_lines(trace))
    saved = next(line for line in reversed(lines) if line["kind"] == "save")
    place = lines.index(saved) + 1
    write_lines(trace, [*lines[:place], {**saved, "path": "ckpt-8", "how": "remove"}, *lines[place:]])
    assert judge(run).code == "newest_removed"


def test_and_so_is_one_that_wrote_it_beside_and_renamed_it(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True), kills=LATER)
    trace, path = run.leg("chaos").attempt(1).trace(0), "ckpt-8/model.pt"
    lines = [{**line, "path": f"{path}.tmp"} if line.get("path") == path else line for line in read_lines(trace)]
    saved = next(line for line in reversed(lines) if line["kind"] == "save")
    place = lines.index(saved) + 1
    renamed = {**saved, "path": path, "before": f"{path}.tmp", "how": "rename", "done": True}
    write_lines(trace, [*lines[:place], renamed, {**saved, "path": path, "how": "remove", "done": True}, *lines[place:]])
    verdict = judge(run)
    assert verdict.code == "newest_removed" and f"({path})" in verdict.cause, verdict.cause


def test_before_the_first_checkpoint_a_restart_begins_at_the_beginning(tmp_path: Path) -> None:
    kills = (Fault(id="F1", rank=1, phase="step", at_step=3, source="faults.schedule[0]"),)
    verdict = judge(write_script_run(tmp_path, kills=kills, spec={"verify": {"confirm": False}}))
    assert (verdict.status, verdict.code) == ("PASS", "exact")
    assert "every attempt began at the beginning" in verdict.cause


def test_one_that_never_saves_is_told_so(tmp_path: Path) -> None:
    verdict = judge(write_script_run(tmp_path, habits=Habits(saves=False)))
    assert (verdict.status, verdict.code, verdict.exact) == ("PASS", "never_saves", False), verdict.cause
    assert "every restart began at step 0" in verdict.cause


def test_ranks_that_go_on_from_different_steps(tmp_path: Path) -> None:
    verdict = judge(write_script_run(tmp_path, habits=Habits(apart=True)))
    assert verdict.status == "FAIL"
    assert "rank 2 from step 0, rank 0 from step 4" in check_of(verdict, "resume_evidence").summary


def test_a_save_of_another_thread_is_named_by_the_first_rename_that_follows_it() -> None:
    """All are written under one name, and renamed after later steps, before the next one."""
    saves = [
        save
        for number in range(3)
        for save in (
            SaveRecord(step=number, path="new.tmp", how="file", time_s=2 * number, aside=True, done=True),
            SaveRecord(step=9, path=f"{number}.pt", how="rename", time_s=2 * number + 1, before="new.tmp", done=True),
        )
    ]
    assert [named_since(save, renames_in(saves)) for save in saves[::2]] == ["0.pt", "1.pt", "2.pt"]


@pytest.mark.parametrize(("also", "status"), [([], "pass"), ([(1, 3)], "fail"), ([(0, 4)], "fail")])
def test_a_step_that_only_the_killed_rank_has_not_recorded_is_no_gap(
    tmp_path: Path, also: list[tuple[int, int]], status: str
) -> None:
    """It died between the step's last all-reduce and its record, and the script went on from what another rank then saved."""
    run = write_script_run(tmp_path, kills=[replace(SCRIPT_KILLS[0], at_step=4)])
    for rank, step in [(1, 4), *also]:
        edit_trace(run, "chaos", 1, rank, only("step", drop, step=step))
    verdict = judge(run)
    others = {check_of(verdict, name).status for name in ("data_order", "parameters", "resume_evidence")}
    assert check_of(verdict, "lineage").status == status and (status == "fail" or others == {"pass"})
    edit_trace(run, "chaos", 1, 2, only("step", put(param="f" * 16), step=4))
    assert check_of(judge(run), "lineage").status == "fail", "one of the others has other weights than the reference"


def test_one_that_ends_early_after_a_restart(tmp_path: Path) -> None:
    verdict = judge(write_script_run(tmp_path, habits=Habits(ends_at=8), kills=SCRIPT_KILLS[:1]))
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "ended_at_another_step", "yours"), verdict.cause
    assert "ended at step 8 on rank 0, expected was step 12" in verdict.cause


def test_one_that_never_comes_back(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, habits=Habits(never_back="ckpt-4/optimizer.pt"), kills=SCRIPT_KILLS[:1])
    assert judge(run).code != "never_came_back"
    ended = {"outcome": "user_error", "message": "rank 0 raised FileNotFoundError: ckpt-4/optimizer.pt"}
    edit_journal(run, "chaos", only("leg.finished", put(**ended)))
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code, verdict.code) == ("FAIL", 3, "never_came_back"), verdict.cause
    assert "never recovered after F1 (" in verdict.cause and "FileNotFoundError" in verdict.cause
    assert "none of its saves was seen to be cut short" in verdict.blame.reason
    trace = run.leg("chaos").attempt(1).trace(0)
    lines = list(read_lines(trace))
    last = next(number for number, line in reversed(list(enumerate(lines))) if line["kind"] == "save" and line["done"])
    write_lines(trace, [*lines[:last], *lines[last + 1 :]])
    assert "what a fault leaves behind" in judge(run).blame.reason
    # Where the traceback is does not take the place of what to do.
    edit_journal(run, "chaos", only("leg.finished", put(hint="the traceback is in rank-0.log")))
    assert f"{judge(run).hint}".endswith("if the newest cannot be read; the traceback is in rank-0.log")
    # Out of the undisturbed run's reach, too: then it is no matter of a restart.
    edit_journal(run, "reference", only("leg.finished", put(**ended)))
    assert judge(run).status == "INCONCLUSIVE"


def crashing_on_notice(run: RunLayout) -> None:
    crashed = put(event="death.unplanned", reason="rank 0 crashed with SIGABRT at step 5", step=5, code=None, error=None)
    edit_journal(run, "chaos", only("fault.observed", crashed))


@pytest.mark.parametrize(("kind", "whose"), [("preempt", "yours"), ("kill", "chaosrun")])
def test_one_that_crashes_on_its_notice(tmp_path: Path, kind: str, whose: str) -> None:
    run = write_script_run(tmp_path, kills=[replace(SCRIPT_KILLS[0], kind=kind)])
    crashing_on_notice(run)
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("INCONCLUSIVE", "fault_not_shown", whose), verdict.cause
    assert "before its attempt was ended: rank 0 crashed with SIGABRT" in verdict.cause
    assert ("the tracebacks are in the logs of attempt 1" in f"{verdict.hint}") == (whose == "yours"), verdict.hint


@pytest.mark.parametrize(("kind", "code"), [("preempt", "never_came_back"), ("kill", "script_failed")])
def test_one_that_never_comes_back_after_a_crash_on_its_notice(tmp_path: Path, kind: str, code: str) -> None:
    """As transformers' checkpoint on SIGTERM, which each rank begins by a timer of its own, and leaves behind incomplete."""
    run = write_script_run(
        tmp_path, habits=Habits(never_back="ckpt-4/optimizer.pt"), kills=[replace(SCRIPT_KILLS[0], kind=kind)]
    )
    crashing_on_notice(run)
    edit_journal(run, "chaos", only("leg.finished", put(outcome="user_error", message="rank 0 raised ValueError")))
    verdict = judge(run)
    assert (verdict.status == "FAIL", verdict.code, verdict.blame.whose) == (kind == "preempt", code, "yours"), verdict.cause
    if kind == "preempt":
        assert "never recovered after F1 (preemption notice" in verdict.cause
        assert "what a fault leaves behind" in verdict.blame.reason


@pytest.mark.parametrize(
    ("says", "refused"),
    [
        ("Unsupported global: GLOBAL argparse.Namespace was not allowed", "argparse.Namespace"),
        ("Unsupported operand 149", "a pickle of protocol 4 or newer"),
        ("Unsupported operand 14", ""),
        ("invalid load key", ""),
    ],
)
def test_one_that_cannot_load_the_objects_it_saved(tmp_path: Path, says: str, refused: str) -> None:
    """As dino, MAE and Swin do, which save their arguments, and RecBole, since torch.load takes `weights_only` for granted."""
    run = write_script_run(tmp_path, habits=Habits(never_back="ckpt-4/optimizer.pt"), kills=SCRIPT_KILLS[:1])
    message = (
        f"rank 0 raised UnpicklingError before its first step: Weights only load failed.\n\tWeightsUnpickler error: {says}"
    )
    edit_journal(run, "chaos", only("leg.finished", put(outcome="user_error", message=message)))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "never_came_back", "yours"), verdict.cause
    assert (f"which holds {refused or 'a'}" in verdict.cause) == bool(refused), verdict.cause
    assert ("weights_only=False" in f"{verdict.hint}") == bool(refused), verdict.hint


@pytest.mark.parametrize("kind", ["UnboundLocalError", "ValueError"])
def test_one_that_reads_what_only_a_first_start_sets(tmp_path: Path, kind: str) -> None:
    """As after a checkpoint at an epoch's end, where a restart's loop has no batch left."""
    run = write_script_run(tmp_path, habits=Habits(never_back="loss"), kills=SCRIPT_KILLS[:1])
    edit_journal(run, "chaos", only("death.unplanned", lambda line: {**line, "error": {**line["error"], "type": kind}}))
    ended = {"outcome": "user_error", "message": f"rank 0 raised {kind}: cannot access local variable 'loss'"}
    edit_journal(run, "chaos", only("leg.finished", put(**ended)))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "never_came_back", "yours"), verdict.cause
    assert ("at the end of an epoch" in f"{verdict.hint}") == (kind == "UnboundLocalError"), verdict.hint


def test_one_that_comes_back_and_fails_in_a_later_step(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, habits=Habits(ends_at=8), kills=SCRIPT_KILLS[:1])
    ended = {"outcome": "user_error", "message": "rank 0 raised ValueError at step 8: checkpoint_2 exists"}
    edit_journal(run, "chaos", only("leg.finished", put(**ended)))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "never_came_back", "yours"), verdict.cause
    assert verdict.cause.startswith("trained on after F1 (") and "checkpoint_2 exists" in verdict.cause
    assert "in steps after a restart" in verdict.blame.reason and "since its start" in f"{verdict.hint}"
    assert f"{verdict.hint}".startswith("it meets a file or folder of the killed attempt")


@pytest.mark.parametrize(("step", "taken"), [(4, True), (0, False)], ids=["the newest save", "an older save"])
def test_what_was_restored_of_a_damaged_save_is_not_put_down_to_the_resume(
    monkeypatch: pytest.MonkeyPatch, step: int, taken: bool
) -> None:
    damage = Fault(id="F1", kind="flip_file_bit", rank=0, phase="save", at_step=step, options={}, source="faults.schedule[0]")
    monkeypatch.setattr(corruption, "fault_problem", lambda *_: None)
    trace = SimpleNamespace(saves=[SimpleNamespace(step=saved) for saved in (0, 4)])
    journal = [event("fault.requested", fault="F1", attempt=1, rank=0, step=step, phase="save")]
    attempts = [SimpleNamespace(number=number, traces={0: trace}) for number in (1, 2)]
    chaos = SimpleNamespace(journal=journal, attempts=attempts)
    drill: Any = SimpleNamespace(plan=SimpleNamespace(faults=(damage,)), chaos=chaos)
    second: Any = SimpleNamespace(attempt=2)
    first: Any = SimpleNamespace(attempt=1)
    assert corruption.damage_taken(drill, second) == (f"F1 ({damage.describe()})" if taken else None)
    assert corruption.damage_taken(drill, first) is None
    told = Cause.of("rng_not_restored", by="script").explained("damaged.taken", damage="F1")
    assert told.sentence == "RNG not restored" and told.blame.reason.startswith("it resumed from what F1 had damaged")


LATER = (Fault(id="F1", rank=1, phase="step", at_step=10, source="faults.schedule[0]"),)


def test_buckets_that_were_not_primed_as_asked_are_torchs(tmp_path: Path) -> None:
    verdict = judge(write_script_run(tmp_path, bugs=Bugs(primed=False), spec={"prime_buckets": False}))
    assert (verdict.code, verdict.blame.whose) == ("bucket_layout", "library"), verdict.cause
    assert "ULP apart, at three and more ranks" in f"{verdict.hint}"


@pytest.mark.parametrize("more", [("tied.weight",), ()])
def test_weights_that_layers_no_longer_share_are_named(tmp_path: Path, more: tuple[str, ...]) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(weights_off=1e-12), kills=SCRIPT_KILLS[:1])
    for rank in range(3):
        tensors = (*TENSORS, *more)
        values = words([0.5] * len(tensors))
        start, step = only("start", put(tensors=tensors, params=values)), only("step", put(params=values, grads=values))
        edit_trace(run, "chaos", 2, rank, lambda line, start=start, step=step: step(start(line) or {}))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "weights_not_restored"), verdict.cause
    assert ("(tied.weight): layers no longer share one" in f"{verdict.hint}") == bool(more), verdict.hint


def test_another_layout_of_primed_buckets_comes_of_how_the_script_wraps(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(primed=False), kills=SCRIPT_KILLS[:1])
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        for rank in range(3):
            layout = [[2, 1, 0]] if attempt == 2 else [[2, 1], [0]]
            edit_trace(run, leg, attempt, rank, only("buckets", put(primed=True, layout=layout)))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "bucket_layout", "yours"), verdict.cause
    assert "bucket_cap_mb" in f"{verdict.hint}" and "rebuilt" not in f"{verdict.hint}"
    edit_ranks(run, "chaos", 2, only("buckets", put(layout=[[0, 1, 2]])))
    assert "DDP rebuilt its buckets" in f"{judge(run).hint}", "they are as DDP first built them, whatever the record says"


def test_a_model_under_ddp_that_has_not_had_its_turn_is_no_difference(tmp_path: Path) -> None:
    """A GAN's generator comes to its first backward pass in the second step of an attempt."""
    run = write_script_run(tmp_path)
    edit_ranks(run, "chaos", 2, only("buckets", put(primed=False, layout=[[0, 1, 2]])))
    assert judge(run).code == "exact"
    verdict = judge(write_script_run(tmp_path / "differs", bugs=Bugs(primed=False)))
    assert (verdict.status, check_of(verdict, "bucket_layout").status) == ("FAIL", "fail")


def test_two_ranks_do_not_show_it(tmp_path: Path) -> None:
    kills = tuple(replace(fault, rank=1) for fault in SCRIPT_KILLS)
    run = write_script_run(tmp_path, bugs=Bugs(primed=False), spec={"prime_buckets": False}, kills=kills, workers=2)
    assert judge(run).code == "exact"


@pytest.mark.parametrize("path", ["the same", "its own"])
def test_ranks_that_write_one_file_are_told_of(tmp_path: Path, path: str) -> None:
    run = write_script_run(tmp_path)
    saves = [line for line in read_lines(run.leg("reference").attempt(1).trace(0)) if line["kind"] == "save"]
    own = [line if path == "the same" else {**line, "path": f"rank-1/{line['path']}"} for line in saves]
    trace = run.leg("reference").attempt(1).trace(1)
    lines = [
        each
        for line in read_lines(trace)
        for each in (line, *(save for save in own if line["kind"] == "step" and save["step"] == line["step"]))
    ]
    write_lines(trace, lines)
    told = any("ranks 0 and 1 each save ckpt-4/model.pt" in warning for warning in judge(run).warnings)
    assert told == (path == "the same")


def test_what_priming_did_is_told(tmp_path: Path) -> None:
    verdict = judge(write_script_run(tmp_path))
    assert any("prime_buckets: false" in warning for warning in verdict.warnings)


def nudge_losses(run: RunLayout, by: float) -> None:
    """As of a job that cannot be exact: in its second attempt losses, gradients and weights are a little off."""

    def nudge(line: dict[str, Any]) -> dict[str, Any]:
        losses = [(float.fromhex(loss) * (1 + by)).hex() for loss in line["loss"]]
        return {**line, "loss": losses, "grad": "0" * 16, "param": f"{line['step']:016x}", "state": f"{line['step']:016x}"}

    edit_ranks(run, "chaos", 2, only("step", nudge))


@pytest.mark.parametrize(
    ("profile", "by", "status"),
    [("strict", 1e-9, "FAIL"), ("standard", 1e-4, "PASS"), ("standard", 1e-2, "FAIL"), ("relaxed", 5e-3, "PASS")],
)
def test_envelopes_for_jobs_that_cannot_be_exact(tmp_path: Path, profile: str, by: float, status: str) -> None:
    run = write_script_run(tmp_path, spec={"verify": {"profile": profile}}, kills=SCRIPT_KILLS[:1])
    nudge_losses(run, by)
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert status == "FAIL" or verdict.code == "within_tolerance"


@pytest.mark.parametrize("bugs", [Bugs(keep_optimizer=False), Bugs(weights_off=1e-12), Bugs(keep_rng=False)])
def test_state_before_the_first_update_is_exact_in_every_profile(tmp_path: Path, bugs: Bugs) -> None:
    verdict = judge(write_script_run(tmp_path, bugs=bugs, spec={"verify": {"profile": "relaxed"}}))
    assert verdict.status == "FAIL" and "began with" in verdict.cause


def without_streams(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "found": {**line["found"], "step": None, "rng": []}}


def forget_streams(run: RunLayout, *, rest: bool = False) -> None:
    """Restarts begin with random streams of no step, and nothing else differs; `rest`: neither leg draws from them."""
    elsewhere = put(rng="1" * 16)
    for rank in range(3):
        for attempt in (2, 3):
            began = only("start", without_streams)
            edit_trace(run, "chaos", attempt, rank, began)
            edit_trace(run, "chaos", attempt, rank, only("start", elsewhere))
            edit_trace(run, "chaos", attempt, rank, only("step", elsewhere))
        ended = only("end", lambda line: {**line, "digests": {**line["digests"], "rng": {"torch": "1"}}})
        edit_trace(run, "chaos", 3, rank, ended)
        for leg in ("reference", "chaos") if rest else ():
            edit_trace(run, leg, 1, rank, only("step", put(rng="2" * 16)))


def test_random_streams_that_nothing_depends_on_are_a_warning(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    forget_streams(run)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("PASS", "exact"), verdict.cause
    warned = [
        each for each in verdict.warnings if each.startswith("the random streams were not restored (attempt 2 began with")
    ]
    assert len(warned) == 1 and "RNG of no step" in warned[0]
    assert not any(each.startswith("the random streams") for each in judge(write_script_run(tmp_path / "right")).warnings)


def test_nothing_is_said_of_what_depends_on_random_streams_where_no_step_followed(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    edit_ranks(run, "chaos", 2, only("start", without_streams), only("step", drop))
    assert not any(each.startswith("the random streams") for each in judge(run).warnings)


@pytest.mark.parametrize("late", [9, 12])
def test_random_streams_that_are_drawn_from_late_are_the_cause_where_numbers_differ(tmp_path: Path, late: int) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for rank in range(3):
        began = only("start", without_streams)
        edit_trace(run, "chaos", 2, rank, began)
        edit_trace(run, "chaos", 2, rank, only("step", put(rng="1" * 16)))
    edit_trace(run, "chaos", 2, 1, only("step", put(loss=["0x1p-3"]), step=late))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "rng_not_restored"), verdict.cause
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.step, verdict.divergence.ranks) == ("rng", late, (0, 1, 2))
    assert f"step {late}, rank 0, attempt 2, which began with weights of step 4" in verdict.cause


def test_random_streams_at_rest_are_not_blamed_for_what_differs_for_another_reason(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    forget_streams(run, rest=True)
    edit_trace(run, "chaos", 3, 1, only("step", put(loss=["0x1p-3"]), step=11))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "forward_pass"), verdict.cause
    assert verdict.divergence is not None and (verdict.divergence.step, verdict.divergence.rank) == (11, 1)


def test_within_an_envelope_random_streams_that_are_drawn_from_count(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, spec={"verify": {"profile": "standard"}})
    forget_streams(run)
    assert judge(run).status == "PASS", "bit for bit all the same"
    nudge_losses(run, 1e-4)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "rng_not_restored") and "began with" in verdict.cause


@pytest.mark.parametrize("still", [True, False])
def test_streams_that_never_change_are_of_every_step(tmp_path: Path, still: bool) -> None:
    """A rank that took its own part from an older file records the steps near that, of all that agree."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    found = {"step": None, "weights": [1], "optimizer": [1], "rng": [0, 1, 2, 3, 6, 7, 8, 9]}
    due = next(line["rng"] for line in read_lines(run.leg("reference").attempt(1).trace(1)) if line.get("step") == 5)
    began = only("start", lambda line: {**line, "rng": due if still else "?", "found": {**line["found"], **found}})
    edit_trace(run, "chaos", 2, 1, began)
    edit_trace(run, "chaos", 2, 1, only("step", put(loss=["0x1p-3"], grad="1" * 16, param="2" * 16), step=5))
    hint = f"{judge(run).hint}"
    assert ("RNG of step 1 on rank 1" in hint) != still, hint


@pytest.mark.parametrize("workers", [1, 2])
def test_a_rank_that_goes_on_from_what_another_saved_without_waiting_is_the_scripts(tmp_path: Path, workers: int) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1], workers=workers)
    path = run.leg("chaos").attempt(2).trace(0)
    start, *rest = read_lines(path)
    start = {**start, "position": {**start["position"], "step": 8}}
    write_lines(path, [start, *(line for line in rest if line["kind"] != "step" or line["step"] > 8)])
    verdict = judge(run)
    summary = check_of(verdict, "lineage").summary
    assert ("rank 0 went on from step 8 in attempt 2" in summary) == (workers == 2), summary
