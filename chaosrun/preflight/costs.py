"""What a run's steps, saves and restarts took, in seconds: the figures that a forecast is made of. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from chaosrun.preflight.model import Facts
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.verify.recovery_times import PHASES, recoveries_of


def costs_of(legs: Sequence[LegHistory]) -> Facts:
    """Medians: "step_s", "save_s", "restart_s" and its phases "detect_s" … "first_step_s"; None of what was not seen. A step
    that a save preceded, and the first one of an attempt, are left out: they have more to do."""
    attempts = [attempt for leg in legs for attempt in leg.attempts]
    restarts = [times for leg in legs for times in recoveries_of(leg)]
    phases = {f"{phase}_s": _median(times.phases[phase] for times in restarts) for phase in PHASES}
    return {
        "step_s": _median(seconds for attempt in attempts for seconds in _steps(attempt)),
        "save_s": _median(seconds for attempt in attempts for seconds in _saves(attempt)),
        "restart_s": _median(times.total_s for times in restarts),
        **phases,
    }


def together(costs: Sequence[Facts]) -> Facts:
    """Medians of several runs."""
    names = dict.fromkeys(name for each in costs for name in each)
    return {name: _median(each.get(name) for each in costs) for name in names}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _steps(attempt: Attempt) -> Iterator[float]:
    ends: dict[int, float] = {}
    for trace in attempt.traces.values():
        for record in trace.steps:
            ends[record.step] = max(record.time_s, ends.get(record.step, record.time_s))
    saved = {record.step for trace in attempt.traces.values() for record in trace.checkpoints}
    for (before, begin_s), (step, end_s) in pairwise(sorted(ends.items())):
        if step == before + 1 and before not in saved:
            yield max(0.0, end_s - begin_s)


def _saves(attempt: Attempt) -> Iterator[float]:
    """Each save's seconds, on the rank on which it took longest: the others wait for it."""
    durations: dict[int, float] = {}
    for trace in attempt.traces.values():
        for record in trace.checkpoints:
            durations[record.step] = max(record.duration_s, durations.get(record.step, 0.0))
    yield from durations.values()
