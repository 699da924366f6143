"""A job under a plan, one point of one rank after another, in any order that its collectives allow: what `plan.course` reckons
without running it. Whether a fault is due is asked of the worker's own code.

What nobody can know beforehand is drawn: which rank is ahead, how soon the others are stopped after a death, and whether a rank
that waits in vain for one that hangs is taken for it. A plan that hangs on one of these is refused.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.points import FaultPoints
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.spec.model import JobSpec

Event = tuple[str, str, int]
"""("point", phase, step); ("launch" | "wait", collective, step); ("commit" | "settled" | "leave" | "end", "", step)."""


@dataclass
class Outcome:
    landed: set[str] = field(default_factory=set)
    """Faults that could be shown to have happened."""
    attempts: list[int] = field(default_factory=list)
    """Of each attempt the step it went on from."""
    completed: bool = False


class JobModel:
    """One way in which the job may go, drawn by `chance`."""

    def __init__(self, spec: JobSpec, plan: FaultPlan, chance: random.Random) -> None:
        assert spec.max_steps is not None
        self.workers, self.last, self.every = spec.workers, spec.max_steps, spec.checkpoint.every_steps
        self.keep = max(2, spec.checkpoint.keep)
        self.plan = plan
        self.chance = chance
        self.out = Outcome()
        self.claimed: set[str] = set()
        self.store: dict[int, str | None] = {}
        """Committed checkpoints, and which fault damaged each."""
        self.unread: set[str] = set()
        self.passed: Counter[str] = Counter()

    def run(self) -> Outcome:
        while not self.out.completed:
            assert len(self.out.attempts) <= len(self.plan.faults), "every attempt but the last is ended by a fault"
            resume = self.restart()
            self.out.attempts.append(resume)
            _Attempt(self, len(self.out.attempts), resume).run()
            self.passed.update(("rendezvous", "restore.begin", "restore.end") if resume else ("rendezvous",))
        return self.out

    def restart(self) -> int:
        self.out.landed |= self.unread
        self.unread.clear()
        while self.store:
            newest = max(self.store)
            damaged_by = self.store[newest]
            if damaged_by is None:
                return newest
            self.out.landed.add(damaged_by)
            del self.store[newest]
        return 0


class _Attempt:
    def __init__(self, job: JobModel, number: int, resume: int) -> None:
        self.job, self.number, self.resume = job, number, resume
        ranks = range(job.workers)
        self.points = [FaultPoints(self.order(rank), LegLayout(Path("nowhere"))) for rank in ranks]
        self.events = [self.course(rank) for rank in ranks]
        self.next: list[Event | None] = [next(events) for events in self.events]
        self.launched: dict[tuple[str, int], set[int]] = {}
        self.gone: set[int] = set()
        """Ranks that do nothing any more."""
        self.ended_by: str | None = None
        self.parked: dict[str, set[int]] = {}
        """Of each group the ranks that wait for the others."""
        self.met: dict[int, Fault] = {}
        """By rank what it does next, that all of its group have come."""
        self.paused: dict[int, str] = {}
        self.stopped: list[str] = []
        self.due: list[list[Fault]] = [[] for _ in ranks]
        """Of each rank what strikes before it goes on."""
        self.slowed: dict[str, tuple[int, int]] = {}
        self.told: dict[int, str] = {}
        """By rank the notice that its leaving is the proof of."""
        self.at = [0] * job.workers
        self.leave_after: int | None = None
        # How soon the others are stopped after a death, and which rank is ahead: extremes find what is rare.
        self.stop = job.chance.choice((0.0, 0.1, 0.5, 1.0))
        self.ahead = job.chance.choice((None, *ranks))

    def order(self, rank: int) -> WorkerOrder:
        armed = [fault for fault in self.job.plan.faults if fault.id not in self.job.claimed and fault.rank == rank]
        return WorkerOrder(
            leg="chaos",
            leg_path="nowhere",
            storage_path=None,
            attempt=self.number,
            rank=rank,
            world_size=self.job.workers,
            local_rank=rank,
            local_world_size=self.job.workers,
            node_rank=0,
            master_addr="",
            master_port=0,
            script="",
            cwd="",
            seed=0,
            deterministic="strict",
            threads=1,
            every_steps=self.job.every,
            keep=self.job.keep,
            faults=tuple(fault.to_json() for fault in armed),
            passed=dict(self.job.passed),
        )

    def course(self, rank: int) -> Iterator[Event]:
        """What a rank does, in its order."""
        yield "point", "rendezvous", 0
        yield from self.together("init", 0)
        if self.resume:
            yield "point", "restore.begin", self.resume
            yield "point", "restore.end", self.resume
        for step in range(self.resume + 1, self.job.last + 1):
            yield "point", "fetch", step
            yield "point", "forward", step
            if self.job.workers > 1:
                yield "launch", "reduce", step
                yield "point", "reduce", step
                yield "wait", "reduce", step
            yield "point", "optimizer", step
            yield "point", "record", step
            if step % self.job.every == 0:
                yield from self.save(rank, step)
            yield "point", "step", step
            yield "settled", "", step
            if self.leave_after == step:
                if step % self.job.every:
                    yield from self.save(rank, step)
                yield from self.together("leave", step)
                yield "leave", "", step
        if self.job.last % self.job.every and self.resume != self.job.last:
            yield from self.save(rank, self.job.last)
        yield from self.together("end", 0)
        yield "end", "", self.job.last

    def save(self, rank: int, step: int) -> Iterator[Event]:
        yield "point", "checkpoint.begin", step
        yield "point", "checkpoint.file", step
        yield from self.together("gather", step)
        yield "point", "checkpoint.precommit", step
        yield from self.together("precommit", step)
        if rank == 0:
            yield "point", "checkpoint.rename.before", step
            yield "commit", "", step
            yield "point", "checkpoint.rename.after", step
        yield from self.together("postcommit", step)
        yield "point", "checkpoint.postcommit", step
        yield "point", "checkpoint.retention", step

    def together(self, name: str, step: int) -> Iterator[Event]:
        if self.job.workers > 1:
            yield "launch", name, step
            yield "wait", name, step

    def run(self) -> None:
        chance = self.job.chance
        while True:
            able = [rank for rank in range(self.job.workers) if rank not in self.gone and self.is_able(rank)]
            if self.ended_by and (not able or chance.random() < self.stop):
                self.end()
                return
            if not able:
                self.resolve()
                if self.job.out.completed:
                    return
                continue
            rank = self.ahead if self.ahead in able and chance.random() < 0.9 else chance.choice(able)
            if rank in self.paused:
                self.job.out.landed.add(self.paused.pop(rank))
            if rank in self.met:
                self.do(self.met.pop(rank))
            elif self.due[rank]:
                self.strike(self.due[rank].pop(0), rank)
            else:
                self.act(rank)

    def resolve(self) -> None:
        """Nobody can do anything more, and nobody has died."""
        if not self.gone and all(event and event[0] == "end" for event in self.next):
            self.job.out.completed = True
            return
        # A hang is declared; all that are stopped are found so, unless one is found instead that waits for them in vain.
        if not self.parked or self.job.chance.random() < 0.5:
            self.job.out.landed.update(self.stopped)
        self.ended_by = "hang"

    def end(self) -> None:
        """Every rank is killed. What had all met is seen to die of it; what waited for others is let off."""
        self.job.out.landed |= {fault.id for fault in self.met.values() if fault.kind == "kill"}
        for fault in self.job.plan.faults:
            if fault.rank in self.parked.get(fault.group or "", ()):
                self.job.claimed.discard(fault.id)

    def is_able(self, rank: int) -> bool:
        event = self.next[rank]
        if any(rank in members for members in self.parked.values()):
            return False
        if rank in self.met or self.due[rank]:
            return True
        if event is None or event[0] == "end":
            return False
        return event[0] != "wait" or len(self.launched.get((event[1], event[2]), ())) == self.job.workers

    def act(self, rank: int) -> None:
        event = self.next[rank]
        assert event is not None
        kind, name, step = event
        if kind == "launch":
            self.launched.setdefault((name, step), set()).add(rank)
        elif kind == "commit":
            self.commit(step)
        elif kind == "settled":
            self.settle(rank, step)
        elif kind == "leave":
            # All have come here, and nobody stops them any more.
            self.job.out.landed.update(self.told.values())
            self.ended_by = "leaving"
            self.gone.update(range(self.job.workers))
        elif kind == "point":
            self.count_slow_steps(rank, name, step)
            self.due[rank] = self.points[rank].due(name, step)  # type: ignore[arg-type]
            self.at[rank] = step
            for fault in self.due[rank]:
                self.points[rank]._armed[name].remove(fault)
        if rank not in self.gone:
            self.next[rank] = next(self.events[rank], None)

    def count_slow_steps(self, rank: int, phase: str, step: int) -> None:
        for fault, (until, owner) in list(self.slowed.items()):
            if (owner, until, "step") == (rank, step, phase):
                self.job.out.landed.add(fault)
                del self.slowed[fault]

    def settle(self, rank: int, step: int) -> None:
        if rank in self.told and self.leave_after is None:
            self.leave_after = step + (self.job.workers > 1)

    def commit(self, step: int) -> None:
        store = self.job.store
        store[step] = None
        valid = sorted((saved for saved, damaged_by in store.items() if damaged_by is None), reverse=True)
        for saved in list(store):
            if len(valid) >= self.job.keep and saved < valid[self.job.keep - 1]:
                del store[saved]

    def strike(self, fault: Fault, rank: int) -> None:
        self.job.claimed.add(fault.id)
        if fault.group is None:
            self.do(fault)
            return
        members = {other.rank: other for other in self.job.plan.faults if other.group == fault.group}
        arrived = self.parked.setdefault(fault.group, set())
        arrived.add(rank)
        if arrived == members.keys():
            self.met |= members
            del self.parked[fault.group]

    def do(self, fault: Fault) -> None:
        landed, store, rank, step = self.job.out.landed, self.job.store, fault.rank, self.at[fault.rank]
        match fault.kind:
            case "kill":
                landed.add(fault.id)
                self.die(fault)
            case "exception":
                if self.ended_by is None:
                    # Who raises while the attempt is being stopped may not come to say so.
                    landed.add(fault.id)
                self.die(fault)
            case "stop":
                self.stopped.append(fault.id)
                self.gone.add(rank)
            case "pause":
                self.paused[rank] = fault.id
            case "slow":
                self.slowed[fault.id] = (step + fault.option("steps"), rank)
            case "preempt":
                # A process ends once: of two notices only one is seen to have been heeded.
                self.told.setdefault(rank, fault.id)
            case "truncate":
                if store:
                    store[max(store)] = fault.id
            case "stale_staging":
                self.job.unread.add(fault.id)
            case _:
                landed.add(fault.id)

    def die(self, fault: Fault) -> None:
        self.gone.add(fault.rank)
        self.ended_by = self.ended_by or fault.id
