"""The commands of the command line as Python functions: all public names are here.

Most functions need ray or torch, `chaosrun --help` neither: each is imported from its home module when it is first used.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.errors import UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import default_root
from chaosrun.supervise.interrupts import Interrupts

if TYPE_CHECKING:
    from chaosrun.campaign.drill import RunResult, resume, run, submit, verify
    from chaosrun.campaign.shrink import shrink
    from chaosrun.campaign.suite_run import suite, suite_plan
    from chaosrun.campaign.sweep import sweep
    from chaosrun.housekeeping.cleaning import clean
    from chaosrun.housekeeping.environment import environment
    from chaosrun.integrations.export import export
    from chaosrun.integrations.scaffold import init
    from chaosrun.integrations.schemas import schema
    from chaosrun.preflight.conduct import Request
    from chaosrun.preflight.result import Result
    from chaosrun.records.run_file import Early, Kind, RunSummary
    from chaosrun.report.landings import Landed
    from chaosrun.report.write import Report, ReportFormat
    from chaosrun.spec.command_line import TypedJob
    from chaosrun.supervise.find_runs import find_run, list_runs
    from chaosrun.supervise.process import SupervisorProcess
    from chaosrun.supervise.remote import cancel, inject
    from chaosrun.supervise.run import Listener, plan
    from chaosrun.verify.diagnosis import Diagnosis
    from chaosrun.verify.trajectory import TrajectoryComparison

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
    "run",
    "schema",
    "shrink",
    "submit",
    "suite",
    "suite_plan",
    "sweep",
    "verify",
    "wait",
    "wait_until",
]

PROGRAM = "chaosrun.cli.supervisor"
"""The program that supervises a drill which this process only follows."""
_HOMES = {
    name: f"chaosrun.{home}"
    for home, names in {
        "campaign.drill": ("RunResult", "resume", "run", "submit", "verify"),
        "campaign.shrink": ("shrink",),
        "campaign.suite_run": ("suite", "suite_plan"),
        "campaign.sweep": ("sweep",),
        "housekeeping.cleaning": ("clean",),
        "housekeeping.environment": ("environment",),
        "integrations.export": ("export",),
        "integrations.scaffold": ("init",),
        "integrations.schemas": ("schema",),
        "records.run_file": ("RunSummary",),
        "supervise.remote": ("cancel", "inject"),
        "supervise.run": ("plan",),
        "supervise.find_runs": ("find_run", "list_runs"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'chaosrun.api' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def begin(
    job: "Path | TypedJob",
    *,
    overrides: Sequence[str] = (),
    root: Path | None = None,
    address: str | None = None,
    reference: str = "auto",
    early: "Early" = "long",
    kind: "Kind" = "drill",
    metrics: str | None = None,
) -> "SupervisorProcess":
    """Begin a drill, or a run in production, in a supervisor process, tied to this one until it is detached; it supervises the
    run when this returns. Raises what `submit` raises before anything starts."""
    from chaosrun.supervise.process import SupervisorProcess
    from chaosrun.supervise.run import create

    base = (default_root() if root is None else root).absolute()
    made = create(job, overrides, base, address, reference, early, kind, metrics)
    return SupervisorProcess.tied(made, address, program=PROGRAM)


def go_on(run: RunLayout, *, address: str | None = None) -> "SupervisorProcess":
    """Continue a run; otherwise like `begin`."""
    from chaosrun.supervise.process import SupervisorProcess

    return SupervisorProcess.tied(run, address, program=PROGRAM)


def report(run: RunLayout, *, format: "ReportFormat" = "html", to: str | None = None) -> "Report":
    """Judge a run from its files, as `verify` does, and write a report; `to`: a path, "-" for the report's text alone, or None
    for its default place. Raises UsageError if it cannot be written, ResourcesError when the disk is full."""
    from chaosrun.campaign.drill import verify
    from chaosrun.report.write import make_report

    return make_report(run, verify(run), format, to)


def compare(runs: Sequence[RunLayout], *, atol: float = 1e-5, leg: str = "reference") -> "TrajectoryComparison":
    """Compare the losses of the runs' reference legs (or of another leg), step by step, with the first run's.

    Raises UsageError for fewer than two runs, a negative or undefined tolerance, and a leg that did not run to its end.
    """
    from chaosrun.records.run_file import read_run
    from chaosrun.verify.trajectory import ComparedRun, TrajectoryComparison, compare_trajectories, trajectory

    if len(runs) < 2:
        raise UsageError("there is nothing to compare a single run with", hint="name two runs or more")
    if not atol >= 0:
        raise UsageError(f"a tolerance of {atol} is not valid", hint="give --atol a number, 0 or more")
    found = [trajectory(run, leg) for run in runs]
    facts = [read_run(run) for run in runs]
    compared = [
        ComparedRun(
            run_id=run.run_id,
            name=info.name,
            workers=losses.workers,
            changes=info.shown_overrides,
            difference=compare_trajectories(found[0], losses, atol=atol),
        )
        for run, info, losses in zip(runs, facts, found, strict=True)
    ]
    return TrajectoryComparison(leg=leg, atol=atol, runs=tuple(compared))


def diagnose(run: RunLayout, *, address: str | None = None, on_event: "Listener | None" = None) -> "Diagnosis":
    """Run both legs of a FAIL again around their first difference, with every quantity recorded, and say what differs first.

    The run itself is left as it is; the diagnosis is also in its diagnosis.json. Raises UsageError, before anything starts, for
    a run without such a difference and for one that is being supervised; otherwise what `submit` raises.
    """
    from chaosrun.supervise.diagnosis import diagnose as replay
    from chaosrun.supervise.diagnosis import open_case
    from chaosrun.supervise.drill import LegRunner, lock_run
    from chaosrun.supervise.run import announce, deadline_of, placed

    listener = on_event or (lambda record: None)
    with Interrupts("`chaosrun diagnose {run}` begins again; the run is as it was") as interrupts:
        interrupts.check(run)
        with lock_run(run):
            case = open_case(run)
            announce(run, listener)
            with placed(run, address, interrupts) as workers:
                about = {"on_record": listener, "on_supervisor": interrupts.watch, "deadline_s": deadline_of(run)}
                return replay(case, LegRunner(workers=workers, **about))


def preflight(
    request: "Request | None" = None,
    *,
    root: Path | None = None,
    address: str | None = None,
    on_event: "Listener | None" = None,
) -> "Result":
    """Check every node of the cluster: which can be used, which cannot, and why.

    Raises UsageError or SpecError before anything starts, ResourcesError when there is no cluster, InterruptedRunError on
    SIGINT and SIGTERM: nothing is left behind then.
    """
    base = (default_root() if root is None else root).absolute()
    with Interrupts() as interrupts:
        from chaosrun.preflight.conduct import Request, conduct

        listener = on_event or (lambda record: None)
        return conduct(request or Request(), root=base, address=address, on_event=listener, interrupts=interrupts)


def ping(run: RunLayout) -> dict[str, object]:
    """Ask a run's supervisor for a sign of life: its run and its pid. Raises UsageError when nobody supervises the run."""
    from chaosrun.supervise.control import Ping, request

    answer = request(run, Ping())
    return {"run": answer.run, "pid": answer.pid}


def landings(run: RunLayout, faults: Sequence[str], *, timeout_s: float) -> "tuple[Landed, ...]":
    """Wait until it is certain where these faults have landed, the leg is over, or `timeout_s` have passed; say where."""
    from chaosrun.report import landings

    return landings.landings(run, faults, timeout_s=timeout_s)


def wait(run: RunLayout, *, timeout_s: float | None = None) -> "RunResult":
    """Wait for the end of a run that another process supervises; returns its verdict. Raises the error with which that process
    ended, RunTimeoutError when `timeout_s` pass first, InterruptedRunError when it was killed."""
    from chaosrun.campaign.drill import RunResult
    from chaosrun.supervise import remote

    verdict, unwritten = remote.wait(run, timeout_s)
    return RunResult(run, verdict, unwritten)


def wait_until(run: RunLayout, *, attempt: int = 1, step: int = 0, timeout_s: float | None = None) -> None:
    """Return once the chaos leg's attempt `attempt` has begun and some rank has completed `step`, in whichever attempt.

    From then on `inject` finds a leg to strike. Raises RunTimeoutError when `timeout_s` pass first; if the run ends first, the
    error with which it ended, or UsageError.
    """
    from chaosrun.report.follow import has_come
    from chaosrun.supervise import remote

    what = f"step {step}" if step else f"attempt {attempt}"
    remote.until(run, has_come(run, attempt=attempt, step=step), what=what, timeout_s=timeout_s)
