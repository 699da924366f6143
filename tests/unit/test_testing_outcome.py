"""What a test may ask of a drill: that PASS is not always exact, and that nobody's question is an answer."""

from pathlib import Path

import pytest
from legs import Bugs, write_run

from chaosrun.integrations.testing.outcome import DrillFailed, Outcome
from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import judge


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
    assert "data order, first at step 5" in told
