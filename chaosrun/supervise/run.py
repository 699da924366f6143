"""Carries a run from its job file to its verdict: plan, directory, control socket, cluster for its workers, drill.

`carry_out` is the only entry: it supervises in a separate process (`chaosrun.supervise.process`), which may die with Ray or be
killed by a planned fault; another one is then started. That one reads from the run's files, as `chaosrun resume` does, what the
killed one had done and whether its cause of death is on record. A process that is already connected to a Ray supervises by
itself.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.cluster.joining import expect_joinable
from chaosrun.errors import NoClusterError, RecoveryError, ResourcesError, RunTimeoutError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.strace import expect_strace
from chaosrun.faults.tracer import SaveNote
from chaosrun.plan.permission import ask_permission
from chaosrun.plan.planner import make_plan
from chaosrun.records.events import EventRecord
from chaosrun.records.layout import RunLayout
from chaosrun.records.markers import Note, read_marker, read_note
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import Early, Kind, read_run
from chaosrun.spec.bounds import crowded
from chaosrun.spec.command_line import TypedJob
from chaosrun.spec.imports import missing_imports
from chaosrun.spec.job_file import Job, load_job, refused
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Problem, spec_error
from chaosrun.supervise.control import Answer, Cancel, Command, Inject, Ping, serve
from chaosrun.supervise.creation import create_run
from chaosrun.supervise.drill import DrillExecution, LegRunner, has_ended, leg_of, supervised
from chaosrun.supervise.find_runs import find_run, remove_run
from chaosrun.supervise.injections import Injections
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.process import SupervisorProcess, SupervisorTask
from chaosrun.supervise.production import Production, lock_job
from chaosrun.supervise.supervisor import Supervisor
from chaosrun.supervise.watchdog import suspicion
from chaosrun.verify.confirm import NO_FAULTS
from chaosrun.verify.verdict import Verdict, judge

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster
    from chaosrun.cluster.workers import ClusterWorkers

Listener = Callable[[EventRecord], None]
Watch = Callable[[Supervisor | None], None]


def plan(job: Path | TypedJob, overrides: Sequence[str] = (), *, address: str | None = None) -> tuple[Job, FaultPlan]:
    """Load a job and expand its faults; starts nothing. Raises SpecError or UsageError; if a private Ray is to be started, as
    neither `address` nor the environment names another, also for what this machine lacks."""
    loaded = load_job(job, overrides)
    problems = _lacking(loaded, address)
    faults = make_plan(loaded.spec, loaded.trace, partial(refused, loaded, problems))
    if problems:
        raise spec_error(problems)
    return loaded, faults


def expect_startable(job: Job, address: str | None) -> None:
    """Raises SpecError for what the job needs and this machine lacks, as `plan` does."""
    if problems := _lacking(job, address):
        raise spec_error(problems)


def _lacking(job: Job, address: str | None) -> list[Problem]:
    if expected_ray(address) != "private":
        return []  # another Ray's nodes may have other packages, and more cores
    problems = list(missing_imports(job))
    if found := crowded(job.spec.workers, job.spec.per_worker.cpu, os.cpu_count() or 1):
        problems.append(job.problem("workers", *found))
    return problems


def create(
    job: Path | TypedJob,
    overrides: Sequence[str],
    root: Path,
    address: str | None,
    reference: str,
    early: Early = "long",
    kind: Kind = "drill",
    metrics: str | None = None,
) -> RunLayout:
    """Create a run directory for the job under an absolute root. Raises UsageError or SpecError, also for faults that the Ray
    at `address`, or a private one, will not allow; ResourcesError where a fault needs strace and it is missing."""
    loaded, faults = plan(job, overrides, address=address)
    faults = faults if kind == "drill" else NO_FAULTS
    if reference not in ("auto", "fresh"):
        reference = str(find_run(reference, root).path.resolve())
    if any(fault.phase == "save" and fault.facts.note is SaveNote for fault in faults.faults):
        expect_strace()
    if expected := expected_ray(address):
        expect_joinable(address or os.environ.get("RAY_ADDRESS", ""))
        ask_permission(faults.faults, loaded.spec, ray=expected, has_successor=True)
    return create_run(
        root,
        loaded,
        plan=faults,
        overrides=list(overrides),
        reference=reference,
        early=early,
        kind=kind,
        metrics=metrics,
        address=address,
    )


def carry_out(
    run: RunLayout,
    root: Path,
    address: str | None,
    listener: Listener,
    interrupts: Interrupts,
    report: Callable[[Verdict], Sequence[str]] = lambda verdict: (),
    *,
    cluster: "RayCluster | None" = None,
    survey: bool = False,
) -> Verdict:
    """Run what remains of a run, judge it and `report` the verdict (`report` returns its warnings); records the outcome in
    supervisor.json. Uses the agents of `cluster`, which are kept for other runs, or its own.

    Works in a child process, on that process's own Ray or the one at `address`, unless this process is connected to one and no
    planned fault ends the supervisor. Raises the child's error, RecoveryError when the child died and no planned fault explains
    it, ResourcesError when Ray's head died.
    """
    interrupts.check(run)
    new = not run.supervisor_json.exists()
    with lock_job(run, root), supervised(run) as (lock, warnings):
        if cluster is None:
            announce(run, listener)
        if cluster is None and (expected_ray(address) is not None or _ending_the_supervisor(run)):
            try:
                verdict = _in_a_process(run, root, address, listener, interrupts, lock)
            except NoClusterError as error:
                if any(run.path.glob("*/journal.jsonl")):
                    hint = f"when it runs again: `chaosrun resume {run_argument(run)}`, with its --address"
                    raise ResourcesError(error.message, hint=hint) from error
                if new:
                    remove_run(run)  # there is nothing to continue
                raise
        else:
            about = {"cluster": cluster, "survey": survey, "deadline_s": deadline_of(run)}
            verdict = execute(run, root, address, listener, interrupts, **about)
        warnings += report(verdict)
        return verdict


def announce(run: RunLayout, listener: Listener) -> None:
    listener({"leg": None, "event": "run.created", "run": run.run_id, "path": str(run.path)})


def _in_a_process(
    run: RunLayout, root: Path, address: str | None, listener: Listener, interrupts: Interrupts, lock: int
) -> Verdict:
    """Supervise the drill in a separate process, and start another one each time a planned fault ends it."""
    again = f"`chaosrun resume {run_argument(run)}` continues the run"
    deadline_s = deadline_of(run)
    info = read_run(run)
    # A run in production gets another supervisor, for any cause of death.
    successors = info.spec["recovery"]["max_restarts"] if info.kind == "run" else 0
    while True:
        struck_before = _struck(run)
        held = {"lock": lock, "parent": os.getpid(), "deadline_s": deadline_s}
        task = SupervisorTask(run=str(run.path.absolute()), root=str(root), address=address, **held)
        with SupervisorProcess(task) as process:
            interrupts.watch(process)
            try:
                last = process.listen(listener)
            finally:
                interrupts.watch(None)
        if last is not None and last.error is not None:
            raise last.error.again(run)
        if last is not None:
            return judge(run)
        new = _struck(run) - struck_before
        if process.watchdog.overdue:
            interrupts.check()
            if has_ended(run):
                return judge(run)
            raise RunTimeoutError("the run's timeout has passed while Ray or the ranks were starting or ending", hint=again)
        if not new and successors:
            successors -= 1
            lost = process.watchdog.lost
            how = f"was ended, as {lost}" if lost else f"ended {process.how_it_ended()}"
            listener({"leg": None, "event": "supervisor.lost", "pid": process.pid, "how": how})
            continue
        if not new and process.watchdog.lost is not None:
            raise ResourcesError(f"{process.watchdog.lost}, and no planned fault was the cause", hint=f"{suspicion()} {again}")
        if not new:
            how = process.how_it_ended()
            raise RecoveryError(
                f"the process that supervised the drill (pid {process.pid}) ended {how}, and no planned fault says so",
                hint=again,
            )
        listener({"leg": None, "event": "supervisor.ended", "pid": process.pid, "faults": sorted(new)})


def deadline_of(run: RunLayout) -> float | None:
    """When the run's timeout, which begins now, expires; CLOCK_MONOTONIC, which nobody sets and processes share."""
    timeout_s = JobSpec.model_validate(read_run(run).spec).timeout
    return None if timeout_s is None else time.monotonic() + timeout_s


def _ending_the_supervisor(run: RunLayout) -> list[Fault]:
    """Faults that end a supervisor; read again each time, as one may have been injected since."""
    plan = FaultPlan.read(run.plan_json)
    return [fault for fault in plan.faults if fault.facts.evidence == "successor"]


def _struck(run: RunLayout) -> set[str]:
    """The faults that a supervisor recorded, before it died, as its cause of death."""
    leg = leg_of(run, run.main)
    return {fault.id for fault in _ending_the_supervisor(run) if read_marker(leg, fault.id) and read_note(leg, fault.id, Note)}


def expected_ray(address: str | None) -> str | None:
    """The kind of Ray that a run will have, as far as known before it starts: "private" or "joined"; None where this process is
    already connected to one."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return None
    return "joined" if address or os.environ.get("RAY_ADDRESS") else "private"


def execute(
    run: RunLayout,
    root: Path,
    address: str | None,
    listener: Listener,
    interrupts: Interrupts,
    *,
    has_successor: bool = False,
    deadline_s: float | None = None,
    cluster: "RayCluster | None" = None,
    survey: bool = False,
) -> Verdict:
    """Run what remains of a run, whose lock is held. `has_successor`: another process continues when this one is killed."""
    interrupts.check(run)
    with (
        reachable(run, listener, interrupts, has_successor=has_successor) as (on_record, on_supervisor),
        placed(run, address, interrupts, cluster) as workers,
    ):
        watched = {"on_record": on_record, "on_supervisor": on_supervisor}
        legs = LegRunner(workers=workers, **watched, has_successor=has_successor, deadline_s=deadline_s)
        if read_run(run).kind == "run":
            return Production(run=run, legs=legs).execute()
        return DrillExecution(run=run, root=root, legs=legs, survey=survey).execute()


@contextmanager
def reachable(
    run: RunLayout, listener: Listener, interrupts: Interrupts, *, has_successor: bool = False
) -> Iterator[tuple[Listener, Watch]]:
    """Take commands for a run, whose lock is held, from other processes of this user; yields the receiver of the drill's
    records and supervisors."""
    injections = Injections(run, has_successor=has_successor)

    def on_record(record: EventRecord) -> None:
        injections.hear(record)
        listener(record)

    def on_supervisor(supervisor: Supervisor | None) -> None:
        injections.watch(supervisor)
        interrupts.watch(supervisor)

    def obey(command: Command) -> Answer:
        match command:
            case Ping():
                return Answer(run=run.run_id, pid=os.getpid())
            case Cancel():
                interrupts.request()
                return Answer()
            case Inject():
                return injections.ask(command)

    with serve(run, obey, on_failure=lambda why: listener({"leg": None, "event": "control.failed", "message": why})):
        yield on_record, on_supervisor


@contextmanager
def placed(
    run: RunLayout, address: str | None, interrupts: Interrupts, cluster: "RayCluster | None" = None
) -> "Iterator[ClusterWorkers]":
    """The given cluster, or a new one, and a run's workers on it."""
    from chaosrun.cluster.ray_cluster import RayCluster
    from chaosrun.cluster.workers import ClusterWorkers

    info = read_run(run)
    spec, directory = JobSpec.model_validate(info.spec), Path(info.directory)
    if cluster is not None:
        yield ClusterWorkers(cluster, spec, directory)
        return
    with interrupts.postponed():
        cluster = RayCluster(address, workers=spec.workers, cpu=spec.per_worker.cpu, gpu=spec.per_worker.gpu)
    try:
        interrupts.check()
        yield ClusterWorkers(cluster, spec, directory)
    finally:
        with interrupts.postponed():
            cluster.close()
