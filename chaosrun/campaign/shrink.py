"""Shrinking: from the fault plan of a run that failed to a smallest one that still fails in the same way.

Every candidate is planned as a job file would plan it and carried out as a drill; what cannot be planned does not fail. Drills
run one after the other on kept agents, unless their faults are for more than worker processes.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from chaosrun.campaign.drill import drill_on, new_run, takes_agents
from chaosrun.campaign.scheduler import Shape
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.plan.planner import make_plan
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import Early, read_run
from chaosrun.spec.fragment import Entry, as_entries, as_yaml, cleared, scheduled
from chaosrun.spec.model import JobSpec
from chaosrun.spec.source import Job, load_job
from chaosrun.supervise.drill import lock_run
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import Listener, carry_out
from chaosrun.supervise.runs import remove_run
from chaosrun.verify.verdict import Verdict

SHRUNK_VERSION = 1
MAX_DRILLS = 100
CRASHES = frozenset({"recovery_failed", "user_error"})
"""Outcomes of a leg under faults that ended in its recovery."""

RunDrill = Callable[[Sequence[str]], str | None]
"""Carry out a drill with these overrides; returns its symptom (`symptom_of`)."""
WHEN_AND_WHO = frozenset({"rank", "phase", "at_step", "occurrence", "attempt", "after"})
"""Keys that entries of every kind may have; the others are options."""
AGAIN = "`chaosrun shrink {run}` begins again; the run is as it was"

T = TypeVar("T")


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

    def to_json(self) -> dict[str, object]:
        verified = None if self.verified is None else self.verified.run_id
        path = str(self.path) if self.verified else None
        told = asdict(self) | {"run": self.run.run_id, "verified": verified, "path": path, "exit_code": self.exit_code}
        del told["fragment"]
        return {"v": SHRUNK_VERSION, **told}


def symptom_of(verdict: Verdict | dict[str, Any]) -> str | None:
    """In which way a drill failed: what differed first, or how its recovery ended. None when it did not fail.

    A drill that proves nothing (a fault that did not land, a job that does not repeat itself) did not fail either.
    """
    told = dict[str, Any](verdict.to_json()) if isinstance(verdict, Verdict) else verdict
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
    return Case(run=run, job=job, overrides=info.overrides, schedule=schedule, symptom=symptom)


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
    run: RunLayout,
    *,
    max_drills: int | None = None,
    early: Early = "always",
    address: str | None = None,
    on_event: Listener | None = None,
) -> Shrunk:
    """Reduce the faults of a run that failed to a smallest plan that fails in the same way; it is also in its shrunk.yaml.
    `early`: as of `submit`.

    Raises UsageError, before anything starts, for a run that did not fail and for one that is being supervised; otherwise as
    `api.submit`.
    """
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    with Interrupts(AGAIN) as interrupts, lock_run(run):
        interrupts.check(run)
        case = open_case(run)
        drills, listener = _Drills(case, early, address, interrupts), on_event or (lambda record: None)
        try:
            return reduce_faults(case, drills.symptom, drills.verify, limit=max_drills or MAX_DRILLS, on_record=listener)
        finally:
            drills.close()
            shutil.rmtree(case.folder, ignore_errors=True)


def reduce_faults(
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


@dataclass(slots=True)
class _Drills:
    """Carries drills of a case out. Agents are there from the first drill on that wants them, until they are closed."""

    case: Case
    early: Early
    address: str | None
    interrupts: Interrupts
    _cluster: RayCluster | None = None

    @property
    def root(self) -> Path:
        return self.case.run.path.parent.parent.absolute()

    def symptom(self, overrides: Sequence[str]) -> str | None:
        """Of a drill that leaves nothing behind."""
        run = new_run(self.case.folder.absolute(), self.case.job.path, overrides, reference="auto", early=self.early)
        try:
            return self._carried_out(run)
        finally:
            remove_run(run)

    def verify(self, overrides: Sequence[str]) -> tuple[RunLayout, str | None]:
        """A drill like any other, that stays beside the run it is about."""
        run = new_run(self.root, self.case.job.path, overrides, reference="auto", early=self.early)
        return run, self._carried_out(run)

    def _carried_out(self, run: RunLayout) -> str | None:
        try:
            plan = FaultPlan.read(run.plan_json)
            if takes_agents(fault.kind for fault in plan.faults):
                self.close()
                return symptom_of(carry_out(run, self.root, self.address, lambda record: None, self.interrupts))
            if self._cluster is None:
                self._cluster = Shape.of(self.case.job.spec).connect(self.address, self.interrupts.postponed)
            return symptom_of(drill_on(self._cluster, run, self.root, watch=self.interrupts.watch))
        except InterruptedRunError as error:
            raise InterruptedRunError("interrupted", hint=AGAIN.format(run=run_argument(self.case.run))) from error
        except ChaosrunError:
            raise
        except Exception as error:
            # What is being looked for may be a bug in here. What its drill has left running goes with the agents.
            self.close()
            return f"bug: {type(error).__name__}"

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            with self.interrupts.postponed():
                cluster.close()


def ddmin(items: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A part of `items`, in their order, that fails and would not if any one of them were left out (1-minimal): delta
    debugging, the algorithm ddmin of A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
    Transactions on Software Engineering 28(2), 2002, section 3.2.

    `items` must fail, and nothing at all must not: neither is tried. `fails` is asked about the same part more than once, so
    it had better remember. Asks on the order of log n times where one item is to blame, n² at worst.
    """
    kept = tuple(items)
    granularity = 2
    while len(kept) >= 2:
        # As many parts, none empty, that differ by at most one in length.
        bounds = [number * len(kept) // granularity for number in range(granularity + 1)]
        parts = [kept[start:end] for start, end in pairwise(bounds)]
        rests = [(*kept[:start], *kept[end:]) for start, end in pairwise(bounds)]
        if found := next((part for part in parts if fails(part)), None):
            # Reduce to a part.
            kept, granularity = found, 2
        elif granularity > 2 and (found := next((rest for rest in rests if fails(rest)), None)):
            # Reduce to a complement: what is left of the parts stays as fine as it was. (Of two parts each is the other's.)
            kept, granularity = found, granularity - 1
        elif granularity < len(kept):
            granularity = min(2 * granularity, len(kept))
        else:
            break
    return kept


def simpler(entry: Entry) -> Iterator[Entry]:
    """Entries of `faults.schedule` that ask for less, the boldest first: a plain kill after the step; a kill; each key left
    out; one rank instead of all; half the step. Not all of them can be planned. Each is smaller: the search for one ends.
    """
    plain = {key: entry[key] for key in ("rank", "at_step") if key in entry}
    found: list[Entry] = [plain] if "at_step" in entry else []
    if "kind" in entry:
        found.append({key: value for key, value in entry.items() if key in WHEN_AND_WHO})
    found += [_without(entry, key) for key in entry if key not in ("rank", "at_step", "kind")]
    if entry.get("rank") == "all":
        found.append({**entry, "rank": 0})
    step = entry.get("at_step")
    if isinstance(step, int) and step > 1:
        found.append({**entry, "at_step": step // 2})
    for number, candidate in enumerate(found):
        if candidate != entry and candidate not in found[:number]:
            yield candidate


def _without(entry: Entry, key: str) -> Entry:
    return {other: value for other, value in entry.items() if other != key}
