"""The present state of a run, from its journals, the ends of its traces, heartbeats and markers. Pure.

Steps done again after a restart are counted once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.faults.observed import signal_name
from chaosrun.records import events as recorded
from chaosrun.records.heartbeat import Heartbeat
from chaosrun.records.history import LegHistory
from chaosrun.records.layout import RUN
from chaosrun.records.traces import RankTrace
from chaosrun.report.facts import RunFacts
from chaosrun.report.sentences import sentence
from chaosrun.verify import recovery_times

State = Literal["starting", "restoring", "training", "saving", "ending", "done", "stopped", "killed", "left", "failed", "hung"]
"""Of a rank: what it does, then how it ended. stopped: by the supervisor, with its attempt."""
RECENT_STEPS = 32
"""Number of steps over which the pace is measured."""
_BEFORE_RESTORE = frozenset({"started", "script", "rendezvous", "joined"})
_OF_RESTORE = frozenset({"restoring", "restored"})
_UNFINISHED_STEP = frozenset({"epoch", "fetch", "forward", "backward", "optimizer", "record"})


@dataclass(slots=True, kw_only=True)
class Lane:
    """One rank of the newest attempt."""

    rank: int
    step: int
    """The newest step it has completed."""
    state: State = "starting"
    note: str = ""
    """Why it ended, or the fault under which it continues."""
    silent_s: float = 0.0
    """How long it has made no progress, if it cannot be waiting for the others."""
    ended: bool = False

    def end(self, state: State, note: str = "") -> None:
        self.state, self.ended, self.silent_s = state, True, 0.0
        self.note = note or self.note


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSeen:
    """The state of a fault. fired: it was about to strike; landed, missed: as in `report.landings`."""

    state: Literal["planned", "fired", "landed", "missed"] = "planned"
    attempt: int | None = None
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LegPicture:
    name: str
    history: LegHistory
    lanes: Mapping[int, Lane] = field(default_factory=dict)
    faults: Mapping[str, FaultSeen] = field(default_factory=dict)
    kept: tuple[int, ...] = ()
    """Steps of the checkpoints on the disk."""
    damage: tuple[str, ...] = ()
    """Sentences on files that could not be read in full."""

    @property
    def attempt(self) -> int:
        """0 before the first one."""
        return self.history.attempts[-1].number if self.history.attempts else 0

    @property
    def resumed_step(self) -> int:
        return self.history.attempts[-1].resume_step if self.history.attempts else 0

    @property
    def final_step(self) -> int | None:
        return self.history.finished.final_step if self.history.finished else None

    @property
    def unplanned(self) -> tuple[recorded.DeathUnplanned, ...]:
        return self.history.events(recorded.DeathUnplanned)

    @property
    def quarantined(self) -> tuple[int, ...]:
        """Steps of the quarantined checkpoints; 0 for one without a step in its name."""
        return tuple(event.step or 0 for event in self.history.events(recorded.CheckpointQuarantined))

    @property
    def last(self) -> str:
        return sentence(self.history.journal[-1]) if self.history.journal else ""

    @property
    def last_s(self) -> float:
        return self.history.journal[-1].time_s if self.history.journal else 0.0

    @property
    def step(self) -> int:
        return min((lane.step for lane in self.lanes.values()), default=self.resumed_step)

    @property
    def reached(self) -> int:
        """The newest step that any rank has completed, in any attempt."""
        return max(map(recovery_times.reached, self.history.attempts), default=0)

    @property
    def restarts(self) -> int:
        return max(0, len(self.history.attempts) - 1)

    @property
    def lost_steps(self) -> int:
        return sum(recovery_times.lost_steps(self.history.attempts).values())

    @property
    def step_s(self) -> float | None:
        """Seconds per step of the slowest rank; from an earlier attempt until this one has a value."""
        for attempt in reversed(self.history.attempts):
            if paces := [pace for trace in attempt.traces.values() if (pace := _pace(trace)) is not None]:
                return max(paces)
        return None


def _pace(trace: RankTrace) -> float | None:
    if len(trace.steps) < 2:
        return None
    first, last = (trace.steps[step] for step in ([*trace.steps][-RECENT_STEPS:][0], trace.steps.last))
    steps, took_s = last.step - first.step, last.time_s - first.time_s
    return took_s / steps if steps > 0 and took_s > 0 else None


def lanes_of(history: LegHistory, beats: Mapping[int, Heartbeat]) -> dict[int, Lane]:
    """The ranks of the newest attempt. `beats`: their newest heartbeats."""
    workers = next((event.workers for event in history.events(recorded.LegStarted)), 0)
    if not history.attempts:
        return {}
    attempt, lanes = history.attempts[-1], {}
    for rank in range(workers):
        lane = lanes[rank] = Lane(rank=rank, step=attempt.resume_step)
        trace = attempt.traces.get(rank)
        if trace is not None and trace.start:
            lane.state = "training"
            lane.step = trace.steps.last or trace.start.position.step
        if history.finished and history.outcome == "completed":
            lane.step = max(lane.step, history.finished.final_step)
        if rank in beats:
            _take_beat(lane, beats[rank], is_first=not attempt.went_on)
    for event in history.journal:
        if getattr(event, "attempt", None) == attempt.number:
            _take_end(lanes, event)
    return lanes


def _take_beat(lane: Lane, beat: Heartbeat, *, is_first: bool) -> None:
    """`is_first`: there is nothing to restore."""
    done = beat.step - (beat.stage in _UNFINISHED_STEP)
    if lane.state == "training" and done < lane.step - 1:
        return  # of another machine: the file as seen here may be old
    lane.state, lane.silent_s = _doing(beat.stage), 0.0 if beat.facts.waits else beat.silent_s
    if lane.state == "restoring" and is_first:
        lane.state = "starting"
    if lane.state in ("training", "saving", "ending"):
        lane.step = max(lane.step, done)


def _take_end(lanes: Mapping[int, Lane], event: recorded.JournalEvent) -> None:
    """Take in an event that ends ranks of the newest attempt."""
    match event:
        case recorded.AttemptStopped():
            for lane in (lanes[rank] for rank in event.killed if rank in lanes):
                if lane.state != "hung" and lane.note in ("", "SIGKILL"):
                    lane.note = ""
                    lane.end("stopped")
        case recorded.HangDeclared():
            if lane := lanes.get(event.first):
                lane.end("hung")
        case recorded.DeathUnplanned():
            if event.rank is not None and (lane := lanes.get(event.rank)) and lane.state != "hung":
                lane.end(lane.state if lane.ended else "failed", "unplanned")
        case recorded.FaultObserved():
            if (lane := lanes.get(event.rank)) and not (event.found or {}).get("problem"):
                lane.note = event.fault
                if event.how != "note" and lane.state != "left":
                    lane.end("hung" if event.how == "hang" else "killed")
        case recorded.WorkerExited():
            if lane := lanes.get(event.rank):
                _take_exit(lane, event)
        case _:
            pass


def _take_exit(lane: Lane, event: recorded.WorkerExited) -> None:
    if event.stopped:
        lane.end("hung" if lane.state == "hung" else "stopped")
    elif event.signal:
        lane.end("killed", lane.note or signal_name(event.signal))
    elif event.exit_code == 0:
        lane.end("done")
    elif event.exit_code == PREEMPTED_EXIT_CODE:
        lane.end("left", "on notice")
    else:
        lane.end("failed", f"exit code {event.exit_code}")


def _doing(stage: str) -> State:
    if stage in _BEFORE_RESTORE:
        return "starting"
    if stage in _OF_RESTORE:
        return "restoring"
    if stage in ("ended", "leaving", "unrecorded"):
        return "ending"
    return "saving" if stage.startswith("checkpoint.") else "training"


def fired(events: Sequence[recorded.JournalEvent]) -> dict[str, FaultSeen]:
    """The faults that were about to strike, from their requests, or from their earlier markers."""
    seen: dict[str, FaultSeen] = {}
    for event in events:
        if isinstance(event, recorded.FaultRequested):
            where = FaultSeen(state="fired", attempt=event.attempt, rank=event.rank, step=event.step)
            seen.setdefault(event.fault, where)
        elif isinstance(event, recorded.FaultWithdrawn):
            seen.pop(event.fault, None)
    return seen


@dataclass(slots=True, kw_only=True)
class RunPicture:
    """A run and its legs, in the order in which they began."""

    run_id: str
    facts: RunFacts = field(default_factory=RunFacts)
    faults: tuple[Fault, ...] = ()
    legs: dict[str, LegPicture] = field(default_factory=dict)
    resumed_s: float | None = None
    """When the latest supervisor took over."""

    def end(self) -> None:
        """Show all ranks without a recorded end as stopped, as no supervisor runs them any more."""
        for lane in chain.from_iterable(leg.lanes.values() for leg in self.legs.values()):
            if not lane.ended:
                lane.end("stopped")

    @property
    def began_s(self) -> float | None:
        """When the latest supervisor began."""
        return self.facts.created_s if self.resumed_s is None else self.resumed_s

    @property
    def leg(self) -> LegPicture | None:
        """The running leg, else the newest."""
        newest = list(reversed(self.legs.values()))
        return next((leg for leg in newest if not leg.history.finished), newest[0] if newest else None)

    @property
    def last_step(self) -> int | None:
        """The last step of the legs: from the reference run, or until that is over from the spec."""
        ends = [leg.final_step for leg in self.legs.values() if leg.history.outcome == "completed"]
        return next((end for end in ends if end), None) or self.facts.max_steps

    def seen(self, fault: Fault) -> FaultSeen:
        chaos = next((leg for name, leg in self.legs.items() if name in ("chaos", RUN)), None)
        return (chaos.faults.get(fault.id) if chaos else None) or FaultSeen(rank=fault.rank, step=fault.at_step)

    def remaining_s(self) -> float | None:
        """Seconds to the end of the chaos leg at the pace of the leg that runs, without restarts; None: not known."""
        leg, last = self.leg, self.last_step
        if leg is None or last is None or leg.history.finished:
            return None
        paces = [known for known in (leg.step_s, *(other.step_s for other in self.legs.values())) if known is not None]
        if not paces or not math.isfinite(paces[0]):
            return None
        return (max(0, last - leg.step) + (last if leg.name == "reference" else 0)) * paces[0]
