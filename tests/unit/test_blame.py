"""Whose fault a verdict is, for every way in which a drill ends."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from legs import Bugs, drop, edit_journal, edit_trace, only, put, write_run
from verdicts import PASSED

from chaosrun.errors import ChaosrunError, InvalidCheckpointError, RecoveryError
from chaosrun.records.heartbeat import Heartbeat
from chaosrun.records.layout import LegLayout
from chaosrun.supervise.deaths import failure_of
from chaosrun.supervise.hangs import SeenRank, Silence, Standstill
from chaosrun.verify import causes, ledger
from chaosrun.verify.account import AttemptSummary, FaultOutcome
from chaosrun.verify.blame import WHOSE, Blame, Whose, blame
from chaosrun.verify.check import Check, failed, inconclusive
from chaosrun.verify.corruption import CAUSE
from chaosrun.verify.divergence import Divergence
from chaosrun.verify.replicas import DRIFT_HINT
from chaosrun.verify.verdict import Verdict, judge

DIVERGED = Divergence(step=5, rank=0, ranks=(0, 1), attempt=2, kind="loss", cause="forward pass", hint="")


def whose(found: Blame) -> tuple[str, str | None, bool]:
    return found.whose, found.part, found.likely


def doubt(cause: str, *checks: Check, outcome: Any = "completed", hint: str | None = None, **more: Any) -> Verdict:
    return replace(PASSED, status="INCONCLUSIVE", exit_code=6, cause=cause, checks=checks, outcome=outcome, hint=hint, **more)


def doubtful(name: str, summary: str, **evidence: Any) -> Verdict:
    check = inconclusive(name, summary, **evidence)
    return doubt(f"{name}: {summary}", check)


def test_everybody_has_a_name() -> None:
    assert WHOSE.keys() == set(get_args(Whose))


def test_in_words() -> None:
    assert blame(PASSED).sentence == "nobody's: the job came back exactly"
    found = Blame(whose="yours", part="script", likely=True, reason="it differs")
    assert found.sentence == "yours (the script), most likely: it differs"
    assert found.to_json() == {"whose": "yours", "likely": True, "part": "script", "reason": "it differs"}


# A FAIL


@pytest.mark.parametrize(
    ("bugs", "expected"),
    [
        # What chaosrun puts back.
        (Bugs(keep_rng=False), ("chaosrun", None, True)),
        (Bugs(keep_weights=False), ("chaosrun", None, True)),
        (Bugs(keep_optimizer=False), ("chaosrun", None, True)),
        (Bugs(keep_buffers=False), ("chaosrun", None, True)),
        (Bugs(batches_off=-2), ("chaosrun", None, False)),
        (Bugs(skip_off=1), ("chaosrun", None, True)),
        (Bugs(stale_checkpoint=True), ("chaosrun", None, True)),
        # What the script has to see to.
        (Bugs(keep_scheduler=False), ("yours", "script", True)),
        (Bugs(keep_registered=False), ("yours", "script", False)),
        (Bugs(keep_augmentation=False), ("yours", "script", False)),
        (Bugs(random_script=True), ("yours", "script", False)),
        (Bugs(drifting_rank=2), ("chaosrun", None, True)),
    ],
)
def test_runs_that_differ(tmp_path: Path, bugs: Bugs, expected: tuple[str, str | None, bool]) -> None:
    verdict = judge(write_run(tmp_path, bugs=bugs, reference_bugs=Bugs()))
    assert verdict.status != "PASS"
    assert whose(blame(verdict)) == expected, verdict.cause


@pytest.mark.parametrize(("protocol", "expected"), [("seedable", "chaosrun"), ("plain", "yours")])
def test_an_inexact_protocol_is_the_job_files(tmp_path: Path, protocol: str, expected: str) -> None:
    spec = {"name": "toy", "script": "train.py", "workers": 3, "data": {"resume": protocol}}
    found = blame(judge(write_run(tmp_path, bugs=Bugs(skip_off=-1), reference_bugs=Bugs(), spec=spec)))
    assert (found.whose, found.part) == (expected, "job file" if expected == "yours" else None)


def test_replicas_that_drift_undisturbed_are_the_scripts(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for leg in ("reference", "chaos"):
        edit_trace(run, leg, 1, 2, only("step", put(param="0" * 16), step=3))
    verdict = judge(run)
    assert verdict.hint == DRIFT_HINT
    assert whose(blame(verdict)) == ("yours", "script", False)
    failure = doubt("chaos leg: the replicas had drifted apart (…) when rank 1 raised", outcome="user_error", hint=DRIFT_HINT)
    assert blame(failure) == blame(verdict)


def test_a_corruption_that_was_found_is_as_planned() -> None:
    found = blame(replace(PASSED, status="FAIL", cause=f"{CAUSE}: F1 flipped bit 3 of w[1]", divergence=DIVERGED))
    assert whose(found) == ("planned", None, False)
    # One that hides a wrong recovery is not.
    beside = "data_order: …, which no corruption explains; besides, F1 flipped bit 3"
    checks = (failed("data_order", "…"), failed("silent_corruption", "F1 flipped bit 3"))
    assert blame(replace(PASSED, status="FAIL", cause=beside, checks=checks)).whose != "planned"


@pytest.mark.parametrize(("component", "expected"), [("registered", "yours"), ("model", "chaosrun"), ("rng", "chaosrun")])
def test_an_inexact_restore(component: str, expected: str) -> None:
    cause = f"rank 1: {component} is not what checkpoint step-00000004 holds: 'x' was 1 when saved and is 2 after the restore"
    assert blame(replace(PASSED, status="FAIL", outcome="inexact_restore", cause=cause)).whose == expected


def causes_in(module: Any) -> set[str]:
    """What its differences are called."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("Cause", "Displacement"):
            named = [key.value for key in node.keywords if key.arg == "cause"]
            found |= {said for value in [*node.args[:1], *named] for said in spelt(value)}
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "cause":
            found |= set(spelt(node.value))
    return found


def spelt(value: ast.expr) -> list[str]:
    if isinstance(value, ast.Constant):
        return [str(value.value)]
    if isinstance(value, ast.IfExp):
        return [*spelt(value.body), *spelt(value.orelse)]
    if isinstance(value, ast.JoinedStr):
        return ["".join(map(filled, value.values))]
    return []


def filled(part: ast.expr) -> str:
    """A part of an f-string; in the place of a value something that fits there."""
    if isinstance(part, ast.FormattedValue):
        return (*spelt(part.value), "optimizer state")[0]
    return spelt(part)[0]


COMPONENTS = {
    "weights",
    "buffers",
    "GradScaler",
    "learning rate",
    "optimizer settings",
    "optimizer state",
    "LR scheduler",
    "RNG",
}
"""Named by `causes._component` and never alone: always "… not restored" or "… drifted"."""


def test_every_cause_has_somebody_to_blame() -> None:
    known = causes_in(causes) - COMPONENTS - {"registered state"}
    assert {"RNG not restored", "forward pass", "another checkpoint restored", "optimizer state not restored"} <= known
    unknown = [cause for cause in known if of_cause(cause, "loss").whose == "unknown"]
    assert not unknown
    placed = causes_in(ledger)
    assert {"data order not restored", "sampler epoch ahead", "data of another rank"} <= placed
    assert not [cause for cause in placed if of_cause(cause, "data order").whose == "unknown"]
    # The control: one that nobody has thought of.
    assert of_cause("the moon was full", "loss").whose == "unknown"


def of_cause(cause: str, kind: Any) -> Blame:
    return blame(replace(PASSED, status="FAIL", cause=cause, divergence=replace(DIVERGED, cause=cause, kind=kind)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lineage", "chaosrun"),
        ("resume_points", "chaosrun"),
        ("final_checkpoint", "chaosrun"),
        ("final_weights", "yours"),
        ("final_registered", "yours"),
        ("completed", "yours"),
        ("bucket_layout", "chaosrun"),
        ("moon", "unknown"),
    ],
)
def test_a_check_that_fails_alone(name: str, expected: str) -> None:
    verdict = replace(PASSED, status="FAIL", cause=f"{name}: differs", checks=(failed("other", ""), failed(name, "differs")))
    assert blame(verdict).whose == expected


# An INCONCLUSIVE


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (None, "nobody"),
        ("interrupted", "nobody"),
        ("user_error", "yours"),
        ("resources", "machine"),
        ("timeout", "unknown"),
    ],
)
def test_a_leg_that_did_not_complete(outcome: str | None, expected: str) -> None:
    assert blame(doubt("chaos leg: it ended", outcome=outcome)).whose == expected


def ended_as(leg: LegLayout, *, exit_code: int | None = 1, killed_by: int | None = None, **end: Any) -> str:
    """The message of an unplanned death, as the supervisor writes it."""
    about = {"completed": False, "status": "failed", "step": 3, "time_s": 1.0, "error": None, **end}
    leg.attempt(1).path.mkdir(parents=True, exist_ok=True)
    leg.attempt(1).end(1).write_text(json.dumps(about) if end else "")
    failure = failure_of(leg, attempt=1, rank=1, exit_code=exit_code, killed_by=killed_by)
    assert failure is not None
    return failure.message


def raised(error: ChaosrunError) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}


@pytest.mark.parametrize(
    ("type_", "message", "ours", "expected"),
    [
        ("ValueError", "bad batch", False, ("yours", "script", False)),
        ("AttributeError", "'NoneType' object has no attribute 'step'", True, ("chaosrun", None, True)),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", False, ("yours", "script", True)),
        ("OSError", "[Errno 5] Input/output error: '/data/a'", False, ("yours", "script", True)),
    ],
)
def test_errors_that_end_the_training(
    tmp_path: Path, type_: str, message: str, ours: bool, expected: tuple[str, str | None, bool]
) -> None:
    error = {"type": type_, "message": message, "hint": None, "exit_code": 4, "ours": ours}
    told = ended_as(LegLayout(tmp_path), error=error)
    assert whose(blame(doubt(f"chaos leg: {told}", outcome="user_error"))) == expected


def test_ranks_that_cannot_leave_together_are_the_scripts(tmp_path: Path) -> None:
    said = "rank 1 had done step 4 when rank 0, told to leave, announced the end of step 2"
    told = ended_as(LegLayout(tmp_path), error=raised(RecoveryError(said)))
    assert blame(doubt(f"chaos leg: {told}", outcome="recovery_failed")).whose == "yours"


def test_a_pass_within_tolerances_is_not_called_exact(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path, verify={"weights": {"atol": 1e-6}}))
    assert verdict.status == "PASS" and not verdict.exact and PASSED.exact
    assert blame(verdict).reason == "the job came back within the tolerances that its job file allows"


def test_deaths_that_nobody_planned(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path)
    told = {
        ended_as(leg, exit_code=None, killed_by=9): "machine",
        ended_as(leg, exit_code=None, killed_by=40): "machine",  # a real-time signal, which has no name
        ended_as(leg, exit_code=None): "machine",
        ended_as(leg, status="preempted", told=1): "machine",
        ended_as(leg, error=raised(InvalidCheckpointError("step-00000004: model.safetensors is missing"))): "machine",
        ended_as(leg, error=raised(InvalidCheckpointError("a.pt: holds more than tensors and plain values: a.B"))): "yours",
        "processes of attempt 2 on node 1234 did not go within 30 s of SIGKILL": "machine",
        hang().message("/train.py"): "yours",
        "something that nobody has thought of": "chaosrun",
    }
    for message, expected in told.items():
        cause = f"chaos leg: {message} (after 3 unplanned restarts without progress)"
        assert blame(doubt(cause, outcome="recovery_failed")).whose == expected, message


def hang() -> Standstill:
    beat = Heartbeat(count=2, step=3, stage="forward", silent_s=40.0, first={}, longest={})
    ranks = tuple(SeenRank(rank=rank, beat=beat, pid=7, state="S", wchan=None, stack=()) for rank in range(2))
    return Standstill(attempt=1, silence=Silence(silent_s=40.0, patience_s=20.0), ranks=ranks)


def test_a_live_run_is_nobodys_and_a_damaged_one_the_machines(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    edit_journal(run, "chaos", only("leg.finished", drop))
    assert blame(judge(run)).whose == "nobody"
    trace = run.leg("chaos").attempt(2).trace(1)
    trace.write_bytes(trace.read_bytes()[:2000] + b"\0\0\n{}\n")
    assert whose(blame(judge(run))) == ("machine", None, True)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (doubt("two undisturbed runs of this job already differ: loss at step 3"), ("yours", "script", False)),
        (doubt("the reference of run a-1 is not this job's, whose …: loss"), ("yours", "command", False)),
        (doubtful("reproducible", "the job does not repeat itself: loss differs"), ("yours", "script", False)),
        (doubtful("reproducible", "the first attempt of the chaos leg went on from a checkpoint"), ("chaosrun", None, True)),
        (doubtful("records", "the records are damaged: x", problems=["x"]), ("machine", None, True)),
        (doubtful("environment", "the legs ran in different environments", differences={}), ("machine", None, False)),
        (
            doubtful("environment", "the environment of the chaos leg was not recorded", legs=["chaos"]),
            ("chaosrun", None, True),
        ),
        (doubtful("reference", "the reference leg was interrupted", attempts=2), ("machine", None, True)),
        (doubtful("reference", "a fault struck the reference leg", faults=["F1"]), ("chaosrun", None, True)),
        (doubtful("losses", "check crashed: KeyError: 1", crashed=True), ("chaosrun", None, False)),
        (doubtful("losses", "only 3 of 9 records could be compared"), ("chaosrun", None, True)),
        (doubtful("losses", "the loss is NaN from step 3 to the end"), ("yours", "script", True)),
        (doubtful("data_order", "every batch has the same bytes"), ("yours", "script", False)),
        (doubtful("parameters", "the parameters never changed"), ("yours", "script", True)),
        (doubtful("silent_corruption", "F1 …, and nothing that is compared shows it"), ("yours", "plan", True)),
        (doubtful("faults_landed", "no fault was planned", planned=0), ("yours", "plan", False)),
        (doubtful("faults_landed", "none of the 2 planned faults came", planned=2, outrun=["F1"]), ("yours", "plan", False)),
        (doubtful("moon", "it was full"), ("unknown", None, False)),
        (doubt("not shown: final_rng"), ("chaosrun", None, True)),
    ],
)
def test_doubts(verdict: Verdict, expected: tuple[str, str | None, bool]) -> None:
    assert whose(blame(verdict)) == expected


@pytest.mark.parametrize(
    ("problem", "step", "expected"),
    [
        ("it never fired", 99, ("yours", "plan", False)),
        ("it never fired", 3, ("yours", "plan", True)),
        ("it never fired", None, ("yours", "plan", True)),
        ("step-00000008 was damaged, but no attempt started after that, so nobody read it", 8, ("yours", "plan", False)),
        ("step-00000008 was damaged, and an attempt went on from it", 8, ("chaosrun", None, False)),
        ("it was requested, but nobody saw it happen", 8, ("chaosrun", None, True)),
        ("process 7 was struck, rank 1 of attempt 1 was process 8", 8, ("chaosrun", None, True)),
    ],
)
def test_a_fault_that_did_not_land(problem: str, step: int | None, expected: tuple[str, str | None, bool]) -> None:
    fault = FaultOutcome(
        id="F2", description="…", rank=0, phase="step", step=step, attempt=None, landed=False, problem=problem, kind="kill"
    )
    check = inconclusive("faults_landed", f"F2: {problem}", planned=2, problems={"F2": problem})
    verdict = doubt(f"faults_landed: F2: {problem}", check, faults=(fault,))
    assert whose(blame(verdict)) == expected


@pytest.mark.parametrize(
    ("ended_by", "expected"),
    [
        ("unplanned death of rank 0: rank 0 was killed by SIGKILL at step 9, and no fault was planned for it", "machine"),
        ("unplanned death: the agent on node 4147af1a died: The actor died unexpectedly", "machine"),
        # It may be the fault's own doing, not known again.
        ("unplanned death of rank 1: rank 1 raised RuntimeError at step 9: lost", "chaosrun"),
        ("F1 (SIGKILL rank 1 after step 9)", "chaosrun"),
    ],
)
def test_a_fault_whose_attempt_something_else_ended(ended_by: str, expected: str) -> None:
    problem = "it was requested, but nobody saw it happen"
    fault = FaultOutcome(
        id="F2", description="…", rank=1, phase="step", step=9, attempt=1, landed=False, problem=problem, kind="stop"
    )
    attempt = AttemptSummary(
        attempt=1,
        resumed_from=None,
        resumed_step=0,
        first_step=1,
        last_step=9,
        ended_by=ended_by,
        lost_steps=1,
        recovery_s=None,
        ranks=2,
    )
    check = inconclusive("faults_landed", f"F2: {problem}", planned=1, problems={"F2": problem})
    found = blame(doubt(f"faults_landed: F2: {problem}", check, faults=(fault,), attempts=(attempt,)))
    assert found.whose == expected
    assert ("run it again" in found.reason) == (expected == "machine")


def test_a_time_that_never_came() -> None:
    problem = "it never fired"
    late = FaultOutcome(
        id="F2", description="…", rank=0, phase=None, step=None, attempt=None, landed=False, problem=problem, kind="kill"
    )
    check = inconclusive("faults_landed", f"F2: {problem}", planned=2, problems={"F2": problem})
    found = blame(doubt(f"faults_landed: F2: {problem}", check, faults=(late,)))
    assert (found.part, found.reason) == ("plan", "the training ended before F2 was due")


def test_a_lost_fault_in_a_run(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path, bugs=Bugs(lost_fault="F2")))
    assert verdict.status == "INCONCLUSIVE"
    # It never fired, and something else killed its rank: the files do not say whether the plan or chaosrun is to blame.
    assert blame(verdict).likely
