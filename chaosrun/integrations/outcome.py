"""How a drill of a test ended, what the test may ask of it, and what is said when it is not so.

Whoever reads a red test reads what `chaosrun verify` says of its run. Frames of chaosrun are hidden from tracebacks; what is
left is the line of the test.
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
    """A drill is not what its test asked for, or could not be carried out."""


DrillFailed.__module__ = "chaosrun"  # pytest prints the full name: where the class is written is of no use to anybody


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One drill, carried out. Nothing has been asked of it yet: `assert_exact` and `assert_verdict` do."""

    run: "RunLayout"
    seed: int
    """Of everything random in its fault plan."""
    again: str | None
    """The command line that runs the same test again, where the session says what the drill does."""
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
        """PASS, that is: every planned fault landed, and everything is equal to the undisturbed run, bit for bit."""
        __tracebackhide__ = True
        self.assert_verdict("PASS")
        if not self.exact:
            hint = 'assert_verdict("PASS") accepts the tolerances of the job file (verify.losses, verify.weights)'
            raise DrillFailed(self._account(f"PASS, but not exact: {self._verdict.cause}", hint))
        return self

    def assert_verdict(self, status: "VerdictStatus", *, kind: str | None = None, cause: str | None = None) -> Self:
        """The verdict, and, if given, what differed first ("data order", "rng", …) and words that its cause must contain."""
        __tracebackhide__ = True
        if surprise := _surprise(self.verdict, status, kind, cause):
            raise DrillFailed(self._account(surprise))
        return self

    def unasked(self) -> str:
        """What is said when a test has never asked for a verdict that is not PASS."""
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
    """The first sentence of the account; None when everything is as it was asked for."""
    seen = verdict.divergence.kind if verdict.divergence else None
    if verdict.status != status:
        expected = "" if status == "PASS" else f" where {status} was expected"
        return f"{verdict.status}{expected}: {verdict.cause}"
    if kind is not None and seen != kind:
        return f"{status}, but {seen or 'nothing'} differed first where {kind} was expected: {verdict.cause}"
    if cause is not None and not verdict.says(cause):
        return f"{status}, but its cause does not say {cause!r}: {verdict.cause}"
    return None
