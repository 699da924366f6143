"""Carrying a run out in this process: its control socket, a cluster for its workers, and its drill."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.records.layout import RunLayout
from chaosrun.supervise.interrupts import Interrupts

if TYPE_CHECKING:
    from chaosrun.cluster.workers import ClusterWorkers
    from chaosrun.supervise.supervisor import Supervisor
    from chaosrun.verify.verdict import Verdict

Listener = Callable[[dict[str, Any]], None]
Watch = Callable[["Supervisor | None"], None]


def expected_ray(address: str | None) -> str | None:
    """The kind of Ray that a run will have, as far as it can be told before it is there: "private" or "joined"; None where
    this process is connected to one."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return None
    return "joined" if address or os.environ.get("RAY_ADDRESS") else "private"


def execute(
    run: RunLayout, root: Path, address: str | None, listener: Listener, interrupts: Interrupts, *, kept: bool = False
) -> "Verdict":
    """Do what is left to do of a run, whose lock is held. `kept`: another process goes on with it when this one is killed."""
    from chaosrun.supervise.drill import Drill

    interrupts.check(run)
    with (
        reachable(run, listener, interrupts, kept=kept) as (on_record, on_supervisor),
        placed(run, address, listener, interrupts) as workers,
    ):
        drill = Drill(
            run=run,
            root=root,
            workers=lambda: workers,
            devices=workers.devices,
            on_record=on_record,
            on_supervisor=on_supervisor,
            kept=kept,
        )
        return drill.execute()


@contextmanager
def reachable(
    run: RunLayout, listener: Listener, interrupts: Interrupts, *, kept: bool = False
) -> Iterator[tuple[Listener, Watch]]:
    """Take commands about a run, whose lock is held, from other processes of this user; yields who is to be told the records
    of its drill, and its supervisors."""
    from chaosrun.supervise.control import serve
    from chaosrun.supervise.injections import Injections

    injections = Injections(run, kept=kept)

    def on_record(record: dict[str, Any]) -> None:
        injections.hear(record)
        listener(record)

    def on_supervisor(supervisor: "Supervisor | None") -> None:
        injections.watch(supervisor)
        interrupts.watch(supervisor)

    def pinged(message: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": run.run_id, "pid": os.getpid()}

    def cancelled(message: Mapping[str, Any]) -> dict[str, Any]:
        interrupts.request()
        return {}

    commands = {"ping": pinged, "cancel": cancelled, "inject": injections.ask}
    with serve(run, commands, on_failure=lambda why: listener({"leg": None, "event": "control.failed", "message": why})):
        yield on_record, on_supervisor


@contextmanager
def placed(run: RunLayout, address: str | None, listener: Listener, interrupts: Interrupts) -> "Iterator[ClusterWorkers]":
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
