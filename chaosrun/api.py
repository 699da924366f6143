"""The commands of the command line as Python functions. Heavy imports (ray, torch) happen inside, when they are needed."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.runs import RunSummary

if TYPE_CHECKING:
    from chaosrun.cluster.workers import ClusterWorkers
    from chaosrun.plan.faults import FaultPlan
    from chaosrun.spec.model import JobSpec
    from chaosrun.spec.source import Job
    from chaosrun.suite import SuiteResult
    from chaosrun.supervise.supervisor import Supervisor
    from chaosrun.verify.diagnosis import Diagnosis
    from chaosrun.verify.trajectory import Comparison
    from chaosrun.verify.verdict import Verdict

__all__ = [
    "RunResult",
    "RunSummary",
    "compare",
    "default_root",
    "diagnose",
    "find_run",
    "list_runs",
    "plan",
    "resume",
    "submit",
    "suite",
    "verify",
]

Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    run: RunLayout
    verdict: "Verdict"


def default_root() -> Path:
    """Where runs are kept: $CHAOSRUN_ROOT, else .chaosrun in the working directory."""
    return Path(os.environ.get("CHAOSRUN_ROOT") or ".chaosrun")


def plan(job: Path, overrides: Sequence[str] = ()) -> "tuple[Job, FaultPlan]":
    """Load a job and expand its faults; starts nothing. Raises SpecError or UsageError."""
    from chaosrun.plan.planner import make_plan
    from chaosrun.spec.source import load_job

    loaded = load_job(job, overrides)
    return loaded, make_plan(loaded.spec)


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
    with _Interrupts() as interrupts:
        from chaosrun.supervise.drill import create_run

        base = default_root() if root is None else root
        loaded, faults = plan(job, overrides)
        if reference not in ("auto", "fresh"):
            reference = str(find_run(reference, base).path.resolve())
        run = create_run(
            base.absolute(),
            loaded.spec,
            job_path=loaded.path.resolve(),
            script=loaded.script_path.resolve(),
            text=loaded.text,
            plan=faults,
            overrides=list(overrides),
            reference=reference,
        )
        return _execute(run, base.absolute(), address, on_event, interrupts)


def resume(run: RunLayout, *, address: str | None = None, on_event: Listener | None = None) -> RunResult:
    """Continue a run whose supervisor died or was interrupted, from its journal; one that has ended is only judged again.

    Raises UsageError while it is supervised, otherwise as `submit`.
    """
    from chaosrun.supervise.drill import has_ended, lock_run

    with _Interrupts() as interrupts:
        if has_ended(run):
            with lock_run(run):
                return RunResult(run, verify(run))
        return _execute(run, run.path.parent.parent.absolute(), address, on_event, interrupts)


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

    listener = on_event or (lambda record: None)
    with _Interrupts("`chaosrun diagnose {run}` begins again; the run is as it was") as interrupts:
        interrupts.check(run)
        with lock_run(run):
            case = open_case(run)
            with _placed(run, address, listener, interrupts) as workers:
                return replay(case, workers=lambda: workers, on_record=listener, on_supervisor=interrupts.watch)


def suite(
    path: Path,
    *,
    only: Sequence[str] = (),
    root: Path | None = None,
    address: str | None = None,
    on_event: Listener | None = None,
) -> "SuiteResult":
    """Run the drills of a suite, all or those called in `only`, one after the other on one Ray, and compare.

    Every file is read before anything starts: raises SpecError and UsageError then, InterruptedRunError as `submit`. A drill
    that cannot be carried out is in the result as one.
    """
    from chaosrun.spec.suite import SuiteDrill, load_suite, select
    from chaosrun.suite import run_suite

    loaded = load_suite(path)
    loaded = select(loaded, only) if only else loaded
    for drill in loaded.drills:
        plan(drill.job.path, drill.overrides)
    listener = on_event or (lambda record: None)

    def run_drill(drill: SuiteDrill) -> "tuple[RunLayout, Verdict]":
        result = submit(drill.job.path, overrides=drill.overrides, root=root, address=address, on_event=on_event)
        return result.run, result.verdict

    def on_drill(number: int, drill: SuiteDrill) -> None:
        of = len(loaded.drills)
        listener({"leg": None, "event": "drill.starting", "name": drill.spec.name, "number": number + 1, "of": of})

    with _one_ray(address, [drill.job.spec for drill in loaded.drills]):
        return run_suite(loaded, run_drill, on_drill)


@contextmanager
def _one_ray(address: str | None, specs: "Sequence[JobSpec]") -> Iterator[None]:
    """Connect once for many drills: each of them finds this process connected, and leaves it so."""
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    from chaosrun.cluster.ray_cluster import RayCluster

    with _Interrupts() as interrupts:
        with interrupts.postponed():
            cluster = RayCluster.connect(
                address,
                workers=max(spec.workers for spec in specs),
                cpu=max(spec.per_worker.cpu for spec in specs),
                gpu=0,
            )
        try:
            interrupts.check()
            yield
        finally:
            with interrupts.postponed():
                cluster.close()


def list_runs(root: Path | None = None) -> list[RunSummary]:
    """All runs under `root`, newest first."""
    import json

    from chaosrun.supervise.drill import is_supervised, read_run

    folder = (default_root() if root is None else root) / "runs"
    summaries = []
    for path in folder.iterdir() if folder.is_dir() else ():
        run = RunLayout(path)
        if not run.run_json.is_file():
            continue  # being created, or not ours
        info = read_run(run)
        if run.verdict_json.is_file():
            status = json.loads(run.verdict_json.read_text())["status"]
        else:
            status = "running" if is_supervised(run) else "interrupted"
        summaries.append(
            RunSummary(run_id=run.run_id, name=info["spec"]["name"], status=status, created_s=info["created_s"], path=path)
        )
    return sorted(summaries, key=lambda summary: (-summary.created_s, summary.run_id))


def find_run(ref: str, root: Path | None = None) -> RunLayout:
    """The run called `ref`: an id, a unique prefix of one, "latest", or the path of a run directory. Raises UsageError."""
    if os.sep in ref and RunLayout(Path(ref)).run_json.is_file():
        return RunLayout(Path(ref))
    runs = list_runs(root)
    if ref == "latest" and runs:
        return RunLayout(runs[0].path)
    exact = [summary for summary in runs if summary.run_id == ref]
    matches = exact or [summary for summary in runs if summary.run_id.startswith(ref)]
    if len(matches) == 1:
        return RunLayout(matches[0].path)
    place = default_root() if root is None else root
    if not matches:
        raise UsageError(f"no run {ref!r} under {place}", hint="`chaosrun list` shows the runs; --root names another place")
    some = ", ".join(summary.run_id for summary in matches[:5])
    raise UsageError(f"{ref!r} could be any of {len(matches)} runs: {some}", hint="write more of the name")


def _execute(
    run: RunLayout, root: Path, address: str | None, on_event: Listener | None, interrupts: "_Interrupts"
) -> RunResult:
    from chaosrun.supervise.drill import Drill, lock_run

    listener = on_event or (lambda record: None)
    interrupts.check(run)
    with lock_run(run), _placed(run, address, listener, interrupts) as workers:
        drill = Drill(
            run=run,
            root=root,
            workers=lambda: workers,
            devices=workers.devices,
            on_record=listener,
            on_supervisor=interrupts.watch,
        )
        return RunResult(run, drill.execute())


@contextmanager
def _placed(run: RunLayout, address: str | None, listener: Listener, interrupts: "_Interrupts") -> "Iterator[ClusterWorkers]":
    """A cluster, and a run's workers on it."""
    # Read when Ray is imported: its C++ handler prints a stack trace at a SIGTERM, and has crashed this process in doing so.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")

    from chaosrun.cluster.ray_cluster import RayCluster
    from chaosrun.cluster.workers import ClusterWorkers
    from chaosrun.spec.model import JobSpec
    from chaosrun.supervise.drill import read_run

    spec = JobSpec.model_validate(read_run(run)["spec"])
    listener({"leg": None, "event": "run.created", "run": run.run_id, "path": str(run.path)})
    with interrupts.postponed():
        cluster = RayCluster.connect(address, workers=spec.workers, cpu=spec.per_worker.cpu, gpu=spec.per_worker.gpu)
    try:
        interrupts.check()
        yield ClusterWorkers(cluster, spec)
    finally:
        with interrupts.postponed():
            cluster.close()


class _Interrupts:
    """SIGINT and SIGTERM end the running leg in order, and anything else with KeyboardInterrupt; that leaves the context as an
    InterruptedRunError, with `again` as its hint. Should a library swallow the KeyboardInterrupt, `check` and `watch` raise it
    again."""

    def __init__(self, again: str = "`chaosrun resume {run}` goes on with the run") -> None:
        self._again = again
        self._supervisor: Supervisor | None = None
        self._former: dict[int, Any] = {}
        self._run: RunLayout | None = None
        self._wished = False
        self._postponed = False

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt):
            hint = self._again.format(run=self._run.run_id) if self._run else None
            raise InterruptedRunError("interrupted", hint=hint) from error

    def check(self, run: RunLayout | None = None) -> None:
        """`run`: what there is to resume from now on."""
        self._run = run or self._run
        if self._wished:
            raise KeyboardInterrupt

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Let a first signal wait for `check`: to leave Ray half started or half stopped may crash. A second does not wait."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False

    def watch(self, supervisor: "Supervisor | None") -> None:
        self._supervisor = supervisor
        if supervisor is not None:
            self.check()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._wished = not self._wished, True
        if self._postponed and first:
            return
        if self._supervisor is None or self._supervisor.is_waiting_for_places:
            raise KeyboardInterrupt
        self._supervisor.interrupt()
