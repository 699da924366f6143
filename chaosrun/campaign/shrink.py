"""Shrinks the fault plan of a failed run to a smallest one that still fails in the same way.

A candidate that cannot be planned counts as not failing. The candidates of a round run in parallel, which does not affect the
result.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.campaign.ddmin import ddmin, simplify
from chaosrun.campaign.drill import drill_on, new_run, takes_agents
from chaosrun.campaign.scheduler import PlacementPool, RunningSupervisors, Scheduler, Shape, Task, one_ray
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.plan.planner import make_plan
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import Early, read_run
from chaosrun.spec.fragment import Entry, as_entries, as_yaml, cleared, scheduled
from chaosrun.spec.job_file import Job, load_job
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.drill import lock_run
from chaosrun.supervise.find_runs import remove_run
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import Listener
from chaosrun.verify.verdict import Verdict
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster

SHRUNK_VERSION = 1
MAX_DRILLS = 100
CRASHES = frozenset({"recovery_failed", "user_error"})
"""Outcomes of a chaos leg whose recovery failed."""

Candidates = Mapping[str, Sequence[str]]
"""Overrides of a job, by the key of the plan that they give."""
RunDrills = Callable[[Candidates, str | None], Mapping[str, str | None]]
"""Carry out drills, in order or side by side, until one has the symptom looked for; symptoms at least up to that one."""
AGAIN = "`chaosrun shrink {run}` begins again; the run is as it was"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    run: RunLayout
    job: Job
    overrides: tuple[str, ...]
    schedule: tuple[Entry, ...]
    """Its faults, as in a job file."""
    symptom: str | None
    """None when it has no verdict because its supervisor died."""

    @property
    def folder(self) -> Path:
        return self.run.path / "shrink"

    def changed(self, schedule: Sequence[Entry]) -> list[str]:
        """The overrides of the job under these faults alone."""
        kept = [override for override in self.overrides if not override.startswith("faults.schedule")]
        return [*kept, *cleared(self.job.spec), scheduled(schedule)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    run: RunLayout
    job: str
    overrides: tuple[str, ...]
    """Overrides of the job file that reproduce the symptom."""
    faults: int
    schedule: tuple[Entry, ...]
    symptom: str | None
    drills: int
    refused: int
    smallest: bool
    """False when the limit of drills was reached before."""
    seen: str | None
    """Symptom of the repeated drill: of the whole plan if that did not fail again, else of the remaining plan."""
    verified: RunLayout | None
    """The run of that drill; None when the whole plan did not fail again."""
    fragment: str

    @property
    def exit_code(self) -> int:
        return 0 if self.verified is not None and self.seen == self.symptom else 6

    @property
    def path(self) -> Path:
        return self.run.path / "shrunk.yaml"

    def to_json(self) -> dict[str, object]:
        verified = None if self.verified is None else self.verified.run_id
        path = str(self.path) if self.verified else None
        told = asdict(self) | {"run": self.run.run_id, "verified": verified, "path": path, "exit_code": self.exit_code}
        del told["fragment"]
        return {"v": SHRUNK_VERSION, **told}


def symptom_of(verdict: Verdict | dict[str, Any]) -> str | None:
    """How a drill failed: the first difference, or how its recovery ended; None when it did not fail."""
    told = dict[str, Any](verdict.to_json()) if isinstance(verdict, Verdict) else verdict
    if told["status"] == "FAIL":
        failing = [check["name"] for check in told["checks"] if check["status"] == "fail"]
        divergence = told["divergence"]
        return f"FAIL: {divergence['kind'] if divergence else next(iter(failing), told['outcome'])}"
    if told["status"] == "INCONCLUSIVE" and told["outcome"] in CRASHES and told["attempts"]:
        return str(told["outcome"]).replace("_", " ")
    return None


def open_case(run: RunLayout) -> FailedRun:
    """Open a run for shrinking. Raises UsageError if it did not fail, or its job file has changed since."""
    info = read_run(run)
    plan = FaultPlan.read(run.plan_json)
    if not plan.faults:
        raise UsageError(f"run {run.run_id} had no faults: there is nothing to leave out", hint="name a run that failed")
    symptom = None
    if run.verdict_json.is_file():
        verdict = json.loads(run.verdict_json.read_text())
        symptom = symptom_of(verdict)
        if symptom is None:
            hint = "only a FAIL, or a recovery that failed, can be shrunk; `chaosrun list` shows the runs"
            raise UsageError(f"run {run.run_id} did not fail: {verdict['status']}, {verdict['cause']}", hint=hint)
    path = Path(info.job)
    job = load_job(path, info.overrides)
    if job.text != run.job_yaml.read_text():
        raise UsageError(f"{path} has changed since run {run.run_id}", hint="submit it again and shrink that run")
    schedule = tuple(as_entries(plan.faults, JobSpec.model_validate(info.spec).workers))
    return FailedRun(run=run, job=job, overrides=info.overrides, schedule=schedule, symptom=symptom)


@dataclass(slots=True)
class _Trials:
    """The drills run so far; each plan is tried once."""

    case: FailedRun
    drill: RunDrills
    limit: int
    symptom: str | None = None
    drills: int = 0
    refused: int = 0
    smallest: tuple[Entry, ...] = ()
    """The last schedule that failed: the smallest so far."""
    _known: dict[str, str | None] = field(default_factory=dict)
    _ahead: dict[str, str | None] = field(default_factory=dict)
    """Symptoms of all drills that ran, even of those whose turn has not come, which do not count as tried yet."""

    def first(self, schedules: Sequence[tuple[Entry, ...]]) -> tuple[Entry, ...] | None:
        """The first plan that fails in the same way. Raises _UsedUpError when the limit of drills is reached."""
        planned = dict(found for schedule in schedules if (found := self._planned(schedule)))
        due = takewhile(lambda each: self._ahead.get(each[0]) != self.symptom, planned.items())
        new = (each for each in due if each[0] not in self._ahead)
        self._ahead |= self.drill(dict(islice(new, self.limit - self.drills)), self.symptom)
        return next((schedule for schedule in schedules if self._fails(schedule)), None)

    def _fails(self, schedule: tuple[Entry, ...]) -> bool:
        same = (found := self.seen(schedule)) is not None and found == self.symptom
        if same:
            self.smallest = schedule
        return same

    def seen(self, schedule: tuple[Entry, ...]) -> str | None:
        if (planned := self._planned(schedule)) is None:
            self.refused += 1
            return None
        key, overrides = planned
        if key not in self._known:
            if self.drills >= self.limit:
                raise _UsedUpError
            self.drills += 1
            if key not in self._ahead:
                self._ahead |= self.drill({key: overrides}, self.symptom)
            self._known[key] = self._ahead[key]
        return self._known[key]

    def _planned(self, schedule: tuple[Entry, ...]) -> tuple[str, Sequence[str]] | None:
        """The planned drill; None if it cannot be planned, as a fault may be unable to fire without the others."""
        overrides = [*self.case.changed(schedule), "verify.confirm=false"]
        try:
            return _key(make_plan(load_job(self.case.job.path, overrides).spec)), overrides
        except UsageError:
            return None


class _UsedUpError(Exception):
    """The limit of drills is reached."""


def shrink(
    run: RunLayout,
    *,
    max_drills: int | None = None,
    early: Early = "always",
    overrides: Sequence[str] = (),
    address: str | None = None,
    on_event: Listener | None = None,
) -> Shrunk:
    """Reduce the faults of a run that failed to a smallest plan that fails in the same way, also written to its shrunk.yaml.
    `early`: as in `submit`; `overrides`: added to the run's. Raises UsageError for a run that did not fail or is being
    supervised; otherwise as `api.submit`."""
    with Interrupts(AGAIN) as interrupts, lock_run(run):
        interrupts.check(run)
        case = open_case(run)
        case = replace(case, overrides=(*case.overrides, *overrides))
        shape = Shape.of(case.job.spec)
        try:
            with one_ray(address, [shape], interrupts) as pool:
                drills = _Drills(case, early, address, pool, shape, on_event or (lambda record: None))
                return reduce_faults(case, drills.symptoms, drills.verify, limit=max_drills or MAX_DRILLS)
        except InterruptedRunError as error:
            raise InterruptedRunError("interrupted", hint=AGAIN.format(run=run_argument(run))) from error
        finally:
            shutil.rmtree(case.folder, ignore_errors=True)


def reduce_faults(
    case: FailedRun, drill: RunDrills, verify: Callable[[Sequence[str]], tuple[RunLayout, str | None]], *, limit: int
) -> Shrunk:
    """`drill` runs candidates, `verify` the drill of the remaining plan, whose run is kept. Writes shrunk.yaml."""
    trials = _Trials(case=case, drill=drill, limit=max(1, limit), smallest=case.schedule)
    seen = trials.seen(case.schedule)
    trials.symptom = case.symptom or seen
    if seen is None or seen != trials.symptom:
        return _outcome(case, trials, smallest=False, seen=seen, verified=None)
    used_up = False
    try:
        simplify(ddmin(case.schedule, trials.first), trials.first)
    except _UsedUpError:
        used_up = True
    run, seen = verify(case.changed(trials.smallest))
    shrunk = _outcome(case, trials, smallest=not used_up, seen=seen, verified=run)
    shrunk.path.write_text(shrunk.fragment)
    return shrunk


def _outcome(case: FailedRun, trials: _Trials, *, smallest: bool, seen: str | None, verified: RunLayout | None) -> Shrunk:
    schedule, seed = trials.smallest, case.job.spec.faults.seed
    about = f"# Run {case.run.run_id} with {count(len(case.schedule), 'fault')}, shrunk: {trials.symptom}\n"
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
    """Equal for plans of the same faults, whatever their ids and entries."""
    faults = [{key: value for key, value in fault.to_json().items() if key not in ("id", "source")} for fault in plan.faults]
    return "\n".join(sorted(json.dumps(fault, sort_keys=True) for fault in faults))


@dataclass(slots=True)
class _Drills:
    case: FailedRun
    early: Early
    address: str | None
    pool: PlacementPool
    shape: Shape
    on_event: Listener
    _begun: int = 0

    def symptoms(self, candidates: Candidates, looked_for: str | None) -> dict[str, str | None]:
        """Run drills, remove their runs, and return their symptoms."""
        folder = self.case.folder.absolute()
        return self._carried_out({key: self._run(folder, each) for key, each in candidates.items()}, looked_for)

    def verify(self, overrides: Sequence[str]) -> tuple[RunLayout, str | None]:
        """Run the drill of the remaining plan; its run is kept next to the run being shrunk."""
        run = self._run(self.root, overrides)
        return run, self._carried_out({run.run_id: run}, None)[run.run_id]

    @property
    def root(self) -> Path:
        return self.case.run.path.parent.parent.absolute()

    def _run(self, folder: Path, overrides: Sequence[str]) -> RunLayout:
        return new_run(folder, self.case.job.path, overrides, reference="auto", early=self.early)

    def _carried_out(self, runs: Mapping[str, RunLayout], looked_for: str | None) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        tasks = {key: self._task(key, FaultPlan.read(run.plan_json)) for key, run in runs.items()}

        def on_result(key: str, symptom: str | None) -> bool:
            found[key] = symptom
            self.on_event({"leg": None, "event": "shrink.tried", "drill": tasks[key].name, "symptom": symptom})
            return symptom is None or symptom != looked_for

        carry = partial(self._carry, runs)
        scheduler = Scheduler(carry=carry, pool=self.pool, at_once=None, on_result=on_result, tell=self.on_event)
        scheduler.run([*tasks.values()])
        return found

    def _task(self, key: str, plan: FaultPlan) -> Task[str]:
        self._begun += 1
        name = f"candidate {self._begun}, {len(plan.faults)} of {count(len(self.case.schedule), 'fault')}"
        return Task(key, name, self.shape, needs_all=takes_agents([fault.kind for fault in plan.faults]))

    def _carry(
        self,
        runs: Mapping[str, RunLayout],
        key: str,
        cluster: "RayCluster | None",
        supervisors: RunningSupervisors,
        listen: Listener,
    ) -> tuple[str | None, bool]:
        run = runs[key]
        try:
            verdict = drill_on(cluster, run, self.root, watch=supervisors.watch(), address=self.address, on_record=listen)
        except ChaosrunError:
            raise
        except Exception as error:
            # The failure may crash chaosrun itself. Processes left by its drill are ended with the agents.
            return f"bug: {type(error).__name__}", False
        finally:
            if run.path.is_relative_to(self.case.folder.absolute()):
                remove_run(run)
        return symptom_of(verdict), True
