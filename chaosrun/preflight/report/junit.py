"""The account of a preflight as JUnit XML: a suite with the verdict alone, and a suite a check, in it a case a node and one for
the whole cluster. Cases keep their names from night to night. FAIL is a failure, ERROR an error, SKIP skipped; a WARN passes,
and its output says so, unless warnings count.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from junitparser import Error, Failure, Skipped, TestCase, TestSuite

from chaosrun.preflight.model import Finding, Status
from chaosrun.preflight.report.account import WHOLE, about, counted, headline
from chaosrun.preflight.result import CheckRun, Result
from chaosrun.report.junit import to_xml, xml_text


def render_junit(result: Result) -> str:
    found: dict[str, dict[str | None, list[Finding]]] = {}
    for finding in result.findings:
        found.setdefault(finding.check, {}).setdefault(finding.node, []).append(finding)
    suites = [_verdict(result), *(_suite(run, found.get(run.name, {}), result) for run in result.checks)]
    started = datetime.fromtimestamp(result.started_s, UTC).replace(tzinfo=None).isoformat(timespec="seconds")
    for suite in suites:
        suite.timestamp = started
    return to_xml(suites)


def _verdict(result: Result) -> TestSuite:
    suite, case = TestSuite("preflight"), TestCase("verdict", "chaosrun.preflight", 0.0)
    text = f"{headline(result)}\n{about(result)}\n{counted(result)}"
    if result.unchecked:
        text += f"\nnot checked: {', '.join(result.unchecked)}"
    if not result.fit:
        against = [f"{node}: {_told(finding)}" for node, findings in result.bad().items() for finding in findings[:1]]
        case.result = [_outcome(Failure, headline(result), "NOT FIT", "\n".join([text, *against]))]
    case.system_out = xml_text(text)
    suite.add_testcases([case])
    return suite


def _suite(run: CheckRun, found: dict[str | None, list[Finding]], result: Result) -> TestSuite:
    suite = TestSuite(xml_text(run.name))
    cases = [_of_place(run.name, place, findings, result) for place, findings in found.items()]
    if not cases:
        case = _case(run.name, WHOLE)
        case.result = [_outcome(Skipped, "it found nothing to look at", "SKIP")]
        cases = [case]
    suite.add_testcases(cases)
    suite.time = round(run.seconds, 3)
    return suite


def _of_place(check: str, place: str | None, findings: Sequence[Finding], result: Result) -> TestCase:
    case = _case(check, place or WHOLE)
    by_status = {status: [each for each in findings if each.status is status] for status in reversed(Status)}
    failing = by_status[Status.FAIL] + (by_status[Status.WARN] if result.strict else [])
    if failing:
        case.result = [_outcome(Failure, _first(failing), "FAIL", _lines(failing + by_status[Status.ERROR]))]
    elif errors := by_status[Status.ERROR]:
        case.result = [_outcome(Error, _first(errors), "ERROR", _lines(errors))]
    elif not by_status[Status.PASS] and not by_status[Status.WARN]:
        case.result = [_outcome(Skipped, _first(findings), "SKIP", _lines(findings))]
    if not failing and by_status[Status.WARN]:
        case.system_out = xml_text(_lines(by_status[Status.WARN]))
    return case


def _case(check: str, name: str) -> TestCase:
    return TestCase(xml_text(name), xml_text(f"chaosrun.preflight.{check}"), 0.0)


def _outcome(kind: type[Failure | Error | Skipped], message: str, type_: str, text: str = "") -> Failure | Error | Skipped:
    outcome = kind(xml_text(" ".join(message.split())), type_)
    outcome.text = xml_text(text)
    return outcome


def _first(findings: Sequence[Finding]) -> str:
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{_told(findings[0])}{more}"


def _told(finding: Finding) -> str:
    where = "" if finding.device is None else f" ({finding.device})"
    measured = f"{finding.measured}, must be {finding.threshold}" if finding.threshold else finding.measured
    return f"{finding.name}{where}: {'; '.join(filter(None, (measured, finding.reason)))}"


def _lines(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{each.status}: {_told(each)}" + (f"\n  do: {each.remedy}" if each.remedy else "") for each in findings)
