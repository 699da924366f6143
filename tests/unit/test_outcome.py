"""What a test may ask of a drill, and what a red one says of it."""

import re
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, write_run
from verdicts import PASSED, script_failed

from chaosrun.integrations.outcome import DrillFailed, Outcome
from chaosrun.records.journal import Journal
from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import Verdict, judge
from tests.unit.events import event

TRACEBACK = "Traceback (most recent call last):\n" + '  File "train.py", line 7, in main\n' * 40 + "ValueError: \x1b[2Jboom\n"


def verdict(**more: Any) -> Verdict:
    return script_failed(PASSED, "chaos leg: rank 1 raised ValueError at step 7: boom", **more)


def account(run: RunLayout) -> str:
    with pytest.raises(DrillFailed) as failure:
        Outcome(run=run, seed=1, again=None, _verdict=verdict()).assert_verdict("PASS")
    return str(failure.value)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHAOSRUN_ROOT", raising=False)
    run = RunLayout(tmp_path / ".chaosrun" / "runs" / "small-1")
    journal = Journal(run.leg("chaos").journal)
    journal.append(event("attempt.starting", attempt=1, resume=None, resume_step=0, armed=[]))
    error = {"type": "ValueError", "message": "boom", "traceback": TRACEBACK}
    journal.append(event("death.unplanned", attempt=1, rank=1, step=7, reason="raised", error=error))
    journal.append(event("leg.finished", outcome="user_error", message="rank 1 raised", hint=None, final_step=7))
    journal.close()
    return run


def test_a_script_that_failed_shows_its_traceback(run: RunLayout) -> None:
    *_, told = account(run).partition("  Traceback of rank 1, attempt 1\n")
    assert '      File "train.py", line 7, in main\n    ValueError: boom\n' in told


def test_what_to_type_finds_the_run_from_where_pytest_was_started(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    assert account(run).endswith("  inspect   chaosrun logs small-1")
    (run.path.parents[2] / "tests").mkdir()
    monkeypatch.chdir(run.path.parents[2] / "tests")
    assert account(run).endswith(f"  inspect   chaosrun logs small-1 --root {run.path.parents[1]}")


def outcome_of(run: RunLayout) -> Outcome:
    return Outcome(run=run, seed=0, again=None, _verdict=judge(run))


def test_exact_is_more_than_a_pass_within_tolerances(tmp_path: Path) -> None:
    assert outcome_of(write_run(tmp_path / "exact")).assert_exact().exact
    loose = outcome_of(write_run(tmp_path / "loose", verify={"losses": {"rtol": 1e-3}}))
    assert loose.assert_verdict("PASS").status == "PASS" and not loose.exact
    with pytest.raises(DrillFailed, match=r"(?s)PASS, but not exact: within the tolerance of .*assert_verdict\(\"PASS\"\)"):
        loose.assert_exact()


def test_what_is_said_when_nobody_asked(tmp_path: Path) -> None:
    told = outcome_of(write_run(tmp_path, bugs=Bugs(skip_off=1), reference_bugs=Bugs())).unasked()
    assert told.startswith("FAIL, and the test did not ask for the verdict of this drill: 1 batch skipped")
    assert re.search(r"First divergence\n +where +step 5.*\n +kind +data order", told)
