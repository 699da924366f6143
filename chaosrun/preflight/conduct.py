"""One preflight from what was asked for to its result: what it reads first, the crew, the checks, the list of good nodes."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.errors import UsageError
from chaosrun.preflight.assess.peers import Baseline
from chaosrun.preflight.catalogue import CHECKS
from chaosrun.preflight.choice import choose
from chaosrun.preflight.engine import Flight, Listener
from chaosrun.preflight.good_nodes import make_way, write_good_nodes
from chaosrun.preflight.model import Level, Setting
from chaosrun.preflight.result import Result
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
class Wish:
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


def conduct(wish: Wish, *, root: Path, address: str | None, on_event: Listener, interrupts: Interrupts) -> Result:
    """Everything that may be wrong with what was asked is told before anything starts. Raises UsageError, SpecError,
    ResourcesError; KeyboardInterrupt, with nothing left behind."""
    checks = choose(CHECKS, wish.level, only=wish.only, skip=wish.skip)
    job = _job(wish)
    baseline = None if wish.baseline is None else Baseline(_read(wish.baseline))
    if wish.good_nodes is not None:
        make_way(wish.good_nodes)
    interrupts.check()
    started_s, began = time.time(), time.monotonic()
    with _crew(address, job, interrupts) as crew:
        interrupts.check()
        crew.until = _until(wish, began)
        crew.start_agents()
        on_event({"event": "cluster.joined", "nodes": len(crew.nodes), "address": crew.address})
        setting = _setting(wish, job, root)
        flight = Flight(setting=setting, crew=crew, checks=checks, on_event=on_event, baseline=baseline)
        made = flight.run(started_s)
    interrupts.check()
    result = replace(
        made,
        seconds=time.monotonic() - began,
        address=crew.address,
        job=None if wish.job is None else str(wish.job),
        baseline=None if wish.baseline is None else str(wish.baseline),
        strict=wish.strict,
        arguments=_arguments(wish, root, address),
        options=_options(wish),
        choice=_choice(wish),
    )
    if wish.good_nodes is not None:
        write_good_nodes(wish.good_nodes, result)
    return result


@contextmanager
def _crew(address: str | None, job: "Job | None", interrupts: Interrupts) -> "Iterator[ProbePool]":
    """A private Ray is told of as many CPUs as the job asks for, as `chaosrun submit` would tell it."""
    from chaosrun.cluster.probe_pool import ProbePool

    cpus = 0.0 if job is None else job.spec.workers * job.spec.per_worker.cpu
    with interrupts.postponed():
        crew = ProbePool.connect(address, cpus=cpus)
    try:
        yield crew
    finally:
        with interrupts.postponed():
            crew.close()


def _setting(wish: Wish, job: "Job | None", root: Path) -> Setting:
    from chaosrun.preflight.drills.on_ray import RayDrills
    from chaosrun.preflight.earlier_run import last_run, saves_of

    run = None if job is None else last_run(root, job)
    return Setting(
        level=wish.level,
        root=root,
        storage=_storage(job) or root,
        job=job,
        seconds=wish.seconds,
        mtbf_s=wish.mtbf_s,
        forecast_nodes=tuple(wish.forecast_nodes),
        former=None if run is None else saves_of(run),
        drills=RayDrills(),
    )


def _arguments(wish: Wish, root: Path, address: str | None) -> tuple[str, ...]:
    job = () if wish.job is None else (str(wish.job), *wish.overrides)
    return (*job, *root_arguments(root), *(() if address is None else ("--address", address)))


def _options(wish: Wish) -> tuple[str, ...]:
    level = () if wish.level is Level.STANDARD else ("--level", wish.level.value)
    duration = () if wish.seconds is None else ("--duration", _time(wish.seconds))
    mtbf = () if wish.mtbf_s is None else ("--mtbf", _time(wish.mtbf_s))
    nodes = ("--nodes", ",".join(map(str, wish.forecast_nodes))) if wish.forecast_nodes else ()
    return (*level, *duration, *mtbf, *nodes)


def _choice(wish: Wish) -> tuple[str, ...]:
    named = (("--only", wish.only), ("--skip", wish.skip))
    return tuple(part for option, names in named if names for part in (option, ",".join(names)))


def _time(seconds: float) -> str:
    return f"{seconds:.15g}s" if seconds % 3600 else f"{seconds / 3600:.15g}h"


def _job(wish: Wish) -> "Job | None":
    if wish.job is None:
        return None
    from chaosrun.spec.source import load_job

    return load_job(wish.job, wish.overrides)


def _storage(job: "Job | None") -> Path | None:
    if job is None or job.spec.checkpoint.storage is None:
        return None
    return (job.directory / job.spec.checkpoint.storage).resolve()


def _read(path: Path) -> Result:
    from chaosrun.preflight.saved import from_json

    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--baseline {path} cannot be read: {error.strerror}", hint="name a file") from error
    except ValueError as error:
        raise UsageError(
            f"--baseline {path} is no JSON: {error}", hint="`chaosrun preflight -o json > FILE` writes one"
        ) from error
    return from_json(value, str(path))


def _until(wish: Wish, began: float) -> float | None:
    if wish.level is not Level.DEEP:
        return began + DEADLINE_S[wish.level]
    return None if wish.seconds is None else began + wish.seconds + DEEP_EXTRA_S
