"""What a run is doing, read from its files alone: works beside a running drill, after it, and after a crash."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from chaosrun.errors import ChaosrunError
from chaosrun.faults.fault import Fault
from chaosrun.records.events import FaultObserved
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import read_object
from chaosrun.records.supervision import read_supervision
from chaosrun.report.escapes import harmless
from chaosrun.report.facts import RunFacts, read_facts
from chaosrun.report.follow import RunFollower
from chaosrun.report.picture import LegPicture, RunPicture
from chaosrun.report.sentences import raised
from chaosrun.wording import count, span

RunState = Literal["not started", "running", "interrupted", "judged"]
"""interrupted: nobody supervises it, and it has no verdict, or one that only says that it was interrupted."""

MOST_CHECKPOINTS = 5
"""That are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    run_id: str
    path: Path
    state: RunState
    facts: RunFacts
    verdict: dict[str, object] | None
    """verdict.json as it stands."""
    picture: RunPicture
    """The same files as live displays see them."""
    error: ChaosrunError | None = None
    """What the last process that supervised it ended with; None while one does, and when it came to a verdict."""

    @property
    def legs(self) -> tuple[LegPicture, ...]:
        return tuple(self.picture.legs.values())

    @property
    def remaining_s(self) -> float | None:
        """To the end of the chaos leg, while somebody works on it."""
        return self.picture.remaining_s() if self.state == "running" else None

    @property
    def damaged(self) -> tuple[str, ...]:
        return tuple(f"{path}: {why}" for leg in self.legs for path, why in leg.damage.items())

    def to_json(self) -> dict[str, Any]:
        about = {"run": self.run_id, "path": str(self.path.absolute()), "state": self.state, **asdict(self.facts)}
        remaining_s = self.remaining_s
        return {
            "v": 1,
            **about,
            "legs": [_leg_json(leg) for leg in self.legs],
            "schedule": [self._fault_json(fault) for fault in self.picture.faults],
            "eta_s": None if remaining_s is None else round(remaining_s, 1),
            "verdict": (self.verdict or {}).get("status"),
            "error": self.error and {key: getattr(self.error, key) for key in ("message", "hint", "exit_code")},
            "damaged": list(self.damaged),
        }

    def _fault_json(self, fault: Fault) -> dict[str, object]:
        about = {"fault": fault.id, "kind": fault.kind, "description": fault.describe()}
        return {**about, **asdict(self.picture.seen(fault))}


def _leg_json(leg: LegPicture) -> dict[str, object]:
    ranks, end = _ranks(leg), leg.history.finished
    landed = [event for event in leg.history.events(FaultObserved) if event.fault in _landed(leg)]
    about = ("fault", "attempt", "rank", "pid", "how", "signal", "exit_code")
    deaths = [
        {key: getattr(death, key) for key in ("attempt", "rank", "step", "reason")}
        | {"error": raised(death.error), "traceback": death.error and death.error.traceback}
        for death in leg.unplanned
    ]
    shown = ("workers", "supervisor_pid", "attempt", "resumed_from", "resumed_step", "quarantined", "outcome", "last", "last_s")
    return {
        "leg": leg.name,
        **{key: getattr(leg, key) for key in (*shown, "restarts", "lost_steps")},
        **{key: getattr(end, key, None) for key in ("message", "hint", "final_step")},
        "landed": [{key: getattr(event, key) for key in about} for event in landed],
        "unplanned": deaths,
        "step": min(ranks.values(), default=None),
        "ranks": {str(rank): step for rank, step in ranks.items()},
        "states": {str(rank): lane.state for rank, lane in leg.lanes.items()},
        "checkpoints": _kept(leg),
        "damage": next(iter(leg.damage.values()), None),
    }


def _ranks(leg: LegPicture) -> dict[int, int]:
    """The newest step of each rank that has done one in the last attempt."""
    return {rank: lane.step for rank, lane in leg.lanes.items() if lane.recent}


def _landed(leg: LegPicture) -> list[str]:
    return [fault for fault, seen in leg.faults.items() if seen.state == "landed"]


def _kept(leg: LegPicture) -> list[int]:
    return sorted(step for step, sound in leg.checkpoints.items() if sound)


def read_status(run: RunLayout, *, supervised: bool, follower: RunFollower | None = None) -> RunStatus:
    """`supervised`: some process holds the run's lock. `follower`: of this run, kept by who asks again and again.

    Raises UsageError when run.json, plan.json or verdict.json is damaged.
    """
    follower = follower or RunFollower(run, whole=False)
    follower.poll()
    verdict = read_object(run.verdict_json) if run.verdict_json.exists() else None
    supervision = None if supervised else read_supervision(run)
    return RunStatus(
        run_id=run.run_id,
        path=run.path,
        state=_state(follower.picture, verdict, supervised=supervised),
        facts=read_facts(run),
        verdict=verdict,
        picture=follower.picture,
        error=supervision and supervision.error and supervision.error.again(run),
    )


def status_lines(status: RunStatus, *, now_s: float) -> list[str]:
    """The account for people, one fact a line."""
    facts = status.facts
    about = f"  {facts.sentence}" if facts.sentence else ""
    lines = [f"run {status.run_id}{about}", f"  state      {_state_sentence(status)}"]
    for leg in status.legs:
        first, *more = _leg(leg, status, now_s)
        lines += [f"  {leg.name:<9}  {first}", *(f"{'':13}{entry}" for entry in more)]
    lines += [f"  damaged    {entry}" for entry in status.damaged]
    if status.error is not None:
        lines.append(f"  error      {status.error.message}")
        if status.error.hint and status.state != "interrupted":
            lines.append(f"  hint       {status.error.hint}")
    if status.state == "interrupted":
        lines.append(f"  go on      chaosrun resume {run_argument(RunLayout(status.path))}")
    return [harmless(line) for line in lines]


def _state(picture: RunPicture, verdict: dict[str, object] | None, *, supervised: bool) -> RunState:
    if supervised:
        return "running"
    if any(leg.outcome == "interrupted" for leg in picture.legs.values()):
        return "interrupted"
    if verdict is not None:
        return "judged"
    return "interrupted" if picture.legs else "not started"


def _state_sentence(status: RunStatus) -> str:
    if status.state == "judged" and status.verdict is not None:
        cause = status.verdict.get("cause")
        return f"finished: {status.verdict.get('status')}" + (f", {cause}" if cause else "")
    remaining_s = status.remaining_s
    return status.state + ("" if remaining_s is None else f", about {span(remaining_s)} to go")


def _leg(leg: LegPicture, status: RunStatus, now_s: float) -> list[str]:
    facts, last, ranks, landed, kept = status.facts, status.picture.last_step, _ranks(leg), _landed(leg), _kept(leg)
    lines: list[str] = []
    if leg.attempt:
        start = f"{leg.resumed_from} (step {leg.resumed_step})" if leg.resumed_from else "the beginning"
        lines.append(f"attempt {leg.attempt}, from {start}")
    if ranks:
        step = min(ranks.values())
        # A hang shows here.
        ahead = ", ".join(f"rank {rank} at {reached}" for rank, reached in ranks.items() if reached != step)
        lines.append(f"step {step}" + ("" if last is None else f" of {last}") + (f" (ahead: {ahead})" if ahead else ""))
    if leg.name == "chaos" and facts.faults is not None:
        named = f" ({', '.join(landed)})" if landed else ""
        lines.append(f"faults landed {len(landed)} of {facts.faults}{facts.whose}{named}")
        to_come = [fault for fault in status.picture.faults if status.picture.seen(fault).state == "planned"]
        if to_come and leg.outcome is None:
            lines.append(f"next {to_come[0].id}: {to_come[0].describe()}")
    if len(kept) > MOST_CHECKPOINTS:
        lines.append(f"{len(kept)} checkpoints, of steps {kept[0]} to {kept[-1]}")
    elif kept:
        many = "s" if len(kept) > 1 else ""
        lines.append(f"checkpoint{many} of step{many} {', '.join(map(str, kept))}")
    if leg.restarts:
        lines.append(f"{count(leg.restarts, 'restart')}, {count(leg.lost_steps, 'step')} lost")
    if leg.unplanned:
        lines.append(count(len(leg.unplanned), "unplanned death"))
    if leg.quarantined:
        lines.append(f"{count(leg.quarantined, 'checkpoint')} quarantined")
    lines.append(f"{leg.last}, {span(max(0.0, now_s - leg.last_s))} ago")
    if leg.history.finished and leg.history.finished.hint:
        lines.append(f"hint: {leg.history.finished.hint}")
    return lines
