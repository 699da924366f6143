"""One drill: run in this process or on kept agents, judged again, removed. Ray and torch are imported when needed."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.errors import UsageError
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.planner import make_plan
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import default_root
from chaosrun.records.run_file import Early, read_run
from chaosrun.report.metrics import served
from chaosrun.report.write import write_reports
from chaosrun.spec.command_line import TypedJob
from chaosrun.spec.job_file import load_job
from chaosrun.supervise.creation import create_run
from chaosrun.supervise.drill import has_ended, lock_run
from chaosrun.supervise.find_runs import remove_run
from chaosrun.supervise.interrupts import Interrupts, OneOfMany
from chaosrun.supervise.run import Listener, Watch, carry_out, create
from chaosrun.verify.verdict import Verdict, judge

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster


@dataclass(frozen=True, slots=True)
class RunResult:
    run: RunLayout
    verdict: Verdict
    unwritten: tuple[str, ...] = ()
    """Why reports are missing; warnings for the user."""


def submit(
    job: Path | TypedJob,
    *,
    overrides: Sequence[str] = (),
    root: Path | None = None,
    address: str | None = None,
    reference: str = "auto",
    early: Early = "long",
    on_event: Listener | None = None,
) -> RunResult:
    """Run one drill and return its verdict.

    `reference` is "auto" (use the cache), "fresh", or a run (id, unique prefix, "latest") whose reference is used. `early`: for
    which jobs the chaos leg may end once all of its state equals the reference's: "always", "long" (more than 1,000 steps),
    "never". `on_event` gets every journal record with the key `leg` added. Raises UsageError or SpecError before anything
    starts, ResourcesError when no cluster is available, InterruptedRunError on SIGINT and SIGTERM: `resume` then continues the
    run.
    """
    with Interrupts() as interrupts:
        base = (default_root() if root is None else root).absolute()
        return _carried_out(create(job, overrides, base, address, reference, early), address, on_event, interrupts)


def run(
    job: Path | TypedJob,
    *,
    overrides: Sequence[str] = (),
    root: Path | None = None,
    address: str | None = None,
    metrics: str | None = None,
    on_event: Listener | None = None,
) -> RunResult:
    """Run the job in production: one leg, every real recovery judged. `metrics`: [HOST:]PORT where /metrics is served. Raises
    as `submit`, and UsageError if the same job is running already."""
    with Interrupts() as interrupts:
        base = (default_root() if root is None else root).absolute()
        made = create(job, overrides, base, address, "auto", kind="run", metrics=metrics)
        return _carried_out(made, address, on_event, interrupts)


def resume(run: RunLayout, *, address: str | None = None, on_event: Listener | None = None) -> RunResult:
    """Continue an interrupted run; one that has ended is judged again. Raises as `submit`, and UsageError while it is
    supervised."""
    with Interrupts() as interrupts:
        if has_ended(run):
            with lock_run(run):
                verdict = verify(run)
                return RunResult(run, verdict, tuple(write_reports(run, verdict)))
        return _carried_out(run, address, on_event, interrupts)


def verify(run: RunLayout) -> Verdict:
    """Judge a run again, from its files alone."""
    read_run(run)
    try:
        return judge(run)
    except OSError as error:
        raise UsageError(
            f"{error.filename or run.path} cannot be read: {error.strerror or error}",
            hint="to judge a run takes permission to read all of its files",
        ) from error


def _carried_out(run: RunLayout, address: str | None, on_event: Listener | None, interrupts: Interrupts) -> RunResult:
    """The verdict, with the reports written before another process may take the run."""
    unwritten: tuple[str, ...] = ()

    def report(verdict: Verdict) -> tuple[str, ...]:
        nonlocal unwritten
        unwritten = tuple(write_reports(run, verdict))
        return unwritten

    with ExitStack() as stack:
        try:
            stack.enter_context(served(run))
        except UsageError:
            if not run.supervisor_json.exists():
                remove_run(run)  # no leg has begun
            raise
        root = run.path.parent.parent.absolute()
        verdict = carry_out(run, root, address, on_event or (lambda record: None), interrupts, report)
    return RunResult(run, verdict, unwritten)


def drill_on(
    cluster: "RayCluster | None",
    run: RunLayout,
    root: Path,
    *,
    watch: Watch,
    address: str | None = None,
    on_record: Listener = lambda record: None,
    report: Callable[[Verdict], Sequence[str]] = lambda verdict: (),
    survey: bool = False,
) -> Verdict:
    """Execute a run as one of many, on these agents or (None) on its own ones at `address`. `root`: its cache of references is
    used. Raises as `carry_out`."""
    with OneOfMany(watch) as interrupts:
        return carry_out(run, root, address, on_record, interrupts, report, cluster=cluster, survey=survey)


def new_run(root: Path, path: Path, overrides: Sequence[str], *, reference: str, early: Early = "always") -> RunLayout:
    """Create a planned drill of the job file at `path`, under `root`/runs. Raises SpecError and UsageError, as `api.plan`
    does."""
    job = load_job(path, overrides)
    plan = make_plan(job.spec, job.trace)
    return create_run(root, job, plan=plan, overrides=list(overrides), reference=reference, early=early)


def takes_agents(kinds: Iterable[str]) -> bool:
    """Whether faults of these kinds end agents, Ray or the supervising process, so that no other drill can use the same
    agents."""
    return any(KINDS[kind].family in ("node", "control") for kind in kinds)
