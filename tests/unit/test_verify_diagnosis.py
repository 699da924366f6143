"""What is replayed to see a difference up close: which attempt, under which faults, up to which step, what is inspected."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from legs import KILLS, Bugs, drop, edit_journal, edit_ranks, edit_trace, only, put, write_run
from script_legs import write_script_run

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.spec.model import JobSpec
from chaosrun.verify.check import Drill
from chaosrun.verify.confirm import NO_FAULTS
from chaosrun.verify.diagnosis import Target, hint_of, repeats, target_of
from chaosrun.verify.inspection import Candidate, InspectionComparison
from chaosrun.verify.verdict import judge

KILL = Fault(id="F1", rank=1, phase="step", at_step=6, source="faults.schedule[0]")


def target(run: RunLayout) -> Target:
    spec = JobSpec.model_validate(json.loads(run.run_json.read_text())["spec"])
    plan = FaultPlan.from_json(json.loads(run.plan_json.read_text()))
    drill = Drill.of(read_leg(run.leg("reference")), read_leg(run.leg("chaos")), spec, plan)
    return target_of(drill, judge(run), run)


def test_the_first_step_after_the_restore(tmp_path: Path) -> None:
    found = target(write_run(tmp_path, bugs=Bugs(keep_rng=False)))
    assert (found.step, found.attempt, found.resume_step, found.final_step) == (5, 2, 4, 12)
    assert found.inspected == (4, 5, 6)
    assert [(fault.id, fault.at_step) for fault in found.faults] == [("F1", 6)]
    assert found.hint == (found.divergence and found.divergence.hint)


def test_only_what_led_to_the_attempt_is_done_again(tmp_path: Path) -> None:
    # The third attempt differs, the second does not: its restore was of the beginning.
    kills = (replace(KILL, at_step=2), replace(KILL, id="F2", at_step=6), replace(KILL, id="F3", at_step=10))
    found = target(write_run(tmp_path, kills=kills, bugs=Bugs(keep_optimizer=False)))
    assert (found.attempt, found.resume_step) == (3, 4)
    assert [fault.id for fault in found.faults_from(0).faults] == ["F1", "F2"]
    assert [fault.id for fault in found.faults_from(2).faults] == ["F2"]
    assert found.faults_from(6).faults == ()


def test_a_fault_without_a_step_gets_the_one_where_it_fired(tmp_path: Path) -> None:
    first = replace(KILL, at_step=None, phase="checkpoint.postcommit")
    run = write_run(tmp_path, kills=(replace(first, at_step=4),), bugs=Bugs(keep_rng=False))
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=(first,)).to_json()))
    assert [fault.at_step for fault in target(run).faults] == [4]


def test_a_death_that_nobody_planned_is_made_a_fault(tmp_path: Path) -> None:
    run = write_run(tmp_path, kills=(KILL,), bugs=Bugs(keep_rng=False))
    plan = FaultPlan(seed=0, faults=(replace(KILL, id="F9", at_step=11),))
    run.plan_json.write_text(json.dumps(plan.to_json()))
    edit_journal(run, "chaos", lambda line: None if line["event"].startswith("fault.") else line)
    edit_journal(
        run,
        "chaos",
        only("attempt.stopped", lambda line: {**line, "event": "death.unplanned", "rank": 2, "step": 6, "reason": "killed"}),
    )
    (fault,) = target(run).faults
    assert (fault.id, fault.rank, fault.phase, fault.at_step) == ("U1", 2, "step", 6)


def test_a_death_before_a_commit_is_one_again(tmp_path: Path) -> None:
    # Eight steps on record, and the next attempt went on from step 4: the checkpoint of step 8 never came to be.
    kill = replace(KILL, at_step=8, phase="checkpoint.precommit")
    run = write_run(tmp_path, kills=(kill,), bugs=Bugs(keep_rng=False))
    facts = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**facts, "spec": {**facts["spec"], "checkpoint": {"every_steps": 4}}}))
    edit_journal(run, "chaos", lambda line: None if line["event"].startswith("fault.") else line)
    (fault,) = target(run).faults
    assert (fault.phase, fault.at_step) == ("checkpoint.precommit", 8)


def test_a_replay_stops_when_all_has_been_seen(tmp_path: Path) -> None:
    found = target(write_run(tmp_path, bugs=Bugs(keep_rng=False)))
    assert found.last_step(NO_FAULTS) == 6
    late = replace(found, faults=(replace(KILL, at_step=11),))
    assert late.last_step(late.faults_from(0)) == 11
    assert replace(found, step=12).last_step(NO_FAULTS) == 12


def test_steps_around_a_later_difference(tmp_path: Path) -> None:
    found = replace(target(write_run(tmp_path, bugs=Bugs(keep_rng=False))), step=10)
    assert found.inspected == (5, 9, 10, 11)
    assert replace(found, step=12).inspected == (5, 11, 12)
    assert replace(found, step=1, resume_step=0).inspected == (1, 2)


def test_a_difference_at_the_end_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    edit_trace(run, "chaos", 4, 1, only("end", lambda line: {**line, "digests": {**line["digests"], "model": {"x": "y"}}}))
    found = target(run)
    assert (found.step, found.attempt, found.divergence) == (12, 4, None)
    assert repeats(found, None) is None


def test_a_restore_that_chaosrun_itself_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, kills=(KILL,))
    for rank in range(3):
        path = run.leg("chaos").attempt(2).trace(rank)
        path.unlink()
    edit_journal(run, "chaos", only("leg.finished", put(outcome="inexact_restore", message="rank 0: rng differs", hint="look")))
    found = target(run)
    assert (found.step, found.attempt, found.resume_step, found.hint) == (5, 2, 4, "look")


def test_nothing_to_diagnose_in_a_pass(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run run passed"):
        target(write_run(tmp_path))


def test_nothing_to_diagnose_without_a_difference(tmp_path: Path) -> None:
    run = write_run(tmp_path, kills=KILLS[:1])
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=KILLS).to_json()))
    with pytest.raises(UsageError, match=r"INCONCLUSIVE, and no step of it differs.*faults_landed"):
        target(run)


def test_nothing_to_diagnose_in_files_that_were_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    weights = run.leg("chaos").checkpoints / "step-00000012" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match=r"FAIL, and no step of it differs.*final_checkpoint"):
        target(run)


def test_nothing_to_compare_with(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    edit_journal(run, "reference", only("leg.finished", drop))
    with pytest.raises(UsageError, match="did not complete") as caught:
        target(run)
    assert caught.value.hint == f"`chaosrun status {run_argument(run)}` says what became of it"


def test_the_same_difference_again(tmp_path: Path) -> None:
    found = target(write_run(tmp_path, bugs=Bugs(keep_rng=False)))
    own = found.divergence
    assert own is not None
    assert repeats(found, replace(own, attempt=1, seen="other bits")) is True
    for other in (None, replace(own, step=6), replace(own, kind="loss"), replace(own, ranks=(1,))):
        assert repeats(found, other) is False


def test_a_leg_that_went_on_beyond_the_end_is_replayed_a_step_beyond_it(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    edit_ranks(run, "chaos", 4, only("end", put(step=14)))
    assert judge(run).code == "ended_at_another_step" and "no checkpoint holds" in (judge(run).hint or "")
    found = target(run)
    assert (found.divergence, found.ended, found.last_step(NO_FAULTS)) == (None, 14, 13)
    assert target(write_run(tmp_path / "inexact", bugs=Bugs(keep_rng=False))).ended == 12


def test_the_hint_names_what_no_checkpoint_holds(tmp_path: Path) -> None:
    held = InspectionComparison(moments=1, candidates=(Candidate(name="scale", values=1, expected="27.0", seen="8.0"),))
    buffers = Bugs(keep_buffers=False, with_digests=False)
    found = target(write_run(tmp_path / "loss", bugs=buffers, reference_bugs=Bugs(with_digests=False)))
    told = "no checkpoint holds scale (8.0, reference: 27.0): pass what holds it to run.register"
    assert hint_of(found, held) == told
    assert hint_of(found, InspectionComparison(moments=1)) == found.hint
    other = target(write_run(tmp_path / "rng", bugs=Bugs(keep_rng=False)))
    assert hint_of(other, held) == f"{other.hint}; {told}"
    own = target(write_script_run(tmp_path / "script", bugs=Bugs(keep_buffers=False)))
    assert f"{hint_of(own, held)}".endswith("(8.0, reference: 27.0): save it with the checkpoint, and restore it")
