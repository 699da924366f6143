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
    from chaosrun.plan.faults import FaultPlan
    from chaosrun.spec.source import Job
    from chaosrun.supervise.supervisor import Supervisor
    from chaosrun.verify.verdict import Verdict

__all__ = ["RunResult", "RunSummary", "default_root", "find_run", "list_runs", "plan", "resume", "submit", "verify"]

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
    # Read when Ray is imported: its C++ handler prints a stack trace at a SIGTERM, and has crashed this process in doing so.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")

    from chaosrun.cluster.ray_cluster import RayCluster
    from chaosrun.cluster.workers import ClusterWorkers
    from chaosrun.spec.model import JobSpec
    from chaosrun.supervise.drill import Drill, lock_run, read_run

    listener = on_event or (lambda record: None)
    interrupts.check(run)
    with lock_run(run):
        spec = JobSpec.model_validate(read_run(run)["spec"])
        listener({"leg": None, "event": "run.created", "run": run.run_id, "path": str(run.path)})
        with interrupts.postponed():
            cluster = RayCluster.connect(address, workers=spec.workers, cpu=spec.per_worker.cpu, gpu=spec.per_worker.gpu)
        try:
            interrupts.check()
            workers = ClusterWorkers(cluster, spec)
            drill = Drill(
                run=run,
                root=root,
                workers=lambda: workers,
                devices=workers.devices,
                on_record=listener,
                on_supervisor=interrupts.watch,
            )
            return RunResult(run, drill.execute())
        finally:
            with interrupts.postponed():
                cluster.close()


class _Interrupts:
    """SIGINT and SIGTERM end the running leg in order, and anything else with KeyboardInterrupt; that leaves the context as an
    InterruptedRunError. Should a library swallow the KeyboardInterrupt, `check` and `watch` raise it again."""

    def __init__(self) -> None:
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
            hint = f"`chaosrun resume {self._run.run_id}` goes on with the run" if self._run else None
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
