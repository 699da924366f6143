"""The account for people: every fact that a reader needs is there, at 80 columns and at 40, with and without colour."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import verdicts
from verdicts import check_that, saying, script_failed

from chaosrun.api import RunSummary
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.events import Outcome, RaisedError
from chaosrun.records.layout import RunLayout
from chaosrun.report.output import has_colour, rendered
from chaosrun.report.text import job_sentence, render_line, render_plan, render_runs, render_text
from chaosrun.report.view import read_view
from chaosrun.spec.model import JobSpec
from chaosrun.verify.check import CheckResult, Divergence
from chaosrun.verify.codes import Cause
from chaosrun.verify.summaries import AttemptSummary, FaultOutcome
from chaosrun.verify.verdict import Verdict
from tests.unit.run_files import tell, write_info

RUN_ID = "bytelm-20260102-030405"

LANDED = FaultOutcome(
    **{"id": "F1", "description": "SIGKILL rank 1 after step 17", "rank": 1, "phase": "step", "step": 17, "kind": "kill"},
    **{"attempt": 1, "landed": True, "problem": None, "evidence": "pid 4211: SIGKILL"},
)
MISSING = FaultOutcome(
    **{"id": "F2", "description": "SIGKILL rank 0 inside the gradient all-reduce of step 44", "rank": 0, "phase": "reduce"},
    **{"step": 44, "kind": "kill", "attempt": None, "landed": False, "problem": "it never fired"},
)
KILLED = "F1 (SIGKILL rank 1 after step 17)"
FIRST = replace(verdicts.ATTEMPT, last_step=17, ended_by=KILLED, lost_steps=7, ranks=3, faults=("F1",))
SECOND = AttemptSummary(
    **{"attempt": 2, "resumed_from": "step-00000010", "resumed_step": 10, "first_step": 11, "last_step": 90},
    **{"ended_by": "completed", "lost_steps": 0, "recovery_s": 0.187, "ranks": 3},
)
CHECKS: tuple[CheckResult, ...] = (
    check_that("completed", "pass", "both legs ended at step 90 on every rank"),
    check_that("gradients", "pass", "270 step records, equal"),
    check_that("final_scheduler", "skip", "no scheduler is registered"),
)
PASSED = replace(
    verdicts.PASSED,
    headline="bit-identical to the reference run: 90 steps on 3 ranks, 1 fault",
    checks=CHECKS,
    faults=(LANDED,),
    attempts=(FIRST, SECOND),
    steps=90,
    lost_steps=7,
)
DIVERGENCE = Divergence(
    step=11,
    ranks=(0, 1, 2),
    attempt=2,
    kind="learning rate",
    reason=Cause.of("lr_scheduler_not_restored", because="used", where="the optimizer used the learning rate of step 1"),
    tensor="blocks.0.attn.qkv.weight",
    expected=((0.001).hex(),),
    seen=((0.0001).hex(),),
)
FAILED = replace(
    PASSED,
    status="FAIL",
    exit_code=3,
    reason=DIVERGENCE.reason,
    headline="LR scheduler not restored",
    place="first difference: step 11, rank 0, attempt 2",
    hint="pass the scheduler to run.register",
    checks=(
        *CHECKS,
        check_that("lr", "fail", "learning rate of step 11 differs"),
        check_that("rng", "inconclusive", "check crashed: KeyError: 1"),
    ),
    divergence=DIVERGENCE,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    monkeypatch.chdir(tmp_path)
    layout = RunLayout(tmp_path / ".chaosrun" / "runs" / RUN_ID)
    layout.path.mkdir(parents=True)
    info: dict[str, Any] = {"job": str(tmp_path / "jobs" / "job.yaml"), "overrides": ("faults.seed=7", "args=[a b]")}
    write_info(layout, FaultPlan(seed=7), **info, spec={"name": "bytelm", "workers": 3, "max_steps": 90})
    seen = {"fault": "F1", "attempt": 1, "rank": 1, "pid": 4211, "how": "death", "exit_code": None, "signal": 9}
    tell(layout, {"event": "leg.started", "workers": 3, "supervisor_pid": 1}, {"event": "fault.observed", **seen})
    return layout


def text(verdict: Verdict, run: RunLayout, *, width: int = 80, whole: bool = False) -> str:
    return rendered(render_text(read_view(run, verdict), whole=whole), width=width, colour=False)


def test_nothing_that_a_run_wrote_commands_a_terminal(run: RunLayout) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m"
    faults = (replace(LANDED, description=evil, evidence=evil), replace(MISSING, problem=evil))
    attempts = (replace(FIRST, ended_by=evil), SECOND)
    divergence = replace(DIVERGENCE, tensor=evil, reason=saying(evil), expected=evil)
    checks = (check_that("lr", "fail", evil),)
    bad = replace(FAILED, headline=evil, hint=evil, faults=faults, attempts=attempts, divergence=divergence, checks=checks)
    for width in (40, 120):
        page = rendered(render_text(read_view(run, bad)), width=width, colour=True)
        assert "\x07" not in page and "red" in page
        assert not re.search(r"\x1b(?!\[[0-9;]*m)", page)
    assert "\x1b" not in text(bad, run)


HEAD = "run bytelm-20260102-030405  bytelm, 3 workers\n"
FIVE_LINES = """\
faults    1 of 1 landed (kill); 7 steps done again, recovery 0.19 s
PASS      bit-identical to the reference run: 90 steps on 3 ranks, 1 fault
report    .chaosrun/runs/bytelm-20260102-030405/report.html
repeat    chaosrun submit jobs/job.yaml faults.seed=7 'args=[a b]'
"""


def test_a_pass_is_five_lines(run: RunLayout) -> None:
    run.report_html.write_text("<html>")
    assert text(PASSED, run) == HEAD + FIVE_LINES


def test_the_whole_of_a_pass(run: RunLayout) -> None:
    run.report_html.write_text("<html>")
    tables = """
Faults: 1 of 1 landed
  fault  what                          where               evidence
  F1     SIGKILL rank 1 after step 17  attempt 1, step 17  pid 4211: SIGKILL

Attempts: 2, 7 steps lost and done again, recovery 0.19 s
  #  resumed from   steps  ended by   lost  recovery
  1  the beginning  1-17   fault F1      7         -
  2  step-00000010  11-90  completed     -    0.19 s

Checks: 2 passed, 1 skipped
  pass  completed        both legs ended at step 90 on every rank
  pass  gradients        270 step records, equal
  skip  final_scheduler  no scheduler is registered

"""
    assert text(PASSED, run, whole=True) == HEAD + tables + FIVE_LINES


@pytest.mark.parametrize("verdict", [PASSED, FAILED])
def test_a_line_for_who_wants_no_more(run: RunLayout, verdict: Verdict) -> None:
    line = rendered(render_line(read_view(run, verdict)), width=40, colour=False)
    assert line == f"{verdict.status}  {RUN_ID}: {verdict.cause}\n"


def test_fail_shows_what_differed_first(run: RunLayout) -> None:
    account = text(FAILED, run, width=120, whole=True)
    assert "Checks: 1 failed, 1 inconclusive, 2 passed, 1 skipped" in account
    checks = account[account.index("Checks:") :].splitlines()[1:]
    assert [line.split()[0] for line in checks[:5]] == ["fail", "inconclusive", "pass", "pass", "skip"]
    divergence = account[account.index("First divergence") : account.index("\nblame")]
    assert "step 11, ranks 0, 1, 2, attempt 2" in divergence
    assert "blocks.0.attn.qkv.weight" in divergence
    assert "expected   [0.001 (0x1.0624dd2f1a9fcp-10)]" in divergence
    assert "seen       [0.0001 (" in divergence
    assert "LR scheduler not restored" in divergence
    assert f"inspect   chaosrun logs {RUN_ID} --leg chaos --attempt 2 --rank 0\n" in account
    assert "hint      pass the scheduler to run.register" in account


def test_a_fail_is_told_in_the_order_in_which_it_is_asked(run: RunLayout) -> None:
    run.report_html.write_text("<html>")
    lines = text(FAILED, run, width=120).splitlines()
    labels = [line[2 if line.startswith("  ") else 0 :].split("  ")[0] for line in lines if not line.startswith("run ")]
    assert [label for label in labels if label] == [
        *(
            "faults",
            "FAIL",
            "First divergence",
            "where",
            "kind",
            "tensor",
            "expected",
            "seen",
            "distance",
            "cause",
            "in detail",
        ),
        *("blame", "hint", "checks", "report", "inspect", "diagnose", "repeat"),
    ]
    assert "FAIL      LR scheduler not restored" in lines and f"{'':10}rng: check crashed: KeyError: 1" in lines


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), None),
        (("final_weights_differ",), "1 further check differs as a consequence"),
        (("final_weights_differ", "ended_at_another_step", "replay_differs"), "3 further checks differ as a consequence"),
    ],
)
def test_what_follows_from_the_first_divergence_is_a_line(run: RunLayout, more: tuple[str, ...], said: str | None) -> None:
    told = [replace(check_that(f"check_{code}", "fail", f"{code} it is"), cause=Cause(code)) for code in more]
    other = replace(check_that("bucket_layout", "fail", "another layout"), cause=Cause("bucket_layout_differs"))
    own = replace(check_that("lr", "fail", "differs"), cause=Cause("records_differ"))
    account = text(replace(FAILED, checks=(*CHECKS, *told, own, other)), run, width=120)
    assert ("as a consequence" in account) == (said is not None) and (said or "") in account
    # What may be another fault is not folded away; what is, is not told one by one.
    assert "bucket_layout: another layout" in account and "it is" not in account and "lr: differs" not in account
    # Without a first divergence nothing follows from anything.
    alone = text(replace(FAILED, divergence=None, checks=(*CHECKS, *told, other)), run, width=120)
    assert "as a consequence" not in alone and all(f"{code} it is" in alone for code in more)


def test_a_diagnosis_is_promised_only_where_there_is_one(run: RunLayout) -> None:
    unnamed = replace(FAILED, divergence=replace(DIVERGENCE, kind="gradient", tensor=None))
    assert "not recorded at this step: `chaosrun diagnose` names it" in text(unnamed, run, width=120)
    (run.path / "run").mkdir()
    told = text(unnamed, run, width=120)
    assert "not recorded at this step" in told and "diagnose" not in told


def test_whose_fault_it_is_follows_the_divergence(run: RunLayout) -> None:
    blame = "blame     yours (the script), most likely: its learning rate scheduler is neither prepared nor registered\n"
    before, _, after = text(FAILED, run, width=120).partition(blame)
    assert before.endswith("or pass it to run.register\n\n") and after.startswith("hint  ")
    assert "blame" not in text(PASSED, run)


def test_the_page_is_named_where_there_is_one(run: RunLayout) -> None:
    assert "report  " not in text(PASSED, run)
    run.report_html.write_text("<html>")
    assert f"\nreport    .chaosrun/runs/{RUN_ID}/report.html\nrepeat  " in text(PASSED, run)


def test_a_run_in_production_names_the_folder_in_which_its_script_left_files(run: RunLayout) -> None:
    work = run.leg("run").work
    work.mkdir(parents=True)
    (work / "data").symlink_to(run.path)
    (work / "empty").mkdir()
    for kind, made, told in (("run", "data/old.pt", False), ("run", "last.pt", True), ("drill", "last.pt", False)):
        run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_bytes()), "kind": kind}))
        (work / made).touch()
        named = f"\nfiles     .chaosrun/runs/{RUN_ID}/run/folders/above/work\n"
        assert (named in text(PASSED, run), "files  " in text(PASSED, run)) == (told, told)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (None, f"\nlook      chaosrun status {RUN_ID}\nresume    chaosrun resume {RUN_ID}\n"),
        ("interrupted", f"\nresume    chaosrun resume {RUN_ID}\n"),
    ],
)
def test_a_run_that_has_not_ended_can_be_gone_on_with(run: RunLayout, outcome: Outcome | None, end: str) -> None:
    verdict = replace(PASSED, status="INCONCLUSIVE", exit_code=6, outcome=outcome, headline="the leg has not finished")
    account = text(verdict, run)
    assert account.endswith(end) and ("look  " in account) == (outcome is None)


@pytest.mark.parametrize(
    ("outcome", "drill", "production"),
    [("resources", True, True), ("user_error", False, True), ("recovery_failed", False, True), ("completed", False, False)],
)
def test_what_a_person_can_mend_is_gone_on_with_rather_than_repeated(
    run: RunLayout, outcome: Outcome, drill: bool, production: bool
) -> None:
    ended = replace(NOT_SHOWN, outcome=outcome)
    assert (f"\nresume    chaosrun resume {RUN_ID}\n" in text(ended, run)) == drill
    (run.path / "run").mkdir()
    assert (f"\nresume    chaosrun resume {RUN_ID}\n" in text(ended, run)) == production


def test_what_a_stopped_run_is_resumed_from_is_told(run: RunLayout) -> None:
    (run.path / "run").mkdir()
    resume = f"resume    chaosrun resume {RUN_ID}"
    note = "from the newest checkpoint, which may be of the attempt that differed"
    assert f"\n{resume}\n          ({note})\n" in text(replace(NOT_SHOWN, outcome="diverged"), run)


def test_commands_join_the_cluster_again_that_the_run_had_joined(run: RunLayout) -> None:
    info = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**info, "address": "head:6379"}))
    again = [line for line in text(replace(NOT_SHOWN, outcome="resources"), run).splitlines() if " --address head:6379" in line]
    assert [line.split()[0] for line in again] == ["resume", "repeat"]


def test_commands_repeat_the_root(run: RunLayout, tmp_path: Path) -> None:
    elsewhere = RunLayout(run.path.rename(new(tmp_path / "my runs" / "runs" / RUN_ID)))
    account = text(PASSED, elsewhere)
    assert f"inspect   chaosrun verify -v {RUN_ID} --root 'my runs'\n" in text(NOT_SHOWN, elsewhere)
    assert "repeat    chaosrun submit jobs/job.yaml faults.seed=7 'args=[a b]' --root 'my runs'\n" in account
    # Told in the middle of a command, and of a run that lies under no root.
    assert f"logs {RUN_ID} --leg chaos --attempt 2 --rank 0 --root 'my runs'\n" in text(FAILED, elsewhere)
    copied = RunLayout(elsewhere.path.rename(tmp_path / "copy"))
    account = text(NOT_SHOWN, copied)
    assert f"inspect   chaosrun verify -v {tmp_path}/copy\n" in account and "--root" not in account


def new(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    return path


def test_job_elsewhere_is_named_in_full(run: RunLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert f"chaosrun submit {tmp_path}/jobs/job.yaml faults.seed=7" in text(PASSED, run)


@pytest.mark.parametrize("verdict", [PASSED, FAILED, replace(FAILED, faults=(LANDED, MISSING))])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_fits_the_terminal(run: RunLayout, verdict: Verdict, width: int) -> None:
    lines = text(verdict, run, width=width).splitlines()
    copied = ("run ", "inspect ", "diagnose ", "repeat ")
    assert max(len(line) for line in lines if not line.startswith(copied)) <= width


def test_names_of_checks_are_whole_however_narrow_the_terminal(run: RunLayout) -> None:
    checks = (
        check_that("resume_evidence", "fail", "attempt 2 began with weights of step 5"),
        check_that("completed", "inconclusive", "the reference leg ended by a timeout"),
    )
    page = rendered(render_text(read_view(run, replace(FAILED, checks=checks)), whole=True), width=40, colour=False)
    assert "\n  fail          resume_evidence  attempt" in page
    found = "".join(line[33:].strip() for line in page.splitlines())
    assert "attempt2beganwithweightsofstep5" in found.replace(" ", ""), "and what was found is not cut off"


def test_a_restart_that_crashed_before_another_came_back_is_counted(run: RunLayout) -> None:
    death = {"event": "death.unplanned", "attempt": 2, "rank": 1, "step": 7, "reason": "rank 1 left with exit code 3"}
    tell(run, death, {"event": "leg.finished", "outcome": "completed", "message": "", "final_step": 90})
    assert "\nfaults    1 of 1 landed (kill); 1 unplanned death, 7 steps done again" in text(PASSED, run)


def test_colour_only_when_asked(run: RunLayout) -> None:
    assert "\x1b" not in rendered(render_text(read_view(run, FAILED)), width=80, colour=False)
    assert "\x1b[1;31mFAIL" in rendered(render_text(read_view(run, FAILED)), width=80, colour=True)


@pytest.mark.parametrize(("leg", "attempt"), [("chaos", 2), ("reference", 1)])
def test_script_error_shows_the_traceback_and_no_checks(run: RunLayout, leg: str, attempt: int) -> None:
    trace = 'Traceback (most recent call last):\n  File "train.py", line 7, in main\nValueError: boom'
    error = RaisedError(type="ValueError", message="boom", traceback=trace)
    if leg == "reference":
        run.leg("chaos").journal.unlink()
    death = {"event": "death.unplanned", "attempt": attempt, "rank": 1, "step": 7, "reason": "raised", "error": error}
    end = {"event": "leg.finished", "outcome": "user_error", "message": "rank 1 raised ValueError"}
    tell(run, {"event": "attempt.starting", "attempt": attempt}, death, end, leg=leg)
    account = text(script_failed(PASSED, attempts=() if leg == "reference" else PASSED.attempts), run)
    assert "Checks" not in account and ("\nfaults  " in account) == (leg == "chaos")
    assert "\nINCONCLUSIVE  the script failed: chaos leg: rank 1 raised\n" in account
    assert f"Traceback of rank 1, attempt {attempt}\n" in account
    assert '    File "train.py", line 7, in main\n  ValueError: boom\n' in account
    assert f"inspect   chaosrun logs {RUN_ID}\n" in account


@pytest.mark.parametrize(
    ("ended_by", "faults", "shown"),
    [
        ("F1 (preemption notice (SIGTERM, 30 s of grace) to rank 0 after step 18)", ("F1",), "fault F1"),
        ("F1 (SIGKILL rank 1 after step 7), F2 (SIGKILL rank 0 after step 7)", ("F1", "F2"), "faults F1, F2"),
        ("inexact_restore", (), "inexact restore"),
        ("unplanned death of rank 0: raised F_1 (odd)", (), "unplanned death of rank 0: raised F_1 (odd)"),
    ],
)
def test_attempts_name_their_faults_by_id(run: RunLayout, ended_by: str, faults: tuple[str, ...], shown: str) -> None:
    first = replace(FIRST, ended_by=ended_by, faults=faults)
    verdict = replace(PASSED, faults=(LANDED, MISSING), attempts=(first, SECOND))
    lines = text(verdict, run, width=120, whole=True).splitlines()
    (row,) = (line for line in lines if line.lstrip().startswith("1  the beginning"))
    assert row.split("1-17   ")[1].rsplit("  ", 2)[0].rstrip(" 7-") == shown


INJECTED = Cause.of("corruption_injected")
AS_PLANNED = replace(
    FAILED, reason=INJECTED, divergence=replace(DIVERGENCE, reason=INJECTED.explained("where", what="F1 flipped bit 3"))
)
LONG = replace(FAILED, divergence=replace(DIVERGENCE, expected=list(range(1000)), seen=[1]))
NOT_SHOWN = replace(PASSED, status="INCONCLUSIVE", exit_code=6, headline="faults_landed: …", faults=(LANDED, MISSING))


@pytest.mark.parametrize(
    ("verdict", "said", "unsaid"),
    [
        (NOT_SHOWN, ["faults    1 of 2 landed (kill)", "F2 NOT SHOWN: it never fired", "\nINCONCLUSIVE  faults_landed"], []),
        (replace(PASSED, headline="[bold]args[/bold] :smile: [1, 2]"), ["PASS      [bold]args[/bold] :smile: [1, 2]\n"], []),
        (FAILED, ["chaosrun diagnose"], []),
        (AS_PLANNED, ["blame     as planned: "], ["chaosrun diagnose"]),
        (LONG, ["(4890 characters)"], ["999"]),
    ],
)
def test_what_is_said_of_a_verdict(run: RunLayout, verdict: Verdict, said: list[str], unsaid: list[str]) -> None:
    account = text(verdict, run, width=120)
    assert [part for part in said if part not in account] == [part for part in unsaid if part in account] == []


def test_a_hint_is_given_once(run: RunLayout) -> None:
    assert text(replace(FAILED, hint=DIVERGENCE.hint), run, width=120).count(DIVERGENCE.hint) == 1


PLAN = FaultPlan(seed=7, faults=(Fault(id="F1", rank=1, at_step=17, source="faults.schedule[0]"),))


def test_plan() -> None:
    spec = JobSpec.model_validate({"name": "bytelm", "script": "train.py", "workers": 3, "max_steps": 90})
    assert rendered(render_plan(spec, PLAN), width=80, colour=False) == (
        "bytelm: 3 workers, 90 steps, a checkpoint every 50 steps, 1 fault (seed 7)\n"
        "\n"
        "  fault  what                          from\n"
        "  F1     SIGKILL rank 1 after step 17  faults.schedule[0]\n"
    )


def test_plan_without_faults() -> None:
    spec = JobSpec.model_validate({"name": "bytelm", "script": "train.py", "workers": 1})
    assert job_sentence(spec, FaultPlan(seed=0)) == "bytelm: 1 worker, a checkpoint every 50 steps, no faults"


def test_runs() -> None:
    runs = [
        RunSummary(run_id="bytelm-2", name="bytelm", status="running", created_s=940.0, path=Path("b")),
        RunSummary(run_id="bytelm-1", name="bytelm", status="FAIL", created_s=0.0, path=Path("a")),
    ]
    assert rendered(render_runs(runs, root=Path("r"), now_s=1000.0), width=80, colour=False) == (
        "run       job     status   age\nbytelm-2  bytelm  running  1m00s\nbytelm-1  bytelm  FAIL     16m40s\n"
    )
    told = {"run_id": "b-1", "name": "b", "created_s": 0.0, "path": Path("a")}
    runs = [
        RunSummary(**told, status="INCONCLUSIVE", outcome="user_error", exit_code=4),
        RunSummary(**told, status="INCONCLUSIVE", outcome="completed", exit_code=6),
        RunSummary(**told, status="FAIL", outcome="inexact_restore", exit_code=3),
        RunSummary(**told, status="interrupted", exit_code=130),
        RunSummary(**told, status="interrupted", exit_code=7),
    ]
    shown = rendered(render_runs(runs, root=Path("r"), now_s=1.0), width=80, colour=False).splitlines()[1:]
    assert [line.removeprefix("b-1  b    ").removesuffix("1.0 s").rstrip() for line in shown] == [
        "INCONCLUSIVE: the script failed (exit 4)",
        "INCONCLUSIVE",
        "FAIL",
        "interrupted",
        "interrupted: exit 7",
    ]
    whole = RunSummary(**{**told, "run_id": f"bytelm-{7:030}"}, status="INCONCLUSIVE", outcome="user_error", exit_code=4)
    narrow = rendered(render_runs([whole], root=Path("r"), now_s=1.0), width=40, colour=False)
    assert whole.run_id in narrow and "INCONCLUSIVE" in narrow
    assert rendered(render_runs([], root=Path("r"), now_s=0.0), width=80, colour=False) == "no runs under r\n"


class _Terminal(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.mark.parametrize(
    ("tty", "environ", "colour"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_when_there_is_colour(tty: bool, environ: dict[str, str], colour: bool) -> None:
    assert has_colour(_Terminal(tty), environ) is colour


def test_a_secret_is_in_no_report(run: RunLayout) -> None:
    info = json.loads(run.run_json.read_text())
    info["overrides"] = ["env.AWS_SECRET_ACCESS_KEY=hunter2", "resume.env.HF_TOKEN=hunter2", "env={API_KEY: hunter2}", "seed=3"]
    run.run_json.write_text(json.dumps(info))
    repeat = read_view(run, FAILED).repeat
    assert repeat is not None and "hunter2" not in repeat.line
    left_out = "'env.AWS_SECRET_ACCESS_KEY=(left out)' 'resume.env.HF_TOKEN=(left out)' 'env=(left out)' seed=3"
    assert left_out in repeat.line
    assert "with what was left out of its changes" in (repeat.note or "")
