"""When silence is a hang, and who stopped first: decided from heartbeats, and from what was seen of the processes.

`HangWatch` and `Standstill` are pure. `HangDetector` connects them to the leg: before anything is killed, it records what a
kill would destroy. It restarts nothing.

A rank is silent while its heartbeat shows the same beat. Ranks wait for one another, so only those furthest behind are judged:
when all of them have been silent for longer than their stage allows, the attempt hangs. A rank whose process is stopped (state
T) waits for no other rank and does no work: then it alone is judged. Silence is summed over the supervisor's polls, at most
LONGEST_LOOK_S from one to the next: a machine that slept, a clock that was set or a delayed supervisor make no rank silent.

How long a rank may be silent, by stage:

- `recovery.hang_timeout`, where it is set, as soon as the rank has recorded a step in this attempt
- else FACTOR times the longest that the leg has seen between two beats of its steps and checkpoints, at least
  SHORTEST_HANG_S; the script's own code between two steps, and what the rank does for the first time in this attempt, are given
  `recovery.start_timeout`; the script's own code that computes, which may validate for an hour, VALIDATION times that
- a process that is stopped: at most `recovery.hang_timeout`, or SHORTEST_HANG_S where that is not set
- before its first step, a rank is given `recovery.start_timeout`; in later attempts FACTOR times what the stage took in those
  that got through it, at least as long as a step
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from chaosrun.cluster.messages import RankStack
from chaosrun.records.events import HangDeclared, SilentRank
from chaosrun.records.grouping import grouped
from chaosrun.records.heartbeat import STAGES, Activity, Heartbeat
from chaosrun.records.layout import LegLayout
from chaosrun.spec.model import SHORTEST_HANG_S, RecoverySpec
from chaosrun.supervise.deaths import reach_of
from chaosrun.supervise.lifecycle import Hang
from chaosrun.supervise.observations import Observations, Record
from chaosrun.wording import rank_list

if TYPE_CHECKING:
    from chaosrun.cluster.workers import ClusterWorkers

FACTOR = 10.0
LONGEST_LOOK_S = 2.0
STACKS_LIMIT_S = 3.0
"""How long ranks have to write their stacks down; stopped processes never do."""
VALIDATION = 20.0
IDLE = 0.01
"""In the script's own code and after the training, where no steps show progress, a rank that uses more of a processor than this
is taken to make progress."""

_STOPPED = frozenset("Tt")
_WAITING_CODE = ("/torch/distributed/", "/torch/autograd/graph.py")
"""Code in which the main thread of a rank is while it waits for others in a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """An attempt hangs."""

    silent_s: float
    patience_s: float


@dataclass(slots=True, kw_only=True)
class _Listening:
    count: int
    cpu_s: float
    silent_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class HangWatch:
    """Judges the silence of one leg's ranks; the times learnt in one attempt are used in the next."""

    hang_timeout_s: float | None
    """None: derived from the leg's observed times."""
    start_timeout_s: float
    world_size: int
    _ranks: dict[int, _Listening] = field(default_factory=dict)
    _beats: dict[int, Heartbeat] = field(default_factory=dict)
    _looked_s: float | None = None
    _firsts: dict[str, float] = field(default_factory=dict)
    _longest: dict[str, float] = field(default_factory=dict)
    """From earlier attempts, by stage."""

    @classmethod
    def of(cls, recovery: RecoverySpec, world_size: int, *, inspecting: bool) -> "HangWatch":
        """`inspecting`: the leg is a replay that records every tensor of some steps, so that the time of earlier steps does not
        predict theirs."""
        timeout_s = recovery.start_timeout if inspecting and recovery.hang_timeout is None else recovery.hang_timeout
        return cls(hang_timeout_s=timeout_s, start_timeout_s=recovery.start_timeout, world_size=world_size)

    def begin(self) -> None:
        """A new attempt starts."""
        for stage in STAGES:
            took_s = [beat.first[stage] for beat in self._beats.values() if stage in beat.first]
            # Without the times of all ranks, the slowest may be missing.
            if len(took_s) == self.world_size:
                self._firsts[stage] = max(self._firsts.get(stage, 0.0), _of_all(stage, took_s))
        self._longest = self._longest_so_far()
        self._ranks, self._beats, self._looked_s = {}, {}, None

    def look(self, now_s: float, activities: Mapping[int, Activity], live: Collection[int]) -> Silence | None:
        """Poll the ranks of this attempt, of which `live` have not ended. Call it about every second."""
        passed_s = 0.0 if self._looked_s is None else min(max(0.0, now_s - self._looked_s), LONGEST_LOOK_S)
        self._looked_s = now_s
        self._beats |= {rank: activity.beat for rank, activity in activities.items() if activity.beat is not None}
        for rank, activity in activities.items():
            self._listen(rank, activity, passed_s)
        judged = [rank for rank in live if rank in activities]
        if not judged:
            return None
        furthest_behind = min(_place(activities[rank].beat) for rank in judged)
        stopped = [rank for rank in judged if activities[rank].is_stopped]
        waited_for = stopped or [rank for rank in judged if _place(activities[rank].beat) == furthest_behind]
        given = {rank: self._given_s(rank, activities[rank]) for rank in waited_for}
        if any(self._ranks[rank].silent_s <= given[rank] for rank in waited_for):
            return None
        return Silence(silent_s=min(self._ranks[rank].silent_s for rank in waited_for), patience_s=max(given.values()))

    def _listen(self, rank: int, activity: Activity, passed_s: float) -> None:
        count = 0 if activity.beat is None else activity.beat.count
        heard = self._ranks.get(rank)
        if heard is None or heard.count != count:
            self._ranks[rank] = _Listening(count=count, cpu_s=activity.cpu_s)
            return
        heard.silent_s += passed_s
        after_training = activity.beat is not None and activity.beat.stage == "ended"
        if after_training and _computes(heard, activity):
            self._ranks[rank] = _Listening(count=count, cpu_s=activity.cpu_s)

    def _validates(self, rank: int, activity: Activity) -> bool:
        """The rank is in the script's own code, computes, and no `hang_timeout` is set."""
        own = activity.beat is not None and activity.beat.facts.own
        return own and self.hang_timeout_s is None and _computes(self._ranks[rank], activity)

    def _given_s(self, rank: int, activity: Activity) -> float:
        given_s = self.given_s(activity.beat)
        if activity.is_stopped:
            return min(given_s, self.hang_timeout_s or SHORTEST_HANG_S)
        return VALIDATION * given_s if self._validates(rank, activity) else given_s

    def given_s(self, beat: Heartbeat | None) -> float:
        """How long a rank whose newest beat this is may be silent."""
        timeout_s = self.hang_timeout_s
        if timeout_s is not None and beat is not None and "record" in beat.first:
            return timeout_s
        shortest_s = SHORTEST_HANG_S if timeout_s is None else timeout_s
        start_s = max(self.start_timeout_s, shortest_s)
        if beat is None:
            return start_s
        if beat.stage in beat.first and not beat.facts.own:
            known = self._longest_so_far()
            gaps = [*known.values(), *([] if beat.stage in known else [beat.first[beat.stage]])]
            return max(shortest_s, FACTOR * max(gaps))
        if beat.stage in self._firsts and not beat.facts.own:
            return max(shortest_s, FACTOR * self._firsts[beat.stage])
        return start_s

    def _longest_so_far(self) -> dict[str, float]:
        """By stage of a step, over all attempts; without the stage of the script's own code."""
        found = dict(self._longest)
        for stage, facts in STAGES.items():
            seen = [beat.longest[stage] for beat in self._beats.values() if stage in beat.longest]
            if seen and not facts.own and (not facts.waits or len(seen) == self.world_size):
                found[stage] = max(found.get(stage, 0.0), _of_all(stage, seen))
        return found


def _computes(heard: _Listening, activity: Activity) -> bool:
    """Whether the rank has used CPU time since its last beat."""
    return activity.cpu_s - heard.cpu_s > IDLE * max(heard.silent_s, 1.0)


def _of_all(stage: str, took_s: Sequence[float]) -> float:
    """The longest over the ranks; for a stage in which ranks wait for one another the shortest, as that rank came last and
    waited for no one."""
    return min(took_s) if STAGES[stage].waits else max(took_s)


def _place(beat: Heartbeat | None) -> tuple[int, int]:
    return (-1, -1) if beat is None else beat.place


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRank:
    """The state in which a rank of a hanging attempt was found."""

    rank: int
    beat: Heartbeat | None
    process: RankStack

    @property
    def is_stopped(self) -> bool:
        return self.process.state is not None and self.process.state in _STOPPED

    @property
    def is_waiting(self) -> bool:
        """Whether its stack shows it in a collective."""
        return bool(self.process.stack) and any(code in self.process.stack[0] for code in _WAITING_CODE)

    @property
    def words(self) -> str:
        return "before its first beat" if self.beat is None else self.beat.words

    def recorded(self) -> SilentRank:
        beat, process = self.beat, self.process
        at = {"step": beat.step, "stage": beat.stage, "silent_s": round(beat.silent_s, 3)} if beat else {}
        return SilentRank(rank=self.rank, pid=process.pid, state=process.state, stack=process.stack, **at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """The state of a hanging attempt, taken before anything was killed."""

    attempt: int
    silence: Silence
    ranks: tuple[FoundRank, ...]
    """Ranks that had not ended; the one that stopped first comes first."""

    @classmethod
    def of(
        cls,
        attempt: int,
        silence: Silence,
        activities: Mapping[int, Activity],
        live: Mapping[int, int],
        seen: Mapping[int, RankStack],
    ) -> "Standstill":
        """`live`: pids by rank; `seen`: what `ClusterWorkers.stacks` found, by rank; a rank that it lacks is unknown."""
        ranks = [
            FoundRank(rank=rank, beat=activities[rank].beat, process=seen.get(rank, RankStack(pid=pid)))
            for rank, pid in sorted(live.items())
            if rank in activities
        ]
        # First ranks whose process is stopped; then those furthest behind, of these first the ranks outside any collective.
        ranks.sort(key=lambda seen: (not seen.is_stopped, _place(seen.beat), seen.is_waiting, seen.rank))
        return cls(attempt=attempt, silence=silence, ranks=tuple(ranks))

    @property
    def first(self) -> FoundRank:
        return self.ranks[0]

    def also_stopped(self) -> tuple[FoundRank, ...]:
        """Other ranks outside any collective: they stopped independently."""
        first = self.first
        return tuple(
            seen
            for seen in self.ranks[1:]
            if seen.is_stopped or (_place(seen.beat) == _place(first.beat) and seen.is_waiting == first.is_waiting)
        )

    def message(self, script: str) -> str:
        """The hang in one sentence; names the line of the training script `script` where the stack shows it."""
        first, also = self.first, self.also_stopped()
        line = _line_of(script, first.process.stack)
        process = "its process is stopped" if first.is_stopped else None
        more = ", ".join(part for part in (line, process) if part)
        together = rank_list(seen.rank for seen in (first, *also))
        told = f"{together} stopped {'together' if also else 'first'}"
        told += f", {first.words}" + (f" ({more})" if more else "")
        return f"attempt {self.attempt} hangs: no progress for {self.silence.silent_s:.0f} s; {told}{self._others()}"

    def _others(self) -> str:
        waiting = [seen for seen in self.ranks[1:] if seen not in self.also_stopped()]
        if not waiting:
            return ""
        places = grouped(waiting, lambda seen: seen.words)
        if len(places) == 1 and len(waiting) > 1:
            return f"; the others waited for it {waiting[0].words}"
        told = ((rank_list(seen.rank for seen in each), words) for words, each in places.items())
        return "; " + ", ".join(f"{ranks} waited for it {words}" for ranks, words in told)

    def declared(self, message: str) -> HangDeclared:
        return HangDeclared(
            attempt=self.attempt,
            first=self.first.rank,
            silent_s=round(self.silence.silent_s, 3),
            patience_s=round(self.silence.patience_s, 3),
            message=message,
            ranks=tuple(seen.recorded() for seen in sorted(self.ranks, key=lambda seen: seen.rank)),
        )


def _line_of(script: str, stack: Sequence[str]) -> str | None:
    """The innermost line of the script in a stack, as "train.py:31"."""
    for frame in stack:
        file, _, rest = frame.rpartition(":")
        if file == script:
            return f"{PurePath(script).name}:{rest.partition(' ')[0]}"
    return None


@dataclass(slots=True, kw_only=True)
class HangDetector:
    """Looks for hangs of one leg, and writes down what is found."""

    workers: "ClusterWorkers"
    leg: LegLayout
    script: str
    watch: HangWatch
    observations: Observations
    record: Record
    _attempt: int = field(default=0, init=False)
    _live: dict[int, int] = field(default_factory=dict, init=False)

    def attempt_started(self, attempt: int, pids: Mapping[int, int]) -> None:
        """`pids` by rank; empty where ranks announce themselves: a rank that never does counts as hanging."""
        self._attempt, self._live = attempt, dict(pids) or dict.fromkeys(range(self.watch.world_size), 0)
        self.watch.begin()

    def announced(self, rank: int, pid: int) -> None:
        self._live[rank] = pid

    def exited(self, rank: int) -> None:
        self._live.pop(rank, None)

    def look(self, now_s: float) -> Hang | None:
        """Poll; call it about every second while an attempt runs."""
        activities = self.workers.activities(self.leg, self._attempt)
        silence = None if activities is None else self.watch.look(now_s, activities, self._live)
        if activities is None or silence is None:
            return None
        seen = self.workers.stacks(self.leg, self._attempt, wait_s=STACKS_LIMIT_S)
        if seen is None:
            return None
        found = Standstill.of(self._attempt, silence, activities, self._live, seen)
        message = found.message(self.script)
        self.record(found.declared(message))
        first = found.first
        fault = self.observations.of_hang(self._attempt, first.rank, first.recorded())
        if fault is not None:
            for other in found.also_stopped():
                self.observations.of_hang(self._attempt, other.rank, other.recorded())
        where = {} if first.beat is None else {"step": first.beat.step, "stage": first.beat.stage}
        return Hang(message=message, rank=first.rank, **where, reach=reach_of(first.beat), fault=fault)
