"""JUnit XML: a case for the verdict of a drill, for each check and for each fault.

Cases keep their names from night to night, so that their histories line up. A failed check is a failure, one that could not be
decided an error, one without data is skipped.
"""

import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from chaosrun.records.layout import RunLayout
from chaosrun.report.escapes import without_escapes
from chaosrun.report.facts import RunFacts
from chaosrun.report.view import RunView

if TYPE_CHECKING:
    from chaosrun.verify.check import CheckResult
    from chaosrun.verify.summaries import FaultOutcome

LONGEST_EVIDENCE = 4000
"""Characters of a check's evidence; verdict.json holds the whole."""
RESULTS = {"failure": Failure, "error": Error, "skipped": Skipped}
_ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, not even escaped (https://www.w3.org/TR/xml/#charsets)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    group: str | None = None
    """"faults" or "checks"."""
    result: Literal["passed", "failure", "error", "skipped"] = "passed"
    message: str = ""
    type: str = ""
    about: Sequence[str | None] = ()
    """Lines of the result."""
    output: Sequence[str | None] = ()
    """Lines of the case itself."""
    time_s: float = 0.0


def render_junit(view: RunView) -> str:
    return to_xml([drill_suite(view.name, view)])


def to_xml(suites: Sequence[TestSuite]) -> str:
    whole = JUnitXml(name="chaosrun")
    times = [suite.time or 0.0 for suite in suites]
    for suite in suites:
        whole.append(suite)
    whole.update_statistics()
    for suite, time_s in zip(whole, times, strict=True):
        suite.time = time_s  # its cases overlap, so the sum of their durations means nothing
    whole.time = round(sum(times), 3)
    file = io.BytesIO()
    whole.write(file, pretty=True)
    return file.getvalue().decode()


def suite_of(name: str, cases: Sequence[Case], properties: Iterable[tuple[str, str]] = ()) -> TestSuite:
    suite = TestSuite(xml_text(name))
    for key, value in properties:
        suite.add_property(key, xml_text(value))
    suite.add_testcases([_test_case(name, case) for case in cases])
    return suite


def _test_case(suite: str, case: Case) -> TestCase:
    classname = f"chaosrun.{suite}" + (f".{case.group}" if case.group else "")
    made = TestCase(xml_text(case.name), xml_text(classname), round(case.time_s, 3))
    if case.result != "passed":
        result = RESULTS[case.result](xml_text(" ".join(case.message.split())), case.type)
        if case.about:
            result.text = _lines(case.about)
        made.result = [result]
    if case.output:
        made.system_out = _lines(case.output)
    return made


def _lines(lines: Sequence[str | None]) -> str:
    return xml_text("\n".join(line for line in lines if line))


def xml_text(text: str) -> str:
    """Remove characters that XML cannot hold, such as lone surrogates, control characters and terminal colours."""
    return _ILLEGAL.sub("", without_escapes(text))


def drill_suite(name: str, view: RunView, *, surprises: Sequence[str] | None = None) -> TestSuite:
    """One drill, called `name`: the same from night to night. `surprises`: how it differs from what a suite expected; if empty
    every case passes, whatever the verdict. None: a PASS is expected."""
    again = None
    if repeat := view.repeat:
        again = repeat.line + (f" ({repeat.note})" if repeat.note else "")
    seconds = _seconds(view.run, view.facts)
    expected = surprises is not None and not surprises
    told = None if again is None else f"reproduce: {again}"
    cases = [
        _of_verdict(view, surprises, told, seconds),
        *(_of_fault(fault, view, told, expected=expected) for fault in view.faults),
        *(_of_check(check, view, told, expected=expected) for check in view.verdict.checks),
    ]
    suite = suite_of(name, cases, _properties(view, again))
    if view.facts.created_s is not None:
        began = datetime.fromtimestamp(view.facts.created_s, UTC).replace(tzinfo=None)
        suite.timestamp = began.isoformat(timespec="seconds")
    suite.time = round(seconds, 3)
    return suite


def _of_verdict(view: RunView, surprises: Sequence[str] | None, again: str | None, seconds: float) -> Case:
    verdict = view.verdict
    about = [
        f"{view.status}: {verdict.cause}",
        None if view.status == "PASS" else f"blame: {verdict.blame.sentence}",
        f"hint: {verdict.hint}" if verdict.hint else None,
        *(f"first divergence, {name}: {what}" for name, what in view.divergence),
        None if view.fatal is None else view.fatal.traceback,
        again,
    ]
    warnings = [f"warning: {sentence}" for sentence in (*verdict.warnings, *view.damage)]
    case = Case(name="verdict", time_s=seconds, output=[*about, *warnings])
    if surprises:
        return replace(case, result="failure", message=surprises[0], type="unexpected", about=[*surprises, *about])
    if surprises is not None:
        return replace(case, output=[*about, "as expected", *warnings])
    if view.status == "PASS":
        return case
    result = "failure" if view.status == "FAIL" else "error"
    return replace(case, result=result, message=verdict.cause, type=view.status, about=about)


def _of_fault(fault: "FaultOutcome", view: RunView, again: str | None, *, expected: bool) -> Case:
    after = (attempt.recovery_s for attempt in view.verdict.attempts if attempt.attempt == (fault.attempt or 0) + 1)
    recovery_s = next(after, None) if fault.landed else None
    recovered = None if recovery_s is None else f"recovered from in {recovery_s:.3f} s"
    output = [f"{fault.id}: {fault.description}", fault.where, fault.seen, recovered, None if fault.landed else again]
    case = Case(name=fault.id, group="faults", output=output, time_s=recovery_s or 0.0)
    if fault.landed:
        return case
    if not view.decided:
        return replace(case, result="skipped", message=f"the run did not complete: {fault.shown}", type="not reached")
    outrun = (each for check in view.verdict.checks for each in check.evidence.get("outrun", ()))
    if expected or fault.id in outrun:  # not due yet when the training ended, which is no one's mistake
        return replace(case, result="skipped", message=fault.shown, type="not reached")
    return replace(case, result="error", message=f"{fault.description}: {fault.shown}", type="INCONCLUSIVE", about=output)


def _of_check(check: "CheckResult", view: RunView, again: str | None, *, expected: bool) -> Case:
    case = Case(name=check.name, group="checks", output=[check.summary])
    match check.status:
        case "pass":
            return case
        case "skip":
            return replace(case, result="skipped", message=check.summary, type="nothing to look at", output=())
        case "inconclusive" if not view.decided:
            said = f"the run did not complete: {check.summary}"
            return replace(case, result="skipped", message=said, type="not decided", output=())
        case _ if expected:
            return replace(case, output=[f"{check.status}, as expected: {check.summary}"])
        case _:
            result, type_ = ("failure", "FAIL") if check.status == "fail" else ("error", "INCONCLUSIVE")
            about = [check.summary, _evidence(check.evidence), again]
            return replace(case, result=result, message=check.summary, type=type_, about=about, output=[check.summary, again])


def _evidence(evidence: Mapping[str, object]) -> str:
    text = "\n".join(f"{key}: {json.dumps(value, default=str, ensure_ascii=False)}" for key, value in evidence.items())
    return text if len(text) <= LONGEST_EVIDENCE else f"{text[:LONGEST_EVIDENCE]}… (the whole is in verdict.json)"


def _properties(view: RunView, again: str | None) -> Iterator[tuple[str, str]]:
    verdict, facts = view.verdict, view.facts
    known: Mapping[str, object] = {
        "run": view.run.run_id,
        "job": facts.job,
        "workers": facts.workers,
        "seed": facts.seed,
        "plan_seed": facts.plan_seed,
        "overrides": shlex.join(facts.overrides) or None,
        "verdict": verdict.status,
        "exit_code": verdict.exit_code,
        "blame": verdict.blame.whose,
        "steps": verdict.steps,
        "lost_steps": verdict.lost_steps,
        "attempts": len(verdict.attempts),
        **view.versions,
        "reproduce": again,
    }
    for key, value in known.items():
        if value is not None:
            yield key, str(value)


def _seconds(run: RunLayout, facts: RunFacts) -> float:
    """The legs' durations from their journals, without unsupervised times and a reference from the cache."""
    from chaosrun.records.history import read_leg
    from chaosrun.verify.recovery_times import wall_s

    legs = (run.main, "confirm", *(() if facts.reference_source else ("reference",)))
    return sum(max(0.0, wall_s(read_leg(run.leg(leg), traces=None).journal) or 0.0) for leg in legs)
