"""What a run looks like at the moment: the fold of its journals, traces, heartbeats and markers that all live displays share.

Pure: is told what was read, reads nothing, knows no clock and no terminal. Steps done again after a restart are counted once.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.faults.observed import signal_name
from chaosrun.records.heartbeat import Heartbeat
from chaosrun.report.facts import RunFacts
from chaosrun.report.progress import LegProgress, advance, sound

"""In the order in which a drill runs them."""
State = Literal["starting", "restoring", "training", "saving", "ending", "done", "stopped", "killed", "left", "failed", "hung"]
"""Of a rank: what it does, then how it ended. stopped: by the supervisor, with its attempt."""
RECENT_STEPS = 32
"""What the rate is taken over."""
_BEFORE_RESTORE = frozenset({"started", "script", "rendezvous", "joined"})
_OF_RESTORE = frozenset({"restoring", "restored"})
_UNFINISHED_STEP = frozenset({"epoch", "fetch", "forward", "backward", "optimizer", "record"})


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
        """How long it has not got on, where it cannot be that it waits for the others."""
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
    """What became of a fault."""

    state: Literal["planned", "fired", "landed", "missed"] = "planned"
    """fired: it was about to strike; landed: something else agrees that it did; missed: it was looked at, and did not."""
    attempt: int | None = None
    rank: int | None = None
    step: int | None = None
    time_s: float | None = None
    """When it fired."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    resume_step: int
    reached: int
    died_s: float | None = None
    first_step_s: float | None = None


class LegPicture:
    """One leg. `take_*` are the fold; what cannot be made sense of is left out and said in `damage`."""

    def __init__(self, name: str) -> None:
        self.progress = LegProgress(leg=name)
        self.lanes: dict[int, Lane] = {}
        self.faults: dict[str, FaultSeen] = {}
        self.checkpoints: dict[int, bool] = {}
        """By step; False: quarantined."""
        self.losses: dict[int, float] = {}
        """By step, over all ranks; that of the newest attempt that did it."""
        self.damage: str | None = None
        self._attempts: dict[int, _Attempt] = {}
        self._shares: dict[tuple[int, int], dict[int, float]] = {}
        self._step_s: float | None = None

    @property
    def name(self) -> str:
        return self.progress.leg

    @property
    def is_over(self) -> bool:
        return self.progress.outcome is not None

    @property
    def step(self) -> int:
        """The newest that every rank has completed."""
        return min((lane.step for lane in self.lanes.values()), default=self.progress.resumed_step)

    @property
    def reached(self) -> int:
        """The newest that any rank has completed, in any attempt."""
        return max((attempt.reached for attempt in self._attempts.values()), default=0)

    @property
    def restarts(self) -> int:
        return max(0, len(self._attempts) - 1)

    @property
    def lost_steps(self) -> int:
        """Steps done or restored that the next attempt did not go on from."""
        attempts = [self._attempts[number] for number in sorted(self._attempts)]
        return sum(max(0, a.reached - b.resume_step) for a, b in pairwise(attempts))

    @property
    def recoveries_s(self) -> list[float]:
        """From the first death of an attempt to the first step of the next, where both are known."""
        attempts = [self._attempts[number] for number in sorted(self._attempts)]
        pairs = pairwise(attempts)
        return [max(0.0, b.first_step_s - a.died_s) for a, b in pairs if a.died_s is not None and b.first_step_s is not None]

    @property
    def step_s(self) -> float | None:
        """Seconds a step takes, by the slowest rank; that of an earlier attempt until there is one of this."""
        known = [lane.step_s for lane in self.lanes.values() if lane.step_s is not None]
        self._step_s = max(known) if known else self._step_s
        return self._step_s

    def take_record(self, record: dict[str, Any]) -> bool:
        """One record of the journal. False when it is none that can be made sense of."""
        try:
            self.progress = advance(self.progress, sound(record))
            self._take(record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.damage = f"a record is not what it should be ({type(error).__name__}: {error})"
            return False
        return True

    def _take(self, record: Mapping[str, Any]) -> None:
        match record.get("event"):
            case "attempt.starting":
                resume_step = record["resume_step"]
                self._step_s = self.step_s
                self._attempts[record["attempt"]] = _Attempt(resume_step=resume_step, reached=resume_step)
                self.lanes = {rank: Lane(rank=rank, step=resume_step) for rank in range(self.progress.workers or 0)}
                if record["resume"] is not None:
                    self.checkpoints[resume_step] = True
            case "worker.exited":
                self._take_exit(record)
            case "fault.requested":
                self.take_marker(record["fault"], {**record, "time_s": record.get("requested_s") or record.get("time_s")})
            case "fault.observed":
                self._take_landing(record)
            case "fault.withdrawn":
                self.faults[record["fault"]] = FaultSeen()
            case "hang.declared":
                if lane := self.lanes.get(record["first"]):
                    lane.end("hung")
            case "death.unplanned":
                if (lane := self.lanes.get(record["rank"])) and lane.state != "hung":
                    lane.end(lane.state if lane.ended else "failed", "unplanned")
            case "attempt.stopped":
                for rank in record.get("killed") or ():
                    lane = self.lanes.get(rank)
                    if lane is not None and lane.state != "hung" and lane.note in ("", "SIGKILL"):
                        lane.note = ""
                        lane.end("stopped")
            case "checkpoint.quarantined":
                self.checkpoints[int(record["step"])] = False
            case _:
                pass

    def _take_exit(self, record: Mapping[str, Any]) -> None:
        attempt, lane = self._attempts.get(record["attempt"]), self.lanes.get(record["rank"])
        code, number = record.get("exit_code"), record.get("signal")
        if attempt is not None and attempt.died_s is None and code != 0:
            attempt.died_s = record.get("died_s")
        if lane is None or record["attempt"] != self.progress.attempt:
            return
        if number:
            lane.end("killed", lane.note or signal_name(number))
        elif code == 0:
            lane.end("done")
        elif code == PREEMPTED_EXIT_CODE:
            lane.end("left", "on notice")
        else:
            lane.end("failed", f"exit code {code}")

    def _take_landing(self, record: Mapping[str, Any]) -> None:
        fault, problem = record["fault"], (record.get("found") or {}).get("problem")
        seen = self.faults.setdefault(fault, FaultSeen(attempt=record["attempt"], rank=record["rank"]))
        seen.state = "missed" if problem else "landed"
        lane = self.lanes.get(record["rank"])
        if lane is None or problem or record["attempt"] != self.progress.attempt:
            return
        lane.note = fault
        if record.get("how") != "note" and lane.state != "left":
            lane.end("hung" if record.get("how") == "hang" else "killed")

    def take_marker(self, fault: str, marker: Mapping[str, Any]) -> None:
        """A fault was about to strike: by its marker, or the journal's copy of that, which comes later."""
        seen = self.faults.setdefault(fault, FaultSeen())
        if seen.state == "planned":
            about = {key: marker[key] for key in ("attempt", "rank", "step", "time_s")}
            self.faults[fault] = FaultSeen(state="fired", **about)

    def withdraw(self, fault: str) -> None:
        """Its marker is gone: it may strike again."""
        if (seen := self.faults.get(fault)) and seen.state == "fired":
            self.faults[fault] = FaultSeen()

    def take_trace(self, attempt: int, rank: int, line: Mapping[str, Any]) -> None:
        """One line of a rank's trace."""
        try:
            match line.get("kind"):
                case "start":
                    self._take_start(attempt, rank, line)
                case "step":
                    self._take_step(attempt, rank, line)
                case "checkpoint":
                    self.checkpoints[int(line["step"])] = True
                case _:
                    pass
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.damage = f"a line of rank {rank}'s trace is not what it should be ({type(error).__name__}: {error})"

    def _take_start(self, attempt: int, rank: int, line: Mapping[str, Any]) -> None:
        lane = self._lane(attempt, rank)
        if lane is not None and not lane.ended:
            lane.state = "training"

    def _take_step(self, attempt: int, rank: int, line: Mapping[str, Any]) -> None:
        step, time_s = int(line["step"]), float(line["time_s"])
        if seen := self._attempts.get(attempt):
            seen.reached = max(seen.reached, step)
            seen.first_step_s = time_s if seen.first_step_s is None else min(seen.first_step_s, time_s)
        if lane := self._lane(attempt, rank):
            lane.step = max(lane.step, step)
            lane.recent.append((step, time_s))
            if not lane.ended:
                lane.state = "training"
        values = [float.fromhex(value) for value in line.get("loss") or ()]
        if values:
            # Of an accumulation window each value is a share of the whole batch's; else the mean over a part of it.
            whole = line.get("items") is not None
            self._take_share(attempt, rank, step, sum(values) if whole else sum(values) / len(values), whole=whole)

    def _take_share(self, attempt: int, rank: int, step: int, share: float, *, whole: bool) -> None:
        shares = self._shares.setdefault((attempt, step), {})
        shares[rank] = share
        if len(shares) == (self.progress.workers or 1):
            del self._shares[attempt, step]
            total = sum(shares.values())
            self.losses[step] = total if whole else total / len(shares)

    def take_beat(self, rank: int, beat: Heartbeat | None) -> None:
        """The newest heartbeat of a rank of the newest attempt."""
        lane = self.lanes.get(rank)
        if lane is None or beat is None or lane.ended:
            return
        done = beat.step - (beat.stage in _UNFINISHED_STEP)
        if lane.recent and done < lane.step - 1:
            return  # of another machine: what is seen of the file is old
        lane.beat = beat
        lane.state = _doing(beat.stage)
        if lane.state == "restoring" and self.progress.resumed_from is None:
            lane.state = "starting"
        if lane.state in ("training", "saving", "ending"):
            lane.step = max(lane.step, done)
            attempt = self._attempts[self.progress.attempt]
            attempt.reached = max(attempt.reached, done)

    def _lane(self, attempt: int, rank: int) -> Lane | None:
        return self.lanes.get(rank) if attempt == self.progress.attempt else None


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
    every_steps: int | None = None
    """Between two checkpoints."""
    legs: dict[str, LegPicture] = field(default_factory=dict)
    created_s: float | None = None
    began_s: float | None = None
    """When the latest supervisor's part of it began."""

    @property
    def leg(self) -> LegPicture | None:
        """The one that runs, else the newest."""
        return next((leg for leg in reversed(self.legs.values()) if not leg.is_over), next(reversed(self.legs.values()), None))

    @property
    def last_step(self) -> int | None:
        """Where the legs end: the undisturbed run tells it; until it has, the spec."""
        ends = [leg.progress.final_step for leg in self.legs.values() if leg.progress.outcome == "completed"]
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
        step_s = leg.step_s
        if step_s is None:
            step_s = next((other.step_s for other in self.legs.values() if other.step_s is not None), None)
        if step_s is None:
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
        again = sum((fault.at_step or 0) % self.every_steps for fault in ending) if self.every_steps else 0
        recoveries = leg.recoveries_s
        recovery_s = sum(recoveries) / len(recoveries) if recoveries else 0.0
        return (steps + again) * step_s + len(ending) * recovery_s
