"""How a test's drill ended, what the test may assert about it, and the message when that fails.

A failed test shows what `chaosrun verify` says of its run. Frames of chaosrun are hidden from tracebacks, which leaves the line
of the test.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from chaosrun.records.layout import RunLayout
    from chaosrun.verify.ruling import VerdictStatus
    from chaosrun.verify.verdict import Verdict

WIDTH = 120


class DrillFailed(AssertionError):
    """A drill did not end as its test asserts, or could not be carried out."""


DrillFailed.__module__ = "chaosrun"  # pytest prints the full name, where the defining module would only distract


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One drill that was carried out. Nothing is asserted yet: `assert_exact` and `assert_verdict` do that."""

    run: "RunLayout"
    seed: int
    """The seed of everything random in its fault plan."""
    again: str | None
    """The command line that runs the same test again, if options of the pytest session determined its drill."""
    _verdict: "Verdict"
    _on_look: Callable[[], object] = field(default=lambda: None, repr=False)

    @property
    def verdict(self) -> "Verdict":
        """status, cause, checks, divergence, faults, attempts: what verdict.json holds."""
        self._on_look()
        return self._verdict

    @property
    def status(self) -> "VerdictStatus":
        return self.verdict.status

    @property
    def exact(self) -> bool:
        """PASS, and every bit was compared: a job file with `verify.losses` or `verify.weights` asks for less."""
        return self.verdict.exact

    @property
    def run_path(self) -> Path:
        return self.run.path

    @property
    def report(self) -> Path | None:
        """The report page; None when it could not be written."""
        return self.run.report_html if self.run.report_html.is_file() else None

    def assert_exact(self) -> Self:
        """Assert PASS: every planned fault landed, and everything is equal to the reference run, bit for bit."""
        __tracebackhide__ = True
        self.assert_verdict("PASS")
        if not self.exact:
            hint = 'assert_verdict("PASS") accepts the tolerances of the job file (verify.losses, verify.weights)'
            raise DrillFailed(self._account(f"PASS, but not exact: {self._verdict.cause}", hint))
        return self

    def assert_verdict(self, status: "VerdictStatus", *, kind: str | None = None, cause: str | None = None) -> Self:
        """Assert the verdict and, if given, what differed first ("data order", "rng", …) and words that the cause contains."""
        __tracebackhide__ = True
        if surprise := _surprise(self.verdict, status, kind, cause):
            raise DrillFailed(self._account(surprise))
        return self

    def unasked(self) -> str:
        """The message when a test never asserted this verdict, which is not PASS."""
        verdict = self._verdict
        return self._account(f"{verdict.status}, and the test did not ask for the verdict of this drill: {verdict.cause}")

    def _account(self, surprise: str, hint: str | None = None) -> str:
        from chaosrun.report.output import rendered
        from chaosrun.report.text import render_text
        from chaosrun.report.view import read_view

        page = rendered(render_text(read_view(self.run, self._verdict)), width=WIDTH, colour=False)
        rows = [("hint", hint), ("run", str(self.run.path)), ("test", self.again)]
        return "\n".join([account(surprise, rows), "", indent(page.rstrip(), "  ")])


def account(sentence: str, rows: Sequence[tuple[str, str | None]]) -> str:
    return "\n".join([sentence, *(f"  {label:<8}  {text}" for label, text in rows if text)])


def _surprise(verdict: "Verdict", status: str, kind: str | None, cause: str | None) -> str | None:
    """The first sentence of the message; None when everything is as asserted."""
    seen = verdict.divergence.kind if verdict.divergence else None
    if verdict.status != status:
        expected = "" if status == "PASS" else f" where {status} was expected"
        return f"{verdict.status}{expected}: {verdict.cause}"
    if kind is not None and seen != kind:
        return f"{status}, but {seen or 'nothing'} differed first where {kind} was expected: {verdict.cause}"
    if cause is not None and not verdict.says(cause):
        return f"{status}, but its cause does not say {cause!r}: {verdict.cause}"
    return None
