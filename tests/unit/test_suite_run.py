"""What a night writes down of each drill, and what it says of the nights before: as far as that needs no Ray."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from suites import DRAWN, night_of, write_suite

from chaosrun.campaign.files import checked, plain
from chaosrun.campaign.history import append, read_history
from chaosrun.campaign.kept_plans import KeptPlans
from chaosrun.campaign.planned_drill import PlannedDrill
from chaosrun.campaign.report.pages import junit_text, render_index, render_markdown
from chaosrun.campaign.report.text import render_suite
from chaosrun.campaign.results import DrillResult
from chaosrun.campaign.scheduler import RunningSupervisors
from chaosrun.campaign.suite_plan import SuiteRequest
from chaosrun.campaign.suite_run import SuiteRun
from chaosrun.errors import InterruptedRunError
from chaosrun.report.output import rendered
from chaosrun.spec.suite import Comparison


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SuiteRun]:
    path = write_suite(tmp_path, "name: toys\njob: job.yaml\ndrills: [{name: a}, {name: b}]\n", DRAWN)
    with night_of(path, tmp_path / "root", SuiteRequest(path=path, asked_s=1795262400.0)) as run:
        yield run


def failed(drill: PlannedDrill) -> DrillResult:
    return DrillResult(name=drill.name, run=None, status=None, expected="PASS", error="no room", surprises=("no room",))


def results(run: SuiteRun, *drills: PlannedDrill) -> dict[str, DrillResult]:
    return {drill.name: failed(drill) for drill in drills}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd")])
def test_what_goes_wrong_with_kept_plans_costs_neither_the_history_nor_the_night(
    run: SuiteRun, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def take(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(KeptPlans, "take", take)
    drill = run.plan.drills[0]
    run.keep(drill, failed(drill))
    assert [entry.drill for entry in read_history(Path(run.plan.history)).entries] == ["a"]
    assert list(run.folder.progress().results) == ["a"]
    (note,) = run.result(results(run, drill)).notes
    assert "could not be updated" in note and str(error) in note


def test_a_history_that_cannot_be_written_costs_no_kept_plan(run: SuiteRun) -> None:
    history = Path(run.plan.history)
    history.unlink()
    history.mkdir()
    drill = run.plan.drills[0]
    run.keep(drill, failed(drill))
    assert [kept.drill for kept in KeptPlans.next_to(history).read()[0]] == ["a"]
    result = run.result(results(run, drill))
    assert len(result.drills) == 1 and result.left == ("b",)
    assert any("is not in the history" in note for note in result.notes)
    assert any("nothing is known of earlier nights" in note for note in result.notes)


def test_a_later_night_is_none_before(run: SuiteRun) -> None:
    """A suite that goes on, after another has begun."""
    drill = run.plan.drills[0]
    history = Path(run.plan.history)
    run.keep(drill, failed(drill))
    (mine,) = read_history(history).entries
    for seconds in (-1, 1):
        other = replace(mine, suite=f"other{seconds}", time_s=mine.time_s + seconds, ok=seconds > 0)
        append(history, other)
    # Failed before, that is, and well only afterwards.
    assert [result.label for result in run.result(results(run, drill)).drills] == ["still"]


def test_no_result_is_lost_unseen(run: SuiteRun) -> None:
    first, second = run.plan.drills
    run.plan = replace(run.plan, drills=(first, replace(second, name="c")))
    with pytest.raises(AssertionError, match="lost"):
        run.result(results(run, first, second))


@pytest.fixture
def cancelled(run: SuiteRun, monkeypatch: pytest.MonkeyPatch) -> DrillResult:
    """The first drill, as it ends when its supervisor is told to end it, alone."""

    def drill_on(*_: object, **__: object) -> None:
        raise InterruptedRunError("interrupted in the chaos leg")

    monkeypatch.setattr("chaosrun.campaign.suite_run.drill_on", drill_on)
    result, sound = run._carry(run.plan.drills[0], None, RunningSupervisors(), lambda record: None)
    assert not sound
    return result


def test_a_cancelled_drill_is_told_and_means_nothing_for_the_nights(run: SuiteRun, cancelled: DrillResult) -> None:
    drill, other = run.plan.drills
    assert (cancelled.cancelled, cancelled.status, cancelled.exit_code, cancelled.ok) == (True, None, 130, False)
    run.keep(drill, cancelled)
    history = Path(run.plan.history)
    assert read_history(history).entries == () and KeptPlans.next_to(history).read()[0] == []
    assert checked(DrillResult, plain(cancelled)) == cancelled
    whole = run.result({drill.name: cancelled, other.name: replace(failed(other), error=None, surprises=(), status="PASS")})
    assert whole.exit_code == 6 and [result.label for result in whole.drills] == [None, None]
    page = " ".join(rendered(render_suite(whole), width=160, colour=False).split())
    assert "a cancelled no, PASS it was cancelled (interrupted in the chaos leg)" in page and "1 cancelled" in page
    assert f"toys.yaml --resume {run.plan.suite_id}" in page
    assert "🚫 cancelled" in render_markdown(whole)
    assert '<error message="it was cancelled (interrupted in the chaos leg)" type="cancelled"/>' in junit_text(whole)


def test_a_cancelled_drill_is_carried_out_when_the_suite_goes_on(run: SuiteRun, cancelled: DrillResult) -> None:
    drill, other = run.plan.drills
    run.keep(drill, cancelled)
    run.keep(other, failed(other))
    done = run.folder.progress()
    assert list(done.results) == ["b"] and cancelled.run is not None and done.started == {"a": str(cancelled.run.path)}


def test_a_drill_that_ends_with_the_whole_suite_is_not_cancelled(run: SuiteRun, cancelled: DrillResult) -> None:
    working = RunningSupervisors()
    working.interrupt()
    with pytest.raises(InterruptedRunError):
        run._carry(run.plan.drills[0], None, working, lambda record: None)


def test_what_had_ended_when_it_was_cut_short_has_pages(run: SuiteRun) -> None:
    first = run.plan.drills[0]
    passed = replace(failed(first), error=None, surprises=(), status="PASS")
    run.keep(first, passed)
    whole = run.so_far("interrupted, 1 of 2 drills done")
    assert [drill.name for drill in whole.drills] == ["a"] and whole.left == ("b",)
    # Nothing failed, and nothing is proven.
    assert (whole.as_expected, whole.exit_code) == (False, 6)
    shown = ET.fromstring(junit_text(whole)).iter("testcase")
    cases = {case.attrib["classname"]: [each.tag for each in case] for case in shown}
    assert cases["chaosrun.b"] == ["skipped"] and cases["chaosrun.suite toys"] == ["error"]
    page = " ".join(rendered(render_suite(whole), width=160, colour=False).split())
    assert "CUT SHORT 1 drill, 1 not ended" in page and f"toys.yaml --resume {run.plan.suite_id}" in page
    assert "🚫 toys: cut short" in render_markdown(whole)
    assert "Not ended: b." in render_index(whole, [], run.folder.path)
    # What is not as expected matters more.
    odd = replace(passed, status="FAIL", surprises=("FAIL where PASS was expected",))
    worse = replace(whole, drills=(odd,))
    assert worse.exit_code == 3 and "NOT AS EXPECTED" in rendered(render_suite(worse), width=160, colour=False)


def test_losses_are_not_compared_when_it_is_cut_short(run: SuiteRun) -> None:
    """That they could not be would be a failure in the history, of what had no chance."""
    run.plan = replace(run.plan, comparison=Comparison(first="a"))
    run.keep(run.plan.drills[1], failed(run.plan.drills[1]))
    before = read_history(Path(run.plan.history)).entries
    assert run.so_far("interrupted").not_compared is None
    assert read_history(Path(run.plan.history)).entries == before
