"""Which worker logs `chaosrun logs` shows."""

from dataclasses import dataclass
from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.records.layout import RunLayout

__all__ = ["WorkerLog", "read_log", "select_logs"]


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
        raise UsageError(f"run {run.run_id} has no logs of a {name} leg yet", hint=f"see `chaosrun status {run.run_id}`")
    number = attempts[-1] if attempt is None else attempt
    if number not in attempts:
        raise UsageError(f"the {name} leg has no attempt {number}", hint=f"it has {_listing(attempts)}")
    layout = run.leg(name).attempt(number)
    ranks = sorted(int(path.name.removeprefix("rank-").removesuffix(".log")) for path in layout.path.glob("rank-*.log"))
    if not ranks:
        raise UsageError(f"attempt {number} of the {name} leg has no logs yet", hint=f"see `chaosrun status {run.run_id}`")
    if rank is not None and rank not in ranks:
        raise UsageError(f"attempt {number} of the {name} leg has no rank {rank}", hint=f"it has {_listing(ranks)}")
    chosen = ranks if rank is None else [rank]
    return [WorkerLog(leg=name, attempt=number, rank=entry, path=layout.log(entry)) for entry in chosen]


def read_log(log: WorkerLog) -> str:
    """Its text; bytes that are not UTF-8 are shown as U+FFFD."""
    return log.path.read_text(encoding="utf-8", errors="replace")


def _listing(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
