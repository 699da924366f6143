"""The results of a suite's drills, compared with what was expected. Made from verdicts and records alone.

An expectation that no verdict can meet is refused at the start.
"""

import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from chaosrun.campaign.planned_drill import PlannedDrill
from chaosrun.errors import ChaosrunError
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_object, read_run
from chaosrun.spec.places import Problem, spec_error
from chaosrun.spec.suite import Comparison, Expectation, SuiteDrill
from chaosrun.spec.tree import find
from chaosrun.spec.validation import nearest
from chaosrun.verify.check import Divergence
from chaosrun.verify.codes import public_codes
from chaosrun.verify.compare import Kind, exact_weights
from chaosrun.verify.ruling import EXIT_CODES, OUTCOME_EXIT_CODES, PASS_CODES, VerdictStatus
from chaosrun.verify.trajectory import LossDifference, compare_trajectories, trajectory
from chaosrun.verify.verdict import Verdict
from chaosrun.wording import listed

SUITE_VERSION = 1
LIKE_A_CODE = re.compile(r"[a-z]+(_[a-z]+)+")
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    status: VerdictStatus
    exit_code: int
    cause: str
    reached: bool
    """Whether every fault of its plan, including this point's, was shown to have happened."""
    run: str | None
    """Id of its run; None when there is none, or it was removed."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    name: str
    run: RunLayout | None
    """None when it could not be started."""
    status: str | None
    expected: str
    exit_code: int | None = None
    cause: str | None = None
    difference: str | None = None
    error: str | None = None
    cancelled: bool = False
    """It was ended by `chaosrun cancel`; resuming the suite runs it."""
    surprises: tuple[str, ...] = ()
    faults: int = 0
    landed: int = 0
    restarts: int = 0
    recovery_s: float | None = None
    """Median over its restarts."""
    lost_steps: int = 0
    took_s: float = 0.0
    reference: str | None = None
    """Cached, or made for it."""
    rerun: str | None = None
    """Night whose failure it repeats."""
    label: str | None = None
    """Compared with the nights before: new, still, fixed or flaky; None: nothing to report."""

    @property
    def ok(self) -> bool:
        return not self.surprises

    @property
    def word(self) -> str:
        """The verdict's status, or the word instead of it."""
        return self.status or ("cancelled" if self.cancelled else "not run")

    def to_json(self) -> dict[str, object]:
        verdict = read_object(self.run.verdict_json) if self.run and self.status else None
        run, path = (None, None) if self.run is None else (self.run.run_id, str(self.run.path))
        return {**asdict(self), "run": run, "path": path, "verdict": verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A drill's losses compared with those of the suite's first drill."""

    name: str
    difference: LossDifference
    control: bool
    """Whether it is expected to be outside the tolerance."""

    @property
    def as_expected(self) -> bool:
        return self.difference.within != self.control

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "control": self.control, "as_expected": self.as_expected, **self.difference.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    name: str
    drills: tuple[DrillResult, ...]
    path: Path | None = None
    suite_id: str = ""
    night: str = ""
    seed: int | None = None
    """The seed from which every drill's faults were drawn, if one was given."""
    shard: str | None = None
    left: tuple[str, ...] = ()
    """Drills that were not run: not begun after a surprise (`--fail-fast`), or not ended when the suite was cut short."""
    cut_short: str | None = None
    """What ended the suite before its drills: an interrupt, or an error outside the drills."""
    took_s: float = 0.0
    first: str | None = None
    compared: tuple[Compared, ...] = ()
    not_compared: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """No drill belongs to this part of the suite: neither a success nor a failure."""
        return not self.drills and not self.left

    @property
    def _well_compared(self) -> bool:
        return self.not_compared is None and all(entry.as_expected for entry in self.compared)

    @property
    def as_expected(self) -> bool:
        whole = not self.left and not self.empty and self.cut_short is None
        return self._well_compared and whole and all(drill.ok for drill in self.drills)

    @property
    def exit_code(self) -> int:
        """PASS's when all is as expected or there was nothing to do, INCONCLUSIVE's when all surprises are inconclusive, else
        FAIL's."""
        if self.as_expected or self.empty:
            return EXIT_CODES["PASS"]
        odd = {drill.status for drill in self.drills if not drill.ok} | ({None} if self.cut_short is not None else set())
        return EXIT_CODES["INCONCLUSIVE" if self._well_compared and odd and odd <= {"INCONCLUSIVE", None} else "FAIL"]

    @property
    def cached(self) -> tuple[int, int]:
        """How many references were taken from the cache, and how many had to be made."""
        used = [drill.reference for drill in self.drills]
        return used.count("cached"), used.count("made")

    def to_json(self) -> dict[str, object]:
        hits, misses = self.cached
        told = {
            "v": SUITE_VERSION,
            **asdict(self),
            "suite": self.suite_id,
            "path": str(self.path) if self.path else None,
            "as_expected": self.as_expected,
            "exit_code": self.exit_code,
            "took_s": round(self.took_s, 3),
            "references": {"cached": hits, "made": misses},
            "drills": [drill.to_json() for drill in self.drills],
            "compared": [entry.to_json() for entry in self.compared],
        }
        del told["suite_id"]
        return told


def drill_result(drill: PlannedDrill, run: RunLayout, verdict: Verdict, *, took_s: float) -> DrillResult:
    times = [attempt.recovery_s for attempt in verdict.attempts if attempt.recovery_s is not None]
    return DrillResult(
        name=drill.name,
        run=run,
        status=verdict.status,
        expected=drill.expect.verdict,
        exit_code=verdict.exit_code,
        cause=verdict.cause,
        difference=_described(verdict.divergence) if verdict.divergence else None,
        surprises=tuple(surprises(drill.expect, verdict)),
        faults=len(verdict.faults),
        landed=sum(fault.landed for fault in verdict.faults),
        restarts=max(0, len(verdict.attempts) - 1),
        recovery_s=round(statistics.median(times), 3) if times else None,
        lost_steps=verdict.lost_steps,
        took_s=round(took_s, 3),
        reference="cached" if read_run(run).reference.source else "made",
        rerun=drill.rerun,
    )


def _described(found: Divergence) -> str:
    """`data order at step 8, rank 0: expected samples [9], seen [3] (sampler epoch not set)`."""
    values = "" if found.kind != "data order" else f": expected samples {_ids(found.expected)}, seen {_ids(found.seen)}"
    return f"{found.kind} at step {found.step}, rank {found.rank}{values} ({found.cause})"


def _ids(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def comparison_result(whole: SuiteResult) -> DrillResult:
    """The comparison of losses as an entry of the history: if it is not as expected, neither is the night, even if all drills
    are."""
    odd = [f"losses of {entry.name}" for entry in whole.compared if not entry.as_expected]
    if whole.not_compared is not None:
        odd.append(whole.not_compared)
    status = None if whole.not_compared is not None else "FAIL" if odd else "PASS"
    told = "; ".join(odd) or None
    return DrillResult(name="comparison of losses", run=None, status=status, expected="PASS", cause=told, surprises=tuple(odd))


def compare_losses(result: SuiteResult, comparison: Comparison) -> SuiteResult:
    """The result with the losses of the drills' reference legs compared with those of one of them."""
    first = comparison.first
    assert first is not None  # the suite decides which drill is the first, not the order of running
    runs = {drill.name: drill.run for drill in result.drills if drill.run is not None and drill.rerun is None}
    if first not in runs:
        return replace(result, first=first, not_compared=f"drill {first} was not run")
    try:
        trajectories = {name: trajectory(run) for name, run in runs.items()}
    except ChaosrunError as error:
        return replace(result, first=first, not_compared=error.message)
    compared = tuple(
        Compared(
            name=other,
            difference=compare_trajectories(trajectories[first], seen, atol=comparison.atol),
            control=other in comparison.beyond,
        )
        for other, seen in trajectories.items()
        if other != first
    )
    return replace(result, first=first, compared=compared)


def expect_possible(drills: Iterable[SuiteDrill]) -> None:
    """Raises SpecError naming every expectation that cannot be met."""
    if problems := [problem for drill in drills for problem in _problems(drill)]:
        raise spec_error(problems)


def surprises(expected: Expectation, verdict: Verdict) -> Iterator[str]:
    """One sentence for each way in which the verdict is not the expected one."""
    if verdict.status != expected.verdict:
        yield f"{verdict.status} where {expected.verdict} was expected: {verdict.cause}"
        return
    if verdict.code == "settled_too_early" and expected.cause is None:
        yield f"the control of the early verdict disagrees with it: {verdict.cause}"
    kind = verdict.divergence.kind if verdict.divergence else None
    if expected.kind is not None and kind != expected.kind:
        yield f"{kind or 'nothing'} differed first, expected was {expected.kind}"
    if expected.cause is not None and not verdict.says(expected.cause):
        yield f"the cause is not {expected.cause!r}: {verdict.cause} ({verdict.code})"
    if expected.exit_code is not None and verdict.exit_code != expected.exit_code:
        yield f"exit code {verdict.exit_code}, expected was {expected.exit_code}"


def _problems(drill: SuiteDrill) -> Iterator[Problem]:
    expected, verify = drill.expect, drill.job.spec.verify
    verdict, kind, cause = expected.verdict, expected.kind, expected.cause

    def problem(key: str, message: str, hint: str) -> Problem:
        return Problem(place=find(drill.said, (key,))[1].place, message=message, hint=hint)

    if kind is not None and kind not in KINDS:
        close = nearest(kind, KINDS)
        hint = f"did you mean {close!r}?" if close else f"there are {', '.join(KINDS)}"
        yield problem("kind", f"no kind {kind!r}", hint=hint)
    elif kind is not None and verdict == "PASS" and verify.losses.exact and exact_weights(verify):
        yield problem("kind", "nothing differs in a PASS", hint="leave out kind, or expect FAIL")
    if cause is not None and LIKE_A_CODE.fullmatch(cause):
        codes = public_codes()
        if cause not in codes:
            close = nearest(cause, codes)
            guess = f"did you mean {close}?" if close else "see docs/causes.md"
            yield problem("cause", f"no cause has the code {cause}", hint=f"{guess} (a word with _ alone is taken for a code)")
        elif verdict == "PASS" and cause not in PASS_CODES:
            yield problem("cause", f"{cause} is no cause of a PASS", hint=f"those are {listed(sorted(PASS_CODES))}")
    possible = {EXIT_CODES[verdict], *(OUTCOME_EXIT_CODES.values() if verdict == "INCONCLUSIVE" else ())}
    if expected.exit_code is not None and expected.exit_code not in possible:
        codes_of_it = " or ".join(map(str, sorted(possible)))
        yield problem("exit_code", f"{verdict} never has exit code {expected.exit_code}", hint=f"it has {codes_of_it}")
