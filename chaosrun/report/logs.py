"""Which worker logs `chaosrun logs` shows."""

import re
from dataclasses import dataclass
from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.records.layout import LEGS, AttemptLayout, RunLayout
from chaosrun.records.naming import run_argument

LOG_NAME = re.compile(r"rank-([0-9]+)\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLog:
    leg: str
    attempt: int
    rank: int
    path: Path


def select_logs(run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None) -> list[WorkerLog]:
    """The logs asked for, by rank; by default those of the last attempt of the newest leg.

    Raises UsageError, naming what there is, when there is no such log.
    """
    name = leg or ("chaos" if run.leg("chaos").attempts() else "reference")
    attempts = run.leg(name).attempts()
    if not attempts:
        raise UsageError(f"run {run.run_id} has no logs of a {name} leg yet", hint=f"see `chaosrun status {run_argument(run)}`")
    number = attempts[-1] if attempt is None else attempt
    if number not in attempts:
        raise UsageError(f"the {name} leg has no attempt {number}", hint=f"it has {_listing(attempts)}")
    layout = run.leg(name).attempt(number)
    ranks = ranks_of(layout)
    if not ranks:
        raise UsageError(
            f"attempt {number} of the {name} leg has no logs yet", hint=f"see `chaosrun status {run_argument(run)}`"
        )
    if rank is not None and rank not in ranks:
        raise UsageError(f"attempt {number} of the {name} leg has no rank {rank}", hint=f"it has {_listing(ranks)}")
    chosen = ranks if rank is None else [rank]
    return [WorkerLog(leg=name, attempt=number, rank=entry, path=layout.log(entry)) for entry in chosen]


def rest_sentence(run: RunLayout, shown: WorkerLog, *, ended: bool) -> str | None:
    """Which attempt of which leg a log is of, and how to see the others; None when there are none."""
    attempts = [number for number in run.leg(shown.leg).attempts() if number != shown.attempt]
    legs = [name for name in LEGS if name != shown.leg and run.leg(name).attempts()]
    more = [
        *([f"--attempt {'|'.join(map(str, attempts))}"] if attempts else []),
        *([f"--leg {'|'.join(legs)}"] if legs else []),
        *(["all of them with -f"] if ended else []),
    ]
    if not attempts and not legs:
        return None
    return f"this is attempt {shown.attempt} of the {shown.leg} leg; others: {', '.join(more)}"


def ranks_of(attempt: AttemptLayout) -> list[int]:
    """Ranks that have a log."""
    names = [LOG_NAME.fullmatch(path.name) for path in attempt.path.glob("rank-*.log")]
    return sorted(int(name[1]) for name in names if name)


def read_log(log: WorkerLog) -> str:
    """Its text; bytes that are not UTF-8 are shown as U+FFFD."""
    return log.path.read_text(encoding="utf-8", errors="replace")


def _listing(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
