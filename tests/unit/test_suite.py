"""A suite's results: what counts as expected, which exit code that makes, and how it is told on a terminal and in Markdown."""

from dataclasses import replace
from pathlib import Path

import pytest
from suites import DRILL
from verdicts import PASSED

from chaosrun.campaign.files import checked, plain
from chaosrun.campaign.report.pages import render_markdown
from chaosrun.campaign.report.text import render_suite
from chaosrun.campaign.results import DrillResult, SuiteResult, drill_result, surprises
from chaosrun.records.layout import RunLayout
from chaosrun.report.output import rendered
from chaosrun.spec.suite import Expectation
from chaosrun.verify.check import Divergence
from chaosrun.verify.codes import Cause
from chaosrun.verify.verdict import Verdict
from tests.unit.run_files import write_info

FAILED = replace(
    PASSED,
    status="FAIL",
    exit_code=3,
    reason=Cause.of("sampler_epoch_not_set", epoch=0, where="at the same place", expected=1),
    headline="sampler epoch not set",
    place="first difference: step 8",
    divergence=Divergence(
        step=8,
        ranks=(0, 1),
        attempt=2,
        kind="data order",
        reason=Cause.of("sampler_epoch_not_set", epoch=0, where="at the same place", expected=1),
        expected=[5],
        seen=[1],
    ),
)
UNDECIDED = replace(PASSED, status="INCONCLUSIVE", exit_code=6, headline="faults_landed: 1 of 2 faults cannot be shown")
AS_SAID = Expectation(verdict="FAIL", kind="data order", cause="step 8", exit_code=3)


def result(folder: Path, name: str, expect: Expectation, verdict: Verdict | str) -> DrillResult:
    if isinstance(verdict, str):
        error = DrillResult(name=name, run=None, status=None, expected=expect.verdict, error=verdict, surprises=(verdict,))
        return error
    run = RunLayout(folder / f"run-of-{name}")
    run.path.mkdir()
    write_info(run)
    return drill_result(replace(DRILL, name=name, expect=expect), run, verdict, took_s=4.2)


def page(whole: SuiteResult, width: int = 140) -> str:
    return rendered(render_suite(whole), width=width, colour=False)


def test_all_as_expected(tmp_path: Path) -> None:
    expected = Expectation(verdict="PASS")
    drills = (result(tmp_path, "drill-0", expected, PASSED), result(tmp_path, "drill-1", AS_SAID, FAILED))
    whole = SuiteResult(name="toys", drills=drills)
    assert whole.exit_code == 0 and whole.as_expected
    text = page(whole)
    assert "AS EXPECTED  2 drills" in text and "NOT AS EXPECTED" not in text
    line = next(line for line in text.splitlines() if "drill-1" in line)
    assert "data order at step 8, rank 0: expected samples [5]" in line
    # On a narrow terminal the difference has a line of its own, and nothing is cut off.
    narrow = page(whole, width=80).splitlines()
    assert any(line.startswith("  drill-1: data order at step 8") for line in narrow)
    assert all(len(line) <= 80 for line in narrow if "chaosrun verify" not in line)
    summary = render_markdown(whole)
    assert "✅ toys: as expected" in summary and "| ✅ FAIL |" in summary and "❌" not in summary


@pytest.mark.parametrize(
    ("verdict", "expected", "told", "code"),
    [
        (FAILED, Expectation(verdict="PASS"), "FAIL where PASS was expected: sampler epoch not set", 3),
        (PASSED, Expectation(verdict="FAIL"), "PASS where FAIL was expected", 3),
        (PASSED, Expectation(verdict="PASS", kind="rng"), "nothing differed first, expected was rng", 3),
        (FAILED, Expectation(verdict="FAIL", kind="rng"), "data order differed first, expected was rng", 3),
        (FAILED, Expectation(verdict="FAIL", cause="batches_repeated"), "the cause is not 'batches_repeated'", 3),
        (FAILED, Expectation(verdict="FAIL", cause="RNG"), "the cause is not 'RNG'", 3),
        (FAILED, Expectation(verdict="FAIL", exit_code=4), "exit code 3, expected was 4", 3),
        (UNDECIDED, Expectation(verdict="PASS"), "INCONCLUSIVE where PASS was expected", 6),
        ("no placement", Expectation(verdict="PASS"), "no placement", 6),
    ],
)
def test_a_surprise_is_told_and_fails_the_suite(
    tmp_path: Path, verdict: Verdict | str, expected: Expectation, told: str, code: int
) -> None:
    drills = (result(tmp_path, "drill-0", expected, verdict), result(tmp_path, "drill-1", Expectation(verdict="PASS"), PASSED))
    whole = SuiteResult(name="toys", drills=drills, seed=20261121)
    assert whole.exit_code == code
    text = page(whole)
    assert "NOT AS EXPECTED" in text and "--seed 20261121" in text
    assert f"drill-0: {told}" in " ".join(text.split())
    assert any("drill-1" in line and "PASS" in line for line in text.splitlines())
    summary = render_markdown(whole).replace("\\", "")
    assert "❌ toys: not as expected" in summary and f"- drill-0: {told}" in summary and "--seed 20261121" in summary
    sign = "🚫" if isinstance(verdict, str) else "⚠️" if verdict is UNDECIDED else "❌"
    assert f"drill-0 | {sign} " in summary and "drill-1 | ✅ PASS |" in summary


def test_a_failure_outweighs_what_is_undecided(tmp_path: Path) -> None:
    expected = Expectation(verdict="PASS")
    drills = (result(tmp_path, "a", expected, UNDECIDED), result(tmp_path, "b", expected, FAILED))
    assert SuiteResult(name="toys", drills=drills).exit_code == 3
    assert SuiteResult(name="toys", drills=drills[:1]).exit_code == 6
    # What was not begun is not as expected either, and a part that holds no drill is.
    assert SuiteResult(name="toys", drills=(), left=("c",)).exit_code == 3
    assert SuiteResult(name="toys", drills=()).exit_code == 0


def test_an_expected_failure_holds_no_surprise() -> None:
    assert list(surprises(AS_SAID, FAILED)) == []
    assert list(surprises(Expectation(verdict="FAIL", cause="sampler_epoch_not_set"), FAILED)) == []


def test_a_result_survives_the_journal(tmp_path: Path) -> None:
    once = result(tmp_path, "a", AS_SAID, FAILED)
    assert checked(DrillResult, plain(once)) == once
    error = result(tmp_path, "b", AS_SAID, "no placement")
    assert checked(DrillResult, plain(error)) == error
