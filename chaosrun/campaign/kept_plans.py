"""Plans of failed drills, one file each next to the history: run first in later nights, until they pass often enough."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chaosrun.campaign.files import decode, save
from chaosrun.campaign.planned_drill import PlannedDrill, exact_overrides, plan_digest, planned_drill
from chaosrun.campaign.results import DrillResult
from chaosrun.errors import ChaosrunError
from chaosrun.faults.fault import FaultPlan
from chaosrun.plan.planner import make_plan
from chaosrun.records.run_file import read_object
from chaosrun.spec.job_file import load_job
from chaosrun.spec.suite import SuiteDrill
from chaosrun.wording import listed

PASSES = 3
"""Nights in which a kept plan has to be as expected, one after the other, before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    drill: str
    night: str
    overrides: tuple[str, ...]
    """Overrides of the job file that plan these faults, one by one if possible (`exact`)."""
    exact: bool
    """The overrides name its faults one by one; else they are planned again from the original request and seed."""
    plan: str
    """Digest of the drill, the job and the faults."""
    faults: Any
    """plan.json of the failed run, for people; empty when the run had not got that far."""
    cause: str
    run: str | None
    suite: str
    """The suite's file on the machine where it failed: several suites may have the same name."""
    passed: tuple[str, ...] = ()
    """Nights since its last failure in which it was as expected."""

    @property
    def name(self) -> str:
        """The file's name; includes the plan, as a drill may fail with several plans in a night."""
        return f"{self.drill}@{self.night}-{self.plan[:6]}"


@dataclass(frozen=True, slots=True)
class KeptPlans:
    """The folder of a suite's kept plans, next to its history."""

    folder: Path

    @classmethod
    def next_to(cls, history: Path) -> "KeptPlans":
        return cls(history.with_name(f"{history.name.removesuffix('.jsonl')}.kept"))

    def read(self) -> tuple[list[KeptPlan], list[str]]:
        """The kept plans, oldest first, and warnings about files that cannot be read."""
        found: list[KeptPlan] = []
        notes: list[str] = []
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []:
            try:
                found.append(decode(KeptPlan, path.read_bytes()))
            except (OSError, ValueError) as error:
                notes.append(f"the kept plan {path} cannot be read ({type(error).__name__}: {error}): remove it")
        return sorted(found, key=lambda kept: (kept.night, kept.drill)), notes

    def take(self, result: DrillResult, planned: PlannedDrill, *, suite: str, night: str) -> None:
        """Update the kept plans from a drill's result. Several results as expected in a night count once. `suite`: its file."""
        known = [kept for kept in self.read()[0] if kept.plan == planned.plan]
        for kept in known:
            if not result.ok:
                save(self._path(kept), replace(kept, passed=()))
            elif len(passed := tuple(dict.fromkeys([*kept.passed, night]))) < PASSES:
                save(self._path(kept), replace(kept, passed=passed))
            else:
                self._path(kept).unlink(missing_ok=True)
        if not known and not result.ok:
            failed = _failed(result, planned, suite, night)
            save(self._path(failed), failed)

    def _path(self, kept: KeptPlan) -> Path:
        readable = re.sub(r"[^A-Za-z0-9._=@,-]+", "_", f"{kept.drill}@{kept.night}")[:120]
        return self.folder / f"{readable}-{re.sub('[^a-z0-9]+', '_', kept.plan)[:6]}.json"


def _failed(result: DrillResult, planned: PlannedDrill, suite: str, night: str) -> KeptPlan:
    told: object = {}
    overrides: tuple[str, ...] | None = None
    try:
        job = load_job(Path(planned.job), planned.overrides)
        plan = make_plan(job.spec, job.trace)
        if result.run is not None and result.run.plan_json.is_file():
            plan = FaultPlan.from_json(told := read_object(result.run.plan_json))
        if (exact := exact_overrides(job.spec, planned.overrides, plan)) is not None:
            changed = load_job(Path(planned.job), exact)
            if plan_digest(planned.drill, changed.spec, make_plan(changed.spec, changed.trace)) == planned.plan:
                overrides = exact
    except (ChaosrunError, ValueError, TypeError, KeyError):
        pass  # the drill may have failed because of its job file or plan: keep the plan unchanged
    return KeptPlan(
        drill=planned.drill,
        night=planned.rerun or night,
        overrides=overrides or planned.overrides,
        exact=overrides is not None,
        plan=planned.plan,
        faults=told,
        cause=result.error or result.cause or "",
        run=None if result.run is None else result.run.run_id,
        suite=suite,
    )


def reruns(
    kept: Iterable[KeptPlan], suite: Sequence[SuiteDrill], tonight: Sequence[PlannedDrill]
) -> tuple[list[PlannedDrill], list[str]]:
    """The drills that repeat kept plans, only for drills that run tonight with another plan; with notes for the user."""
    drills = {drill.name: drill for drill in suite}
    chosen = {drill.name for drill in tonight}
    planned_anyway = {drill.plan for drill in tonight}
    found: list[PlannedDrill] = []
    notes: list[str] = []
    elsewhere: list[str] = []
    for each in {plan.name: plan for plan in kept}.values():
        if each.drill not in drills:
            notes.append(f"{each.name} is kept, and not repeated: there is no drill {each.drill} (it failed in {each.suite})")
            continue
        if each.drill not in chosen:
            elsewhere.append(each.name)
            continue
        if each.plan in planned_anyway:
            continue
        drill = drills[each.drill]
        try:
            job = load_job(drill.job.path, each.overrides)
            plan = make_plan(job.spec, job.trace)
        except ChaosrunError as error:
            first = error.message.splitlines()[0]
            notes.append(f"{each.name} is kept, and not repeated: its plan does not fit the job: {first}")
            continue
        planned = planned_drill(replace(drill, job=job), each.overrides, plan, name=each.name, rerun=each.night)
        if planned.plan != each.plan:
            notes.append(f"{each.name}: the job has changed since it failed")
            planned = replace(planned, plan=each.plan)
        if not each.exact:
            notes.append(f"{each.name}: its faults are not named one by one, they are drawn again from seed {plan.seed}")
        found.append(planned)
    if elsewhere:
        notes.append(f"kept, and not repeated because its drill does not run here: {listed(elsewhere)}")
    return found, notes
