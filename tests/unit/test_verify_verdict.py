"""From checks to PASS, FAIL or INCONCLUSIVE and an exit code: what a verdict rests on, and that doubt is never a PASS."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from legs import KILLS, Bugs, die_raising, drop, edit_journal, edit_trace, only, put, with_spec, write_run

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.observed import Disproof
from chaosrun.records.layout import RunLayout
from chaosrun.verify import landed, ruling
from chaosrun.verify import verdict as verdict_module
from chaosrun.verify.check import CheckResult, Drill, skipped
from chaosrun.verify.checks import CHECKS, REQUIRED, run_checks
from chaosrun.verify.code_checks import WANDERS, irreproducible
from chaosrun.verify.codes import Cause
from chaosrun.verify.compare import Kind
from chaosrun.verify.verdict import Verdict, judge
from tests.records import read_lines, torn, write_lines


def failing(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.checks if check.status == "fail"]


def test_exact_run_passes(run: RunLayout) -> None:
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code, verdict.outcome) == ("PASS", 0, "completed")
    assert verdict.cause == "bit-identical to the reference run: 12 steps on 3 ranks, 3 faults; saved and resumed by chaosrun"
    assert (verdict.steps, verdict.lost_steps, verdict.divergence) == (12, 7, None)


def test_summaries_of_faults_and_attempts(run: RunLayout) -> None:
    verdict = judge(run)
    assert [(fault.id, fault.attempt, fault.step, fault.landed) for fault in verdict.faults] == [
        ("F1", 1, 6, True),
        ("F2", 2, 10, True),
        ("F3", 3, 12, True),
    ]
    assert [(entry.resumed_from, entry.first_step, entry.last_step, entry.lost_steps) for entry in verdict.attempts] == [
        (None, 1, 6, 2),
        ("step-00000004", 5, 9, 1),
        ("step-00000008", 9, 12, 4),
        ("step-00000008", 9, 12, 0),
    ]
    assert verdict.attempts[0].ended_by == "F1 (SIGKILL rank 1 after step 6)"
    assert verdict.attempts[3].ended_by == "completed"
    # From the death of rank 1 over the observed exits, the restart and three start lines to the first step line, by the clock.
    deaths = [json.loads(line) for line in run.leg("chaos").journal.read_text().splitlines()]
    died_s = next(event["died_s"] for event in deaths if event["event"] == "worker.exited")
    first = next(
        line for line in read_lines(run.leg("chaos").attempt(2).trace(0)) if line["kind"] == "step" and line["step"] == 5
    )
    assert verdict.attempts[0].recovery_s is None
    assert verdict.attempts[1].recovery_s == first["time_s"] - died_s


def test_verdict_is_json(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", put(loss=["nan", "inf"]), step=7))
    value = json.loads(json.dumps(judge(run).to_json(), allow_nan=False))
    assert (value["v"], value["status"], value["exit_code"]) == (1, "FAIL", 3)
    assert (value["divergence"]["kind"], value["divergence"]["seen"]) == ("loss", "nan")
    assert [check["name"] for check in value["checks"]] == [function.__name__ for function in CHECKS]


def test_a_wrong_order_is_told_by_its_samples(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path, bugs=Bugs(skip_off=1), reference_bugs=Bugs()))
    assert verdict.divergence is not None
    expected, seen = list(verdict.divergence.expected), list(verdict.divergence.seen)
    assert expected != seen
    where = f"first difference in data order: step 5, rank 0, attempt 2: samples {expected} expected, {seen} seen"
    assert verdict.cause == f"1 batch skipped ({where})"
    assert verdict.hint is not None and "data.resume" not in verdict.hint


def test_under_a_protocol_that_is_not_exact_the_hint_says_what_to_set(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(skip_off=1), reference_bugs=Bugs())
    with_spec(data={"resume": "skip"})(run)
    verdict = judge(run)
    assert verdict.hint == "set data.resume: seedable (data.resume is skip, and only seedable is exact)"
    assert verdict.blame.part == "job file"
    # What it looks like is still told, with the divergence.
    assert verdict.divergence is not None and verdict.divergence.cause == "1 batch skipped" and verdict.divergence.hint


@pytest.mark.parametrize(
    ("ids", "others", "shown"),
    [
        (range(8), range(8), "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (range(64), [*range(20), -1, *range(21, 64)], "[…, 20, 21, 22, 23, 24, 25, 26, 27, …]"),
        (range(10), [-1, *range(9)], "[0, 1, 2, 3, 4, 5, 6, 7, …]"),
        (range(10), range(9), "[…, 9]"),
        (["a"], ["b"], "[a]"),
    ],
)
def test_of_a_large_batch_the_samples_that_differ_are_shown(ids: Sequence[Any], others: Sequence[Any], shown: str) -> None:
    assert ruling._around([*ids], [*others]) == shown


def test_unprimed_buckets_fail_where_two_ranks_hide_them(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path, bugs=Bugs(primed=False), workers=2, kills=KILLS[:1]))
    assert (verdict.status, failing(verdict)) == ("FAIL", ["bucket_layout"])
    assert "not primed" in verdict.cause


def test_confirmed_irreproducible(tmp_path: Path) -> None:
    bugs = Bugs(keep_optimizer=False)
    verdict = judge(write_run(tmp_path, bugs=bugs, reference_bugs=Bugs(), irreproducible="loss at step 3"))
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6)
    assert (verdict.code, verdict.cause) == (
        "undisturbed_runs_differ",
        "two fault-free runs of this job already differ: loss at step 3",
    )
    # The place stays, the blame of recovery goes.
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.cause) == ("optimizer", "not shown to come from the restore")
    assert verdict.divergence.hint == verdict.hint


@pytest.mark.parametrize("kind", [kind for kind in get_args(Kind) if irreproducible(kind) in WANDERS])
def test_what_wanders_first_is_what_to_set(tmp_path: Path, kind: str) -> None:
    about: dict[str, Any] = {"irreproducible": f"{kind} at step 3, rank 0", "wanders": kind}
    verdict = judge(write_run(tmp_path, bugs=Bugs(keep_optimizer=False), reference_bugs=Bugs(), **about))
    assert verdict.hint == WANDERS[irreproducible(kind)].hint


def test_a_reference_that_was_replaced_is_told(tmp_path: Path) -> None:
    replaced = {"mode": "auto", "source": None, "key": "key", "replaced": "loss at step 3, rank 0"}
    verdict = judge(write_run(tmp_path, reference=replaced))
    assert verdict.status == "PASS" and "replaced by a new run" in verdict.warnings[0]
    assert "loss at step 3, rank 0" in verdict.warnings[0]


def test_a_run_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.json was written by another chaosrun \(version 2, this one"):
        judge(write_run(tmp_path, v=2))


@pytest.mark.parametrize("leg", ["chaos", "reference", "confirm"])
def test_a_file_of_another_leg_leaves_nothing_to_pass_or_blame(tmp_path: Path, leg: str) -> None:
    run = write_run(tmp_path, bugs=Bugs(keep_optimizer=False), reference_bugs=Bugs())
    assert judge(run).status == "FAIL"
    record = run.leg(leg).attempt(1).opened(1)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text('{"path": "/books/stats", "left_by": "reference leg", "changed_s": 1.0, "attempt": 1, "rank": 1}\n')
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.exit_code) == ("INCONCLUSIVE", "file_of_another_leg", 6)
    assert verdict.blame.likely and "changed from outside" in (verdict.hint or "")
    assert "/books/stats" in verdict.cause and f"the {leg} leg read" in verdict.cause and "reference leg" in verdict.cause
    assert verdict.hint is not None and "CHAOSRUN_OUTPUT" in verdict.hint and verdict.blame.whose == "yours"


@pytest.mark.parametrize(
    ("there", "here", "leg"),
    [
        ({"/job/train.py": "a"}, {"/job/train.py": "b", "/job/more.py": "c"}, "chaos"),
        ({"/job/train.py": "a"}, {"/job/train.py": "a b a"}, "chaos"),
        ({"/job/train.py": "a b"}, {"/job/train.py": "b"}, "reference"),
        ({"/job/train.py": "a", "/job/more.py": "c"}, {"/job/train.py": "a"}, None),
        ({"/job/train.py": "a"}, ["damaged"], None),
    ],
    ids=["between the legs", "and back", "while the reference trained", "imported by one leg alone", "unknown"],
)
def test_a_source_that_was_edited_while_the_drill_ran_leaves_nothing_to_pass_or_blame(
    tmp_path: Path, there: object, here: object, leg: str | None
) -> None:
    run = write_run(tmp_path)
    run.reference.inputs.write_text(json.dumps(there))
    run.leg("chaos").inputs.write_text(json.dumps(here))
    verdict = judge(run)
    assert verdict.status == ("INCONCLUSIVE" if leg else "PASS"), verdict.cause
    if leg:
        assert verdict.code == "source_changed" and "/job/train.py was changed while the drill ran" in verdict.cause
        assert f"the {leg} leg, or a part of it, ran another version" in verdict.cause and verdict.blame.whose == "yours"


def test_a_file_from_before_the_training_explains_legs_that_differ_and_nothing_else(tmp_path: Path) -> None:
    def leave(run: RunLayout) -> None:
        about = {"path": "/books/runs", "left_by": "reference leg", "changed_s": 1.0}
        record = {**about, "attempt": 1, "rank": 1, "before_training": True}
        run.leg("chaos").attempt(1).opened(1).write_text(json.dumps(record) + "\n")

    for name, bugs, status in (("exact", Bugs(), "PASS"), ("inexact", Bugs(keep_optimizer=False), "FAIL")):
        run = write_run(tmp_path / name, bugs=bugs, reference_bugs=Bugs())
        leave(run)
        assert judge(run).status == status
    run = write_run(tmp_path / "random", bugs=Bugs(random_script=True))
    unseen = judge(run)
    assert (unseen.status, unseen.exit_code, unseen.code) == ("INCONCLUSIVE", 6, "job_not_repeatable")
    leave(run)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "file_of_another_leg") and "/books/runs" in verdict.cause


def test_fault_missing_and_inexact_is_a_failure(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path, bugs=Bugs(lost_fault="F2", keep_rng=False), reference_bugs=Bugs()))
    assert verdict.status == "FAIL"
    assert verdict.attempts[1].ended_by == "unplanned death of rank 2: signal 9"


def test_no_fault_planned_proves_nothing(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path, kills=()))
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6)
    assert verdict.cause == "faults_landed: no fault was planned: nothing about recovery was tested"
    assert verdict.hint == "plan at least one: faults.schedule or faults.random in the job file"


TIMED = Fault(id="F4", rank=0, phase=None, after_s=500.0, source="faults.schedule[3]")


def replan(run: RunLayout, *faults: Fault) -> None:
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=faults).to_json()))


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("event", ["armed", "injected"])
def test_a_fault_that_is_gone_from_the_plan_is_never_a_pass(run: RunLayout, event: str, digest: bool) -> None:
    injected = replace(TIMED, source="inject")
    late = injected if event == "injected" else TIMED
    plan = FaultPlan(seed=0, faults=(*KILLS, late))

    def told(line: dict[str, Any]) -> dict[str, Any]:
        if line["event"] == "leg.started" and digest:
            return {**line, "plan": plan.digest()}
        if line["event"] == "attempt.starting" and event == "armed":
            return {**line, "armed": [*line["armed"], late.id]}
        return line

    edit_journal(run, "chaos", lambda line: {**told(line), "seen": True})
    if event == "injected":
        lines = run.leg("chaos").journal.read_text().splitlines(keepends=True)
        record = {"v": 2, "event": "fault.injected", "time_s": 1.0, "fault": late.id, "kind": "kill", "rank": 0, "what": ""}
        lines.insert(3, json.dumps({**record, **({"plan": late.digest()} if digest else {})}) + "\n")
        run.leg("chaos").journal.write_text("".join(lines))
        edit_journal(run, "chaos", lambda line: {**line, "again": True})
    replan(run, *KILLS, late)
    assert judge(run).status == "INCONCLUSIVE" and "F4: it never fired" in judge(run).cause
    replan(run, *KILLS)
    verdict = judge(run)
    assert verdict.status == "INCONCLUSIVE"
    assert f"F4 was {event}, and is not in the plan" in verdict.cause
    replan(run, *KILLS, replace(late, required=False))
    # Without a digest, nobody can tell what was planned; what was injected is to strike in any case.
    assert judge(run).status == ("INCONCLUSIVE" if digest or event == "injected" else "PASS")
    late_words = "it never fired" if event == "injected" else "its time had not come when the training ended"
    assert judge(run).faults[-1].problem == late_words


def test_a_plan_that_was_changed_is_told_by_its_digest(run: RunLayout) -> None:
    edit_journal(run, "chaos", only("leg.started", put(plan=FaultPlan(seed=0, faults=KILLS).digest())))
    assert judge(run).status == "PASS"
    replan(run, *KILLS[:2], replace(KILLS[2], source="faults.schedule[7]"))
    verdict = judge(run)
    assert (verdict.status, "plan.json is not the plan" in verdict.cause) == ("INCONCLUSIVE", True)
    assert verdict.blame.whose == "machine"


def test_the_digest_of_a_plan_outlives_its_file_and_what_is_injected() -> None:
    plan = FaultPlan(seed=0, faults=(*KILLS, replace(TIMED, after_s=500, options={"grace_s": 5})))
    again = FaultPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.digest() == plan.digest()
    injected = replace(TIMED, id="F5", source="inject")
    assert FaultPlan(seed=0, faults=(*plan.faults, injected)).digest() == plan.digest()
    assert replace(injected, required=False).digest() != injected.digest()
    assert FaultPlan(seed=0, faults=(*KILLS, replace(TIMED, required=False))).digest() != plan.digest()


@pytest.mark.parametrize(
    "found", [{"end": []}, {"end": {}}, {"end": {"status": "x", "error": 5}}, {"note": 3}, {"end": None, "after_s": "soon"}]
)
def test_a_sighting_with_odd_parts_proves_nothing(tmp_path: Path, found: Any) -> None:
    """The shape is right, a value is not: nothing crashes, and nothing landed."""
    run = write_run(tmp_path, kills=KILLS[:1])
    replan(run, replace(KILLS[0], kind="preempt", options={"grace_s": 5.0}))
    edit_journal(run, "chaos", only("fault.observed", put(found=found)))
    (fault,) = judge(run).faults
    assert not fault.landed and fault.problem is not None and "cannot be read" in fault.problem


@pytest.mark.parametrize(
    ("event", "values"),
    [("fault.observed", {"found": 7}), *(("attempt.starting", {"attempt": odd}) for odd in (10**400, 0, True, None, []))],
)
def test_a_value_that_cannot_be_is_a_damaged_record(run: RunLayout, event: str, values: dict[str, Any]) -> None:
    edit_journal(run, "chaos", only(event, put(**values)))
    verdict = judge(run)
    assert (verdict.status, "the records are damaged" in verdict.cause) == ("INCONCLUSIVE", True)


def test_a_pass_without_any_restore_says_so(tmp_path: Path) -> None:
    kills = [Fault(id="F1", rank=0, phase="step", at_step=2, source="faults.schedule[0]")]
    verdict = judge(write_run(tmp_path, kills=kills))
    assert verdict.status == "PASS"
    assert "no checkpoint was restored" in verdict.cause


def test_fault_before_any_step_can_pass(tmp_path: Path) -> None:
    kills = [Fault(id="F1", rank=0, phase="reduce", at_step=1, source="faults.schedule[0]")]
    assert judge(write_run(tmp_path, kills=kills)).status == "PASS"


@pytest.mark.parametrize("leg", ["reference", "chaos"])
@pytest.mark.parametrize(
    ("outcome", "exit_code", "whose"),
    [
        *(("user_error", 4, "yours"), ("recovery_failed", 5, "chaosrun"), ("resources", 7, "machine")),
        *(("timeout", 124, "unknown"), ("interrupted", 130, "nobody")),
    ],
)
def test_leg_that_did_not_complete(run: RunLayout, leg: str, outcome: str, exit_code: int, whose: str) -> None:
    edit_journal(run, leg, only("leg.finished", put(outcome=outcome, message="what happened", hint="what to do")))
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code, verdict.outcome) == ("INCONCLUSIVE", exit_code, outcome)
    assert (verdict.cause, verdict.hint, verdict.blame.whose) == (f"{leg} leg: what happened", "what to do", whose)


def test_reference_that_failed_before_the_chaos_leg_began(run: RunLayout) -> None:
    edit_journal(run, "reference", only("leg.finished", put(outcome="user_error", message="train.py raised at step 7")))
    for path in sorted(run.leg("chaos").path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    verdict = judge(run)
    assert (verdict.exit_code, verdict.cause) == (4, "reference leg: train.py raised at step 7")


def test_death_that_no_rank_died(run: RunLayout) -> None:
    hang = {"event": "death.unplanned", "rank": None, "reason": "no progress for 300 s", "step": None, "error": None}
    edit_journal(run, "chaos", only("fault.observed", lambda line: {**line, **hang} if line["fault"] == "F2" else line))
    verdict = judge(run)
    assert verdict.attempts[1].ended_by == "unplanned death: no progress for 300 s"
    assert verdict.status == "INCONCLUSIVE" and "F2: it was requested" in verdict.cause


def test_inexact_restore_fails_with_its_message(run: RunLayout) -> None:
    edit_journal(run, "chaos", only("leg.finished", put(outcome="inexact_restore", message="head.bias is not the saved one")))
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code, verdict.cause) == ("FAIL", 3, "head.bias is not the saved one")


def test_a_script_that_fails_at_every_restart(run: RunLayout) -> None:
    die_raising(run)
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code, verdict.code) == ("FAIL", 3, "raises_after_restart"), verdict.cause
    assert "fails at every restart after F3 (" in verdict.cause and "rank 1 raised ValueError" in verdict.cause


@pytest.mark.parametrize(
    "error", [{"ours": True}, {"type": "RuntimeError"}, {"type": "UserScriptError"}, {"type": "OutOfMemoryError"}], ids=str
)
def test_an_error_that_need_not_be_of_the_restart_proves_nothing(run: RunLayout, error: dict[str, Any]) -> None:
    """An error of chaosrun, of a device or a network, and what chaosrun refuses."""
    die_raising(run, **error)
    assert judge(run).status == "INCONCLUSIVE"


def test_a_script_that_differs_and_then_fails_at_every_restart(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(keep_rng=False))
    expected = judge(run)
    die_raising(run)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", expected.code), verdict.cause
    assert verdict.place == f"{expected.place}; then rank 1 raised ValueError"


def test_unfinished_leg(run: RunLayout) -> None:
    edit_journal(run, "chaos", only("leg.finished", drop))
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code, verdict.outcome) == ("INCONCLUSIVE", 6, None)


def test_torn_last_line_of_a_killed_rank_is_tolerated(run: RunLayout) -> None:
    path = run.leg("chaos").attempt(1).trace(1)
    record = torn(path)
    with path.open("ab") as file:
        file.write(record)
    assert judge(run).status == "PASS"


def test_damaged_middle_line_is_never_a_pass(run: RunLayout) -> None:
    path = run.leg("chaos").attempt(1).trace(1)
    data, record = path.read_bytes(), torn(path)
    path.write_bytes(data[: -len(record) - 5] + record + b"\xc0" * 9)
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6)
    assert "the records are damaged" in verdict.cause


def test_missing_rank_is_never_a_pass(run: RunLayout) -> None:
    for leg in ("reference", "chaos"):
        for path in run.leg(leg).path.glob("attempts/*/rank-2.trace"):
            path.unlink()
    assert judge(run).status == "INCONCLUSIVE"


def test_empty_traces_are_never_a_pass(run: RunLayout) -> None:
    for leg in ("reference", "chaos"):
        for path in run.leg(leg).path.glob("attempts/*/rank-*.trace"):
            path.write_bytes(b"")
    assert judge(run).status == "INCONCLUSIVE"


def test_missing_step_on_one_rank_fails(run: RunLayout) -> None:
    edit_trace(run, "chaos", 4, 1, only("step", drop, step=10))
    assert judge(run).status == "FAIL"


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_required_check_that_only_skips_or_crashes_is_never_a_pass(
    run: RunLayout, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skipping(_drill: Drill) -> CheckResult:
        return skipped("not today")

    def crashing(_drill: Drill) -> CheckResult:
        raise ZeroDivisionError(name)

    for double in (skipping, crashing):
        double.__name__ = name
        others = tuple(double if check.__name__ == name else check for check in CHECKS)
        monkeypatch.setattr(verdict_module, "run_checks", partial(run_checks, checks=others))
        verdict = judge(run)
        assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6)
        assert name in verdict.cause or "crashed" in verdict.cause


LOOSE = {"weights": {"atol": 1e-6}, "losses": {"atol": 1e-6}}


def test_within_tolerance(tmp_path: Path) -> None:
    off = Bugs(weights_off=1e-9)
    assert judge(write_run(tmp_path / "exact", bugs=off, reference_bugs=Bugs())).status == "FAIL"
    verdict = judge(write_run(tmp_path / "loose", bugs=off, reference_bugs=Bugs(), verify=LOOSE))
    assert (verdict.status, verdict.exact, verdict.divergence) == ("PASS", False, None)
    assert verdict.cause.startswith("within the tolerance of")
    assert verdict.blame.reason == "the job recovered within the tolerances that its job file allows"
    for part, tolerance in LOOSE.items():
        assert not judge(write_run(tmp_path / part, verify={part: tolerance})).exact
    assert {check.name for check in verdict.checks if check.status == "skip"} == {
        "gradients",
        "parameters",
        "final_optimizer",
        "final_scheduler",
        "final_registered",
    }
    weights = next(check for check in verdict.checks if check.name == "final_weights")
    assert 0 < weights.evidence["largest_difference"] < 1e-6


def test_beyond_tolerance(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path, bugs=Bugs(weights_off=1e-2), reference_bugs=Bugs(), verify=LOOSE))
    assert verdict.status == "FAIL"
    assert {"losses", "final_weights"} <= set(failing(verdict))


def test_tolerance_on_losses_alone_leaves_weights_exact(tmp_path: Path) -> None:
    verify = {"losses": {"rtol": 1e-3}}
    verdict = judge(write_run(tmp_path, bugs=Bugs(weights_off=1e-9), reference_bugs=Bugs(), verify=verify))
    assert verdict.status == "FAIL"
    assert "losses" not in failing(verdict) and "final_weights" in failing(verdict)


def test_tolerance_still_sees_rng_and_data(tmp_path: Path) -> None:
    for number, bugs in enumerate((Bugs(keep_rng=False), Bugs(skip_off=1))):
        run = write_run(tmp_path / str(number), bugs=bugs, reference_bugs=Bugs(), verify={"weights": {"atol": 1e9}})
        assert judge(run).status == "FAIL"


def test_tolerance_without_weights_to_compare_is_inconclusive(tmp_path: Path) -> None:
    run = write_run(tmp_path, verify=LOOSE)
    (run.leg("chaos").checkpoints / "step-00000012" / "model.safetensors").unlink()
    verdict = judge(run)
    weights = next(check for check in verdict.checks if check.name == "final_weights")
    assert weights.status == "inconclusive"
    assert verdict.status == "FAIL"
    assert failing(verdict) == ["final_checkpoint"]


@pytest.mark.parametrize(("leg", "status"), [("chaos", "FAIL"), ("reference", "INCONCLUSIVE")])
def test_a_checkpoint_that_goes_after_the_verdict_of_the_run_s_end_is_not_chaosruns_fault(
    run: RunLayout, leg: str, status: str
) -> None:
    run.verdict_json.write_text(json.dumps(judge(run).to_json()))
    shutil.rmtree(run.leg(leg).checkpoints / "step-00000012")
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == (status, "final_checkpoint_invalid", "machine")
    assert "but was intact when the run ended" in verdict.cause and "verdict.json" in (verdict.hint or "")


@pytest.mark.parametrize(
    "verdict", ["", "[]", '{"checks": [1]}', '{"checks": [{"name": "final_checkpoint", "status": "fail"}]}']
)
def test_a_checkpoint_that_no_verdict_found_whole_fails(run: RunLayout, verdict: str) -> None:
    run.verdict_json.write_text(verdict)
    shutil.rmtree(run.leg("chaos").checkpoints / "step-00000012")
    assert failing(judge(run)) == ["final_checkpoint"]


def test_a_damaged_journal_is_the_cause_and_not_that_the_leg_has_not_finished(run: RunLayout) -> None:
    journal = run.leg("chaos").journal
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join((*lines[:3], b"nonsense\n", *lines[4:])))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "records_damaged")
    assert "journal.jsonl:4: not a JSON record" in verdict.cause and "submit the job again" in (verdict.hint or "")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.json", None, "is not a run"),
        ("plan.json", None, "is not a run"),
        ("run.json", "{", "not JSON"),
        ("run.json", "[]", "not a JSON object"),
        ("run.json", '{"spec": {"name": "toy"}}', "spec"),
        ("plan.json", "{}", "not a plan"),
    ],
)
def test_not_a_run(run: RunLayout, name: str, text: str | None, words: str) -> None:
    path = run.path / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UsageError, match=words):
        judge(run)


def test_checkpoints_in_another_storage(run: RunLayout, tmp_path: Path) -> None:
    storage = tmp_path / "elsewhere"
    storage.mkdir()
    run.leg("chaos").checkpoints.rename(storage / "checkpoints")
    assert judge(run).status == "FAIL"
    facts = json.loads(run.run_json.read_bytes())
    run.run_json.write_text(json.dumps({**facts, "storage": {"reference": None, "chaos": str(storage)}}))
    assert judge(run).status == "PASS"


def variants(value: Any) -> Iterator[Any]:
    """The value changed in one place, or with one element missing."""
    match value:
        case bool():
            yield not value
        case int():
            yield value + 1
        case str():
            yield ("1" if value[:1] != "1" else "2") + value[1:]
        case None:
            yield "something"
        case [first, *rest]:
            yield from ([other, *rest] for other in variants(first))
            yield rest
        case dict():
            for key in value:
                yield from ({**value, key: other} for other in variants(value[key]))
                yield {name: kept for name, kept in value.items() if name != key}


NOT_COMPARED = {
    ("start", "time_s"),
    ("step", "time_s"),
    ("checkpoint", "time_s"),
    ("end", "time_s"),
    ("checkpoint", "duration_s"),
    ("start", "params"),  # names the tensor; the 64-bit `param` decides
    ("start", "rng"),  # of a restored attempt: the first step's own decides
    ("buckets", "step"),
}


def test_no_recorded_value_changes_unseen(run: RunLayout) -> None:
    path = run.leg("chaos").attempt(4).trace(1)
    lines = list(read_lines(path))
    unseen: list[tuple[str, str, Any]] = []
    judged = 0
    seen_kinds: set[str] = set()
    for number, line in enumerate(lines):
        if line["kind"] in seen_kinds:
            continue
        seen_kinds.add(line["kind"])
        for key in line:
            if (line["kind"], key) in NOT_COMPARED:
                continue
            for other in variants(line[key]):
                changed = [*lines[:number], {**line, key: other}, *lines[number + 1 :]]
                write_lines(path, changed)
                judged += 1
                if judge(run).status == "PASS":
                    unseen.append((line["kind"], key, other))
    assert seen_kinds == {"start", "buckets", "step", "checkpoint", "end"}
    assert judged > 70
    assert unseen == []
    write_lines(path, lines)
    assert judge(run).status == "PASS"


@pytest.mark.parametrize(
    ("code", "because"),
    [*((code, code) for code in ("no_such_file", "nothing_to_strike", "fewer_operations", "no_loader_worker")), ("said", None)],
)
def test_a_place_that_no_save_has_is_the_plans(code: str, because: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(id="F1", kind="missing_file", rank=0, phase="save", at_step=4, options={}, source="faults.schedule[0]")
    request = SimpleNamespace(attempt=1)
    monkeypatch.setattr(landed, "requests_of", lambda *_: [request])
    drill: Any = SimpleNamespace(chaos=SimpleNamespace(attempts=(), events=lambda _: ()))
    found, more = landed._because(fault, Disproof(code, "the save left no file that matches *x"), drill)
    assert (found, more) == (because, {})
    told = Cause.of("fault_not_shown", because=found, fault="F1", problem="", failing=1, planned=1, which="faults")
    assert told.blame.whose == ("yours" if because else "chaosrun")
