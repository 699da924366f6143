"""Conducts one preflight from request to result: chooses the checks, reads job and baseline, makes the pool, writes the list of
good nodes."""

import difflib
import importlib
import json
import pkgutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.errors import UsageError
from chaosrun.preflight import checks as folder
from chaosrun.preflight.earlier_run import earlier_run
from chaosrun.preflight.engine import Engine
from chaosrun.preflight.model import Check, Level, Setting
from chaosrun.preflight.peers import Baseline
from chaosrun.preflight.result import Result, from_json
from chaosrun.records.destination import expect_writable, is_stream, write_to
from chaosrun.records.naming import root_arguments
from chaosrun.records.object_urls import is_url
from chaosrun.spec.job_file import Job, load_job
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import Listener, expect_startable

if TYPE_CHECKING:
    from chaosrun.cluster.probe_pool import ProbePool


_MODULES = [importlib.import_module(f"{folder.__name__}.{each.name}") for each in pkgutil.iter_modules(folder.__path__)]
CHECKS: Sequence[Check[Any]] = sorted(
    (module.CHECK for module in _MODULES if hasattr(module, "CHECK")), key=lambda check: check.order
)
"""All checks of the folder, in their declared order."""
DEADLINE_S = {Level.QUICK: 120.0, Level.STANDARD: 600.0}
"""No probe runs after this, whatever hangs: far more than the level takes where nothing does."""
DEEP_EXTRA_S = 300.0
"""What a deep preflight may take beyond the time that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
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
    """Errors in the request are reported before anything starts. Raises UsageError, SpecError, ResourcesError;
    KeyboardInterrupt, with nothing left behind."""
    checks = choose(CHECKS, request.level, only=request.only, skip=request.skip)
    job = load_job(request.job, request.overrides) if request.job else None
    if job is not None:
        expect_startable(job, address)
    baseline = _baseline(request.baseline) if request.baseline else None
    if request.good_nodes is not None:
        expect_good_nodes(request.good_nodes)
    interrupts.check()
    started_s, began = time.time(), time.monotonic()
    with _pool(address, job, interrupts) as pool:
        interrupts.check()
        if request.level is not Level.DEEP:
            pool.until = began + DEADLINE_S[request.level]
        elif request.seconds is not None:
            pool.until = began + request.seconds + DEEP_EXTRA_S
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
        job=str(request.job) if request.job else None,
        baseline=str(request.baseline) if request.baseline else None,
        strict=request.strict,
        **_asked(request, root, address),
    )
    if request.good_nodes is not None:
        write_good_nodes(request.good_nodes, result)
    return result


@contextmanager
def _pool(address: str | None, job: Job | None, interrupts: Interrupts) -> "Iterator[ProbePool]":
    """The pool of agents; a private Ray counts as many CPUs as the job requests, as with `chaosrun submit`."""
    from chaosrun.cluster.probe_pool import ProbePool

    with interrupts.postponed():
        pool = ProbePool.connect(address, cpus=job.spec.workers * job.spec.per_worker.cpu if job else 0.0)
    try:
        yield pool
    finally:
        with interrupts.postponed():
            pool.close()


def _setting(request: Request, job: Job | None, root: Path) -> Setting:
    from chaosrun.preflight.drills.on_ray import run_drills

    storage = job.spec.checkpoint.storage if job else None
    return Setting(
        level=request.level,
        root=root,
        storage=(job.directory / storage).resolve() if job and storage is not None and not is_url(storage) else root,
        job=job,
        token=uuid.uuid4().hex[:16],
        seconds=request.seconds,
        mtbf_s=request.mtbf_s,
        forecast_nodes=tuple(request.forecast_nodes),
        last_run=earlier_run(root, job) if job else None,
        drills=run_drills,
    )


def _asked(request: Request, root: Path, address: str | None) -> dict[str, tuple[str, ...]]:
    """The request, as words of a command line."""
    job = (str(request.job), *request.overrides) if request.job else ()

    def said(**options: str | None) -> tuple[str, ...]:
        return tuple(part for name, value in options.items() if value for part in (f"--{name}", value))

    return {
        "arguments": (*job, *root_arguments(root), *said(address=address)),
        "options": said(
            level=None if request.level is Level.STANDARD else request.level.value,
            duration=_time(request.seconds),
            mtbf=_time(request.mtbf_s),
            nodes=",".join(map(str, request.forecast_nodes)),
        ),
        "choice": said(only=",".join(request.only), skip=",".join(request.skip)),
    }


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds:.15g}s" if seconds % 3600 else f"{seconds / 3600:.15g}h"


def _baseline(path: Path) -> Baseline:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--baseline {path} cannot be read: {error.strerror}", hint="name a file") from error
    except ValueError as error:
        hint = "`chaosrun preflight -o json > FILE` writes one"
        raise UsageError(f"--baseline {path} is not JSON: {error}", hint=hint) from error
    return Baseline(from_json(value, str(path)))


def choose(
    checks: Sequence[Check[Any]], level: Level, *, only: Sequence[str] = (), skip: Sequence[str] = ()
) -> tuple[Check[Any], ...]:
    """The chosen checks, in order; those in `only` at any level. Raises UsageError for an unknown name, or when none is
    left."""
    names = [check.name for check in checks]
    for option, wanted in (("--only", only), ("--skip", skip)):
        for name in wanted:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
                raise UsageError(f"{option} {name}: there is no such check", hint=hint)
    made = list(Level)[: list(Level).index(level) + 1]
    chosen = tuple(
        check for check in checks if check.name not in skip and (check.name in only if only else check.level in made)
    )
    if not chosen:
        raise UsageError("no check is left to make", hint=f"there are {', '.join(names)}")
    return chosen


# The file of good nodes, for a scheduler: one name per line as in the report, which is the hostname if one Ray node runs
# per host.


def expect_good_nodes(path: Path) -> None:
    """Remove an older list, which might be mistaken for this preflight's. Raises UsageError if none can be written."""
    expect_writable("--write-good-nodes", path)
    if not is_stream(path):
        path.unlink(missing_ok=True)


def write_good_nodes(path: Path, result: Result) -> None:
    """Write the file atomically; it is empty when no node is good. Raises UsageError."""
    write_named("--write-good-nodes", path, "".join(f"{name}\n" for name in result.good))


def write_named(option: str, path: Path, text: str) -> None:
    """Write the file that this option names. Raises UsageError."""
    try:
        write_to(path, text.encode())
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}", hint="name another file") from error
