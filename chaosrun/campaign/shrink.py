"""Shrinking: from the fault plan of a run that failed to a smallest one that still fails in the same way.

Every candidate is planned as a job file would plan it and carried out as a drill; what cannot be planned does not fail. Must
not know how a drill is carried out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaosrun.campaign.ddmin import ddmin
from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.plan.fragment import as_entries, as_yaml, cleared, scheduled
from chaosrun.plan.planner import make_plan
from chaosrun.plan.points import Entry
from chaosrun.plan.simpler import simpler
from chaosrun.records.layout import RunLayout
from chaosrun.spec.model import JobSpec
from chaosrun.spec.source import Job, load_job
from chaosrun.supervise.drill import read_run
from chaosrun.verify.verdict import Verdict

SHRUNK_VERSION = 1
MAX_DRILLS = 100
CRASHES = frozenset({"recovery_failed", "user_error"})
"""Outcomes of a leg under faults that ended in its recovery."""

RunDrill = Callable[[Sequence[str]], str | None]
"""Carry out a drill with these overrides; returns its symptom (`symptom_of`)."""
Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run to be shrunk."""

    run: RunLayout
    job: Job
    overrides: tuple[str, ...]
    schedule: tuple[Entry, ...]
    """Its faults, as a job file would say them."""
    symptom: str | None
    """None when it has no verdict: its supervisor did not live to give one."""

    @property
    def folder(self) -> Path:
        """Where its drills are."""
        return self.run.path / "shrink"

    def changed(self, schedule: Sequence[Entry]) -> list[str]:
        """The overrides of the job under these faults alone."""
        return [*self.overrides, *cleared(self.job.spec), scheduled(schedule)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    run: RunLayout
    job: str
    overrides: tuple[str, ...]
    """Of the job file, that bring the symptom about."""
    faults: int
    """Entries that there were."""
    schedule: tuple[Entry, ...]
    """Entries that are left."""
    symptom: str | None
    """How both fail."""
    drills: int
    refused: int
    """Candidates that could not be planned."""
    smallest: bool
    """False when the drills were used up before."""
    seen: str | None
    """Symptom of the drill that was to fail again: of the whole plan when it did not, else of the plan that is left."""
    verified: RunLayout | None
    """The run of that drill; None when the whole plan did not fail again."""
    fragment: str

    @property
    def exit_code(self) -> int:
        return 0 if self.verified is not None and self.seen == self.symptom else 6

    @property
    def path(self) -> Path:
        return self.run.path / "shrunk.yaml"

    def to_json(self) -> dict[str, Any]:
        return {
            "v": SHRUNK_VERSION,
            "run": self.run.run_id,
            "symptom": self.symptom,
            "faults": self.faults,
            "schedule": [dict(entry) for entry in self.schedule],
            "smallest": self.smallest,
            "drills": self.drills,
            "refused": self.refused,
            "seen": self.seen,
            "verified": None if self.verified is None else self.verified.run_id,
            "job": self.job,
            "overrides": list(self.overrides),
            "path": str(self.path) if self.verified else None,
            "exit_code": self.exit_code,
        }


def symptom_of(verdict: Verdict | Mapping[str, Any]) -> str | None:
    """In which way a drill failed: what differed first, or how its recovery ended. None when it did not fail.

    A drill that proves nothing (a fault that did not land, a job that does not repeat itself) did not fail either.
    """
    told = verdict.to_json() if isinstance(verdict, Verdict) else verdict
    if told["status"] == "FAIL":
        failing = [check["name"] for check in told["checks"] if check["status"] == "fail"]
        divergence = told["divergence"]
        return f"FAIL: {divergence['kind'] if divergence else next(iter(failing), told['outcome'])}"
    if told["status"] == "INCONCLUSIVE" and told["outcome"] in CRASHES and told["attempts"]:
        return str(told["outcome"]).replace("_", " ")
    return None


def open_case(run: RunLayout) -> Case:
    """Raises UsageError for a run that did not fail, and for one whose job file is another by now."""
    info = read_run(run)
    plan = FaultPlan.from_json(json.loads(run.plan_json.read_text()))
    if not plan.faults:
        raise UsageError(f"run {run.run_id} had no faults: there is nothing to leave out", hint="name a run that failed")
    symptom = None
    if run.verdict_json.is_file():
        verdict = json.loads(run.verdict_json.read_text())
        symptom = symptom_of(verdict)
        if symptom is None:
            hint = "only a FAIL, or a recovery that failed, can be shrunk; `chaosrun list` shows the runs"
            raise UsageError(f"run {run.run_id} did not fail: {verdict['status']}, {verdict['cause']}", hint=hint)
    path = Path(info["job"])
    job = load_job(path, info["overrides"])
    if job.text != run.job_yaml.read_text():
        raise UsageError(f"{path} has changed since run {run.run_id}", hint="submit it again and shrink that run")
    schedule = tuple(as_entries(plan.faults, JobSpec.model_validate(info["spec"]).workers))
    return Case(run=run, job=job, overrides=tuple(info["overrides"]), schedule=schedule, symptom=symptom)


@dataclass(slots=True)
class _Trials:
    """The drills so far, each plan tried once."""

    case: Case
    drill: RunDrill
    limit: int
    on_record: Listener
    symptom: str | None = None
    """What counts as failing in the same way."""
    drills: int = 0
    refused: int = 0
    smallest: tuple[Entry, ...] = ()
    """The last that failed, which is smaller than all before."""
    _known: dict[str, str | None] = field(default_factory=dict)

    def fails(self, schedule: tuple[Entry, ...]) -> bool:
        """Raises _UsedUpError when another drill would be one too many."""
        same = (found := self.seen(schedule)) is not None and found == self.symptom
        if same:
            self.smallest = schedule
        return same

    def seen(self, schedule: tuple[Entry, ...]) -> str | None:
        overrides = [*self.case.changed(schedule), "verify.confirm=false"]
        try:
            plan = make_plan(load_job(self.case.job.path, overrides).spec)
        except UsageError:
            # Without the others this one could never fire.
            self.refused += 1
            return None
        key = _key(plan)
        if key not in self._known:
            if self.drills >= self.limit:
                raise _UsedUpError
            self.drills += 1
            self._known[key] = found = self.drill(overrides)
            about = {"number": self.drills, "faults": len(schedule), "of": len(self.case.schedule), "symptom": found}
            self.on_record({"leg": None, "event": "shrink.tried", **about})
        return self._known[key]


class _UsedUpError(Exception):
    """No more drills."""


def shrink(
    case: Case,
    drill: RunDrill,
    verify: Callable[[Sequence[str]], tuple[RunLayout, str | None]],
    *,
    limit: int,
    on_record: Listener,
) -> Shrunk:
    """`drill` carries a candidate out, `verify` the drill of what is left, whose run is kept. Writes shrunk.yaml."""
    trials = _Trials(case=case, drill=drill, limit=max(1, limit), on_record=on_record, smallest=case.schedule)
    seen = trials.seen(case.schedule)
    trials.symptom = case.symptom or seen
    if seen is None or seen != trials.symptom:
        return _told(case, trials, smallest=False, seen=seen, verified=None)
    used_up = False
    try:
        _simplify(ddmin(case.schedule, trials.fails), trials.fails)
    except _UsedUpError:
        used_up = True
    run, seen = verify(case.changed(trials.smallest))
    shrunk = _told(case, trials, smallest=not used_up, seen=seen, verified=run)
    shrunk.path.write_text(shrunk.fragment)
    return shrunk


def _simplify(schedule: tuple[Entry, ...], fails: Callable[[tuple[Entry, ...]], bool]) -> None:
    """Put simpler faults in the place of those that are left, for as long as it fails."""
    place = 0
    while place < len(schedule):
        changed = ((*schedule[:place], entry, *schedule[place + 1 :]) for entry in simpler(schedule[place]))
        if (found := next((candidate for candidate in changed if fails(candidate)), None)) is None:
            place += 1
        else:
            schedule = found


def _told(case: Case, trials: _Trials, *, smallest: bool, seen: str | None, verified: RunLayout | None) -> Shrunk:
    schedule, seed = trials.smallest, case.job.spec.faults.seed
    about = f"# Run {case.run.run_id} with {len(case.schedule)} faults, shrunk: {trials.symptom}\n"
    return Shrunk(
        run=case.run,
        job=str(case.job.path),
        overrides=tuple(case.changed(schedule)),
        faults=len(case.schedule),
        schedule=schedule,
        symptom=trials.symptom,
        drills=trials.drills,
        refused=trials.refused,
        smallest=smallest,
        seen=seen,
        verified=verified,
        fragment=about + as_yaml(seed, schedule),
    )


def _key(plan: FaultPlan) -> str:
    """The same for plans of the same faults, whatever they are called and whichever entry asked for them."""
    faults = [{key: value for key, value in fault.to_json().items() if key not in ("id", "source")} for fault in plan.faults]
    return "\n".join(sorted(json.dumps(fault, sort_keys=True) for fault in faults))
