"""What a run looks like at the moment: its journals' history and what traces, heartbeats and markers add while it goes on.

Pure: is told what was read, reads nothing, knows no clock and no terminal. Steps done again after a restart are counted once.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.faults.observed import signal_name
from chaosrun.records.events import (
    AttemptStarting,
    AttemptStopped,
    CheckpointQuarantined,
    DeathUnplanned,
    FaultObserved,
    FaultRequested,
    FaultWithdrawn,
    HangDeclared,
    JournalEvent,
    LegStarted,
    Outcome,
    SupervisorResumed,
    WorkerExited,
)
from chaosrun.records.heartbeat import Heartbeat
from chaosrun.records.history import LegHistory
from chaosrun.records.layout import LegLayout
from chaosrun.report.facts import RunFacts
from chaosrun.report.sentences import sentence

State = Literal["starting", "restoring", "training", "saving", "ending", "done", "stopped", "killed", "left", "failed", "hung"]
"""Of a rank: what it does, then how it ended. stopped: by the supervisor, with its attempt."""
RECENT_STEPS = 32
"""What the rate is taken over."""
_BEFORE_RESTORE = frozenset({"started", "script", "rendezvous", "joined"})
_OF_RESTORE = frozenset({"restoring", "restored"})
_UNFINISHED_STEP = frozenset({"epoch", "fetch", "forward", "backward", "optimizer", "record"})


class TraceLine(msgspec.Struct):
    """What a picture needs of a line of a trace."""

    kind: str
    step: int = 0
    time_s: float = 0.0
    loss: tuple[str, ...] = ()
    items: int | str | None = None
    """Of a step how many there were; of a probe, what they are."""
    position: dict[str, int] = {}


@dataclass(slots=True, kw_only=True)
class Lane:
    """One rank of the newest attempt."""

    rank: int
    step: int
    """The newest it has completed."""
    state: State = "starting"
    note: str = ""
    """Why it ended, or the fault it goes on with."""
    ended: bool = False
    beat: Heartbeat | None = None
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Its newest steps and when each was done."""

    def end(self, state: State, note: str = "") -> None:
        self.state, self.ended = state, True
        self.note = note or self.note

    @property
    def silent_s(self) -> float:
        """How long it has made no progress, where it cannot be that it waits for the others."""
        return 0.0 if self.ended or self.beat is None or self.beat.facts.waits else self.beat.silent_s

    @property
    def step_s(self) -> float | None:
        """Seconds that a step takes it."""
        if len(self.recent) < 2:
            return None
        (first, began_s), (last, ended_s) = self.recent[0], self.recent[-1]
        return (ended_s - began_s) / (last - first) if last > first and ended_s > began_s else None


@dataclass(slots=True, kw_only=True)
class FaultSeen:
    """What became of a fault. fired: it was about to strike; landed, missed: as `report.landings` has it."""

    state: Literal["planned", "fired", "landed", "missed"] = "planned"
    attempt: int | None = None
    rank: int | None = None
    step: int | None = None


class LegPicture:
    """One leg. `take_*` are told what is new of it."""

    def __init__(self, name: str, layout: LegLayout) -> None:
        self.name = name
        self.history = LegHistory(name=name, layout=layout)
        self.workers: int | None = None
        self.supervisor_pid: int | None = None
        self.lanes: dict[int, Lane] = {}
        self.faults: dict[str, FaultSeen] = {}
        self.checkpoints: dict[int, bool] = {}
        """By step; False: quarantined."""
        self.losses: dict[int, float] = {}
        """By step, over all ranks; that of the newest attempt that did it."""
        self.damage: dict[Path, str] = {}
        """Files that could not be read in full, and why."""
        self._reached: dict[int, int] = {}
        """By attempt."""
        self._first_step_s: dict[int, float] = {}
        self._shares: dict[tuple[int, int], dict[int, float]] = {}
        self._step_s: float | None = None

    @property
    def attempt(self) -> int:
        """0 before the first one."""
        return self.history.attempts[-1].number if self.history.attempts else 0

    @property
    def resumed_from(self) -> str | None:
        return self.history.attempts[-1].resume if self.history.attempts else None

    @property
    def resumed_step(self) -> int:
        return self.history.attempts[-1].resume_step if self.history.attempts else 0

    @property
    def is_over(self) -> bool:
        return self.history.finished is not None

    @property
    def outcome(self) -> Outcome | None:
        return self.history.outcome

    @property
    def final_step(self) -> int | None:
        return self.history.finished.final_step if self.history.finished else None

    @property
    def unplanned(self) -> tuple[DeathUnplanned, ...]:
        return self.history.events(DeathUnplanned)

    @property
    def quarantined(self) -> int:
        return len(self.history.events(CheckpointQuarantined))

    @property
    def last(self) -> str:
        """What happened last."""
        return sentence(self.history.journal[-1]) if self.history.journal else ""

    @property
    def last_s(self) -> float:
        return self.history.journal[-1].time_s if self.history.journal else 0.0

    @property
    def step(self) -> int:
        """The newest that every rank has completed."""
        return min((lane.step for lane in self.lanes.values()), default=self.resumed_step)

    @property
    def reached(self) -> int:
        """The newest that any rank has completed, in any attempt."""
        return max(self._reached.values(), default=0)

    @property
    def restarts(self) -> int:
        return max(0, len(self.history.attempts) - 1)

    @property
    def lost_steps(self) -> int:
        """Steps done or restored that the next attempt did not go on from."""
        return sum(max(0, self._reached.get(a.number, 0) - b.resume_step) for a, b in pairwise(self.history.attempts))

    @property
    def recoveries_s(self) -> list[float]:
        """From the first death of an attempt to the first step of the next, where both are known."""
        died = [next((end.died_s for end in a.exits if end.exit_code != 0), None) for a in self.history.attempts]
        first = [self._first_step_s.get(attempt.number) for attempt in self.history.attempts]
        pairs = zip(died, first[1:], strict=False)
        return [max(0.0, began_s - died_s) for died_s, began_s in pairs if died_s is not None and began_s is not None]

    @property
    def step_s(self) -> float | None:
        """Seconds a step takes, by the slowest rank; that of an earlier attempt until there is one of this."""
        known = [lane.step_s for lane in self.lanes.values() if lane.step_s is not None]
        self._step_s = max(known) if known else self._step_s
        return self._step_s

    def take_history(self, history: LegHistory) -> None:
        """The journal has grown."""
        fresh = history.journal[len(self.history.journal) :]
        for event in fresh:
            self._take(event)
        self.history = history

    def _take(self, event: JournalEvent) -> None:
        match event:
            case LegStarted():
                self.workers, self.supervisor_pid = event.workers, event.supervisor_pid
            case SupervisorResumed():
                self.supervisor_pid = event.supervisor_pid
            case AttemptStarting():
                self._step_s = self.step_s
                self._reached[event.attempt] = event.resume_step
                self.lanes = {rank: Lane(rank=rank, step=event.resume_step) for rank in range(self.workers or 0)}
                if event.resume is not None:
                    self.checkpoints[event.resume_step] = True
            case CheckpointQuarantined(step=int(step)):
                self.checkpoints[step] = False
            case FaultRequested():
                self.take_request(event)
            case FaultWithdrawn():
                self.faults[event.fault] = FaultSeen()
            case WorkerExited() | FaultObserved() | HangDeclared() | DeathUnplanned() | AttemptStopped():
                if max(self._reached, default=0) == event.attempt:
                    self._take_end(event)
            case _:
                pass

    def _take_end(self, event: WorkerExited | FaultObserved | HangDeclared | DeathUnplanned | AttemptStopped) -> None:
        """What ends ranks of the newest attempt."""
        lanes = self.lanes
        match event:
            case AttemptStopped():
                for lane in (lanes[rank] for rank in event.killed if rank in lanes):
                    if lane.state != "hung" and lane.note in ("", "SIGKILL"):
                        lane.note = ""
                        lane.end("stopped")
            case HangDeclared():
                if lane := lanes.get(event.first):
                    lane.end("hung")
            case DeathUnplanned():
                if event.rank is not None and (lane := lanes.get(event.rank)) and lane.state != "hung":
                    lane.end(lane.state if lane.ended else "failed", "unplanned")
            case FaultObserved():
                if (lane := lanes.get(event.rank)) and not (event.found or {}).get("problem"):
                    lane.note = event.fault
                    if event.how != "note" and lane.state != "left":
                        lane.end("hung" if event.how == "hang" else "killed")
            case WorkerExited():
                if lane := lanes.get(event.rank):
                    _take_exit(lane, event)

    def take_request(self, request: FaultRequested) -> None:
        """A fault is about to strike: by its marker, or by the journal's copy of that, which comes later."""
        if self.faults.setdefault(request.fault, FaultSeen()).state == "planned":
            where = FaultSeen(state="fired", attempt=request.attempt, rank=request.rank, step=request.step)
            self.faults[request.fault] = where

    def withdraw(self, fault: str) -> None:
        """Its marker is gone: it may strike again."""
        if (seen := self.faults.get(fault)) and seen.state == "fired":
            self.faults[fault] = FaultSeen()

    def take_trace(self, attempt: int, rank: int, line: TraceLine) -> None:
        """One line of a rank's trace. Raises ValueError where it makes no sense."""
        lane = self.lanes.get(rank) if attempt == self.attempt else None
        if lane and not lane.ended and line.kind in ("start", "step"):
            lane.state = "training"
            lane.step = max(lane.step, line.position.get("step", 0))
        if line.kind == "checkpoint":
            self.checkpoints[line.step] = True
        if line.kind != "step":
            return
        if line.step < 1:
            raise ValueError(f"a record of step {line.step}")
        if attempt in self._reached:
            self._reached[attempt] = max(self._reached[attempt], line.step)
            self._first_step_s[attempt] = min(self._first_step_s.get(attempt, math.inf), line.time_s)
        if lane:
            lane.step = max(lane.step, line.step)
            lane.recent.append((line.step, line.time_s))
        if values := [_loss(value) for value in line.loss]:
            # Of an accumulation window each value is a share of the whole batch's; else the mean over a part of it.
            whole = line.items is not None
            self._take_share(attempt, rank, line.step, sum(values) / (1 if whole else len(values)), whole=whole)

    def _take_share(self, attempt: int, rank: int, step: int, share: float, *, whole: bool) -> None:
        shares = self._shares.setdefault((attempt, step), {})
        shares[rank] = share
        if len(shares) == (self.workers or 1):
            del self._shares[attempt, step]
            self.losses[step] = sum(shares.values()) / (1 if whole else len(shares))

    def take_beat(self, rank: int, beat: Heartbeat) -> None:
        """The newest heartbeat of a rank of the newest attempt."""
        lane = self.lanes.get(rank)
        if lane is None or lane.ended:
            return
        done = beat.step - (beat.stage in _UNFINISHED_STEP)
        if lane.recent and done < lane.step - 1:
            return  # of another machine: what is seen of the file is old
        lane.beat = beat
        lane.state = _doing(beat.stage)
        if lane.state == "restoring" and self.resumed_from is None:
            lane.state = "starting"
        if lane.state in ("training", "saving", "ending"):
            lane.step = max(lane.step, done)
            self._reached[self.attempt] = max(self._reached[self.attempt], done)


def _take_exit(lane: Lane, event: WorkerExited) -> None:
    if event.signal:
        lane.end("killed", lane.note or signal_name(event.signal))
    elif event.exit_code == 0:
        lane.end("done")
    elif event.exit_code == PREEMPTED_EXIT_CODE:
        lane.end("left", "on notice")
    else:
        lane.end("failed", f"exit code {event.exit_code}")


def _loss(value: str) -> float:
    try:
        return float.fromhex(value)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _doing(stage: str) -> State:
    if stage in _BEFORE_RESTORE:
        return "starting"
    if stage in _OF_RESTORE:
        return "restoring"
    if stage in ("ended", "leaving"):
        return "ending"
    return "saving" if stage.startswith("checkpoint.") else "training"


@dataclass(slots=True, kw_only=True)
class RunPicture:
    """A run and its legs, in the order in which they began."""

    run_id: str
    facts: RunFacts = field(default_factory=RunFacts)
    faults: tuple[Fault, ...] = ()
    """The plan of the chaos leg."""
    legs: dict[str, LegPicture] = field(default_factory=dict)
    resumed_s: float | None = None
    """When the latest supervisor took over."""

    @property
    def began_s(self) -> float | None:
        """When the latest supervisor's part of it began."""
        return self.facts.created_s if self.resumed_s is None else self.resumed_s

    @property
    def leg(self) -> LegPicture | None:
        """The one that runs, else the newest."""
        return next((leg for leg in reversed(self.legs.values()) if not leg.is_over), next(reversed(self.legs.values()), None))

    @property
    def last_step(self) -> int | None:
        """Where the legs end: the undisturbed run tells it; until it has, the spec."""
        ends = [leg.final_step for leg in self.legs.values() if leg.outcome == "completed"]
        return next((end for end in ends if end), None) or self.facts.max_steps

    def seen(self, fault: Fault) -> FaultSeen:
        chaos = next((leg for name, leg in self.legs.items() if name.endswith("chaos")), None)
        return (chaos.faults.get(fault.id) if chaos else None) or FaultSeen(rank=fault.rank, step=fault.at_step)

    def remaining_s(self) -> float | None:
        """Seconds to the end of the chaos leg at the pace of the leg that runs; None while there is no pace, or no end known.

        A fault still to come costs the steps since the last checkpoint before it, and a recovery like those so far. Judging,
        and a second undisturbed run, are not in it.
        """
        leg, last = self.leg, self.last_step
        if leg is None or last is None or leg.is_over:
            return None
        paces = [known for known in (leg.step_s, *(other.step_s for other in self.legs.values())) if known is not None]
        if not paces or not math.isfinite(paces[0]):
            return None
        steps = float(max(0, last - leg.step))
        to_come: Sequence[Fault] = ()
        if leg.name == "reference":
            to_come, steps = self.faults, steps + last
        elif leg.name == "chaos":
            to_come = [fault for fault in self.faults if self.seen(fault).state == "planned"]
        ending = [
            fault for fault in to_come if fault.facts.evidence != "note" and (fault.required or fault.at_step is not None)
        ]
        every = self.facts.every_steps
        again = sum((fault.at_step or 0) % every for fault in ending) if every else 0
        recoveries = leg.recoveries_s
        recovery_s = sum(recoveries) / len(recoveries) if recoveries else 0.0
        return (steps + again) * paces[0] + len(ending) * recovery_s
