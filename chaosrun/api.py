"""The commands of the command line as Python functions. Heavy imports (ray, torch) happen inside, when they are needed."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.errors import UsageError
from chaosrun.housekeeping.cleaning import clean
from chaosrun.housekeeping.environment import environment
from chaosrun.integrations.export.kinds import export
from chaosrun.integrations.scaffold.files import init
from chaosrun.integrations.schemas import schema
from chaosrun.records.layout import RunLayout
from chaosrun.records.runs import RunSummary
from chaosrun.supervise import remote
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.remote import cancel, inject
from chaosrun.supervise.run import Listener, carry_out, create, placed, plan
from chaosrun.supervise.runs import default_root, find_run, list_runs

if TYPE_CHECKING:
    from chaosrun.campaign.folder import Agenda
    from chaosrun.campaign.night import Wish
    from chaosrun.campaign.results import SuiteResult
    from chaosrun.campaign.shrink import Shrunk
    from chaosrun.campaign.sweeps import Sweep
    from chaosrun.preflight.conduct import Request as PreflightRequest
    from chaosrun.preflight.engine import Listener as PreflightListener
    from chaosrun.preflight.result import Result as PreflightResult
    from chaosrun.report.landings import Landed
    from chaosrun.report.write import Report, ReportFormat
    from chaosrun.supervise.guard import SupervisorProcess
    from chaosrun.verify.diagnosis import Diagnosis
    from chaosrun.verify.trajectory import Comparison
    from chaosrun.verify.verdict import Verdict

__all__ = [
    "RunResult",
    "RunSummary",
    "begin",
    "cancel",
    "clean",
    "compare",
    "default_root",
    "diagnose",
    "environment",
    "export",
    "find_run",
    "go_on",
    "init",
    "inject",
    "landings",
    "list_runs",
    "ping",
    "plan",
    "preflight",
    "report",
    "resume",
    "schema",
    "shrink",
    "submit",
    "suite",
    "suite_plan",
    "sweep",
    "verify",
    "wait",
]


@dataclass(frozen=True, slots=True)
class RunResult:
    run: RunLayout
    verdict: "Verdict"
    unwritten: tuple[str, ...] = ()
    """Why reports are missing; warnings for people."""


PROGRAM = "chaosrun.cli.supervisor"
"""Supervises a drill that this process only follows."""


def _nobody(record: Mapping[str, Any]) -> None:
    """The default listener: drops every record."""


def submit(
    job: Path,
    *,
    overrides: Sequence[str] = (),
    root: Path | None = None,
    address: str | None = None,
    reference: str = "auto",
    on_event: Listener | None = None,
) -> RunResult:
    """Run one drill and return its verdict, whatever it is.

    `reference` is "auto" (use the cache), "fresh", or a run (id, unique prefix, "latest") whose reference is used. `on_event`
    gets every journal record with the key `leg` added. Raises UsageError or SpecError before anything starts, ResourcesError
    when no cluster can be had, InterruptedRunError on SIGINT and SIGTERM: no process is left then, `resume` goes on.
    """
    with Interrupts() as interrupts:
        base = (default_root() if root is None else root).absolute()
        run = create(job, overrides, base, address, reference)
        return _carried_out(run, base, address, on_event, interrupts)


def begin(
    job: Path,
    *,
    overrides: Sequence[str] = (),
    root: Path | None = None,
    address: str | None = None,
    reference: str = "auto",
) -> "SupervisorProcess":
    """Begin a drill in a process of its own, tied to this one until it is detached; it is being supervised when this returns.
    Raises as `submit` before anything starts."""
    from chaosrun.supervise.guard import SupervisorProcess

    run = create(job, overrides, (default_root() if root is None else root).absolute(), address, reference)
    return SupervisorProcess.tied(run, address, program=PROGRAM)


def go_on(run: RunLayout, *, address: str | None = None) -> "SupervisorProcess":
    """As `begin`, to continue a run."""
    from chaosrun.supervise.guard import SupervisorProcess

    return SupervisorProcess.tied(run, address, program=PROGRAM)


def resume(run: RunLayout, *, address: str | None = None, on_event: Listener | None = None) -> RunResult:
    """Continue a run whose supervisor died or was interrupted, from its journal; one that has ended is only judged again.

    Raises UsageError while it is supervised, otherwise as `submit`.
    """
    from chaosrun.supervise.drill import has_ended, lock_run

    with Interrupts() as interrupts:
        if has_ended(run):
            with lock_run(run):
                return _reported(run, verify(run))
        root = run.path.parent.parent.absolute()
        return _carried_out(run, root, address, on_event, interrupts)


def _carried_out(
    run: RunLayout, root: Path, address: str | None, on_event: Listener | None, interrupts: Interrupts
) -> RunResult:
    """With its reports, which are there before anybody else may take the run."""
    results: list[RunResult] = []

    def report(verdict: "Verdict") -> tuple[str, ...]:
        results.append(_reported(run, verdict))
        return results[0].unwritten

    carry_out(run, root, address, on_event or _nobody, interrupts, report)
    return results[0]


def _reported(run: RunLayout, verdict: "Verdict") -> RunResult:
    from chaosrun.report.write import write_reports

    return RunResult(run, verdict, tuple(write_reports(run, verdict)))


def report(run: RunLayout, *, format: "ReportFormat" = "html", to: str | None = None) -> "Report":
    """Judge a run from its files, as `verify` does, and write a report; `to`: a path, "-" for its text alone, or where it is
    kept by default. Raises UsageError where it cannot be written, ResourcesError when the disk is full."""
    from chaosrun.report.write import make_report

    return make_report(run, verify(run), format, to)


def verify(run: RunLayout) -> "Verdict":
    """Judge a run again, from its files alone."""
    from chaosrun.supervise.drill import read_run
    from chaosrun.verify.verdict import judge

    read_run(run)
    return judge(run)


def compare(runs: Sequence[RunLayout], *, atol: float = 1e-5, leg: str = "reference") -> "Comparison":
    """Losses of the runs' undisturbed legs (or of another leg), step by step, against the first run's.

    Raises UsageError for fewer than two runs, a tolerance that is none, and a leg that did not run to its end.
    """
    from chaosrun.supervise.drill import read_run
    from chaosrun.verify.trajectory import ComparedRun, Comparison, compare_trajectories, trajectory

    if len(runs) < 2:
        raise UsageError("there is nothing to compare a single run with", hint="name two runs or more")
    if not atol >= 0:
        raise UsageError(f"a tolerance of {atol} is none", hint="give --atol a number, 0 or more")
    found = [trajectory(run, leg) for run in runs]
    facts = [read_run(run) for run in runs]
    compared = [
        ComparedRun(
            run_id=run.run_id,
            name=info["spec"]["name"],
            workers=losses.workers,
            changes=tuple(info["overrides"]),
            difference=compare_trajectories(found[0], losses, atol=atol),
        )
        for run, info, losses in zip(runs, facts, found, strict=True)
    ]
    return Comparison(leg=leg, atol=atol, runs=tuple(compared))


def diagnose(run: RunLayout, *, address: str | None = None, on_event: Listener | None = None) -> "Diagnosis":
    """Run both legs of a FAIL again around their first difference, every quantity written down, and say what differs first.

    The run itself is left as it is; the diagnosis is also in its diagnosis.json. Raises UsageError, before anything starts, for
    a run without such a difference and for one that is being supervised; otherwise as `submit`.
    """
    from chaosrun.supervise.diagnosis import diagnose as replay
    from chaosrun.supervise.diagnosis import open_case
    from chaosrun.supervise.drill import lock_run

    listener = on_event or _nobody
    with Interrupts("`chaosrun diagnose {run}` begins again; the run is as it was") as interrupts:
        interrupts.check(run)
        with lock_run(run):
            case = open_case(run)
            with placed(run, address, listener, interrupts) as workers:
                return replay(case, workers=lambda: workers, on_record=listener, on_supervisor=interrupts.watch)


def suite(
    wish: "Wish",
    *,
    resume: str | None = None,
    at_once: int | None = None,
    root: Path | None = None,
    address: str | None = None,
    on_event: Listener | None = None,
    on_cut_short: "Callable[[SuiteResult], None] | None" = None,
) -> "SuiteResult":
    """Run the drills of a suite, as many at once as there is room for, or `at_once`, and compare; its pages are in its folder.

    Every file is read, and every drill planned, before anything starts: raises SpecError and UsageError then, else as `submit`.
    A drill that cannot be carried out is in the result as one. `resume` goes on with a suite (id, unique prefix, "latest").
    An interrupt leaves pages of the drills that had ended; `on_cut_short` is told of those before it is raised.
    """
    from chaosrun.campaign.suite import run_suite

    base = default_root() if root is None else root
    return run_suite(
        wish,
        resume=resume,
        at_once=at_once,
        root=base,
        address=address,
        on_event=on_event or _nobody,
        on_cut_short=on_cut_short or (lambda so_far: None),
    )


def suite_plan(wish: "Wish", *, root: Path | None = None) -> "Agenda":
    """What `suite` would do. Starts nothing."""
    from chaosrun.campaign.suite import list_drills

    return list_drills(wish, default_root() if root is None else root)


def sweep(
    job: Path,
    *,
    overrides: Sequence[str] = (),
    steps: Sequence[int] = (),
    only: Sequence[str] = (),
    at_once: int | None = None,
    keep: bool = False,
    resume: str | None = None,
    root: Path | None = None,
    address: str | None = None,
    on_event: Listener | None = None,
) -> "Sweep":
    """Kill the job once at each of its points, one drill each, against one reference; its own faults are left out.

    `steps`: those at which the training's phases are tried, instead of a few that are chosen; `only`: patterns of phases or
    points; `at_once`: most drills at the same time; `keep` the runs that pass, too. `resume` goes on with a sweep (id, unique
    prefix, "latest"). Raises as `submit`; InterruptedRunError leaves it to be gone on with, once its points are known.
    """
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    from chaosrun.campaign.place import warm_places
    from chaosrun.campaign.sweep import Choice, begin_sweep, opened, take_up, try_points
    from chaosrun.spec.source import load_job

    listener = on_event or _nobody
    base = (default_root() if root is None else root).absolute()
    choice = Choice(overrides=tuple(overrides), steps=tuple(steps), only=tuple(only))
    with Interrupts() as interrupts, opened(base, job, choice, resume) as (folder, known):
        loaded = load_job(job, choice.overrides if known is None else known.overrides)
        with warm_places(address, loaded, base, at_most=at_once, calmly=interrupts.postponed) as places:
            interrupts.check()
            if known is None:
                known = begin_sweep(places[0], folder, choice, watch=interrupts.watch, on_record=listener)
            else:
                take_up(known, places[0])
            return try_points(known, folder, places, keep=keep, on_record=listener)


def shrink(
    run: RunLayout, *, max_drills: int | None = None, address: str | None = None, on_event: Listener | None = None
) -> "Shrunk":
    """Reduce the faults of a run that failed to a smallest plan that fails in the same way; it is also in its shrunk.yaml.

    Raises UsageError, before anything starts, for a run that did not fail and for one that is being supervised; otherwise as
    `submit`.
    """
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    from chaosrun.campaign.bench import Bench
    from chaosrun.campaign.shrink import MAX_DRILLS, open_case
    from chaosrun.campaign.shrink import shrink as reduce
    from chaosrun.supervise.drill import lock_run

    with Interrupts("`chaosrun shrink {run}` begins again; the run is as it was") as interrupts, lock_run(run):
        interrupts.check(run)
        case = open_case(run)
        root = run.path.parent.parent.absolute()
        with Bench(
            case,
            address=address,
            carry_out=lambda candidate: carry_out(candidate, root, address, _nobody, interrupts),
            watch=interrupts.watch,
            calmly=interrupts.postponed,
        ) as bench:
            return reduce(case, bench.drill, bench.verify, limit=max_drills or MAX_DRILLS, on_record=on_event or _nobody)


def preflight(
    request: "PreflightRequest | None" = None,
    *,
    root: Path | None = None,
    address: str | None = None,
    on_event: "PreflightListener | None" = None,
) -> "PreflightResult":
    """Check every node of the cluster: which can be used, which cannot, and why.

    Raises UsageError or SpecError before anything starts, ResourcesError when no cluster can be had, InterruptedRunError on
    SIGINT and SIGTERM: nothing is left behind then.
    """
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    base = (default_root() if root is None else root).absolute()
    with Interrupts() as interrupts:
        from chaosrun.preflight.conduct import Request, conduct

        return conduct(request or Request(), root=base, address=address, on_event=on_event or _nobody, interrupts=interrupts)


def ping(run: RunLayout) -> dict[str, Any]:
    """Ask a run's supervisor for a sign of life: its run and its pid. Raises UsageError when nobody supervises the run."""
    from chaosrun.supervise.control import request

    return request(run, "ping")


def landings(run: RunLayout, faults: Sequence[str], *, timeout_s: float) -> "tuple[Landed, ...]":
    """Where these faults have landed, as soon as that is certain, the leg is over, or `timeout_s` have passed."""
    from chaosrun.report.landings import read_landings

    return remote.settled(run, lambda: read_landings(run, faults), timeout_s=timeout_s)


def wait(run: RunLayout, *, timeout_s: float | None = None) -> RunResult:
    """The verdict, once a run has ended that another process supervises. Raises what that process ended with, RunTimeoutError
    when `timeout_s` pass first, InterruptedRunError when it was killed."""
    verdict, unwritten = remote.wait(run, timeout_s)
    return RunResult(run, verdict, unwritten)
