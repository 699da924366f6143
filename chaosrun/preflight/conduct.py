"""One preflight from what was asked for to its result: which checks, what it reads first, the pool, the list of good nodes."""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.errors import UsageError
from chaosrun.preflight.catalogue import CHECKS
from chaosrun.preflight.engine import Engine, Listener
from chaosrun.preflight.model import Check, Level, Setting
from chaosrun.preflight.peers import Baseline
from chaosrun.preflight.result import Result, from_json
from chaosrun.records.destination import expect_folder, is_stream, write_to
from chaosrun.records.naming import root_arguments
from chaosrun.supervise.interrupts import Interrupts

if TYPE_CHECKING:
    from chaosrun.cluster.probe_pool import ProbePool
    from chaosrun.spec.source import Job

DEADLINE_S = {Level.QUICK: 120.0, Level.STANDARD: 600.0}
"""No probe runs after this, whatever hangs: far more than the level takes where nothing does."""
DEEP_EXTRA_S = 300.0
"""What a deep preflight may take beyond the time that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for."""

    job: Path | None = None
    overrides: Sequence[str] = ()
    level: Level = Level.STANDARD
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    baseline: Path | None = None
    good_nodes: Path | None = None
    strict: bool = False
    seconds: float | None = None
    mtbf_s: float | None = None
    forecast_nodes: Sequence[int] = ()


def conduct(request: Request, *, root: Path, address: str | None, on_event: Listener, interrupts: Interrupts) -> Result:
    """Everything that may be wrong with what was asked is told before anything starts. Raises UsageError, SpecError,
    ResourcesError; KeyboardInterrupt, with nothing left behind."""
    checks = choose(CHECKS, request.level, only=request.only, skip=request.skip)
    job = _job(request)
    baseline = None if request.baseline is None else Baseline(_read(request.baseline))
    if request.good_nodes is not None:
        expect_good_nodes(request.good_nodes)
    interrupts.check()
    started_s, began = time.time(), time.monotonic()
    with _pool(address, job, interrupts) as pool:
        interrupts.check()
        pool.until = _until(request, began)
        pool.start_agents()
        on_event({"event": "cluster.joined", "nodes": len(pool.nodes), "address": pool.address})
        setting = _setting(request, job, root)
        engine = Engine(setting=setting, pool=pool, checks=checks, on_event=on_event, baseline=baseline)
        made = engine.run(started_s)
    interrupts.check()
    result = replace(
        made,
        seconds=time.monotonic() - began,
        address=pool.address,
        job=None if request.job is None else str(request.job),
        baseline=None if request.baseline is None else str(request.baseline),
        strict=request.strict,
        arguments=_arguments(request, root, address),
        options=_options(request),
        choice=_choice(request),
    )
    if request.good_nodes is not None:
        write_good_nodes(request.good_nodes, result)
    return result


@contextmanager
def _pool(address: str | None, job: "Job | None", interrupts: Interrupts) -> "Iterator[ProbePool]":
    """A private Ray is told of as many CPUs as the job asks for, as `chaosrun submit` would tell it."""
    from chaosrun.cluster.probe_pool import ProbePool

    cpus = 0.0 if job is None else job.spec.workers * job.spec.per_worker.cpu
    with interrupts.postponed():
        pool = ProbePool.connect(address, cpus=cpus)
    try:
        yield pool
    finally:
        with interrupts.postponed():
            pool.close()


def _setting(request: Request, job: "Job | None", root: Path) -> Setting:
    from chaosrun.preflight.drills.on_ray import RayDrills
    from chaosrun.preflight.earlier_run import earlier_run

    return Setting(
        level=request.level,
        root=root,
        storage=_storage(job) or root,
        job=job,
        token=uuid.uuid4().hex[:16],
        seconds=request.seconds,
        mtbf_s=request.mtbf_s,
        forecast_nodes=tuple(request.forecast_nodes),
        last_run=None if job is None else earlier_run(root, job),
        drills=RayDrills(),
    )


def _arguments(request: Request, root: Path, address: str | None) -> tuple[str, ...]:
    job = () if request.job is None else (str(request.job), *request.overrides)
    return (*job, *root_arguments(root), *(() if address is None else ("--address", address)))


def _options(request: Request) -> tuple[str, ...]:
    level = () if request.level is Level.STANDARD else ("--level", request.level.value)
    duration = () if request.seconds is None else ("--duration", _time(request.seconds))
    mtbf = () if request.mtbf_s is None else ("--mtbf", _time(request.mtbf_s))
    nodes = ("--nodes", ",".join(map(str, request.forecast_nodes))) if request.forecast_nodes else ()
    return (*level, *duration, *mtbf, *nodes)


def _choice(request: Request) -> tuple[str, ...]:
    named = (("--only", request.only), ("--skip", request.skip))
    return tuple(part for option, names in named if names for part in (option, ",".join(names)))


def _time(seconds: float) -> str:
    return f"{seconds:.15g}s" if seconds % 3600 else f"{seconds / 3600:.15g}h"


def _job(request: Request) -> "Job | None":
    if request.job is None:
        return None
    from chaosrun.spec.source import load_job

    return load_job(request.job, request.overrides)


def _storage(job: "Job | None") -> Path | None:
    if job is None or job.spec.checkpoint.storage is None:
        return None
    return (job.directory / job.spec.checkpoint.storage).resolve()


def _read(path: Path) -> Result:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--baseline {path} cannot be read: {error.strerror}", hint="name a file") from error
    except ValueError as error:
        raise UsageError(
            f"--baseline {path} is no JSON: {error}", hint="`chaosrun preflight -o json > FILE` writes one"
        ) from error
    return from_json(value, str(path))


def _until(request: Request, began: float) -> float | None:
    if request.level is not Level.DEEP:
        return began + DEADLINE_S[request.level]
    return None if request.seconds is None else began + request.seconds + DEEP_EXTRA_S


# Which checks


def choose(
    checks: Sequence[Check[Any]], level: Level, *, only: Sequence[str] = (), skip: Sequence[str] = ()
) -> tuple[Check[Any], ...]:
    """In the catalogue's order. A check that is named is made whatever its level. Raises UsageError for a name that none has,
    and when nothing is left."""
    names = [check.name for check in checks]
    for option, wanted in (("--only", only), ("--skip", skip)):
        for name in wanted:
            if name not in names:
                raise UsageError(f"{option} {name}: there is no such check", hint=_hint(name, names))
    chosen = tuple(
        check for check in checks if check.name not in skip and (check.name in only if only else level.includes(check.level))
    )
    if not chosen:
        raise UsageError("no check is left to make", hint=f"there are {', '.join(names)}")
    return chosen


def _hint(name: str, names: Sequence[str]) -> str:
    from chaosrun.spec.diagnosis import nearest

    spelt = {known.replace(" ", "_"): known for known in names}
    close = nearest(name.replace(" ", "_"), spelt)
    return f"did you mean {spelt[close]!r}?" if close else f"there are {', '.join(names)}"


# The file of good nodes: for a scheduler, one a line, by the name that the report calls it; that is its hostname, wherever one
# Ray node runs on a host.


def expect_good_nodes(path: Path) -> None:
    """Remove an older list: it would be taken for this preflight's, should this one not come to its end. Raises UsageError
    where the new one could not be written."""
    with _told_of(path):
        expect_folder(path)
        if not is_stream(path):
            write_to(path, b"")
            path.unlink()


def write_good_nodes(path: Path, result: Result) -> None:
    """Whole or not at all; empty when no node is good. Raises UsageError."""
    with _told_of(path):
        write_to(path, "".join(f"{name}\n" for name in result.good).encode())


@contextmanager
def _told_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "name another file"
        raise UsageError(f"--write-good-nodes {path} cannot be written: {error.strerror}", hint=hint) from error
