"""Whose fault a verdict is, for every way in which a drill ends."""

import ast
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from legs import KILLS, Bugs, drop, edit_journal, only, put, write_run
from verdicts import PASSED

import chaosrun.verify
from chaosrun.cluster.messages import Exited
from chaosrun.errors import (
    ChaosrunError,
    HookedStateError,
    InvalidCheckpointError,
    LeftApartError,
    OptimizerCastError,
    ParameterOrderError,
    RegisteredStateError,
    ResourcesError,
    RestoreMismatchError,
    UnsafeCheckpointError,
)
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.events import EndCode
from chaosrun.records.heartbeat import Heart
from chaosrun.records.layout import LegLayout
from chaosrun.supervise.deaths import failure_of
from chaosrun.supervise.lifecycle import Audit, Audited, Failure, Finish, Placed, RankDeath, Started, Stopped, begin, decide
from chaosrun.verify.codes import REMEDIES, TABLE, Cause
from chaosrun.verify.row import WHOSE, Blame, Whose
from chaosrun.verify.ruling import END_CODES
from chaosrun.verify.verdict import judge
from tests.sources import parsed


def whose(found: Blame) -> tuple[str, str | None, bool]:
    return found.whose, found.part, found.likely


def test_everybody_has_a_name() -> None:
    assert WHOSE.keys() == set(get_args(Whose))


def test_in_words() -> None:
    assert PASSED.blame.sentence == "nobody's: the job recovered exactly"
    found = Blame(whose="yours", part="script", likely=True, reason="it differs")
    assert found.sentence == "yours (the script), most likely: it differs"
    assert asdict(found) == {"whose": "yours", "likely": True, "part": "script", "reason": "it differs"}


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
    assert whose(verdict.blame) == expected, verdict.cause


@pytest.mark.parametrize(("protocol", "expected"), [("seedable", "chaosrun"), ("plain", "yours")])
def test_an_inexact_protocol_is_the_job_files(tmp_path: Path, protocol: str, expected: str) -> None:
    spec = {"name": "toy", "script": "train.py", "workers": 3, "data": {"resume": protocol}}
    found = judge(write_run(tmp_path, bugs=Bugs(skip_off=-1), reference_bugs=Bugs(), spec=spec)).blame
    assert (found.whose, found.part) == (expected, "job file" if expected == "yours" else None)


# The table


CALLS = {"Cause", "Cause.of", "failed", "inconclusive", "report"}
FOLDER = Path(chaosrun.verify.__path__[0])


def named_codes() -> set[str]:
    """Codes that the sources name, those of faults that did not land among them, and those that are made of a part's name."""
    found: set[str] = set()
    for path in (*FOLDER.glob("*.py"), *(FOLDER.parent / "faults").glob("*.py")):
        texts = {node.value for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.Constant)}
        if path.name[:5] != "code_":
            found |= {text for text in texts if isinstance(text, str)}
    return found | {*get_args(EndCode), *END_CODES.values()}


def made_of(code: str) -> bool:
    """A code of `code_differences` that `causes` puts together."""
    endings = ("_not_restored", "_drifted", "_of_another_rank", "_of_another_step", "_renamed")
    return code.endswith(endings)


def test_every_code_is_found_by_somebody() -> None:
    named = named_codes()
    assert not [code for code in TABLE if "." not in code and code not in named and not made_of(code)]
    assert not [code for code in TABLE if "." in code and named.isdisjoint((code, code.partition(".")[2]))]


def test_every_code_that_is_given_has_a_row() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
                place = 0 if ast.unparse(node.func).startswith("Cause") else 1
                code = node.args[place] if len(node.args) > place else None
                if isinstance(code, ast.Constant):
                    assert code.value in TABLE, f"{path.name}:{node.lineno}: {code.value}"
    assert {*get_args(EndCode), *END_CODES.values()} <= TABLE.keys()


def test_a_code_that_nobody_knows_is_refused() -> None:
    with pytest.raises(AssertionError, match="moon_full is not in the table"):
        _ = Cause.of("moon_full").sentence
    assert "moon_full" not in named_codes() and not made_of("moon_full")


@pytest.mark.parametrize("code", TABLE)
def test_every_row_can_be_told(code: str) -> None:
    row = TABLE[code]
    assert code == code.lower() and " " not in code
    for template in filter(None, (row.sentence, row.hint, row.blame and row.blame.reason)):
        assert not template.endswith("."), template
        for _, name, spec, _ in Formatter().parse(template):
            assert name is None or ((name.isidentifier() and (spec or "").isalnum()) or not spec), template


OF_ATTACHED = {
    *("source_keeps_its_place", "batch_contents", "state_outside"),
    *("result_differs", "hook_changes_state", "raises_after_restart"),
}
"""What is said of scripts that chaosrun restores alone. The contents of batches are told of others by `batch_contents.own`."""


def test_what_a_sentence_names_first_is_no_hint() -> None:
    for code in ("environment_differs", "bits_differ", "records_damaged"):
        hint = Cause.of(code, first="threads was 1, then 2", where="rank 1", more="").hint
        assert hint == TABLE[code].hint, hint


@pytest.mark.parametrize("name", [name for name in TABLE if name.partition(".")[0] in TABLE])
def test_a_script_that_resumes_by_itself_is_not_told_what_chaosrun_would_restore(name: str) -> None:
    code, _, because = name.partition(".")
    hints = " ".join(row.hint or "" for row in TABLE.values())
    fields = {field: 1 if (spec or "").isalpha() else ["x"] for _, field, spec, _ in Formatter().parse(hints) if field}
    params = {field: value for field, value in fields.items() if field not in ("known", *REMEDIES["script"])}
    hint = f"{Cause(code, {**params, 'by': 'script'}, because or None).hint}"
    assert code in OF_ATTACHED or not any(word in hint for word in ("run.register", "prepare", "chaosrun.")), hint


def test_every_difference_has_somebody_to_blame(tmp_path: Path) -> None:
    from chaosrun.verify.code_differences import DIFFERENCE_ROWS

    assert not [code for code, row in DIFFERENCE_ROWS.items() if "." not in code and row.blame is None]


ALONE = {
    "chaosrun": "step_missing wrong_resume_point final_checkpoint_differs bucket_layout_differs",
    "yours": "final_state_differs ended_at_another_step",
    "unknown": "saved_state_differs",
}


@pytest.mark.parametrize(("code", "expected"), [(code, whose) for whose in ALONE for code in ALONE[whose].split()])
def test_a_check_that_fails_alone(code: str, expected: str) -> None:
    row = TABLE[code]
    assert ("unknown" if row.blame is None else row.blame.whose) == expected


# A leg that did not complete


def failed_as(
    leg: LegLayout, *, exit_code: int | None = 1, killed_by: int | None = None, attempt: int = 1, rank: int = 1, **end: Any
) -> Failure:
    """An unplanned death, and the end that its rank wrote down."""
    about = {"completed": False, "status": "failed", "exit_code": 4, "step": 3, "time_s": 1.0, "error": None, **end}
    leg.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    leg.attempt(attempt).end(rank).write_text(json.dumps(about) if end else "")
    exited = Exited(attempt=attempt, rank=rank, pid=1, exit_code=exit_code, signal=killed_by, died_s=0.0)
    failure = failure_of(leg, exited)
    assert failure is not None
    return failure


@pytest.mark.parametrize("of_command", [False, True])
def test_a_rank_of_a_command_is_not_told_to_be_drilled_as_one(tmp_path: Path, of_command: bool) -> None:
    attempt = LegLayout(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    if of_command:
        attempt.launcher_log(0).parent.mkdir(parents=True, exist_ok=True)
        attempt.launcher_log(0).touch()
    hint = f"{failed_as(LegLayout(tmp_path), exit_code=0).hint}"
    assert "another program in its place" in hint and ("drill a script" in hint) == (not of_command)


def ended_as(leg: LegLayout, **end: Any) -> Cause:
    """As the supervisor writes it down."""
    failure = failed_as(leg, **end)
    return Cause(failure.code or END_CODES[failure.outcome], {"leg": "chaos", "message": failure.message})


def test_a_script_that_is_done_and_leaves_with_another_code_than_0_is_told_so(tmp_path: Path) -> None:
    """No crash, and no os._exit: it has written down its end, after its last step."""
    cause = ended_as(LegLayout(tmp_path), exit_code=1, completed=True, status="returned", step=24)
    assert cause.params["message"] == "rank 1 left with exit code 1 after step 24, without an error"


@pytest.mark.parametrize(("exit_code", "may_be"), [(0, "another program in its place"), (9, "a crash in native code")])
def test_what_may_have_ended_a_rank_without_a_record_depends_on_its_exit_code(
    tmp_path: Path, exit_code: int, may_be: str
) -> None:
    assert may_be in (failed_as(LegLayout(tmp_path), exit_code=exit_code).hint or "")


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
    assert whose(ended_as(LegLayout(tmp_path), error=error).blame) == expected


@pytest.mark.parametrize(
    ("attempt", "type_", "step", "ours", "again"),
    [
        (1, "ModuleNotFoundError", 0, False, False),
        (1, "FileNotFoundError", 0, False, False),
        (1, "UnboundLocalError", 0, False, False),
        (1, "UserScriptError", 0, False, False),
        (1, "ConnectionError", 0, False, True),
        (1, "OutOfMemoryError", 0, False, True),
        (1, "RuntimeError", 0, False, True),
        (1, "print", 0, False, True),  # a name of Python's, and no error
        (1, "ModuleNotFoundError", 1, False, True),
        (2, "ModuleNotFoundError", 0, False, True),
        (1, "TypeError", 0, True, True),  # inside chaosrun
    ],
)
def test_an_error_that_comes_whenever_the_script_begins_is_not_tried_again(
    tmp_path: Path, attempt: int, type_: str, step: int, ours: bool, again: bool
) -> None:
    error = {"type": type_, "message": "no", "hint": None, "exit_code": 4, "ours": ours}
    failure = failed_as(LegLayout(tmp_path), exit_code=4, attempt=attempt, step=step, error=error)
    assert failure.refused is not again
    assert ("before its first step" in failure.message) is (step == 0 and type_ != "UserScriptError")
    assert ("at step 1" in failure.message) is (step == 1)
    state, actions = begin(2, 3)
    for event in (Placed(), Audited(resume=None, step=0), Started(), RankDeath(rank=1, failure=failure), Stopped()):
        state, actions = decide(state, event)
    assert isinstance(actions[0], Audit if again else Finish)


NOT_SET = "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set"


@pytest.mark.parametrize(
    ("type_", "message", "ours", "told"),
    [
        ("KeyError", "'RANK'", False, True),
        ("KeyError", "'LOCAL_RANK'", False, True),
        ("ValueError", NOT_SET, False, True),
        ("KeyError", "'RANKING'", False, False),
        ("ValueError", "bad RANK", False, False),
        ("KeyError", "'RANK'", True, False),
    ],
)
def test_a_single_worker_without_a_rank_is_told_how_to_get_one(
    tmp_path: Path, type_: str, message: str, ours: bool, told: bool
) -> None:
    error = {"type": type_, "message": message, "hint": None, "exit_code": 4, "ours": ours}
    failure = failed_as(LegLayout(tmp_path), exit_code=4, rank=0, step=0, error=error)
    assert ("torchrun --nproc_per_node 1" in (failure.hint or "")) is told


@pytest.mark.parametrize(
    ("message", "completed", "time_s", "told"),
    [
        ("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1", True, 1.0, True),
        ("Connection reset by peer", True, 1.0, True),
        ("Connection closed by peer", True, 3.0, False),  # it left afterwards
        ("Connection closed by peer", False, 1.0, False),
        ("bad batch", True, 1.0, False),
    ],
)
def test_who_had_left_is_told_of_a_rank_that_was_left_alone(
    tmp_path: Path, message: str, completed: bool, time_s: float, told: bool
) -> None:
    attempt = LegLayout(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    error = {"type": "RuntimeError", "message": message, "hint": None, "exit_code": 4, "ours": False}
    over = {"completed": completed, "status": "returned", "exit_code": 0, "step": 20, "time_s": time_s, "error": None}
    attempt.end(1).write_text(json.dumps(over))
    for rank in (0, 1):
        attempt.heartbeat(rank).touch()
    failure = failed_as(LegLayout(tmp_path), exit_code=4, rank=0, status="raised", step=20, time_s=2.0, error=error)
    assert ("rank 1 had left at step 20 with exit code 0; the traceback is in" in (failure.hint or "")) is told


@pytest.mark.parametrize(
    ("flags", "free", "told"),
    [
        (os.ST_RDONLY, 1 << 30, ("Read-only file system", "make it writable again")),
        (0, 0, ("No space left on device", "free some space there")),
        (0, 1 << 30, None),
    ],
)
def test_a_rank_that_could_not_record_its_end_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, free: int, told: tuple[str, str] | None
) -> None:
    leg = LegLayout(tmp_path)
    status = SimpleNamespace(f_flag=flags, f_bavail=free, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    failure = failed_as(leg, exit_code=ResourcesError.exit_code)
    if told is None:
        assert (failure.outcome, failure.message.split(" at ")[0]) == ("user_error", "rank 1 left with exit code 7")
        return
    assert failure.outcome == "resources"
    assert failure.message == f"rank 1 stopped at step 0: its records cannot be written to {tmp_path}: {told[0]}"
    assert failure.hint and failure.hint.startswith(told[1])


@pytest.mark.parametrize("exit_code", [None, 0, 1, ResourcesError.exit_code])
def test_a_rank_whose_end_a_failing_disk_refused_is_told_so(tmp_path: Path, exit_code: int | None) -> None:
    """With EIO the disk has space and takes writes; a rank of a command leaves with any code."""
    leg, heart = LegLayout(tmp_path), Heart()
    heart.open(leg.attempt(1).heartbeat(1))
    heart.beat("ended", 9)
    assert failed_as(leg, exit_code=exit_code).outcome != "resources"
    heart.beat("unrecorded", 9)
    failure = failed_as(leg, exit_code=exit_code)
    assert failure.outcome == "resources"
    assert failure.message == f"rank 1 stopped at step 0: its records cannot be written to {tmp_path}: its log may say why"
    assert failure.hint and failure.hint.startswith("have the disk looked at")
    assert failed_as(leg, exit_code=exit_code, completed=True).outcome == "resources"


def test_deaths_that_nobody_planned(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path)
    told = [
        (ended_as(leg, exit_code=None, killed_by=9), "machine"),
        (ended_as(leg, exit_code=None, killed_by=40), "machine"),  # a real-time signal, which has no name
        (ended_as(leg, exit_code=None, killed_by=11), "yours"),
        (ended_as(leg, exit_code=None), "machine"),
        (ended_as(leg, error=raised(RestoreMismatchError("rank 1: model is not what it was"))), "chaosrun"),
        (ended_as(leg, status="preempted", told=1), "machine"),
        (ended_as(leg, error=raised(InvalidCheckpointError("step-00000004: model.safetensors is missing"))), "machine"),
        (ended_as(leg, error=raised(UnsafeCheckpointError("a.pt: holds more than tensors and plain values: a.B"))), "yours"),
        (ended_as(leg, error=raised(LeftApartError("rank 1 had done step 4"))), "yours"),
        (ended_as(leg, error=raised(RegisteredStateError("rank 1: registered is not what it was"))), "yours"),
        (ended_as(leg, error=raised(ParameterOrderError("rank 1: the optimizer's parameter 0 is b"))), "yours"),
        (ended_as(leg, error=raised(HookedStateError("rank 1: model is not what it was"))), "yours"),
        (ended_as(leg, error=raised(OptimizerCastError("rank 1: optimizer is not what it was"))), "library"),
        (Cause("unkillable"), "machine"),
        (Cause("node_lost"), "machine"),
        (Cause("hung"), "yours"),
        (Cause("recovery_failed"), "chaosrun"),
    ]
    for cause, expected in told:
        assert cause.blame.whose == expected, cause


def test_a_live_run_is_nobodys_and_a_damaged_one_the_machines(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    edit_journal(run, "chaos", only("leg.finished", drop))
    assert judge(run).blame.whose == "nobody"
    trace = run.leg("chaos").attempt(2).trace(1)
    trace.write_bytes(trace.read_bytes()[:2000] + b"\0\0\n{}\n")
    assert whose(judge(run).blame) == ("machine", None, True)


DOUBTS = {
    ("yours", "script", False): "undisturbed_runs_differ job_not_repeatable reference_raised batches_all_alike",
    ("yours", "script", True): "loss_nan parameters_constant",
    ("yours", "command", False): "reference_of_another_job",
    ("yours", "plan", False): "no_fault_planned faults_too_late",
    ("yours", "plan", True): "corruption_unseen",
    ("planned", None, False): "corruption_injected",
    ("machine", None, False): "environment_differs",
    ("machine", None, True): "records_damaged reference_interrupted",
    ("chaosrun", None, False): "check_crashed",
    (
        "chaosrun",
        None,
        True,
    ): "first_attempt_restored environment_not_recorded fault_in_reference records_lacking checks_missing",
}


@pytest.mark.parametrize(("code", "expected"), [(code, blamed) for blamed in DOUBTS for code in DOUBTS[blamed].split()])
def test_doubts(code: str, expected: tuple[str, str | None, bool]) -> None:
    found = TABLE[code].blame
    assert found is not None and whose(found) == expected


@pytest.mark.parametrize(
    ("because", "expected"),
    [
        ("never_due", ("yours", "plan", False)),
        ("never_due_by_time", ("yours", "plan", True)),
        ("never_reached", ("yours", "plan", True)),
        ("unread", ("yours", "plan", False)),
        ("used", ("chaosrun", None, False)),
        ("other_death", ("machine", None, False)),
        (None, ("chaosrun", None, True)),
    ],
)
def test_a_fault_that_did_not_land(because: str | None, expected: tuple[str, str | None, bool]) -> None:
    found = Cause("fault_not_shown", {"fault": "F2", "death": "a node was lost", "late": ["F2"], "end": 9}, because).blame
    assert whose(found) == expected and "F2" in found.reason


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("killed", "machine"),
        ("node_lost", "machine"),
        # It may be the fault's own doing, not known again.
        ("out_of_memory", "chaosrun"),
        (None, "chaosrun"),
    ],
)
def test_a_fault_whose_attempt_something_else_ended(tmp_path: Path, code: str | None, expected: str) -> None:
    run = write_run(tmp_path)
    death = {"event": "death.unplanned", "code": code, "reason": "it died", "error": None}

    def unseen(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, **death} if line["fault"] == "F2" else line

    edit_journal(run, "chaos", only("fault.observed", unseen))
    verdict = judge(run)
    assert verdict.code == "fault_not_shown" and verdict.blame.whose == expected
    assert ("run it again" in verdict.blame.reason) == (expected == "machine")


def test_a_fault_that_the_training_did_not_live_to_see(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    plan = FaultPlan(seed=0, faults=(*KILLS, replace(KILLS[0], id="F9", at_step=600)))
    run.plan_json.write_text(json.dumps(plan.to_json()))
    edit_journal(run, "chaos", only("leg.started", put(plan=plan.digest())))
    verdict = judge(run)
    assert (verdict.code, verdict.blame.reason) == ("fault_not_shown", "the training ended before F9 was due")
    assert "before F9: plan them earlier" in (verdict.hint or "")


def test_a_lost_fault_in_a_run(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path, bugs=Bugs(lost_fault="F2")))
    assert verdict.status == "INCONCLUSIVE"
    # It never fired, and something else killed its rank: the files do not say whether the plan or chaosrun is to blame.
    assert verdict.blame.likely
