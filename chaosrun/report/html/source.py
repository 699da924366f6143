"""What a page is made from: the run's files, read once. A file that is damaged is named, and what hangs on it is left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from chaosrun.errors import ChaosrunError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_object, recorded_leg
from chaosrun.report.facts import RunFacts, read_facts
from chaosrun.spec.model import JobSpec
from chaosrun.verify.lineage import Lineage, lineage
from chaosrun.verify.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    history: LegHistory
    chain: Lineage

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def began(self) -> bool:
        return bool(self.history.journal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    run: RunLayout
    verdict: Verdict
    facts: RunFacts
    spec: JobSpec | None
    plan: FaultPlan | None
    reference: Leg
    chaos: Leg
    diagnosis: Mapping[str, Any] | None
    problems: tuple[str, ...]
    """Sentences on files that could not be read, or not in full."""

    @property
    def told(self) -> Leg:
        """The leg whose course is shown: the disturbed one, or the one that it never came to."""
        return self.chaos if self.chaos.began else self.reference


def read_source(run: RunLayout, verdict: Verdict) -> Source:
    """Never fails on content. Raises OSError when a file of the run cannot be read at all."""
    problems: list[str] = []
    info = _object(run, "run.json", problems) or {}
    legs = [_leg(run, info, name, problems) for name in ("reference", "chaos")]
    return Source(
        run=run,
        verdict=verdict,
        facts=_facts(run, problems),
        spec=_spec(run, info, problems),
        plan=_plan(run, problems),
        reference=legs[0],
        chaos=legs[1],
        diagnosis=_object(run, "diagnosis.json", problems) if run.diagnosis_json.exists() else None,
        problems=tuple(dict.fromkeys(problems)),
    )


def _object(run: RunLayout, name: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        return read_object(run.path / name)
    except UsageError as error:
        problems.append(error.message)
        return None


def _facts(run: RunLayout, problems: list[str]) -> RunFacts:
    try:
        return read_facts(run)
    except UsageError as error:
        # The same file is named by whoever reads it for more; this one may be the only one to trip over it.
        if not problems:
            problems.append(error.message)
        return RunFacts()


def _spec(run: RunLayout, info: Mapping[str, Any], problems: list[str]) -> JobSpec | None:
    if "spec" not in info:
        return None
    try:
        return JobSpec.model_validate(info["spec"])
    except ValidationError as error:
        problems.append(f"{run.run_json}: spec: {error.errors()[0]['msg']}")
        return None


def _plan(run: RunLayout, problems: list[str]) -> FaultPlan | None:
    found = _object(run, "plan.json", problems)
    try:
        return None if found is None else FaultPlan.from_json(found)
    except ChaosrunError as error:
        problems.append(f"{run.plan_json}: {error.message}")
        return None


def _leg(run: RunLayout, info: Mapping[str, Any], name: str, problems: list[str]) -> Leg:
    try:
        layout = recorded_leg(run, info, name)
    except UsageError as error:
        problems.append(error.message)
        layout = run.leg(name)
    if not layout.journal.exists() and not layout.attempts():
        # A leg that never began: nothing is damaged.
        history = LegHistory(name=name, layout=layout)
    else:
        history = read_leg(layout)
        problems.extend(f"{name} leg: {problem}" for problem in history.problems)
    return Leg(history=history, chain=lineage(history))
