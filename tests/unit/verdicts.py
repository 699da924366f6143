"""A verdict, for tests of what is made of one; `dataclasses.replace` makes others of it."""

from dataclasses import replace
from typing import Any

from chaosrun.verify.check import CheckResult, Status
from chaosrun.verify.codes import Cause
from chaosrun.verify.summaries import AttemptSummary
from chaosrun.verify.verdict import Verdict

PASSED = Verdict(
    status="PASS",
    exit_code=0,
    reason=Cause.of("exact", steps=9, ranks=2, faults=1, more=""),
    headline="bit-identical to the reference run",
    hint=None,
    outcome="completed",
    checks=(),
    divergence=None,
    faults=(),
    attempts=(),
    steps=9,
    lost_steps=0,
)


ATTEMPT = AttemptSummary(
    **{"attempt": 1, "resumed_from": None, "resumed_step": 0, "first_step": 1, "last_step": 3, "ended_by": "F1"},
    **{"lost_steps": 0, "recovery_s": None, "ranks": 2},
)


def script_failed(verdict: Verdict, headline: str = "chaos leg: rank 1 raised", **more: Any) -> Verdict:
    reason = Cause.of("script_failed", leg="chaos", message="rank 1 raised")
    about = {"status": "INCONCLUSIVE", "exit_code": 4, "outcome": "user_error", "reason": reason, "headline": headline}
    return replace(verdict, **{**about, **more})


def saying(text: str) -> Cause:
    """A cause whose sentence and hint hold this text."""
    told = {"which": "faults", "failing": 1, "planned": 1, "fault": "F1", "problem": text, "late": text, "end": text}
    return Cause("fault_not_shown", told, "never_due")


def check_that(name: str, status: Status, summary: str, **evidence: object) -> CheckResult:
    """A check that says this, whatever the table of causes has for it."""
    cause = saying(summary) if status in ("fail", "inconclusive") else None
    return CheckResult(name=name, status=status, summary=summary, evidence=evidence, cause=cause)
