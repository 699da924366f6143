"""What a run is doing, read from its files alone: works beside a running drill, after it, and after a crash."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.trace import TornRecordError
from chaosrun.report.facts import RunFacts, read_facts, read_object
from chaosrun.report.progress import LegProgress, StepSeen, count, last_step, read_progress, span

__all__ = ["LegStatus", "RunState", "RunStatus", "read_status", "status_lines"]

RunState = Literal["not started", "running", "interrupted", "judged"]
"""interrupted: nobody supervises it, and it has no verdict, or one that only says that it was interrupted."""

LEGS = ("reference", "chaos", "confirm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LegStatus:
    progress: LegProgress
    ranks: dict[int, StepSeen]
    """The newest step of each rank of the last attempt."""
    damaged: tuple[str, ...] = ()
    """Record files that cannot be read to their end, and why."""

    @property
    def step(self) -> int | None:
        """The step that every rank of the last attempt has completed."""
        return min((seen.step for seen in self.ranks.values()), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    run_id: str
    path: Path
    state: RunState
    facts: RunFacts
    legs: tuple[LegStatus, ...]
    verdict: dict[str, Any] | None
    """verdict.json as it stands."""

    @property
    def damaged(self) -> tuple[str, ...]:
        return tuple(entry for leg in self.legs for entry in leg.damaged)

    def to_json(self) -> dict[str, Any]:
        legs = [
            {**asdict(leg.progress), "step": leg.step, "ranks": {str(rank): seen.step for rank, seen in leg.ranks.items()}}
            for leg in self.legs
        ]
        about = {"run": self.run_id, "path": str(self.path), "state": self.state, **asdict(self.facts)}
        return {"v": 1, **about, "legs": legs, "verdict": (self.verdict or {}).get("status"), "damaged": list(self.damaged)}


def read_status(run: RunLayout, *, supervised: bool) -> RunStatus:
    """`supervised`: some process holds the run's lock.

    Raises UsageError when run.json, plan.json or verdict.json is damaged.
    """
    legs = tuple(_read_leg(name, run.leg(name)) for name in LEGS if run.leg(name).journal.exists())
    verdict = read_object(run.verdict_json)
    return RunStatus(
        run_id=run.run_id,
        path=run.path,
        state=_state(legs, verdict, supervised=supervised),
        facts=read_facts(run),
        legs=legs,
        verdict=verdict,
    )


def status_lines(status: RunStatus, *, now_s: float) -> list[str]:
    """The account for people, one fact a line."""
    facts = status.facts
    about = f"  {facts.sentence}" if facts.sentence else ""
    lines = [f"run {status.run_id}{about}", f"  state      {_state_sentence(status)}"]
    for leg in status.legs:
        first, *more = _leg(leg, facts, now_s)
        lines += [f"  {leg.progress.leg:<9}  {first}", *(f"{'':13}{entry}" for entry in more)]
    lines += [f"  damaged    {entry}" for entry in status.damaged]
    if status.state == "interrupted":
        lines.append(f"  go on      chaosrun resume {status.run_id}")
    return lines


def _read_leg(name: str, layout: LegLayout) -> LegStatus:
    progress = read_progress(name, layout)
    damaged = [progress.damage] if progress.damage else []
    ranks: dict[int, StepSeen] = {}
    for rank in range(progress.workers or 0):
        try:
            seen = last_step(layout.attempt(progress.attempt).trace(rank))
        except TornRecordError as error:
            damaged.append(str(error))
            continue
        if seen is not None:
            ranks[rank] = seen
    return LegStatus(progress=progress, ranks=ranks, damaged=tuple(damaged))


def _state(legs: tuple[LegStatus, ...], verdict: dict[str, Any] | None, *, supervised: bool) -> RunState:
    if supervised:
        return "running"
    if any(leg.progress.outcome == "interrupted" for leg in legs):
        return "interrupted"
    if verdict is not None:
        return "judged"
    return "interrupted" if legs else "not started"


def _state_sentence(status: RunStatus) -> str:
    if status.state == "judged" and status.verdict is not None:
        cause = status.verdict.get("cause")
        return f"finished: {status.verdict.get('status')}" + (f", {cause}" if cause else "")
    return status.state


def _leg(leg: LegStatus, facts: RunFacts, now_s: float) -> list[str]:
    progress = leg.progress
    lines: list[str] = []
    if progress.attempt:
        start = f"{progress.resumed_from} (step {progress.resumed_step})" if progress.resumed_from else "the beginning"
        lines.append(f"attempt {progress.attempt}, from {start}")
    if leg.step is not None:
        lines.append(f"step {leg.step}" + (f" of {facts.max_steps}" if facts.max_steps else "") + _ahead(leg))
    if progress.leg == "chaos" and facts.faults is not None:
        named = f" ({', '.join(landing.fault for landing in progress.landed)})" if progress.landed else ""
        lines.append(f"faults landed {len(progress.landed)} of {facts.faults}{named}")
    if progress.unplanned:
        lines.append(count(len(progress.unplanned), "unplanned death"))
    if progress.quarantined:
        lines.append(f"{count(progress.quarantined, 'checkpoint')} quarantined")
    lines.append(f"{progress.last}, {span(max(0.0, now_s - progress.last_s))} ago")
    if progress.hint:
        lines.append(f"hint: {progress.hint}")
    return lines


def _ahead(leg: LegStatus) -> str:
    """Ranks ahead of the slowest one: a hang shows here."""
    ahead = {rank: seen.step for rank, seen in leg.ranks.items() if seen.step != leg.step}
    return f" (ahead: {', '.join(f'rank {rank} at {step}' for rank, step in ahead.items())})" if ahead else ""
