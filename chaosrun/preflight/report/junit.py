"""The report of a preflight as JUnit XML: a suite with the verdict alone, and a suite per check with a case per node and one
for the whole cluster. Cases keep their names from night to night. FAIL is a failure, ERROR an error, SKIP skipped; a WARN
passes, and its output says so, unless warnings count.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from chaosrun.preflight.model import Finding, Status
from chaosrun.preflight.report.rows import WHOLE, report_of
from chaosrun.preflight.result import Result
from chaosrun.records.grouping import grouped
from chaosrun.report.junit import Case, suite_of, to_xml


def render_junit(result: Result) -> str:
    found = grouped(result.findings, lambda each: each.check)
    suites = [suite_of("preflight", [_verdict(result)])]
    for run in result.checks:
        nothing = Case(name=WHOLE, result="skipped", message="it found nothing to look at", type="SKIP")
        of_nodes = grouped(found.get(run.name, ()), lambda each: each.node)
        cases = [_case(node, those, result.strict) for node, those in of_nodes.items()]
        suite = suite_of(f"preflight.{run.name}", cases or [nothing])
        suite.time = round(run.seconds, 3)
        suites.append(suite)
    for suite in suites:
        suite.timestamp = datetime.fromtimestamp(result.started_s, UTC).replace(tzinfo=None).isoformat(timespec="seconds")
    return to_xml(suites)


def _verdict(result: Result) -> Case:
    report = report_of(result)
    unchecked = f"not checked: {', '.join(result.unchecked)}" if result.unchecked else None
    output = [report.headline, report.about, report.counted, unchecked]
    if result.fit:
        return Case(name="verdict", output=output)
    against = [f"{node}: {_text_of(findings[0])}" for node, findings in result.bad().items()]
    return Case(
        name="verdict", result="failure", message=report.headline, type="NOT FIT", about=[*output, *against], output=output
    )


def _case(node: str | None, findings: Sequence[Finding], strict: bool) -> Case:
    name, by_status = node or WHOLE, {status: [each for each in findings if each.status is status] for status in Status}
    warnings, errors = by_status[Status.WARN], by_status[Status.ERROR]
    failing = by_status[Status.FAIL] + (warnings if strict else [])
    output = [] if failing else _lines(warnings)
    if failing:
        return Case(name=name, result="failure", message=_first(failing), type="FAIL", about=_lines(failing + errors))
    if errors:
        return Case(name=name, result="error", message=_first(errors), type="ERROR", about=_lines(errors), output=output)
    if not by_status[Status.PASS] and not warnings:
        return Case(name=name, result="skipped", message=_first(findings), type="SKIP", about=_lines(findings))
    return Case(name=name, output=output)


def _first(findings: Sequence[Finding]) -> str:
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{_text_of(findings[0])}{more}"


def _text_of(finding: Finding) -> str:
    where = "" if finding.device is None else f" ({finding.device})"
    measured = f"{finding.measured}, must be {finding.threshold}" if finding.threshold else finding.measured
    return f"{finding.name}{where}: {'; '.join(filter(None, (measured, finding.reason)))}"


def _lines(findings: Sequence[Finding]) -> list[str]:
    return [f"{each.status}: {_text_of(each)}" + (f"\n  do: {each.remedy}" if each.remedy else "") for each in findings]
