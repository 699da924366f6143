"""Many drills, what was expected of each, and one summary. Judges by the drills' verdicts and records alone.

Must not know how a drill is run: it is given a function that runs one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaosrun.errors import ChaosrunError, InterruptedRunError
from chaosrun.records.layout import RunLayout
from chaosrun.spec.suite import Comparison, Expectation, Suite, SuiteDrill
from chaosrun.verify.trajectory import Difference, compare_trajectories, trajectory
from chaosrun.verify.verdict import Verdict

__all__ = ["Compared", "DrillResult", "SuiteResult", "run_suite", "surprises"]

SUITE_VERSION = 1
EXIT_UNEXPECTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """One drill of a suite, carried out."""

    name: str
    run: RunLayout | None
    """None when it could not be started."""
    verdict: Verdict | None
    error: str | None = None
    """Why there is no verdict."""
    surprises: tuple[str, ...] = ()
    """In which ways it is not what was expected; none when it is."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "run": self.run.run_id if self.run else None,
            "path": str(self.run.path) if self.run else None,
            "verdict": self.verdict.to_json() if self.verdict else None,
            "error": self.error,
            "surprises": list(self.surprises),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A drill's losses beside those of the suite's first."""

    name: str
    difference: Difference
    control: bool
    """It is meant to lie beyond the tolerance."""

    @property
    def as_expected(self) -> bool:
        return self.difference.within != self.control

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "control": self.control, "as_expected": self.as_expected, **self.difference.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    name: str
    drills: tuple[DrillResult, ...]
    first: str | None = None
    """The drill that the others' losses were compared with."""
    compared: tuple[Compared, ...] = ()
    not_compared: str | None = None
    """Why the comparison that was asked for could not be made."""

    @property
    def as_expected(self) -> bool:
        drills = all(not drill.surprises for drill in self.drills)
        return drills and self.not_compared is None and all(entry.as_expected for entry in self.compared)

    @property
    def exit_code(self) -> int:
        return 0 if self.as_expected else EXIT_UNEXPECTED

    def to_json(self) -> dict[str, Any]:
        return {
            "v": SUITE_VERSION,
            "name": self.name,
            "as_expected": self.as_expected,
            "drills": [drill.to_json() for drill in self.drills],
            "first": self.first,
            "compared": [entry.to_json() for entry in self.compared],
            "not_compared": self.not_compared,
        }


def run_suite(
    suite: Suite,
    run_drill: Callable[[SuiteDrill], tuple[RunLayout, Verdict]],
    on_drill: Callable[[int, SuiteDrill], None] = lambda number, drill: None,
) -> SuiteResult:
    """Run every drill in order, one that cannot be carried out included, and compare. `on_drill` hears before each.

    Raises InterruptedRunError at once: what is done is in the runs.
    """
    results = []
    for number, drill in enumerate(suite.drills):
        on_drill(number, drill)
        results.append(_carried_out(drill, run_drill))
    drills = tuple(results)
    comparison = suite.spec.comparison
    if comparison is None:
        return SuiteResult(name=suite.spec.name, drills=drills)
    return _compared(suite.spec.name, drills, comparison)


def _carried_out(drill: SuiteDrill, run_drill: Callable[[SuiteDrill], tuple[RunLayout, Verdict]]) -> DrillResult:
    try:
        run, verdict = run_drill(drill)
    except InterruptedRunError:
        raise
    except ChaosrunError as error:
        return DrillResult(name=drill.spec.name, run=None, verdict=None, error=error.message, surprises=(error.message,))
    return DrillResult(name=drill.spec.name, run=run, verdict=verdict, surprises=tuple(surprises(drill.spec.expect, verdict)))


def surprises(expected: Expectation, verdict: Verdict) -> Iterator[str]:
    """One sentence for each way in which the verdict is not the expected one."""
    if verdict.status != expected.verdict:
        yield f"{verdict.status} where {expected.verdict} was expected: {verdict.cause}"
        return
    kind = verdict.divergence.kind if verdict.divergence else None
    if expected.kind is not None and kind != expected.kind:
        yield f"{kind or 'nothing'} differed first, expected was {expected.kind}"
    if expected.cause is not None and expected.cause not in verdict.cause:
        yield f"the cause does not say {expected.cause!r}: {verdict.cause}"
    if expected.exit_code is not None and verdict.exit_code != expected.exit_code:
        yield f"exit code {verdict.exit_code}, expected was {expected.exit_code}"


def _compared(name: str, drills: tuple[DrillResult, ...], comparison: Comparison) -> SuiteResult:
    first = comparison.first or drills[0].name
    runs: Mapping[str, Path] = {drill.name: drill.run.path for drill in drills if drill.run is not None}
    if first not in runs:
        return SuiteResult(name=name, drills=drills, first=first, not_compared=f"drill {first} was not run")
    try:
        trajectories = {name: trajectory(RunLayout(path)) for name, path in runs.items()}
    except ChaosrunError as error:
        return SuiteResult(name=name, drills=drills, first=first, not_compared=error.message)
    compared = tuple(
        Compared(
            name=other,
            difference=compare_trajectories(trajectories[first], seen, atol=comparison.atol),
            control=other in comparison.beyond,
        )
        for other, seen in trajectories.items()
        if other != first
    )
    return SuiteResult(name=name, drills=drills, first=first, compared=compared)
