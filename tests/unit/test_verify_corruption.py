"""Injected corruption in the records: where it struck, where it was first seen, and what it is not blamed for."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, copy_run, edit_journal, edit_trace, only, put, write_run

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.diagnosis import open_case
from chaosrun.verify.check import CheckResult, Drill
from chaosrun.verify.confirm import worth_confirming
from chaosrun.verify.corruption import injections
from chaosrun.verify.verdict import Verdict, judge

FLIP = Fault(
    id="F1", kind="flip_bit", rank=1, phase="optimizer", at_step=7, options={"state": "parameter"}, source="faults.schedule[0]"
)
NOTE = {
    "state": "parameter",
    "tensor": "block.weight",
    "dtype": "float32",
    "element": 17,
    "bit": 30,
    "before": "3f800000",
    "after": "7f800000",
    "value_before": "1.0",
    "value_after": "inf",
    "final": True,
}
WHAT = "F1 flipped bit 30 of block.weight[17] on rank 1 at step 7"
OTHER = "AAAABBBBCCCCDDDD"
"""Words of a fingerprint that is nobody's."""


def from_step(first: int, **values: Any) -> Any:
    return lambda line: {**line, **values} if line["kind"] == "step" and line["step"] >= first else line


def inject(run: RunLayout, fault: Fault = FLIP, *, attempt: int = 1, found: dict[str, Any] | None = None) -> None:
    """Write into the journal that the fault struck, before its attempt came to its end."""
    before = next(
        record
        for record in journal_of(run)
        if record["event"] in ("worker.exited", "leg.finished") and record.get("attempt", attempt) == attempt
    )
    about = {"attempt": attempt, "rank": fault.rank}
    time = {"v": 2, "seq": 0, "time_s": before["time_s"]}
    asked = {**time, "event": "fault.requested", "fault": fault.id, **about, "step": fault.at_step, "phase": fault.phase}
    seen = {"event": "fault.observed", "fault": fault.id, "pid": 100 * attempt + fault.rank, "how": "note", "signal": None}
    seen |= {**time, **about, "exit_code": None, "died_s": None, "found": NOTE if found is None else found}
    path = run.leg("chaos").journal
    lines = path.read_text().splitlines(keepends=True)
    at = before["seq"] - 1
    path.write_text("".join([*lines[:at], json.dumps(asked) + "\n", json.dumps(seen) + "\n", *lines[at:]]))
    edit_journal(run, "chaos", only("leg.finished", put(hint="")))


def journal_of(run: RunLayout) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.leg("chaos").journal.read_text().splitlines()]


def plan(run: RunLayout, *faults: Fault) -> None:
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=faults).to_json()))


def shown(verdict: Verdict) -> CheckResult:
    return next(check for check in verdict.checks if check.name == "silent_corruption")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return write_run(tmp_path_factory.mktemp("undisturbed"), kills=())


@pytest.fixture
def run(undisturbed: RunLayout, tmp_path: Path) -> RunLayout:
    """An exact run with F1 in its plan and in its journal; what it did is up to the test."""
    run = copy_run(undisturbed, tmp_path)
    plan(run, FLIP)
    inject(run)
    return run


def test_the_place_of_the_injection_and_of_the_first_sighting(run: RunLayout) -> None:
    edit_trace(run, "chaos", 1, 1, from_step(7, param="0" * 16, params=OTHER))
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3)
    seen = "first seen in parameters of step 7, rank 1, embed.weight (parameters, rank_agreement)"
    assert verdict.cause == f"silent corruption, as injected: {WHAT}; {seen}"
    assert [fault.landed for fault in verdict.faults] == [True]
    check = shown(verdict)
    assert check.evidence["injected"] == [
        {"fault": "F1", "attempt": 1, "step": 7, "rank": 1, **{k: NOTE[k] for k in NOTE if k != "final"}}
    ]
    assert (check.evidence["seen"]["step"], check.evidence["seen"]["ranks"]) == (7, [1])
    assert {check.name: check.status for check in verdict.checks}["reproducible"] == "pass"
    assert verdict.divergence is not None and verdict.divergence.cause == "silent corruption, as injected"
    assert not worth_confirming(verdict)
    with pytest.raises(UsageError, match="was injected: F1 flipped bit 30"):
        open_case(run)


def test_two_sightings(run: RunLayout) -> None:
    """A gradient first, the parameters after it."""
    gradient = {**NOTE, "state": "gradient"}
    edit_journal(run, "chaos", only("fault.observed", put(found=gradient)))
    edit_trace(run, "chaos", 1, 1, from_step(7, grad="0" * 16, grads=OTHER))
    edit_trace(run, "chaos", 1, 1, from_step(8, param="0" * 16, params=OTHER))
    assert judge(run).cause == (
        "silent corruption, as injected: F1 flipped bit 30 of the gradient of block.weight[17] on rank 1 at step 7; first seen "
        "in gradients of step 7, rank 1, embed.weight (gradients); the replicas part at step 8 (rank_agreement)"
    )


def test_a_moment_shows_in_the_next_checkpoint_and_late_sightings_are_confirmed(run: RunLayout) -> None:
    moment = {**NOTE, "state": "exp_avg"}
    edit_journal(run, "chaos", only("fault.observed", put(found=moment)))

    def other_state(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "digests": {**line["digests"], "optimizer": {"0/state": "0" * 16}}}

    edit_trace(run, "chaos", 1, 1, only("checkpoint", other_state, step=12))
    verdict = judge(run)
    assert verdict.cause == (
        "silent corruption, as injected: F1 flipped bit 30 of exp_avg of block.weight[17] on rank 1 at step 7; first seen in "
        f"the optimizer's state of step 12, rank 1, {shown(verdict).evidence['seen']['tensor']} (checkpointed_state)"
    )
    assert worth_confirming(verdict)


@pytest.mark.parametrize("every_steps", [5, 4])
def test_what_shows_only_at_the_end(run: RunLayout, every_steps: int) -> None:
    """Also where the checkpoint of the last step was due, and so was saved before."""
    info = json.loads(run.run_json.read_text())
    info["spec"]["checkpoint"] = {"every_steps": every_steps}
    run.run_json.write_text(json.dumps(info))
    last = dataclasses.replace(FLIP, phase="step", at_step=12)
    plan(run, last)
    edit_journal(run, "chaos", only("fault.requested", put(step=12, phase="step")))

    def other_state(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "digests": {**line["digests"], "model": {"block.weight": "0" * 16}}}

    edit_trace(run, "chaos", 1, 1, only("end", other_state))
    verdict = judge(run)
    assert verdict.status == "FAIL"
    assert "first seen in the state at the end of step 12, rank 1, embed.weight (final_weights)" in verdict.cause


def test_a_corruption_without_a_trace_shows_nothing(run: RunLayout) -> None:
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6)
    assert verdict.cause == f"silent_corruption: {WHAT}, and nothing that is compared shows it"
    assert verdict.hint is not None and "another tensor" in verdict.hint
    assert [fault.landed for fault in verdict.faults] == [True]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"final": True, "problem": "no moment"}, "no moment"),
        ({**NOTE, "after": NOTE["before"]}, "its bits are the same before and after"),
        ({"final": True}, "the note does not say what was damaged"),
    ],
)
def test_a_corruption_that_did_not_take_place(run: RunLayout, found: dict[str, Any], words: str) -> None:
    edit_journal(run, "chaos", only("fault.observed", put(found=found)))
    verdict = judge(run)
    assert verdict.status == "INCONCLUSIVE"
    assert "planned faults cannot be shown to have happened" in verdict.cause and words in verdict.cause


def test_a_job_that_differs_before_the_injection_is_not_reproducible(run: RunLayout) -> None:
    edit_trace(run, "chaos", 1, 1, from_step(7, param="0" * 16, params=OTHER))
    edit_trace(run, "chaos", 1, 0, only("step", put(loss=["0x0p+0", "0x0p+0"]), step=6))
    verdict = judge(run)
    assert (verdict.status, verdict.cause[:34]) == ("INCONCLUSIVE", "the job does not repeat itself: lo")
    assert not verdict.cause.startswith("silent")


def test_neither_is_one_that_differs_in_that_step_before_the_optimizer(run: RunLayout) -> None:
    edit_trace(run, "chaos", 1, 1, only("step", put(rng="0" * 16), step=7))
    verdict = judge(run)
    assert verdict.status == "INCONCLUSIVE" and "rng differs at step 7" in verdict.cause


def test_an_older_difference_of_recovery_keeps_its_own_cause(tmp_path: Path) -> None:
    """A restore that lost the RNG, then a corruption: the first is what failed."""
    kill = Fault(id="F2", rank=2, phase="step", at_step=6, source="faults.schedule[1]")
    run = write_run(tmp_path, kills=(kill,), bugs=Bugs(keep_rng=False), reference_bugs=Bugs())
    late = dataclasses.replace(FLIP, at_step=11)
    plan(run, kill, late)
    inject(run, late, attempt=2)
    verdict = judge(run)
    assert verdict.status == "FAIL" and verdict.cause.startswith("RNG not restored")
    assert shown(verdict).status == "inconclusive" and "does not come from what was injected" in shown(verdict).summary


def test_a_rollback_heals_and_the_tail_still_tells(tmp_path: Path) -> None:
    kill = Fault(id="F2", rank=2, phase="step", at_step=6, source="faults.schedule[1]")
    run = write_run(tmp_path, kills=(kill,))
    early = dataclasses.replace(FLIP, at_step=5)
    plan(run, early, kill)
    inject(run, early)
    unseen = judge(run)
    assert unseen.status == "INCONCLUSIVE"
    edit_trace(run, "chaos", 1, 1, from_step(5, param="0" * 16, params=OTHER))
    verdict = judge(run)
    assert verdict.status == "FAIL"
    assert "at step 5; first seen in parameters of step 5, rank 1" in verdict.cause
    failing = [check.name for check in verdict.checks if check.status == "fail"]
    assert failing == ["rank_agreement", "replay_agreement", "silent_corruption"]


def test_a_checkpoint_saved_on_notice_after_it_heals_nothing(tmp_path: Path) -> None:
    """It is due at no period, so it comes after the faults of its step, and holds what they did."""
    kill = Fault(id="F2", rank=2, phase="step", at_step=4, source="faults.schedule[1]")
    flip = dataclasses.replace(FLIP, phase="step", at_step=4)
    for number, (more, healed) in enumerate(
        [
            ({"checkpoint": {"every_steps": 4}}, 2),
            ({"checkpoint": {"every_steps": 3}}, None),
            ({"resume": {"by": "script"}}, 2),  # which saves before the step is over
        ]
    ):
        spec = {"name": "toy", "script": "train.py", "workers": 3, **more}
        run = write_run(tmp_path / str(number), kills=(kill,), spec=spec)
        plan(run, flip, kill)
        inject(run, flip)
        legs = [read_leg(run.leg(name)) for name in ("reference", "chaos")]
        (found,) = injections(Drill.of(legs[0], legs[1], JobSpec.model_validate(spec), FaultPlan.read(run.plan_json)))
        assert (legs[1].attempts[1].resume_step, found.healed) == (4, healed)


def test_after_a_rollback_it_is_blamed_for_nothing_more(tmp_path: Path) -> None:
    kill = Fault(id="F2", rank=2, phase="step", at_step=6, source="faults.schedule[1]")
    run = write_run(tmp_path, kills=(kill,), bugs=Bugs(keep_rng=False), reference_bugs=Bugs())
    early = dataclasses.replace(FLIP, at_step=5)
    plan(run, early, kill)
    inject(run, early)
    verdict = judge(run)
    assert verdict.status == "FAIL" and verdict.cause.startswith("RNG not restored")


def test_a_training_that_breaks_down_over_it(run: RunLayout) -> None:
    edit_trace(run, "chaos", 1, 1, from_step(7, param="0" * 16, params=OTHER))
    edit_journal(run, "chaos", only("leg.finished", put(outcome="user_error", message="rank 1 raised: the loss is NaN")))
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3)
    assert verdict.cause.endswith("; then rank 1 raised: the loss is NaN") and WHAT in verdict.cause
    edit_journal(run, "chaos", only("leg.finished", put(outcome="timeout", message="too late")))
    assert (judge(run).status, judge(run).exit_code) == ("INCONCLUSIVE", 124)


def test_with_a_tolerance_the_ranks_still_disagree(tmp_path: Path) -> None:
    run = write_run(tmp_path, kills=(), verify={"weights": {"atol": 1e-3}, "losses": {"atol": 1e-3}})
    plan(run, FLIP)
    inject(run)
    edit_trace(run, "chaos", 1, 1, from_step(7, param="0" * 16, params=OTHER))
    verdict = judge(run)
    assert verdict.status == "FAIL"
    assert "first seen in parameters of step 7, rank 1, embed.weight (rank_agreement)" in verdict.cause


def test_a_plan_without_corruption_has_no_such_check(undisturbed: RunLayout) -> None:
    assert "silent_corruption" not in {check.name for check in judge(undisturbed).checks}
