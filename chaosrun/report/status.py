"""The status of a run, read from its files alone: works during a drill, after it, and after a crash."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from chaosrun.errors import ChaosrunError, UsageError
from chaosrun.processes import where_stopped
from chaosrun.records.events import FaultObserved, LegStarted, SupervisorResumed
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_arguments
from chaosrun.records.run_file import read_object
from chaosrun.records.supervision import read_supervision
from chaosrun.report.draw import LABEL, draw
from chaosrun.report.escapes import harmless
from chaosrun.report.facts import RunFacts, read_facts
from chaosrun.report.follow import RunFollower
from chaosrun.report.next_commands import command
from chaosrun.report.picture import FaultSeen, LegPicture, RunPicture
from chaosrun.report.sentences import raised
from chaosrun.wording import span

RunState = Literal["not started", "running", "interrupted", "judged"]
"""interrupted: nobody supervises it, and it has no verdict, or one that only says that it was interrupted."""

WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    run: RunLayout
    state: RunState
    facts: RunFacts
    verdict: dict[str, object] | None
    picture: RunPicture
    error: ChaosrunError | None = None
    """The error that ended its last supervisor; None while it is supervised, and when it reached a verdict."""
    stopped: str | None = None
    """What to do about its supervisor if that is stopped (Ctrl-Z, SIGSTOP)."""

    @property
    def legs(self) -> tuple[LegPicture, ...]:
        return tuple(self.picture.legs.values())

    @property
    def remaining_s(self) -> float | None:
        """To the end of the chaos leg, while it is supervised."""
        return self.picture.remaining_s() if self.state == "running" else None

    @property
    def damaged(self) -> tuple[str, ...]:
        return tuple(problem for leg in self.legs for problem in leg.damage)

    def to_json(self) -> dict[str, Any]:
        about = {"run": self.run.run_id, "path": str(self.run.path.absolute()), "state": self.state, **asdict(self.facts)}
        remaining_s = self.remaining_s
        return {
            "v": 1,
            **about,
            "legs": [_leg_json(leg) for leg in self.legs],
            "schedule": [
                {"fault": fault.id, "kind": fault.kind, "description": fault.describe(), **asdict(self.picture.seen(fault))}
                for fault in self.picture.faults
            ],
            "eta_s": None if remaining_s is None else round(remaining_s, 1),
            "verdict": (self.verdict or {}).get("status"),
            "error": self.error and {key: getattr(self.error, key) for key in ("message", "hint", "exit_code")},
            "damaged": list(self.damaged),
        }


def _leg_json(leg: LegPicture) -> dict[str, object]:
    end, steps = leg.history.finished, {str(rank): lane.step for rank, lane in leg.lanes.items()}
    begun = _supervisors(leg)
    landed = [
        event for event in leg.history.events(FaultObserved) if leg.faults.get(event.fault, FaultSeen()).state == "landed"
    ]
    about = ("fault", "attempt", "rank", "pid", "how", "signal", "exit_code")
    deaths = [
        {key: getattr(death, key) for key in ("attempt", "rank", "step", "reason")}
        | {"error": raised(death.error), "traceback": death.error and death.error.traceback}
        for death in leg.unplanned
    ]
    shown = ("last", "last_s", "restarts", "lost_steps")
    return {
        "leg": leg.name,
        "workers": next((event.workers for event in leg.history.events(LegStarted)), None),
        "supervisor_pid": begun[-1].supervisor_pid if begun else None,
        "resumed_from": leg.history.attempts[-1].resume if leg.history.attempts else None,
        "attempt": leg.attempt,
        "resumed_step": leg.resumed_step,
        "outcome": leg.history.outcome,
        **{key: getattr(leg, key) for key in shown},
        **{key: getattr(end, key, None) for key in ("message", "hint", "final_step")},
        "landed": [{key: getattr(event, key) for key in about} for event in landed],
        "unplanned": deaths,
        "step": min(steps.values(), default=None),
        "ranks": steps,
        "states": {str(rank): lane.state for rank, lane in leg.lanes.items()},
        "checkpoints": list(leg.kept),
        "quarantined": len(leg.quarantined),
        "damage": next(iter(leg.damage), None),
    }


def read_status(run: RunLayout, *, supervised: bool, follower: RunFollower | None = None) -> RunStatus:
    """`supervised`: some process holds the run's lock. `follower`: of this run, kept by callers that poll.

    Raises UsageError when run.json, plan.json or verdict.json is damaged.
    """
    follower = follower or RunFollower(run)
    follower.poll()
    verdict = read_object(run.verdict_json) if run.verdict_json.exists() else None
    supervision = read_supervision(run, judged=supervised or verdict is not None)
    if not supervised or (supervision and supervision.began_s > _began_s(follower.picture)):
        follower.picture.end()  # also while a new supervisor starts, which takes over later
    return RunStatus(
        run=run,
        state=_state(follower.picture, verdict, supervised=supervised),
        facts=read_facts(run),
        verdict=verdict,
        picture=follower.picture,
        error=supervision.error.again(run) if supervision and supervision.error and not supervised else None,
        stopped=where_stopped(supervision.pid) if supervision and supervised else None,
    )


def _began_s(picture: RunPicture) -> float:
    """When the newest supervisor began a leg, or continued one."""
    begun = (event.time_s for leg in picture.legs.values() for event in _supervisors(leg))
    return max(begun, default=float("inf"))


def _supervisors(leg: LegPicture) -> list[LegStarted | SupervisorResumed]:
    return [event for event in leg.history.journal if isinstance(event, LegStarted | SupervisorResumed)]


def status_lines(status: RunStatus, *, now_s: float) -> list[str]:
    """The status for people: the picture of live displays, and facts from the files of a run that is not running."""
    rows = [("hint", leg.history.finished.hint) for leg in status.legs if leg.history.finished and leg.history.finished.hint]
    rows += [("damaged", problem) for problem in status.damaged]
    if status.error is not None:
        rows.append(("error", status.error.message))
    # After a wrong usage, such as a fault at a step that is never reached, a resumed run ends in the same way.
    resumable = status.state == "interrupted" and not isinstance(status.error, UsageError)
    if status.error is not None and status.error.hint and not resumable:
        rows.append(("hint", status.error.hint))
    if resumable:
        resume = command("resume", "resume", *run_arguments(status.run), *status.facts.joining)
        rows.append((resume.label, resume.line))
    drawn = [line.plain.rstrip() for line in draw(status.picture, now_s=now_s, width=WIDTH)[1:]] if status.legs else []
    return [
        harmless(f"run {status.run.run_id}  {status.facts.sentence}".rstrip()),
        harmless(f"{'state':<{LABEL}}{_state_sentence(status)}"),
        *drawn,
        *(harmless(f"{label:<{LABEL}}{words}") for label, words in rows),
    ]


def _state(picture: RunPicture, verdict: dict[str, object] | None, *, supervised: bool) -> RunState:
    if supervised:
        return "running"
    if any(leg.history.outcome == "interrupted" for leg in picture.legs.values()):
        return "interrupted"
    if verdict is not None:
        return "judged"
    return "interrupted" if picture.legs else "not started"


def _state_sentence(status: RunStatus) -> str:
    if status.state == "judged" and status.verdict is not None:
        cause = status.verdict.get("cause")
        return f"finished: {status.verdict.get('status')}" + (f", {cause}" if cause else "")
    remaining_s = status.remaining_s
    if status.stopped:
        return f"{status.state}, but {status.stopped}"
    return status.state + ("" if remaining_s is None else f", about {span(remaining_s)} to go")
