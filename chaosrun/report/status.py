"""What a run is doing, read from its files alone: works beside a running drill, after it, and after a crash."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from chaosrun.errors import ChaosrunError
from chaosrun.faults.fault import Fault
from chaosrun.records.layout import LEGS, LegLayout, RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.supervision import read_supervision
from chaosrun.records.trace import TornRecordError
from chaosrun.report.escapes import harmless
from chaosrun.report.facts import RunFacts, read_facts, read_object
from chaosrun.report.follow import RunFollower
from chaosrun.report.picture import LegPicture, RunPicture
from chaosrun.report.progress import LegProgress, StepSeen, last_step, read_progress
from chaosrun.wording import count, span

RunState = Literal["not started", "running", "interrupted", "judged"]
"""interrupted: nobody supervises it, and it has no verdict, or one that only says that it was interrupted."""

MOST_CHECKPOINTS = 5
"""That are listed."""


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
    picture: RunPicture
    """The same files as live displays see them."""
    error: ChaosrunError | None = None
    """What the last process that supervised it ended with; None while one does, and when it came to a verdict."""

    @property
    def remaining_s(self) -> float | None:
        """To the end of the chaos leg, while somebody works on it."""
        return self.picture.remaining_s() if self.state == "running" else None

    @property
    def damaged(self) -> tuple[str, ...]:
        return tuple(entry for leg in self.legs for entry in leg.damaged)

    def to_json(self) -> dict[str, Any]:
        about = {"run": self.run_id, "path": str(self.path.absolute()), "state": self.state, **asdict(self.facts)}
        remaining_s = self.remaining_s
        return {
            "v": 1,
            **about,
            "legs": [self._leg_json(leg) for leg in self.legs],
            "schedule": [self._fault_json(fault) for fault in self.picture.faults],
            "eta_s": None if remaining_s is None else round(remaining_s, 1),
            "verdict": (self.verdict or {}).get("status"),
            "error": self.error and {key: getattr(self.error, key) for key in ("message", "hint", "exit_code")},
            "damaged": list(self.damaged),
        }

    def _leg_json(self, leg: LegStatus) -> dict[str, Any]:
        seen = self.picture.legs.get(leg.progress.leg) or LegPicture(leg.progress.leg)
        return {
            **asdict(leg.progress),
            "step": leg.step,
            "ranks": {str(rank): seen.step for rank, seen in leg.ranks.items()},
            "states": {str(rank): lane.state for rank, lane in seen.lanes.items()},
            "restarts": seen.restarts,
            "lost_steps": seen.lost_steps,
            "checkpoints": sorted(step for step, sound in seen.checkpoints.items() if sound),
        }

    def _fault_json(self, fault: Fault) -> dict[str, Any]:
        seen = self.picture.seen(fault)
        return {
            "fault": fault.id,
            "kind": fault.kind,
            "description": fault.describe(),
            "state": seen.state,
            "attempt": seen.attempt,
            "rank": seen.rank,
            "step": seen.step,
        }


def read_status(run: RunLayout, *, supervised: bool, follower: RunFollower | None = None) -> RunStatus:
    """`supervised`: some process holds the run's lock. `follower`: of this run, kept by who asks again and again.

    Raises UsageError when run.json, plan.json or verdict.json is damaged.
    """
    follower = follower or RunFollower(run, whole=False)
    follower.poll()
    legs = tuple(_read_leg(name, run.leg(name)) for name in LEGS if run.leg(name).journal.exists())
    verdict = read_object(run.verdict_json)
    supervision = None if supervised else read_supervision(run)
    return RunStatus(
        run_id=run.run_id,
        path=run.path,
        state=_state(legs, verdict, supervised=supervised),
        facts=read_facts(run),
        legs=legs,
        verdict=verdict,
        picture=follower.picture,
        error=supervision and supervision.error,
    )


def status_lines(status: RunStatus, *, now_s: float) -> list[str]:
    """The account for people, one fact a line."""
    facts = status.facts
    about = f"  {facts.sentence}" if facts.sentence else ""
    lines = [f"run {status.run_id}{about}", f"  state      {_state_sentence(status)}"]
    for leg in status.legs:
        first, *more = _leg(leg, status, now_s)
        lines += [f"  {leg.progress.leg:<9}  {first}", *(f"{'':13}{entry}" for entry in more)]
    lines += [f"  damaged    {entry}" for entry in status.damaged]
    if status.error is not None:
        lines.append(f"  error      {status.error.message}")
        if status.error.hint and status.state != "interrupted":
            lines.append(f"  hint       {status.error.hint}")
    if status.state == "interrupted":
        lines.append(f"  go on      chaosrun resume {run_argument(RunLayout(status.path))}")
    return [harmless(line) for line in lines]


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
    remaining_s = status.remaining_s
    return status.state + ("" if remaining_s is None else f", about {span(remaining_s)} to go")


def _leg(leg: LegStatus, status: RunStatus, now_s: float) -> list[str]:
    progress, facts = leg.progress, status.facts
    seen = status.picture.legs.get(progress.leg) or LegPicture(progress.leg)
    last = status.picture.last_step
    lines: list[str] = []
    if progress.attempt:
        start = f"{progress.resumed_from} (step {progress.resumed_step})" if progress.resumed_from else "the beginning"
        lines.append(f"attempt {progress.attempt}, from {start}")
    if leg.step is not None:
        lines.append(f"step {leg.step}" + ("" if last is None else f" of {last}") + _ahead(leg))
    if progress.leg == "chaos" and facts.faults is not None:
        named = f" ({', '.join(landing.fault for landing in progress.landed)})" if progress.landed else ""
        lines.append(f"faults landed {len(progress.landed)} of {facts.faults}{facts.whose}{named}")
        to_come = [fault for fault in status.picture.faults if status.picture.seen(fault).state == "planned"]
        if to_come and progress.outcome is None:
            lines.append(f"next {to_come[0].id}: {to_come[0].describe()}")
    if kept := sorted(step for step, sound in seen.checkpoints.items() if sound):
        lines.append(_checkpoints(kept))
    if seen.restarts:
        lines.append(f"{count(seen.restarts, 'restart')}, {count(seen.lost_steps, 'step')} lost")
    if progress.unplanned:
        lines.append(count(len(progress.unplanned), "unplanned death"))
    if progress.quarantined:
        lines.append(f"{count(progress.quarantined, 'checkpoint')} quarantined")
    lines.append(f"{progress.last}, {span(max(0.0, now_s - progress.last_s))} ago")
    if progress.hint:
        lines.append(f"hint: {progress.hint}")
    return lines


def _checkpoints(steps: list[int]) -> str:
    if len(steps) > MOST_CHECKPOINTS:
        return f"{len(steps)} checkpoints, of steps {steps[0]} to {steps[-1]}"
    one = len(steps) == 1
    return f"checkpoint{'' if one else 's'} of step{'' if one else 's'} {', '.join(map(str, steps))}"


def _ahead(leg: LegStatus) -> str:
    """Ranks ahead of the slowest one: a hang shows here."""
    ahead = {rank: seen.step for rank, seen in leg.ranks.items() if seen.step != leg.step}
    return f" (ahead: {', '.join(f'rank {rank} at {step}' for rank, step in ahead.items())})" if ahead else ""
