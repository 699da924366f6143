"""A leg that was ended early: PASS only where its complete state is shown to be the reference's after the last fault."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from legs import KILLS, Bugs, copy_run, drop, edit_journal, edit_ranks, edit_trace, only, put, with_spec, write_run

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.layout import RunLayout, checkpoint_name
from chaosrun.records.run_file import Early, read_run
from chaosrun.records.traces import StateRecord
from chaosrun.spec.model import JobSpec
from chaosrun.supervise import early_end
from chaosrun.supervise.workers import order_template
from chaosrun.verify.verdict import Verdict, judge
from tests.records import read_lines, write_lines

STEPS, SETTLED = 12, 8
KILLED = KILLS[0]
LAST = 2
"""The attempt after the kill at step 6, which went on from step 4."""
RANKS = (0, 1, 2)
Break = Callable[[RunLayout], None]


def settled_run(root: Path, *, outcome: str = "settled", **about: Any) -> RunLayout:
    """An exact run, or one with bugs, as if its chaos leg had been ended at step 8."""
    run = whole_run(root, **about)

    def cut(line: dict[str, Any]) -> dict[str, Any] | None:
        return None if line["kind"] == "end" or line.get("step", 0) > SETTLED else line

    edit_ranks(run, "chaos", LAST, cut)
    edit_journal(run, "chaos", only("leg.finished", put(outcome=outcome, final_step=SETTLED)))
    return run


def whole_run(root: Path, **about: Any) -> RunLayout:
    run = write_run(root, kills=(KILLED,), steps=STEPS, **about)
    run.leg("reference").repeats.write_text("{}")
    for leg, attempt in (("reference", 1), ("chaos", LAST)):
        edit_ranks(run, leg, attempt, only("checkpoint", lambda line: {**line, "own": f"of step {line['step']}"}))
    return run


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return settled_run(tmp_path_factory.mktemp("settled"))


def test_a_settled_leg_passes_and_says_what_it_rests_on(settled: RunLayout) -> None:
    verdict = judge(settled)
    assert (verdict.status, verdict.code, verdict.outcome, verdict.steps) == ("PASS", "settled", "settled", SETTLED), (
        verdict.cause
    )
    assert verdict.exact and verdict.settled == "settled at step 8 of 12: complete state equal"
    by_name = {check.name: check.summary for check in verdict.checks}
    assert by_name["final_weights"].startswith("at step 8, where the leg was ended: ")
    assert by_name["completed"] == "the reference ended at step 12; the chaos leg was ended at step 8 on every rank"
    assert "24 records are equal" in by_name["losses"]
    json.dumps(verdict.to_json(), allow_nan=False)


def between_checkpoints(root: Path, **seen: Any) -> RunLayout:
    """As if at step 8 the reference had only recorded its state, and the chaos leg, before it saved; `seen`: of its record."""
    run = settled_run(root)
    for rank in RANKS:
        edit_trace(run, "reference", 1, rank, only("checkpoint", as_state, step=SETTLED))
        path = run.leg("chaos").attempt(LAST).trace(rank)
        lines = list(read_lines(path))
        place = next(number for number, line in enumerate(lines) if (line["kind"], line.get("step")) == ("checkpoint", SETTLED))
        write_lines(path, [*lines[:place], {**as_state(lines[place]), **seen}, *lines[place:]])
    return run


def as_state(line: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in line.items() if key in StateRecord.__struct_fields__}, "kind": "state"}


def test_a_leg_settles_between_two_checkpoints(tmp_path: Path) -> None:
    verdict = judge(between_checkpoints(tmp_path))
    assert (verdict.status, verdict.code) == ("PASS", "settled"), verdict.cause
    assert verdict.settled == "settled at step 8 of 12: complete state equal"


@pytest.mark.parametrize(("seen", "why"), [({"own": "other"}, "keeps beside"), ({"unseen": ["a counter"]}, "a counter")])
def test_what_was_recorded_before_the_save_decides(tmp_path: Path, seen: dict[str, Any], why: str) -> None:
    verdict = judge(between_checkpoints(tmp_path, **seen))
    assert verdict.status == "INCONCLUSIVE" and why in verdict.cause


def of_checkpoint(leg: str, change: Any, rank: int = 1) -> Break:
    attempt = 1 if leg == "reference" else LAST
    return lambda run: edit_trace(run, leg, attempt, rank, only("checkpoint", change, step=SETTLED))


def another_fault(run: RunLayout) -> None:
    late = Fault(id="F2", rank=0, phase="step", at_step=11, source="faults.schedule[1]")
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=(KILLED, late)).to_json()))


def changed_weight(line: dict[str, Any]) -> dict[str, Any]:
    return {
        **line,
        "digests": {**line["digests"], "optimizer": {**line["digests"]["optimizer"], "head.bias.momentum": "other"}},
    }


REFUSED: dict[str, tuple[Break, str]] = {
    "never shown to repeat itself": (lambda run: run.leg("reference").repeats.unlink(), "never shown to repeat itself"),
    "a later fault": (another_fault, "F2"),
    "own state is another one": (of_checkpoint("chaos", put(own="other")), "keeps beside its checkpoints"),
    "own state of the reference": (of_checkpoint("reference", put(own="other"), rank=2), "keeps beside its checkpoints"),
    "nobody looked": (of_checkpoint("chaos", put(own="")), "keeps beside its checkpoints"),
    "no digest": (of_checkpoint("chaos", put(unseen=["counter (itertools.count)"])), "counter (itertools.count)"),
    "no digest in the reference": (of_checkpoint("reference", put(unseen=["it wrote state.txt"])), "it wrote state.txt"),
    "a save that changes": (of_checkpoint("chaos", put(changed={"rng": "torch"})), "a save changes the training"),
    "outside": (
        lambda run: edit_trace(run, "reference", 1, 0, only("end", put(outside=["ema (Tensor)"]))),
        "the training changes state that no checkpoint holds",
    ),
    "an earlier attempt was further": (
        lambda run: edit_trace(run, "chaos", 1, 0, only("step", put(step=9), step=6)),
        "an earlier attempt had come to step 9",
    ),
    "tolerance": (with_spec(verify={"losses": {"rtol": 1e-3}}), "a tolerance was given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_pass_where_the_rest_does_not_follow(settled: RunLayout, tmp_path: Path, name: str) -> None:
    spoil, words = REFUSED[name]
    run = copy_run(settled, tmp_path)
    spoil(run)
    verdict = judge(run)
    assert verdict.status != "PASS", verdict.cause
    check = next(check for check in verdict.checks if check.name == "early_end")
    assert (check.status, words in check.summary) == ("inconclusive", True) or verdict.status == "FAIL", check.summary


def test_a_leg_that_never_ran_is_not_said_to_have_reached_its_end(settled: RunLayout, tmp_path: Path) -> None:
    run = copy_run(settled, tmp_path)
    shutil.rmtree(run.leg("chaos").path)
    check = next(check for check in judge(run).checks if check.name == "early_end")
    assert check.summary == "the chaos leg did not end early"


def test_saved_state_that_differs_fails(settled: RunLayout, tmp_path: Path) -> None:
    run = copy_run(settled, tmp_path)
    of_checkpoint("chaos", changed_weight)(run)
    assert judge(run).status == "FAIL"


@pytest.mark.parametrize(
    "bugs", [Bugs(keep_optimizer=False), Bugs(keep_buffers=False), Bugs(keep_registered=False), Bugs(skip_off=1)]
)
def test_a_leg_that_differs_fails_with_the_cause_of_the_whole_one(tmp_path: Path, bugs: Bugs) -> None:
    whole = judge(whole_run(tmp_path / "whole", bugs=bugs))
    for outcome in ("settled", "differed"):
        verdict = judge(settled_run(tmp_path / outcome, outcome=outcome, bugs=bugs))
        assert (verdict.status, verdict.code, verdict.cause) == (whole.status, whole.code, whole.cause)
        assert whole.status == "FAIL"


def test_a_leg_that_is_said_to_differ_and_does_not_proves_nothing(tmp_path: Path) -> None:
    verdict = judge(settled_run(tmp_path, outcome="differed"))
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "ended_at_a_difference")


def test_a_whole_leg_that_fails_after_it_had_settled_is_a_mistake_of_the_tool(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    assert judge(run).code == "exact"
    shutil.rmtree(run.leg("chaos").checkpoints / checkpoint_name(SETTLED))  # retention removes them
    edit_trace(run, "chaos", LAST, 1, only("step", put(loss=["0x1.8p+1", "0x1.8p+1"]), step=10))
    verdict: Verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "settled_too_early", "chaosrun"), verdict.cause
    # Where it would not have been ended, the failure is the job's.
    edit_trace(run, "chaos", LAST, 1, only("checkpoint", put(own="other"), step=SETTLED))
    assert judge(run).code != "settled_too_early"


def test_an_unfinished_checkpoint_does_not_settle(settled: RunLayout, tmp_path: Path) -> None:
    run = copy_run(settled, tmp_path)
    edit_trace(run, "chaos", LAST, 2, only("checkpoint", drop, step=SETTLED))
    assert judge(run).status == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("asked", "leg", "looks_after", "settle"),
    [
        ("never", "chaos", None, ""),
        ("never", "reference", None, ""),
        ("long", "chaos", None, ""),  # of 12 steps
        ("long", "reference", 1000, ""),
        ("always", "chaos", 0, "stop"),
        ("always", "reference", 0, ""),
        ("watch", "chaos", 0, "watch"),
    ],
)
def test_only_drills_that_may_end_early_look(
    tmp_path: Path, asked: Early, leg: str, looks_after: int | None, settle: str
) -> None:
    run = whole_run(tmp_path)
    info = read_run(run)
    spec = JobSpec.model_validate(info.spec)
    template = order_template(leg, run.leg(leg), spec, info, reference=None)
    orders = early_end.with_early_end(template, spec, asked, FaultPlan.read(run.plan_json), run.leg("reference"))
    assert (orders.looks_after, orders.settle) == (looks_after, settle)
    run.leg("reference").repeats.unlink()
    again = early_end.with_early_end(template, spec, asked, FaultPlan.read(run.plan_json), run.leg("reference"))
    assert again.settle == ("watch" if settle else ""), "of a job that was not shown to repeat itself"


def test_references_that_say_enough_are_found_by_all() -> None:
    assert early_end.reference_keys("k", "always") == early_end.reference_keys("k", "watch") == ("k-early",)
    assert early_end.reference_keys("k", "long") == early_end.reference_keys("k", "never") == ("k", "k-early")
