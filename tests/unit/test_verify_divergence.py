"""Where the chaos leg first left the reference, and what it is said to be: each broken restore names its own cause."""

from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from legs import Bugs, copy_run, drop, edit_ranks, edit_trace, only, put, write_run

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.verify.check import Divergence, Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.divergence import _first_tensor
from chaosrun.verify.verdict import judge, judge_drill, spec_of
from tests.records import read_lines


def diverging(run: RunLayout) -> Divergence:
    divergence = judge(run).divergence
    assert divergence is not None
    return divergence


def test_what_nobody_saves_is_named_where_all_else_was_restored(run: RunLayout) -> None:
    edit_ranks(run, "chaos", 2, only("step", put(param="f" * 16), step=5))
    assert "slow weights" in diverging(run).hint
    edit_trace(run, "reference", 1, 0, only("end", put(outside=["second (RMSprop over 2 parameters)"])))
    divergence = diverging(run)
    assert (divergence.code, divergence.reason.hazard) == ("optimizer_update", "O8")
    assert "second (RMSprop over 2 parameters)" in divergence.hint


def test_what_nobody_saves_is_named_where_the_order_of_the_data_may_follow_it(tmp_path: Path) -> None:
    """A sampler that draws by weights which the loop changes."""
    run = write_run(tmp_path)
    edit_ranks(run, "chaos", 2, only("step", put(ids=[[900, 901], [902, 903]]), step=7))
    assert "use a seedable sampler" in diverging(run).hint
    edit_trace(run, "reference", 1, 0, only("end", put(outside=["weights (Tensor)"])))
    divergence = diverging(run)
    assert divergence.code == "data_order_not_restored" and "use a seedable sampler" in divergence.hint
    assert "the training changes weights (Tensor) (pass what holds it to run.register" in divergence.hint


@pytest.mark.parametrize("left_out_by", ["chaos", "reference"])
@pytest.mark.parametrize(("none", "code"), [({"loss": []}, "forward_pass"), ({}, "gradient")])
def test_a_step_that_one_leg_left_out_is_told(run: RunLayout, left_out_by: str, none: dict[str, Any], code: str) -> None:
    left_out = only("step", put(lr=[], grad="", grads="", **none), step=6)
    for leg, attempt in {"chaos": [("chaos", 2)], "reference": [("reference", 1), ("chaos", 1)]}[left_out_by]:
        edit_ranks(run, leg, attempt, left_out)
    divergence = diverging(run)
    assert (divergence.code, divergence.reason.because) == (code, "left_out")
    made = (
        "was skipped here, but made in the reference run"
        if left_out_by == "chaos"
        else "was made here, but skipped in the reference run"
    )
    assert f"the step {made}" in divergence.hint


def test_rates_that_stand_still_after_a_right_restore_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    kept = next(line["lr"] for line in read_lines(run.leg("reference").attempt(1).trace(0)) if line.get("step") == 4)
    edit_ranks(run, "chaos", 2, only("step", put(lr=kept)))
    divergence = diverging(run)
    assert (divergence.code, divergence.reason.because) == ("learning_rate", "still")
    assert "took from optimizer.param_groups before the restore" in divergence.hint


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
    # The steps alone tell, also of a run that recorded no state at its checkpoints.
    run = write_run(
        tmp_path,
        bugs=replace(bugs, with_digests=False),
        reference_bugs=Bugs(primed=bugs.primed, with_ids=bugs.with_ids, with_digests=False),
    )
    verdict = judge(run)
    divergence = diverging(run)
    assert (divergence.step, divergence.kind, divergence.cause) == (step, kind, cause)
    assert hint in divergence.hint
    assert verdict.status == "FAIL" and verdict.cause.startswith(cause)
    assert divergence.attempt == (3 if step == 9 else 2)


@pytest.mark.parametrize(
    ("bugs", "kind", "cause", "tensor", "hint"),
    [
        (Bugs(keep_rng=False), "rng", "RNG not restored", "torch", "freshly seeded"),
        (Bugs(keep_weights=False), "weights", "weights not restored", "embed.weight", "the initial ones"),
        (Bugs(keep_optimizer=False), "optimizer", "optimizer state not restored", "embed.weight.momentum", "moments"),
        (Bugs(keep_scheduler=False), "learning rate", "LR scheduler not restored", "0.last_epoch", "prepare the scheduler"),
        (Bugs(keep_buffers=False), "buffers", "buffers not restored", "norm.mean", "BatchNorm statistics"),
        (Bugs(keep_registered=False), "registered", "registered state not restored", "average", "load_state_dict"),
    ],
)
def test_what_a_restore_left_out_is_named(tmp_path: Path, bugs: Bugs, kind: str, cause: str, tensor: str, hint: str) -> None:
    divergence = diverging(write_run(tmp_path, bugs=bugs, reference_bugs=Bugs()))
    assert (divergence.step, divergence.kind, divergence.cause, divergence.tensor) == (5, kind, cause, tensor)
    assert divergence.ranks == (0, 1, 2)
    assert hint in divergence.hint


def test_the_parameters_order_is_the_scripts_before_any_fault_and_after(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole")
    reordered = put(tensors=["block.weight", "embed.weight", "head.bias"], param="0" * 16)
    for leg, attempt, rank in (("chaos", 1, 0), ("reference", 1, 1)):
        run = copy_run(whole, tmp_path / f"{leg}{rank}")
        edit_trace(run, leg, attempt, rank, only("start", reordered))
        verdict = judge(run)
        assert (verdict.status, verdict.code, verdict.blame.part) == ("INCONCLUSIVE", "parameter_order", "script")
        assert "parameter 0 is block.weight on rank" in verdict.cause and "before the first fault" in verdict.cause
        assert "model.named_parameters()" in (verdict.hint or "")
    run = copy_run(whole, tmp_path / "later")
    edit_trace(run, "chaos", 2, 1, only("start", reordered))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.reason.hazard) == ("FAIL", "parameter_order", "O5")
    # The control: other names are no other order.
    run = copy_run(whole, tmp_path / "renamed")
    edit_trace(run, "chaos", 2, 1, only("start", put(tensors=["other.weight", "block.weight", "head.bias"], param="0" * 16)))
    assert judge(run).code == "weights_not_restored"


def test_a_save_that_changes_live_state_explains_what_comes_after_it(tmp_path: Path) -> None:
    spoilt = write_run(tmp_path / "spoilt", bugs=Bugs(weights_off=1e-12), reference_bugs=Bugs())
    assert judge(copy_run(spoilt, tmp_path / "control")).code == "weights_not_restored"
    saved = put(changed={"model": "embed.weight"}, hooks=["rounding"])
    edit_trace(spoilt, "chaos", 1, 1, only("checkpoint", saved, step=4))
    verdict = judge(spoilt)
    assert (verdict.status, verdict.code, verdict.blame.part) == ("FAIL", "save_changes_state", "script")
    assert verdict.hint and verdict.hint.startswith("the save of step 4 changed model embed.weight (hooks: rounding)")


@pytest.mark.parametrize("within_a_save", [True, False])
def test_a_registered_object_that_follows_a_clock_is_named_and_no_hook(tmp_path: Path, *, within_a_save: bool) -> None:
    run = write_run(tmp_path)

    def later(line: dict[str, Any]) -> dict[str, Any]:
        registered = {**line["digests"]["registered"], "clock/elapsed": "float:0x1.8p+1"}
        digests = {**line["digests"], "registered": registered}
        return {**line, "digests": digests, "changed": {"registered": "clock/elapsed"} if within_a_save else {}}

    edit_ranks(run, "chaos", 1, only("checkpoint", later, step=4))
    differ = Cause.of("undisturbed_runs_differ", difference="registered at step 4, rank 0")
    legs = read_leg(run.leg("reference")), read_leg(run.leg("chaos"))
    drill = Drill.of(legs[0], legs[1], spec_of(run), FaultPlan.read(run.plan_json), None)
    if not within_a_save:
        # What is seen to differ between two runs may be state that is not seeded.
        assert "leave it out of state_dict()" not in f"{judge(run).hint}" and "clock/elapsed" in judge(run).cause
        return
    for verdict in (judge(run), judge_drill(drill, irreproducible=differ)):
        assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "job_not_repeatable"), verdict.cause
        told = f"{verdict.hint} {verdict.divergence and verdict.divergence.hint} {verdict.warnings}"
        assert "another value of clock/elapsed at each call" in told and "leave it out of state_dict()" in told
        assert "hook" not in told


def test_a_save_that_the_reference_made_too_explains_nothing_later(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(keep_rng=False), reference_bugs=Bugs())
    edit_trace(run, "chaos", 1, 1, only("checkpoint", put(changed={"rng": "torch"}), step=4))
    alike = judge(copy_run(run, tmp_path / "alike"))
    assert alike.code == "rng_not_restored"
    assert [warning for warning in alike.warnings if warning.startswith("the save of step 4 changed rng torch: how often")]
    switched = copy_run(run, tmp_path / "switched")
    edit_trace(switched, "chaos", 1, 1, only("checkpoint", put(changed={"mode": "0"}), step=4))
    assert judge(switched).code == "save_changes_state"
    edit_ranks(run, "reference", 1, only("checkpoint", drop, step=4))
    assert judge(run).code == "save_changes_state"


def restored_as(component: str, values: dict[str, str]) -> Any:
    """An edit of what a `start` line says was restored."""
    return only("start", lambda line: {**line, "digests": {**line["digests"], component: values}})


def checkpointed(run: RunLayout, rank: int, step: int) -> dict[str, dict[str, str]]:
    lines = read_lines(run.leg("reference").attempt(1).trace(rank))
    return next(line["digests"] for line in lines if line["kind"] == "checkpoint" and line["step"] == step)


def test_a_restore_from_another_ranks_file_is_recognised(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, restored_as("rng", checkpointed(run, 2, 4)["rng"]))
    divergence = diverging(run)
    assert (divergence.cause, divergence.ranks) == ("RNG of another rank", (1,))
    assert "rank 1 restored what rank 2 holds" in divergence.hint and "ranks 0, 2 are as they should be" in divergence.hint


def test_a_restore_from_another_steps_file_is_recognised(run: RunLayout) -> None:
    edit_trace(run, "chaos", 3, 0, restored_as("optimizer", checkpointed(run, 0, 4)["optimizer"]))
    assert diverging(run).cause == "optimizer state of another step"
    assert "what it held after step 4" in diverging(run).hint


def test_values_under_each_others_names_are_recognised(run: RunLayout) -> None:
    saved = checkpointed(run, 0, 4)["optimizer"]
    first, second, *_ = saved
    edit_trace(run, "chaos", 2, 0, restored_as("optimizer", {**saved, first: saved[second], second: saved[first]}))
    assert diverging(run).cause == "optimizer state under other names"


@pytest.mark.parametrize(
    ("component", "name", "kind", "cause"),
    [
        ("optimizer", "scaler/scale", "optimizer", "GradScaler not restored"),
        ("optimizer", "0/param_groups/0/lr", "learning rate", "learning rate not restored"),
        ("optimizer", "0/param_groups/0/eps", "optimizer", "optimizer settings not restored"),
        ("model", "head.bias", "weights", "weights not restored"),
    ],
)
def test_parts_of_a_component_have_their_own_names(run: RunLayout, component: str, name: str, kind: str, cause: str) -> None:
    saved = checkpointed(run, 0, 4)[component]
    edit_trace(run, "chaos", 2, 0, restored_as(component, {**saved, name: "0" * 16}))
    assert (diverging(run).kind, diverging(run).cause, diverging(run).tensor) == (kind, cause, name)


@pytest.mark.parametrize(
    ("component", "kind", "cause"),
    [
        ("buffers", "buffers", "buffers drifted"),
        ("registered", "registered", "registered state drifted"),
        ("rng", "rng", "RNG drifted"),
    ],
)
def test_what_only_a_checkpoint_shows(run: RunLayout, component: str, kind: str, cause: str) -> None:
    def change(line: dict[str, Any]) -> dict[str, Any]:
        values = dict.fromkeys(line["digests"][component], "0" * 16)
        return {**line, "digests": {**line["digests"], component: values}}

    edit_trace(run, "chaos", 2, 1, only("checkpoint", change, step=8))
    divergence = diverging(run)
    assert (divergence.step, divergence.kind, divergence.cause, divergence.ranks) == (8, kind, cause, (1,))


@pytest.mark.parametrize(
    ("step", "key", "value", "kind", "cause"),
    [
        (5, "rng", "0" * 16, "rng", "RNG drifted"),
        (7, "rng", "0" * 16, "rng", "RNG drifted"),
        (5, "loss", ["0x1p-3", "0x1p-3"], "loss", "forward pass"),
        (5, "lr", ["0x1p-3"], "learning rate", "learning rate"),
        (5, "param", "0" * 16, "optimizer", "optimizer update"),
    ],
)
def test_a_right_restore_is_not_blamed(run: RunLayout, step: int, key: str, value: Any, kind: str, cause: str) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", put(**{key: value}), step=step))
    divergence = diverging(run)
    assert (divergence.step, divergence.kind, divergence.cause) == (step, kind, cause)
    assert "not restored" not in divergence.hint


def test_settings_that_the_script_changes_after_a_right_restore_have_drifted(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", put(param="0" * 16, settings="0" * 16), step=6))
    divergence = diverging(run)
    assert (divergence.step, divergence.kind, divergence.cause) == (6, "optimizer", "optimizer settings drifted")
    assert "depends on something that no checkpoint holds" in divergence.hint


def test_a_right_restore_of_what_only_the_chaos_leg_saved_is_not_blamed(run: RunLayout) -> None:
    """A job that leaves on notice saves where the reference does not."""
    edit_ranks(run, "reference", 1, only("checkpoint", drop, step=4))
    edit_trace(run, "chaos", 2, 1, only("step", put(param="0" * 16), step=5))
    assert diverging(run).cause == "optimizer update"
    edit_trace(run, "chaos", 2, 1, restored_as("optimizer", {}))
    assert diverging(run).cause == "optimizer state not restored"


@pytest.mark.parametrize(("step", "words"), [(5, "changed after the restore"), (6, "steps after a restore")])
def test_another_update_after_a_restore_is_not_called_chance(run: RunLayout, step: int, words: str) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", put(param="0" * 16), step=step))
    hint = diverging(run).hint
    assert words in hint and "state_dict leaves out" in hint and "not deterministic" not in hint


@pytest.mark.parametrize(("also", "words"), [({}, "same data and RNG"), ({"rng": "0" * 16}, "differ after it")])
def test_numbers_drawn_within_a_step_show_after_it(run: RunLayout, also: dict[str, str], words: str) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", put(loss=["0x1p-3", "0x1p-3"]), step=5))
    edit_trace(run, "chaos", 2, 1, only("step", put(loss=["0x1p-3", "0x1p-3"], **also), step=6))
    assert diverging(run).cause == "forward pass"
    assert words in diverging(run).hint


@pytest.mark.parametrize(
    ("items", "words"),
    [("independent", "a cache of samples augmented"), ("global_rng", "item 3 depends"), ("unknown", "a random stream")],
)
def test_batch_contents_as_the_probe_saw_them(run: RunLayout, items: str, words: str) -> None:
    def with_finding(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "kind": "probe", "items": items, "detail": "item 3 depends"} if line["kind"] == "buckets" else line

    edit_trace(run, "chaos", 1, 0, with_finding)
    edit_trace(run, "chaos", 2, 0, only("step", put(batch=["0" * 16, "1" * 16]), step=5))
    assert diverging(run).cause == "batch contents"
    assert words in diverging(run).hint


def test_an_optimizer_that_differs_between_ranks_is_not_a_wrong_file(run: RunLayout) -> None:
    other = {**checkpointed(run, 0, 4)["optimizer"], "0/state/w/prev_loss": "1" * 16}
    edit_trace(run, "reference", 1, 1, only("checkpoint", lambda line: _with(line, "optimizer", other), step=4))
    edit_trace(run, "chaos", 1, 1, only("checkpoint", lambda line: _with(line, "optimizer", other), step=4))
    assert (diverging(run).cause, diverging(run).ranks) == ("optimizer state of another rank", (1,))
    assert "ranks held different ones" in diverging(run).hint
    assert (judge(run).blame.whose, judge(run).blame.part) == ("yours", "script")


def _with(line: dict[str, Any], component: str, values: dict[str, str]) -> dict[str, Any]:
    return {**line, "digests": {**line["digests"], component: values}}


def test_another_checkpoint_than_the_one_ordered(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("start", put(restored=None)))
    found = diverging(run)
    assert (found.kind, found.cause, found.ranks) == ("position", "another checkpoint restored", (1,))


def test_a_wrong_position_is_told_before_what_follows_from_it(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("start", put(position={"epoch": 0, "batches": 9, "step": 4})))
    edit_trace(run, "chaos", 2, 1, only("step", put(ids=[[900, 901], [902, 903]]), step=5))
    assert (diverging(run).step, diverging(run).kind, diverging(run).cause) == (5, "position", "position not restored")


def test_a_window_cut_short(run: RunLayout) -> None:
    def change(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "ids": line["ids"][:1], "batch": line["batch"][:1], "loss": line["loss"][:1]}

    edit_trace(run, "chaos", 2, 1, only("step", change, step=7))
    assert (diverging(run).kind, diverging(run).cause) == ("data order", "accumulation window")


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
    param = next(line["param"] for line in read_lines(path) if line["kind"] == "step" and line["step"] == 2)
    edit_ranks(run, "chaos", 2, only("start", put(param=param)))
    assert diverging(run).cause == "weights of another step"
    assert "after step 2" in diverging(run).hint


def test_weights_of_a_ranks_own_are_not_restored_by_attach(run: RunLayout) -> None:
    """An expert, which no DDP wraps: only rank 0's is saved."""

    def own(line: dict[str, Any]) -> dict[str, Any]:
        words = {name: "AAAA" + line[name][4:] for name in ("params", "grads") if line.get(name)}
        return {**line, **words, "param": line["param"][::-1]} if line["kind"] in ("start", "step") else line

    params = [line["param"] for line in read_lines(run.leg("reference").attempt(1).trace(0)) if line["kind"] == "step"]
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        edit_trace(run, leg, attempt, 1, own)
    edit_trace(run, "chaos", 2, 1, only("start", put(param=params[3])))
    assert diverging(run).cause == "weights of another rank"
    assert "rank 1 restored what rank 0 holds" in diverging(run).hint and "checkpoints of its own" in diverging(run).hint
    assert (judge(run).blame.whose, judge(run).blame.part) == ("yours", "script")


def test_the_tensor_is_named(run: RunLayout) -> None:
    def change(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "grad": "0" * 16, "grads": line["grads"][:6] + "AA" + line["grads"][8:]}

    edit_trace(run, "chaos", 2, 0, only("step", change, step=8))
    assert (diverging(run).kind, diverging(run).tensor) == ("gradient", "block.weight")


@pytest.mark.parametrize(
    ("attempt", "step", "status"),
    [
        (2, 9, "FAIL"),
        # Attempt 4 went on from the same checkpoint, and agrees: no proof against the restore.
        (3, 11, "INCONCLUSIVE"),
    ],
)
def test_a_difference_that_was_rolled_back_is_found(run: RunLayout, attempt: int, step: int, status: str) -> None:
    edit_trace(run, "chaos", attempt, 0, only("step", put(param="0" * 16), step=step))
    verdict = judge(run)
    assert verdict.status == status
    assert (verdict.code == "job_not_repeatable" and verdict.blame.likely) == (status == "INCONCLUSIVE")
    assert verdict.divergence is not None
    assert (verdict.divergence.attempt, verdict.divergence.step) == (attempt, step)
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
    lines = read_lines(run.leg("reference").attempt(1).trace(0))
    other = next(line for line in lines if line["kind"] == "step" and line["step"] == 7)
    edit_trace(run, "chaos", 2, 1, only("step", put(ids=other["ids"]), step=7))
    assert diverging(run).cause == "data of another rank"
    assert "rank 0's of step 7" in diverging(run).hint


def test_gradient_that_differs_on_one_rank_is_not_blamed_on_buckets(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("buckets", put(layout=[[0, 1, 2]])))
    edit_trace(run, "chaos", 2, 1, only("step", put(grad="0" * 16), step=5))
    assert diverging(run).cause == "gradient"
    assert "accumulated before the checkpoint" in diverging(run).hint


def test_missing_records_are_no_divergence(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", drop, step=7))
    verdict = judge(run)
    assert verdict.divergence is None
    assert (verdict.status, verdict.cause) == ("FAIL", "lineage: rank 1 lacks step 7")


def test_weights_that_the_script_changed_between_two_steps_are_told(tmp_path: Path) -> None:
    """An optimizer around another one pulls them to weights of its own, which it keeps for itself."""
    run = write_run(tmp_path, bugs=Bugs(keep_buffers=False, with_digests=False), reference_bugs=Bugs(with_digests=False))
    for rank in range(3):

        def pulled(line: dict[str, Any]) -> dict[str, Any]:
            return {**line, "began": "f" * 16} if line["step"] == 5 else line

        edit_trace(run, "chaos", 2, rank, only("step", pulled))
    found = diverging(run)
    assert (found.code, found.reason.because) == ("forward_pass", "changed_between")
    assert "changes the weights between the steps" in found.hint
    assert found.reason.sentence == "weights changed differently between steps"


def test_weights_changed_before_a_start_was_recorded_are_not_told_as_changed_differently(tmp_path: Path) -> None:
    """A momentum encoder is moved before the first forward pass, at which a restart is recorded."""
    run = write_run(tmp_path, bugs=Bugs(keep_buffers=False, with_digests=False), reference_bugs=Bugs(with_digests=False))
    edit_ranks(run, "reference", 1, only("step", put(began="e" * 16), step=5))
    edit_ranks(run, "chaos", 2, only("start", put(param="e" * 16)))
    found = diverging(run)
    assert (found.code, found.step, found.reason.because) == ("forward_pass", 5, "restored")


@pytest.mark.parametrize(
    ("seen", "named"),
    [((9, 5, 6), "frozen"), ((1, 2, 6), "head"), ((1, 4, 4), None), ((1, 5, 6, 7), None)],
    ids=["frozen and another", "as at the beginning", "all trained", "another model"],
)
def test_a_parameter_is_named_where_the_reference_tells_of_its_beginning_and_of_a_later_step(
    seen: tuple[int, ...], named: str | None
) -> None:
    def words(*each: int) -> bytes:
        return array("I", each).tobytes()

    names = ("frozen", "head", "body")
    begun = SimpleNamespace(tensors=names, params=words(1, 2, 3))
    steps = {step: SimpleNamespace(step=step, params=words(1, 5, 6) if step == 11 else b"") for step in (9, 10, 11)}
    lineage = SimpleNamespace(of=lambda rank: steps, at=lambda rank, step: steps[step])
    first = SimpleNamespace(traces={0: SimpleNamespace(start=begun)})
    drill: Any = SimpleNamespace(reference=SimpleNamespace(attempts=[first]), reference_lineage=lineage)
    start: Any = SimpleNamespace(tensors=names, params=words(*seen))
    assert _first_tensor(drill, 0, start, 10) == named
