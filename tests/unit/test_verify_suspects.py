"""What a checkpoint holds besides model and optimizer, is suspected where all else came back."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, drop, edit_ranks, edit_trace, finding, only, put, write_run
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import judge
from tests.records import read_lines, write_lines

Line = dict[str, Any]
HELD = {"m/block.weight": "1", "m/buffer": "1", "o/state/0/exp_avg": "1", "o/param_groups/0/lr": "1"}


@pytest.mark.parametrize("saved_again", ["otherwise", "alike", "never"])
def test_what_is_saved_beside_model_and_optimizer_is_suspected(tmp_path: Path, saved_again: str) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_buffers=False), kills=SCRIPT_KILLS[:1])
    beside = {"queue/rows": "1", "ptr": "4"}
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        other = saved_again != "alike" and (leg, attempt) == ("chaos", 2)
        held = {**HELD, **beside, **({"ptr": "0", "queue/rows": "2"} if other else {}), "clock": f"{leg}{attempt}"}
        tell = only("save", lambda line, held=held: {**line, "held": {} if line["done"] else held})  # type: ignore[misc]
        edit_trace(run, leg, attempt, 0, tell)
    if saved_again == "never":
        edit_trace(run, "chaos", 2, 0, only("save", drop))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "forward_pass", "yours"), verdict.cause
    told = "besides model and optimizer, ckpt-4/model.pt and ckpt-4/optimizer.pt hold ptr, queue, which"
    assert (told in f"{verdict.hint}") == (saved_again != "alike"), verdict.hint


def test_what_is_saved_beside_is_suspected_of_a_change_between_two_steps(tmp_path: Path) -> None:
    """The count of an averager of the ranks' weights, which is saved and not loaded."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        held = {**HELD, "averager": "0" if (leg, attempt) == ("chaos", 2) else "4"}
        tell = only("save", lambda line, held=held: {**line, "held": {} if line["done"] else held})  # type: ignore[misc]
        edit_trace(run, leg, attempt, 0, tell)
    edit_ranks(run, "chaos", 2, only("step", put(began="f" * 16, loss=["0x1p-3"]), step=6))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "forward_pass"), verdict.cause
    assert "weights changed differently between steps" in verdict.cause
    assert "hold averager, which a restart must also load" in f"{verdict.hint}", verdict.hint
    assert "changed the weights between two steps" in verdict.blame.reason


@pytest.mark.parametrize(
    ("kept", "streams", "told"),
    [("0", {}, True), ("4", {}, False), ("0", {"rng": "other"}, False)],
    ids=["lost", "loaded", "drew"],
)
def test_what_batches_are_made_of_is_suspected(tmp_path: Path, kept: str, streams: Line, told: bool) -> None:
    """A replay memory, or an environment: no step of the reference began with such a batch."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        held = {**HELD, "memory": kept if (leg, attempt) == ("chaos", 2) else "4"}
        tell = only("save", lambda line, held=held: {**line, "held": {} if line["done"] else held})  # type: ignore[misc]
        edit_trace(run, leg, attempt, 0, tell)
        edit_ranks(run, leg, attempt, only("step", put(ids=[])))
    edit_ranks(run, "chaos", 2, only("step", put(batch=["x", "y"], **streams), step=5))
    verdict = judge(run)
    assert (verdict.status, verdict.blame.whose) == ("FAIL", "yours"), verdict.cause
    assert (
        "besides model and optimizer, ckpt-4/model.pt and ckpt-4/optimizer.pt hold memory, " in f"{verdict.hint}"
    ) == told, verdict.hint
    assert streams or verdict.code == "data_order_not_restored", verdict.cause
    assert streams or "an environment, a memory of earlier steps" in f"{verdict.hint}"


@pytest.mark.parametrize(("rng", "told"), [(5, True), (0, False)], ids=["of the next step", "of the beginning"])
def test_a_save_before_the_update_that_it_counts_is_told_as_such(tmp_path: Path, rng: int, told: bool) -> None:
    """Weights and optimizer are of step 4, the data of step 5."""
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=2), kills=SCRIPT_KILLS[:1])
    for rank in range(3):
        began = only("start", finding(step=None, rng=[rng]))
        edit_trace(run, "chaos", 2, rank, began)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "batches_skipped"), verdict.cause
    assert (
        "optimizer's step, and counts it as done (save after the step, or count it later), or the restart takes"
        in f"{verdict.hint}"
    ) == told


@pytest.mark.parametrize("again", ["0", "mean of 8"])
def test_what_one_rank_saved_and_is_right_there_was_not_loaded_on_the_others(tmp_path: Path, again: str) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):

        def tell_of(line: Line, again: str = again if attempt == 2 else "mean of 8") -> Line:
            held = {**HELD, "mean": "mean of 4" if line["step"] == 4 else again, "width": "64", "step": f"{line['step']}"}
            return {**line, "held": {} if line["done"] else held}

        tell = only("save", tell_of)
        edit_trace(run, leg, attempt, 0, tell)
    edit_trace(run, "chaos", 2, 1, only("step", put(loss=["0x1p-3"]), step=5))
    hint = f"{judge(run).hint}"
    told = "differs on rank 1 only: besides model and optimizer, ckpt-4/model.pt and ckpt-4/optimizer.pt hold mean"
    assert told in hint and "saved by rank 0 and right there: load it on every rank, too" in hint


@pytest.mark.parametrize(("trained", "told"), [(["m"], "teacher"), ([], ""), (["m", "teacher"], "")])
def test_a_teacher_with_the_models_names_is_no_trained_model(tmp_path: Path, trained: list[str], told: str) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_buffers=False), kills=SCRIPT_KILLS[:1])
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        held = {**HELD, "teacher/block.weight": "0" if (leg, attempt) == ("chaos", 2) else "4"}
        more = {"held": held, "trained": trained}
        tell = only("save", lambda line, more=more: {**line, **({} if line["done"] else more)})  # type: ignore[misc]
        edit_trace(run, leg, attempt, 0, tell)
    hint = f"{judge(run).hint}"
    assert ("ckpt-4/model.pt and ckpt-4/optimizer.pt hold teacher, " in hint) == bool(told), hint


@pytest.mark.parametrize(("before", "after"), [("tmp", "step-4.pt"), ("tmp/model.pt", "step-4/model.pt")])
def test_a_file_is_called_what_the_script_has_renamed_it_to(tmp_path: Path, before: str, after: str) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_buffers=False), kills=SCRIPT_KILLS[:1])
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        other = {"ptr": "0" if (leg, attempt) == ("chaos", 2) else "4"}
        held = {**HELD, **other}
        trace = run.leg(leg).attempt(attempt).trace(0)
        write_lines(trace, list(renamed(read_lines(trace), before, after, held)))
    assert f"besides model and optimizer, {after} holds ptr, which" in f"{judge(run).hint}"


def renamed(lines: Iterable[Line], before: str, after: str, held: dict[str, str]) -> Iterator[Line]:
    """Each save of a leg is this file."""
    for line in lines:
        if line["kind"] != "save":
            yield line
        elif line["path"].endswith("model.pt"):
            yield {**line, "path": before, "held": {} if line["done"] else held}
            if line["done"]:
                source, target = before.partition("/")[0], after.partition("/")[0]
                yield {**line, "how": "rename", "path": target, "before": source, "held": {}}


@pytest.mark.parametrize(
    ("written", "rng"),
    [(write_script_run, True), (write_run, True), (write_script_run, False)],
    ids=["script", "attached", "beside streams"],
)
@pytest.mark.parametrize("lost", [True, False])
def test_modules_that_are_set_otherwise_are_named(
    tmp_path: Path, lost: bool, written: Callable[..., RunLayout], rng: bool
) -> None:
    """A dropout that one step changes, and a layer that it unfreezes: no state dict holds that. Streams that nothing draws from
    (Lightning saves none) do not hide it."""
    run = written(tmp_path, bugs=Bugs(keep_buffers=False, with_digests=False, keep_rng=rng), kills=SCRIPT_KILLS[:1])
    first, later = {"1.p": "0.1", "0.weight.requires_grad": "False"}, {"1.p": "0.4", "0.weight.requires_grad": ""}
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        for rank in range(3):
            path = run.leg(leg).attempt(attempt).trace(rank)
            start, *rest = read_lines(path)
            told = [(1, first), (3, later)] if attempt == 1 else [(5, first if lost else {"1.p": "0.4"})]
            lines = [{"kind": "holdings", "step": step, "modules": held} for step, held in told]
            write_lines(path, [start, *lines, *rest])
    verdict = judge(run)
    code = "forward_pass" if rng else "rng_not_restored"
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", code, "yours"), verdict.cause
    named = "0.weight.requires_grad is False (reference: True), 1.p is 0.1 (reference: 0.4)"
    assert (named in f"{verdict.hint}") == lost, verdict.hint


@pytest.mark.parametrize(("after", "told"), [(1, True), (-1, False)], ids=["after the step", "before its end"])
@pytest.mark.parametrize("bugs", [Bugs(keep_buffers=False), Bugs(skip_off=1)], ids=["loss", "data"])
def test_a_file_that_is_ahead_of_the_checkpoint_is_named(tmp_path: Path, bugs: Bugs, after: int, told: bool) -> None:
    run = write_script_run(tmp_path, bugs=bugs, kills=SCRIPT_KILLS[:1])
    leg = run.leg("chaos")
    done = [line["time_s"] for rank in range(3) for line in read_lines(leg.attempt(1).trace(rank)) if line.get("step") == 4]
    path = str(leg.output.absolute() / "seen" / "cursor.json")
    record = {"path": path, "left_by": "", "changed_s": max(done) + after * 1e-3, "attempt": 2, "rank": 0}
    leg.attempt(2).opened(0).write_text(f"{json.dumps(record)}\n")
    verdict = judge(run)
    assert (verdict.status, verdict.blame.whose) == ("FAIL", "yours"), verdict.cause
    assert ("the script read seen/cursor.json, which it had written to after step 4" in f"{verdict.hint}") == told, verdict.hint


@pytest.mark.parametrize("again", [False, True], ids=["as saved", "written again"])
def test_a_file_that_the_save_itself_has_renamed_is_not_ahead(tmp_path: Path, again: bool) -> None:
    """A rename is reported before it is made: the file has changed after all that is recorded of its save."""
    run = write_script_run(tmp_path, bugs=Bugs(keep_buffers=False), kills=SCRIPT_KILLS[:1])
    leg = run.leg("chaos")
    trace = leg.attempt(1).trace(0)
    lines = list(read_lines(trace))
    at = max(number for number, line in enumerate(lines) if line["kind"] == "save" and line["step"] == 4)
    renamed = {**lines[at], "how": "rename", "path": "last.pt", "before": "last.tmp", "held": {}}
    later = {**renamed, "how": "open", "step": 5, "done": False, "before": "", "time_s": renamed["time_s"] + 0.1}
    write_lines(trace, [*lines[: at + 1], renamed, *([later] if again else []), *lines[at + 1 :]])
    done = [line["time_s"] for rank in range(3) for line in read_lines(leg.attempt(1).trace(rank)) if line.get("step") == 4]
    path = str(leg.output.absolute() / "last.pt")
    record = {"path": path, "left_by": "", "changed_s": max(done) + 1e-4, "attempt": 2, "rank": 0}
    leg.attempt(2).opened(0).write_text(f"{json.dumps(record)}\n")
    verdict = judge(run)
    assert (verdict.status, verdict.blame.whose) == ("FAIL", "yours"), verdict.cause
    assert ("the script read last.pt" in f"{verdict.hint}") == again, verdict.hint


@pytest.mark.parametrize("older", [True, False])
def test_a_rank_that_saved_its_own_file_at_an_earlier_step_is_told_of(tmp_path: Path, older: bool) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        held = {**HELD, "mean": f"{attempt}"}
        tell = only("save", lambda line, held=held: {**line, "held": {} if line["done"] else held})  # type: ignore[misc]
        edit_trace(run, leg, attempt, 0, tell)
    trace = run.leg("chaos").attempt(1).trace(1)
    lines = read_lines(trace)
    save = {"kind": "save", "step": 2 if older else 4, "path": "own-1.pt", "how": "torch.save", "time_s": 12.0, "done": False}
    write_lines(trace, [*lines, {**save, "held": {"mean": "7"}}])
    edit_trace(run, "chaos", 2, 1, only("step", put(loss=["0x1p-3"]), step=5))
    told = "rank 1 had last saved a file of its own (own-1.pt) after step 2, not after step 4"
    assert (told in f"{judge(run).hint}") == older
