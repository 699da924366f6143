"""A run in production: one leg, no reference; each recovery is judged while the run goes on, and the whole run at its end. Like
a drill it can be continued from its files.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.events import can_go_on
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RUN, RunLayout
from chaosrun.records.locks import locked
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import RunInfo, own_leg, read_run
from chaosrun.records.supervision import is_supervised
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.drill import LegRunner, outcome_of, run_files
from chaosrun.supervise.find_runs import list_runs, remove_run
from chaosrun.supervise.workers import order_template
from chaosrun.verify.verdict import Verdict, judge


@dataclass(slots=True, kw_only=True)
class Production:
    run: RunLayout
    legs: LegRunner

    def execute(self) -> Verdict:
        """Run what remains and judge the run. Raises as `DrillExecution.execute`."""
        with run_files(self.run, "resume"):
            info = read_run(self.run)
            spec, leg = JobSpec.model_validate(info.spec), own_leg(self.run, info, RUN)
            if can_go_on(outcome_of(leg), in_production=True):
                plan, faults = FaultPlan.read(self.run.plan_json), spec.faults
                if not leg.journal.exists() and any((faults.schedule, faults.random, faults.replay, faults.preset)):
                    self.legs.on_record({"leg": RUN, "event": "faults.not_struck", "time_s": time.time()})
                if not leg.journal.exists() and (left := _left_behind(self.run, info)):
                    named = {"other": left.run_id, "again": run_argument(left)}
                    self.legs.on_record({"leg": RUN, "event": "run.left_behind", **named, "time_s": time.time()})
                template = order_template(RUN, leg, spec, info)
                self.run.verdict_json.unlink(missing_ok=True)  # of the end that is continued now
                result = self.legs.run(RUN, leg, template, plan, spec)
                if result.outcome == "interrupted":
                    hint = f"`chaosrun resume {run_argument(self.run)}` continues the run"
                    raise InterruptedRunError("interrupted", hint=hint)
            verdict = judge(self.run)
            write_durably(self.run.verdict_json, json.dumps(verdict.to_json(), indent=1).encode())
            return verdict


@contextmanager
def lock_job(run: RunLayout, root: Path) -> Iterator[None]:
    """Hold the job of a run in production: the same one is not run twice at once under a root. Raises UsageError, naming the
    other run where it is known."""
    info = read_run(run)
    if info.kind != "run":
        yield
        return
    key = _key(info)
    folder = root / "jobs"
    folder.mkdir(exist_ok=True)
    others = (RunLayout(each.path) for each in list_runs(root) if each.status == "running" and each.run_id != run.run_id)
    other = next((each for each in others if is_supervised(each) and _key(read_run(each)) == key), None)
    name = "" if other is None else f" as run {other.run_id}"
    hint = "`chaosrun list` shows it" if other is None else f"follow it: chaosrun status -w {run_argument(other)}"
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / f"{key}.lock", f"job {info.name} is being run already{name},", hint=hint))
        except UsageError:
            if not run.supervisor_json.exists():
                remove_run(run)  # no leg of it has begun
            raise
        yield


def _left_behind(run: RunLayout, info: RunInfo) -> RunLayout | None:
    """The run of the same job before this one, if `chaosrun resume` would go on with it."""
    earlier = (each for each in list_runs(run.path.parents[1]) if each.created_s < info.created_s and each.status != "damaged")
    of_the_job = (other for each in earlier if _key(read_run(other := RunLayout(each.path))) == _key(info))
    last = next(of_the_job, None)
    may_go_on = last and last.leg(RUN).journal.exists() and can_go_on(outcome_of(last.leg(RUN)), in_production=True)
    return last if may_go_on else None


def _key(info: RunInfo) -> str:
    """Identifies a job: its directory, its script, and its spec with the changes of the command line."""
    said = json.dumps([info.kind, info.directory, info.script, info.spec], sort_keys=True)
    return sha256(said.encode()).hexdigest()[:16]
