"""JUnit XML as CI systems read it: what is red, what is not, and that the file is one whatever a run holds."""

import json
import re
import xml.etree.ElementTree as etree
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped, TestSuite
from legs import Bugs, copy_run, die_raising, edit_journal, only, put, write_run
from verdicts import check_that, script_failed

from chaosrun.records.layout import RunLayout
from chaosrun.report.junit import Case, drill_suite, render_junit, suite_of, to_xml, xml_text
from chaosrun.report.view import read_view
from chaosrun.verify.verdict import Verdict, judge

Judged = tuple[RunLayout, Verdict]
# Attributes and children, in the order of JUnit's schema as Jenkins and Ant have it; * for what must be there.
PARTS: dict[str, tuple[set[str], list[str]]] = {
    "testsuites": ({"name", "time", "tests", "failures", "errors", "skipped", "disabled"}, ["testsuite"]),
    "testsuite": (
        {"name*", "tests*", "failures", "errors", "skipped", "disabled", "time", "timestamp", "hostname", "id", "package"},
        ["properties", "testcase", "system-out", "system-err"],
    ),
    "properties": (set(), ["property"]),
    "property": ({"name*", "value*"}, []),
    "testcase": (
        {"name*", "classname*", "time", "assertions", "status"},
        ["skipped", "error", "failure", "system-out", "system-err"],
    ),
    "skipped": ({"message", "type"}, []),
    "error": ({"message", "type"}, []),
    "failure": ({"message", "type"}, []),
    "system-out": (set(), []),
    "system-err": (set(), []),
}


def complaints(element: etree.Element) -> list[str]:
    """In which ways this is not JUnit XML."""
    attributes, children = PARTS[element.tag]
    known = {name.rstrip("*") for name in attributes}
    lacking = {name[:-1] for name in attributes if name.endswith("*")} - element.attrib.keys()
    found = [f"{element.tag}: {name}" for name in (element.attrib.keys() - known) | lacking]
    found += [f"{element.tag}: {child.tag} in it" for child in element if child.tag not in children]
    places = [children.index(child.tag) for child in element if child.tag in children]
    found += [f"{element.tag}: children in another order"] if places != sorted(places) else []
    if not re.fullmatch(r"\d+(\.\d+)?", element.get("time", "0")):
        found.append(f"{element.tag}: time {element.get('time')}")
    if element.tag == "testcase" and sum(child.tag in ("skipped", "error", "failure") for child in element) > 1:
        found.append(f"{element.tag}: several results")
    return found + [complaint for child in element if child.tag in PARTS for complaint in complaints(child)]


def judged(folder: Path, **bugs: Any) -> Judged:
    run = write_run(folder, **bugs)
    return run, judge(run)


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    return judged(tmp_path_factory.mktemp("failed"), bugs=Bugs(keep_rng=False), reference_bugs=Bugs())


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    return judged(tmp_path_factory.mktemp("lost"), bugs=Bugs(lost_fault="F2"))


def outcomes(suite: TestSuite) -> dict[str, str]:
    """By class and name: pass, fail, error or skip."""
    words = {Failure: "fail", Error: "error", Skipped: "skip"}
    return {
        f"{case.classname}/{case.name}": next((words[type(result)] for result in case.result), "pass")  # type: ignore[index]
        for case in suite
    }


def read(suites: Sequence[TestSuite]) -> list[TestSuite]:
    """As somebody else reads it: no complaints, and counts that are right."""
    text = to_xml(suites)
    assert complaints(etree.fromstring(text)) == []
    whole = list(JUnitXml.fromstring(text.encode()))
    for suite in whole:
        found = list(outcomes(suite).values())
        counted = (suite.tests, suite.failures, suite.errors, suite.skipped)
        assert counted == (len(found), found.count("fail"), found.count("error"), found.count("skip"))
    return whole


def read_drill(run: RunLayout, verdict: Verdict, **more: Any) -> TestSuite:
    (suite,) = read([drill_suite("toy", read_view(run, verdict), **more)])
    return suite


def test_a_pass_is_green(passed: Judged) -> None:
    suite = read_drill(*passed)
    found = outcomes(suite)
    assert set(found.values()) == {"pass"}
    others = ["chaosrun.toy/verdict", *(f"chaosrun.toy.faults/F{n}" for n in (1, 2, 3))]
    assert [name for name in found if "checks" not in name] == others
    assert [name.rpartition("/")[2] for name in found if ".checks/" in name] == [check.name for check in passed[1].checks]


def test_a_fail_is_red_with_what_is_needed_to_do_it_again(differing: Judged) -> None:
    run, verdict = differing
    suite = read_drill(run, verdict)
    found = outcomes(suite)
    for check in verdict.checks:
        expected = {"pass": "pass", "fail": "fail", "skip": "skip", "inconclusive": "error"}[check.status]
        assert found[f"chaosrun.toy.checks/{check.name}"] == expected
    assert found["chaosrun.toy/verdict"] == "fail"
    again = "reproduce: chaosrun submit /job.yaml"
    for case in suite:
        if case.is_failure:
            assert case.result[0].message
            assert again in (case.result[0].text or "") and again in (case.system_out or ""), case.name
    text = next(case for case in suite if case.name == "verdict").result[0].text or ""
    assert "blame: chaosrun's, most likely: RNG not restored" in text
    assert "first divergence, where: step 5, ranks 0, 1, 2, attempt 2" in text
    first = next(case for case in suite if case.name == "rng").result[0].text or ""
    assert '"field": "rng"' in first and "differing: " in first


def test_properties_and_times(passed: Judged) -> None:
    run, verdict = passed
    suite = drill_suite("toy", read_view(run, verdict))
    told = {entry.name: entry.value for entry in suite.properties()}
    assert told | {"run": run.run_id, "workers": "3", "plan_seed": "0", "verdict": "PASS", "torch": "2.13.0"} == told
    assert told["reproduce"] == "chaosrun submit /job.yaml"
    assert datetime.fromisoformat(suite.timestamp or "") == datetime(1970, 1, 1, 0, 16, 40)
    times = {case.name: case.time for case in suite}
    # Half a second a look of the clock: both legs together, and each fault's recovery.
    assert times["verdict"] == pytest.approx(sum(wall_s(run, leg) for leg in ("reference", "chaos")))
    assert [times[f"F{number}"] for number in (1, 2, 3)] == [attempt.recovery_s for attempt in verdict.attempts[1:]]
    assert JUnitXml.fromstring(to_xml([suite]).encode()).time == times["verdict"]


def wall_s(run: RunLayout, leg: str) -> float:
    times = [json.loads(line)["time_s"] for line in run.leg(leg).journal.read_text().splitlines()]
    return times[-1] - times[0]


@pytest.mark.parametrize(
    ("before", "counted_s"), [([], 10.0), ([{"event": "leg.finished", "outcome": "interrupted", "message": None}], 0.0)]
)
def test_only_an_interruption_is_no_time_of_the_run(
    passed: Judged, tmp_path: Path, before: list[dict[str, Any]], counted_s: float
) -> None:
    """A takeover after a fault that ended the supervisor is a part of what the drill took."""
    run = copy_run(passed[0], tmp_path)
    journal = run.leg("chaos").journal
    *lines, last = [json.loads(line) for line in journal.read_text().splitlines()]
    at_s = lines[-1]["time_s"]
    resumed = {"event": "supervisor.resumed", "supervisor_pid": 2, "time_s": at_s + 10.0}
    told = [*lines, *({**record, "time_s": at_s} for record in before), resumed, {**last, "time_s": last["time_s"] + 10.0}]
    journal.write_text("".join(f"{json.dumps({**line, 'seq': number})}\n" for number, line in enumerate(told, start=1)))
    took_s = [drill_suite("toy", read_view(its, passed[1])).time or 0.0 for its in (passed[0], run)]
    assert took_s[1] - took_s[0] == pytest.approx(counted_s, abs=0.01)


def test_a_fault_that_did_not_land_is_an_error(lost: Judged) -> None:
    found = outcomes(read_drill(*lost))
    assert [found[f"chaosrun.toy.faults/F{number}"] for number in (1, 2, 3)] == ["pass", "error", "pass"]
    assert found["chaosrun.toy/verdict"] == found["chaosrun.toy.checks/faults_landed"] == "error"


def test_one_that_the_training_outran_is_skipped(lost: Judged) -> None:
    run, verdict = lost
    checks = (check_that("faults_landed", "pass", "2 of 3 landed", outrun=["F2"]),)
    assert outcomes(read_drill(run, replace(verdict, status="PASS", checks=checks)))["chaosrun.toy.faults/F2"] == "skip"


def test_a_run_that_did_not_complete_is_one_error(lost: Judged) -> None:
    run, verdict = lost
    checks = (check_that("losses", "inconclusive", "only 3 of 9"), check_that("lr", "fail", "differs"))
    checks += (check_that("x", "skip", "nothing"), check_that("y", "pass", "fine"))
    broken = script_failed(verdict, headline="chaos leg: rank 1 raised ValueError", checks=checks)
    found = outcomes(read_drill(run, broken))
    assert [found[f"chaosrun.toy.checks/{name}"] for name in ("losses", "lr", "x", "y")] == ["skip", "fail", "skip", "pass"]
    assert [name for name, what in found.items() if what == "error"] == ["chaosrun.toy/verdict"]


def test_the_traceback_of_a_script_that_failed(passed: Judged, tmp_path: Path) -> None:
    run = copy_run(passed[0], tmp_path)
    die_raising(run, "Traceback:\nValueError: boom")
    suite = read_drill(run, script_failed(passed[1]))
    assert "Traceback:\nValueError: boom\n" in (next(iter(suite)).result[0].text or "")


def test_names_stay_from_night_to_night(differing: Judged, passed: Judged) -> None:
    names = [[(case.classname, case.name) for case in drill_suite("toy", read_view(*judged))] for judged in (differing, passed)]
    assert names[0] == names[1]
    assert len(set(names[0])) == len(names[0])


class TestInASuite:
    def test_a_fail_that_was_expected_is_green(self, differing: Judged) -> None:
        suite = read_drill(*differing, surprises=())
        assert set(outcomes(suite).values()) <= {"pass", "skip"}
        assert "as expected" in (next(case for case in suite if case.name == "rng").system_out or "")

    def test_a_surprise_is_red(self, differing: Judged, passed: Judged) -> None:
        suite = read_drill(*passed, surprises=["PASS where FAIL was expected: …"])
        (case,) = [case for case in suite if case.is_failure]
        assert (case.name, case.result[0].message) == ("verdict", "PASS where FAIL was expected: …")
        suite = read_drill(*differing, surprises=["FAIL where PASS was expected"])
        assert outcomes(suite)["chaosrun.toy.checks/rng"] == "fail"

    def test_one_that_was_not_carried_out(self) -> None:
        (suite,) = read([suite_of("far", [Case(name="verdict", result="error", message="no room for 9 workers")])])
        assert outcomes(suite) == {"chaosrun.far/verdict": "error"}
        assert next(iter(suite)).result[0].message == "no room for 9 workers"

    def test_many_in_one_file(self, differing: Judged, passed: Judged) -> None:
        three = zip("aba", (passed, differing, passed), strict=True)
        assert [suite.name for suite in read([drill_suite(name, read_view(*each)) for name, each in three])] == ["a", "b", "a"]


EVERYTHING = "".join(map(chr, range(0x20))) + "\x7f\x1b[31mred\x1b[0m\ud800\udfff\ufffe\uffff😀<>&\"']]>"


def test_what_xml_cannot_hold_is_left_out(passed: Judged) -> None:
    run, verdict = passed
    nasty = replace(
        verdict,
        status="FAIL",
        headline=EVERYTHING,
        hint=EVERYTHING,
        warnings=(EVERYTHING,),
        checks=(check_that("lr", "fail", EVERYTHING, what=EVERYTHING),),
        faults=(replace(verdict.faults[0], description=EVERYTHING, evidence=EVERYTHING),),
    )
    (suite,) = read([drill_suite(EVERYTHING, read_view(run, nasty))])
    assert xml_text(EVERYTHING) == "\t\n\r\x7fred😀<>&\"']]>"
    result = next(case for case in suite if case.name == "lr").result[0]
    assert (result.message or "").endswith("red😀<>&\"']]>")


def test_evidence_is_cut_where_it_is_long(passed: Judged) -> None:
    run, verdict = passed
    suite = read_drill(run, replace(verdict, checks=(check_that("lr", "fail", "differs", all=["x"] * 9000),)))
    text = next(case for case in suite if case.name == "lr").result[0].text or ""
    assert len(text) < 5000
    assert "verdict.json" in text


def test_a_run_alone(differing: Judged) -> None:
    whole = JUnitXml.fromstring(render_junit(read_view(*differing)).encode())
    assert [suite.name for suite in whole] == ["toy"]


def test_the_control_of_the_structure() -> None:
    case = "<testcase name='b' time='soon'><system-out/><error/></testcase>"
    assert complaints(etree.fromstring(f"<testsuites><testsuite name='a'>{case}<x/></testsuite></testsuites>")) == [
        "testsuite: tests",
        "testsuite: x in it",
        "testcase: classname",
        "testcase: children in another order",
        "testcase: time soon",
    ]


def test_times_beyond_floats(passed: Judged, tmp_path: Path) -> None:
    run = copy_run(passed[0], tmp_path)
    edit_journal(run, "chaos", only("leg.finished", put(time_s=10**400)))
    assert not complaints(etree.fromstring(to_xml([drill_suite("toy", read_view(run, judge(run)))])))
