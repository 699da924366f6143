"""The account of a drill as JUnit XML, which GitLab, Jenkins and GitHub's test reporters show: a case for the verdict, for each
check and for each fault.

Cases keep their names from night to night, so that their histories line up: a fault is called by its id, what it does is told
in its output. A failed check is a failure, one that could not be decided an error, one with nothing to look at is skipped.
"""

import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from chaosrun.records.journal import CONCLUSIVE
from chaosrun.records.layout import RunLayout
from chaosrun.report.escapes import without_escapes
from chaosrun.report.facts import RunFacts, read_facts, read_versions
from chaosrun.report.next_commands import repeat_command, repeat_note
from chaosrun.report.text import fatal_death
from chaosrun.verify.blame import blame

if TYPE_CHECKING:
    from chaosrun.campaign.results import SuiteResult
    from chaosrun.verify.account import FaultOutcome
    from chaosrun.verify.check import Check
    from chaosrun.verify.verdict import Verdict

LONGEST_EVIDENCE = 4000
"""Characters of a check's evidence; verdict.json holds the whole."""
_ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, not even escaped (https://www.w3.org/TR/xml/#charsets)."""


def render_junit(run: RunLayout, verdict: "Verdict") -> str:
    return to_xml([drill_suite(read_facts(run).name or run.run_id, run, verdict)])


def to_xml(suites: Sequence[TestSuite]) -> str:
    whole = JUnitXml(name="chaosrun")
    times = [suite.time or 0.0 for suite in suites]
    for suite in suites:
        whole.append(suite)
    for suite, time_s in zip(whole, times, strict=True):
        suite.update_statistics()
        suite.time = time_s  # the sum of its cases, which overlap, is no duration of anything
    whole.tests, whole.failures, whole.errors, whole.skipped = (
        sum(getattr(suite, name) or 0 for suite in whole) for name in ("tests", "failures", "errors", "skipped")
    )
    whole.time = round(sum(times), 3)
    file = io.BytesIO()
    whole.write(file, pretty=True)
    return file.getvalue().decode()


def drill_suite(
    name: str,
    run: RunLayout | None,
    verdict: "Verdict | None",
    *,
    surprises: Sequence[str] | None = None,
    error: str | None = None,
    instead: str = "not carried out",
) -> TestSuite:
    """One drill, called `name`: the same from night to night.

    `surprises`: in which ways it is not what a suite expected of it. With none of them every case passes, whatever the verdict
    is; None: a PASS is expected. `error`: why there is no verdict, `instead`: what there is.
    """
    suite = TestSuite(xml_text(name))
    if run is None or verdict is None:
        case = _case(name, "verdict")
        case.result = [_result(Error, error or "the drill could not be carried out", instead)]
        suite.add_testcases([case])
        return suite
    facts = read_facts(run)
    repeat = repeat_command(run, facts)
    note = repeat_note(run, facts)
    again = None if repeat is None else f"reproduce: {shlex.join(repeat)}" + (f" ({note})" if note else "")
    seconds = _seconds(run, facts)
    expected = surprises is not None and not surprises
    cases = [
        _of_verdict(name, run, verdict, surprises, again, seconds),
        *(_of_fault(name, fault, verdict, again, expected=expected) for fault in verdict.faults),
        *(_of_check(name, check, verdict, again, expected=expected) for check in verdict.checks),
    ]
    for key, value in _properties(run, facts, verdict, again):
        suite.add_property(key, xml_text(value))
    suite.add_testcases(cases)
    if facts.created_s is not None:
        suite.timestamp = datetime.fromtimestamp(facts.created_s, UTC).replace(tzinfo=None).isoformat(timespec="seconds")
    suite.time = round(seconds, 3)
    return suite


def skipped_suite(name: str, why: str, instead: str = "not begun") -> TestSuite:
    """A drill that was not carried out, and is no failure itself."""
    suite, case = TestSuite(xml_text(name)), _case(name, "verdict")
    case.result = [_result(Skipped, why, instead)]
    suite.add_testcases([case])
    return suite


def comparison_suite(result: "SuiteResult") -> TestSuite:
    """The losses of a suite's drills beside those of its first: a case each."""
    suite = TestSuite("comparison")
    if result.not_compared is not None:
        case = _case("comparison", "losses")
        case.result = [_result(Error, f"the losses could not be compared: {result.not_compared}", "not compared")]
        suite.add_testcases([case])
    for entry in result.compared:
        case = _case("comparison", entry.name)
        found = entry.difference
        beyond = "at no step" if found.first_beyond is None else f"from step {found.first_beyond} on"
        about = f"beside {result.first}: beyond the tolerance {beyond}, largest difference {found.largest:.3g}"
        if not entry.as_expected:
            what = "within the tolerance, where a control must not be" if entry.control else "beyond the tolerance"
            case.result = [_result(Failure, f"losses {what}", "unexpected", about)]
        case.system_out = _said(about, "a control, as expected" if entry.control and entry.as_expected else None)
        suite.add_testcases([case])
    return suite


def xml_text(text: str) -> str:
    """Without what XML cannot hold; lone surrogates, control characters and colours of a terminal among them."""
    return _ILLEGAL.sub("", without_escapes(text))


def _case(name: str, what: str, group: str | None = None, time_s: float = 0.0) -> TestCase:
    classname = f"chaosrun.{name}" + (f".{group}" if group else "")
    return TestCase(xml_text(what), xml_text(classname), round(time_s, 3))


def _result(kind: Any, message: str, type_: str, text: str = "") -> Any:
    result = kind(xml_text(" ".join(message.split())), type_)
    if text:
        result.text = xml_text(text)
    return result


def _said(*lines: str | None) -> str:
    return xml_text("\n".join(line for line in lines if line))


def _of_verdict(
    name: str, run: RunLayout, verdict: "Verdict", surprises: Sequence[str] | None, again: str | None, seconds: float
) -> TestCase:
    case = _case(name, "verdict", time_s=seconds)
    whose = None if verdict.status == "PASS" else f"blame: {blame(verdict).sentence}"
    hint = f"hint: {verdict.hint}" if verdict.hint else None
    death = fatal_death(verdict, run)
    raised = None if death is None else death.traceback
    about = _said(f"{verdict.status}: {verdict.cause}", whose, hint, *_first(verdict), raised, again)
    if surprises:
        case.result = [_result(Failure, surprises[0], "unexpected", _said(*surprises, about))]
    elif surprises is None and verdict.status == "FAIL":
        case.result = [_result(Failure, verdict.cause, "FAIL", about)]
    elif surprises is None and verdict.status == "INCONCLUSIVE":
        case.result = [_result(Error, verdict.cause, "INCONCLUSIVE", about)]
    warnings = [f"warning: {sentence}" for sentence in verdict.warnings]
    case.system_out = _said(about, "as expected" if surprises == () or surprises == [] else None, *warnings)
    return case


def _first(verdict: "Verdict") -> Iterator[str]:
    found = verdict.divergence
    if found is not None:
        ranks = ", ".join(map(str, found.ranks))
        yield f"first divergence: {found.kind} at step {found.step}, ranks {ranks}, attempt {found.attempt}: {found.cause}"
        yield f"expected: {_json(found.expected)}"
        yield f"seen: {_json(found.seen)}"


def _of_fault(name: str, fault: "FaultOutcome", verdict: "Verdict", again: str | None, *, expected: bool) -> TestCase:
    after = next((attempt for attempt in verdict.attempts if attempt.attempt == (fault.attempt or 0) + 1), None)
    recovery_s = after.recovery_s if after is not None and fault.landed else None
    case = _case(name, fault.id, "faults", recovery_s or 0.0)
    where = None if fault.attempt is None else f"attempt {fault.attempt}" + (f", step {fault.step}" if fault.step else "")
    recovered = None if recovery_s is None else f"recovered from in {recovery_s:.3f} s"
    shown = fault.evidence or "landed" if fault.landed else f"not shown: {fault.problem}"
    about = _said(f"{fault.id}: {fault.description}", where, shown, recovered)
    if not fault.landed:
        if verdict.outcome not in CONCLUSIVE:
            case.result = [_result(Skipped, f"the run did not complete: {fault.problem}", "not reached")]
        elif expected or fault.id in _outrun(verdict):
            case.result = [_result(Skipped, f"{fault.problem}", "not reached")]
        else:
            case.result = [_result(Error, f"{fault.description}: {fault.problem}", "INCONCLUSIVE", _said(about, again))]
    case.system_out = about if fault.landed else _said(about, again)
    return case


def _outrun(verdict: "Verdict") -> Sequence[str]:
    """Faults whose time had not come when the training ended: no fault of anybody's."""
    return next((check.evidence.get("outrun", ()) for check in verdict.checks if check.name == "faults_landed"), ())


def _of_check(name: str, check: "Check", verdict: "Verdict", again: str | None, *, expected: bool) -> TestCase:
    case = _case(name, check.name, "checks")
    if check.status == "pass":
        case.system_out = xml_text(check.summary)
    elif check.status == "skip":
        case.result = [_result(Skipped, check.summary, "nothing to look at")]
    elif check.status == "inconclusive" and verdict.outcome not in CONCLUSIVE:
        case.result = [_result(Skipped, f"the run did not complete: {check.summary}", "not decided")]
    elif expected:
        case.system_out = _said(f"{check.status}, as expected: {check.summary}")
    else:
        kind, type_ = (Failure, "FAIL") if check.status == "fail" else (Error, "INCONCLUSIVE")
        case.result = [_result(kind, check.summary, type_, _said(check.summary, _evidence(check.evidence), again))]
        case.system_out = _said(check.summary, again)
    return case


def _evidence(evidence: Mapping[str, Any]) -> str:
    text = "\n".join(f"{key}: {_json(value)}" for key, value in evidence.items())
    return text if len(text) <= LONGEST_EVIDENCE else f"{text[:LONGEST_EVIDENCE]}… (the whole is in verdict.json)"


def _json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _properties(run: RunLayout, facts: RunFacts, verdict: "Verdict", again: str | None) -> Iterator[tuple[str, str]]:
    whose = blame(verdict)
    known: Mapping[str, Any] = {
        "run": run.run_id,
        "job": facts.job,
        "workers": facts.workers,
        "seed": facts.seed,
        "plan_seed": facts.plan_seed,
        "overrides": shlex.join(facts.overrides) or None,
        "verdict": verdict.status,
        "exit_code": verdict.exit_code,
        "blame": whose.whose,
        "steps": verdict.steps,
        "lost_steps": verdict.lost_steps,
        "attempts": len(verdict.attempts),
        "chaosrun": facts.chaosrun,
        **read_versions(run),
        "reproduce": None if again is None else again.removeprefix("reproduce: "),
    }
    for key, value in known.items():
        if value is not None:
            yield key, str(value)


def _seconds(run: RunLayout, facts: RunFacts) -> float:
    """What the legs took, by their journals; a reference from the cache took no time here, nor does a run that waits for
    `chaosrun resume`."""
    from chaosrun.records.traces import whole_lines
    from chaosrun.verify.recovery_times import finite, pauses

    total = 0.0
    for leg in ("chaos", "confirm", *(() if facts.reference_source else ("reference",))):
        lines = [line for line in whole_lines(run.leg(leg).journal, []) if finite(line.get("time_s")) is not None]
        waits_s = sum(end - begin for begin, end in pauses(lines))
        total += lines[-1]["time_s"] - lines[0]["time_s"] - waits_s if lines else 0.0
    return max(0.0, total)
