"""The last completed run of a job: the times of its steps, saves and restarts, and the size of its checkpoints."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec import Struct

from chaosrun.errors import UsageError
from chaosrun.records.history import Attempt, LegHistory, read_leg
from chaosrun.records.layout import LegLayout, RunLayout, checkpoint_step
from chaosrun.records.run_file import RunInfo, read_object, read_run, recorded_leg
from chaosrun.spec.job_file import Job
from chaosrun.verify.recovery_times import recoveries_of

OF_ONE_RUN = ("recovery", "verify", "timeout")
"""Parts of a job that may differ between the earlier run and this one. Faults may not: some slow a job down, and drills of
`shrink` do not count."""


class Costs(Struct, frozen=True, kw_only=True):
    """Medians in seconds; None if nothing was measured."""

    step_s: float | None = None
    save_s: float | None = None
    restart_s: float | None = None
    steps: int = 0


class EarlierRun(Struct, frozen=True, kw_only=True):
    run: str
    costs: Costs = Costs()
    bytes: int | None = None
    """Size of its newest checkpoint; None: none is left."""


def earlier_run(root: Path, job: Job) -> EarlierRun | None:
    """The newest completed run of the same job under a root; None: there is none."""
    found, asked = list[tuple[RunLayout, RunInfo]](), _training(job.spec.model_dump(mode="json"))
    with suppress(OSError):
        for path in (root / "runs").iterdir():
            run = RunLayout(path)
            with suppress(UsageError):  # still running, interrupted, or damaged
                info = read_run(run)
                same = info.job == str(job.path.resolve()) and _training(info.spec) == asked
                if same and read_object(run.verdict_json).get("outcome") == "completed":
                    found.append((run, info))
    if not found:
        return None
    run, info = max(found, key=lambda entry: entry[1].created_s)
    with suppress(UsageError, OSError):
        legs = [recorded_leg(run, info, name) for name in ("chaos", "reference")]
        size = next(filter(None, map(_newest_checkpoint, legs)), None)
        return EarlierRun(run=run.run_id, costs=costs_of([read_leg(leg) for leg in legs]), bytes=size)
    return EarlierRun(run=run.run_id)


def _training(spec: Mapping[str, object]) -> Mapping[str, object]:
    checkpoint = spec.get("checkpoint")
    storage = checkpoint.get("storage") if isinstance(checkpoint, Mapping) else None
    return {**{key: part for key, part in spec.items() if key not in OF_ONE_RUN}, "checkpoint": storage}


def _newest_checkpoint(leg: LegLayout) -> int | None:
    """Its size in bytes."""
    names = os.listdir(leg.checkpoints) if leg.checkpoints.is_dir() else []
    for name in sorted((name for name in names if checkpoint_step(name) is not None), reverse=True):
        files = [path for path in (leg.checkpoints / name).rglob("*") if path.is_file() and not path.is_symlink()]
        if files:
            return sum(path.stat().st_size for path in files)
    return None


def costs_of(legs: Sequence[LegHistory]) -> Costs:
    """Steps right after a save, and the first of an attempt, are left out, as they do extra work."""
    attempts = [attempt for leg in legs for attempt in leg.attempts]
    steps = [step for attempt in attempts for trace in attempt.traces.values() for step in trace.steps]
    return Costs(
        step_s=_median(seconds for attempt in attempts for seconds in _steps(attempt)),
        save_s=_median(seconds for attempt in attempts for seconds in _saves(attempt).values()),
        restart_s=_median(times.total_s for leg in legs for times in recoveries_of(leg)),
        steps=max(steps, default=0),
    )


def together(costs: Sequence[Costs]) -> Costs:
    """Combine the costs of several runs of the same training."""
    seconds = {name: _median(getattr(each, name) for each in costs) for name in ("step_s", "save_s", "restart_s")}
    return Costs(**seconds, steps=max((each.steps for each in costs), default=0))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _steps(attempt: Attempt) -> Iterator[float]:
    ends = _slowest((each.step, each.time_s) for trace in attempt.traces.values() for each in trace.steps.values())
    saved = _saves(attempt)
    for (before, begin_s), (step, end_s) in pairwise(sorted(ends.items())):
        if step == before + 1 and before not in saved:
            yield max(0.0, end_s - begin_s)


def _saves(attempt: Attempt) -> dict[int, float]:
    """By step, each save's seconds."""
    return _slowest((each.step, each.duration_s) for trace in attempt.traces.values() for each in trace.checkpoints)


def _slowest(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """By step, the value of the slowest rank, for which the others wait."""
    found: dict[int, float] = {}
    for step, value in values:
        found[step] = max(value, found.get(step, value))
    return found
