"""Simulated ranks: what `chaosrun.protocol` does in a worker, on the real store, points, markers, heartbeats and end records.

Each is a generator that yields where it spends time or waits for its peers; between two yields nothing else happens.
"""

import functools
import json
import signal
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from chaosrun.checkpoint.audit import list_members
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import ChaosrunError, ResourcesError, UserScriptError
from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import Phase
from chaosrun.faults.points import FaultPoints
from chaosrun.processes import ProcessIdentity
from chaosrun.records.codec import encode
from chaosrun.records.events import RaisedError
from chaosrun.records.heartbeat import Heart
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LegLayout, checkpoint_step
from chaosrun.records.manifest import FileEntry, Manifest
from chaosrun.records.markers import WorkerEnd, read_markers, write_marker
from chaosrun.records.order import WorkerOrder
from tests.records import manifest_of

if TYPE_CHECKING:
    from tests.simulation.drill import Simulation

Life = Generator[Callable[[], bool] | float, None, None]
"""Yields seconds to spend, or what to wait for."""
GROUP_LIMIT_S = 60.0
SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "abort": signal.SIGABRT}


class Exit(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class PeerLost(Exception):
    """What torch raises in those that are left."""


class InjectedError(Exception):
    """A planned exception."""

    fault = ""


class Team:
    """The ranks of one attempt, and where they meet."""

    def __init__(self) -> None:
        self.arrived: dict[str, set[int]] = {}
        self.members: list[SimulatedRank] = []
        self.waiting: dict[SimulatedRank, Callable[[], bool]] = {}
        self.sealed: dict[int, dict[int, dict[str, FileEntry]]] = {}
        self.has_lost = False
        """A rank."""

    def meets(self, place: str, rank: int, size: int) -> Callable[[], bool]:
        there = self.arrived.setdefault(place, set())
        there.add(rank)
        return lambda: len(there) == size

    def look(self) -> None:
        """Something has changed: who has waited for that goes on."""
        for rank, until in list(self.waiting.items()):
            if not rank.is_alive:
                del self.waiting[rank]
            elif until():
                del self.waiting[rank]
                rank.go_on(0.0005)


class SimulatedRank:
    """One process."""

    def __init__(self, simulation: "Simulation", order: WorkerOrder, on_end: Callable[["SimulatedRank"], None]) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.order = order
        self.rank, self.attempt = order.rank, order.attempt
        self.pid = self.world.new_pid()
        self.ticks = self.pid * 7
        self.is_alive = True
        self.is_stopped = False
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.step = 0
        self.began_at = 0
        self.completed = False
        self.waits_for_peers = False
        self._on_end = on_end
        self._leg = LegLayout(simulation.leg.path)
        self._layout = self._leg.attempt(order.attempt)
        self._heart = Heart(self.world.monotonic)
        self._points = FaultPoints(order, self._leg)
        self._store = CheckpointStore(self._leg, order.keep)
        self._team = simulation.team(order.attempt)
        self._team.members.append(self)
        self._random = self.world.random(f"rank {self.rank}")
        self._dying = False
        self._life = self._run()
        self.go_on(self._random.uniform(0.001, 0.05))

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.ticks)

    # What the kernel does to it

    def send(self, number: int) -> bool:
        if not self.is_alive:
            return False
        if number == signal.SIGSTOP:
            self.is_stopped = True
        elif not self._dying:
            self._dying = True
            self.world.after(self.simulation.dying_s(), lambda: self._end(signal_number=number))
        return True

    def leave(self, code: int) -> None:
        """Without a word."""
        self._end(code=code)

    def vanish(self) -> None:
        """Its machine is gone."""
        self._end(signal_number=signal.SIGKILL)

    def _end(self, *, code: int | None = None, signal_number: int | None = None) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self.exit_code, self.signal = code, signal_number
        self._life.close()
        self._team.has_lost = True
        self._team.look()
        self.simulation.rank_ended(self)
        self._on_end(self)

    def _go(self) -> None:
        """Run until it next waits."""
        if not self.is_alive or self._dying or self.is_stopped or self.simulation.hangs(self):
            return
        try:
            asked = self.simulation.let_act(self, self._life)
        except StopIteration:
            self._end(code=0)
        except Exit as left:
            self._end(code=left.code)
        except RankKilled:
            self._end(signal_number=signal.SIGKILL)
        else:
            if callable(asked):
                self._team.waiting[self] = asked
            else:
                self.go_on(asked)
            self._team.look()

    def go_on(self, after_s: float) -> None:
        self.world.after(after_s, self._go)

    # Its life

    def _run(self) -> Life:
        try:
            yield from self._train()
            self._leave(WorkerEnd(status="returned", exit_code=0, completed=True, **self._about()))
            self.completed = True
        except PeerLost:
            error = RaisedError(type="RuntimeError", message="Connection closed by peer", exit_code=1)
            self._leave(WorkerEnd(status="raised", exit_code=1, error=error, **self._about()))
            raise Exit(1) from None
        except InjectedError as raised:
            error = RaisedError(
                type="InjectedError", message=str(raised), fault=raised.fault, exit_code=UserScriptError.exit_code
            )
            self._leave(WorkerEnd(status="raised", exit_code=UserScriptError.exit_code, error=error, **self._about()))
            raise Exit(UserScriptError.exit_code) from None
        except ChaosrunError as raised:
            error = RaisedError(
                type=type(raised).__name__, message=raised.message, hint=raised.hint, exit_code=raised.exit_code, ours=True
            )
            with suppress(OSError):
                self._leave(WorkerEnd(status="raised", exit_code=raised.exit_code, error=error, **self._about()))
            raise Exit(raised.exit_code) from None
        except OSError as raised:
            raise Exit(ResourcesError.exit_code) from raised

    def _about(self) -> dict[str, Any]:
        return {"pid": self.pid, "step": self.step, "time_s": self.world.wall()}

    def _leave(self, end: WorkerEnd) -> None:
        path = self._layout.end(self.rank)
        data = encode(end)
        if self.simulation.tears_end(self):
            path.write_bytes(data[: len(data) // 2])
            raise RankKilled
        write_durably(path, data)

    def _train(self) -> Life:
        order = self.order
        self._heart.open(self._layout.heartbeat(self.rank))
        self._heart.beat("started", 0)
        yield self._spent(0.02)
        self._heart.beat("rendezvous", 0)
        yield from self._reach("rendezvous", 0)
        yield from self._meet("rendezvous")
        self._heart.beat("joined", 0)
        yield self._spent(0.01)
        if order.resume is not None:
            yield from self._restore(order.resume)
        self.began_at = self.step
        self._heart.beat("restored", self.step)
        assert order.max_steps is not None
        for step in range(self.step + 1, order.max_steps + 1):
            yield from self._make(step)
            if step % order.every_steps == 0 or step == order.max_steps:
                yield from self._save(step)
        self._heart.beat("ended", self.step)
        yield self._spent(0.01)
        yield from self._meet("end")

    def _restore(self, name: str) -> Life:
        step = checkpoint_step(name) or 0
        yield from self._reach("restore.begin", step)
        self._heart.beat("restoring", step)
        yield self._spent(0.02)
        manifest = self._store.audit(name, hashed=[self._file()], vouched=self.order.audited)
        self.simulation.restored(self, name, manifest)
        self.step = manifest.step
        yield from self._reach("restore.end", step)

    def _make(self, step: int) -> Life:
        self._heart.beat("fetch", step)
        yield from self._reach("fetch", step)
        self._heart.beat("forward", step)
        yield self._spent(0.03)
        yield from self._reach("forward", step)
        self._heart.beat("backward", step)
        yield from self._reach("reduce", step)
        yield from self._meet(f"step {step}")
        self._heart.beat("optimizer", step)
        yield from self._reach("optimizer", step)
        self._heart.beat("record", step)
        self.step = step
        yield from self._reach("record", step)
        self._heart.beat("after", step)
        if step % self.order.every_steps != 0 and step != self.order.max_steps:
            yield from self._reach("step", step)

    def _save(self, step: int) -> Life:
        self._heart.beat("checkpoint.write", step)
        yield from self._reach("checkpoint.begin", step)
        staging = self._store.stage(step, self.attempt)
        disk = self.simulation.disk
        disk.put(staging / self._file(), rank_state(step, self.rank))
        yield self._spent(0.02)
        if self.rank == 0:
            disk.put(staging / "model.safetensors", rank_state(step, -1))
        sealed = self._store.seal(staging, [self._file()])
        yield from self._reach("checkpoint.file", step)
        self._team.sealed.setdefault(step, {})[self.rank] = sealed
        self._heart.beat("checkpoint.gather", step)
        yield from self._meet(f"gather {step}")
        self._heart.beat("checkpoint.manifest", step)
        if self.rank == 0:
            yield self._spent(0.01)
            files = {name: entry for part in self._team.sealed[step].values() for name, entry in part.items()}
            rest = sorted(name for name in list_members(staging) if name not in files)
            files |= self._store.seal(staging, rest)
            self._store.write_manifest(staging, self._manifest(step, files))
        yield from self._reach("checkpoint.precommit", step)
        self._heart.beat("checkpoint.precommit", step)
        yield from self._meet(f"precommit {step}")
        self._heart.beat("checkpoint.commit", step)
        if self.rank == 0:
            yield from self._reach("checkpoint.rename.before", step)
            self._store.commit(staging, step)
            self.simulation.committed(self, step)
            yield from self._reach("checkpoint.rename.after", step)
        self._heart.beat("checkpoint.postcommit", step)
        yield from self._meet(f"postcommit {step}")
        self._heart.beat("checkpoint.retention", step)
        yield from self._reach("checkpoint.postcommit", step)
        if self.rank == 0:
            self._store.retain()
        yield from self._reach("checkpoint.retention", step)
        yield from self._reach("step", step)

    def _manifest(self, step: int, files: dict[str, FileEntry]) -> Manifest:
        about = {"world_size": self.order.world_size, "attempt": self.attempt, "time_s": self.world.wall()}
        return manifest_of(step, files=dict(sorted(files.items())), **about)

    def _file(self) -> str:
        return f"chaosrun-rank-{self.rank}.pt"

    def _spent(self, usual_s: float) -> float:
        return usual_s * self._random.uniform(0.5, 1.5)

    def _meet(self, place: str) -> Life:
        there = self._team.meets(place, self.rank, self.order.world_size)
        self.waits_for_peers = True
        yield lambda: there() or self._team.has_lost
        self.waits_for_peers = False
        if not there():
            if self._random.random() < 0.3:
                yield lambda: False  # a collective that never returns
            yield self._random.uniform(0.001, 0.5)
            raise PeerLost

    # Planned faults

    def _reach(self, phase: Phase, step: int) -> Life:
        for fault in self._points.due(phase, step):
            yield from self._strike(fault, phase, step)

    def _strike(self, fault: Fault, phase: Phase, step: int) -> Life:
        where = {"phase": phase, "step": step, "group": fault.group}
        who = {"pid": self.pid, "ticks": self.ticks, "rank": self.rank, "attempt": self.attempt}
        if write_marker(self._leg, fault.id, **who, **where) is None:
            return
        if fault.group is not None:
            yield from self._wait_for_group(fault)
        yield 0.0001
        self.simulation.struck(fault, self)
        match fault.kind:
            case "exit":
                raise Exit(0)
            case "exception":
                error = InjectedError(f"fault {fault.id}")
                error.fault = fault.id
                raise error
            case "stop":
                self.is_stopped = True
                yield lambda: False
            case "hang":
                yield lambda: False
            case _:
                self._dying = True
                self.world.after(0.0, lambda: self._end(signal_number=SIGNALS[fault.kind]))
                yield lambda: False

    def _wait_for_group(self, fault: Fault) -> Life:
        size, complete = int((fault.group or "").rpartition("/")[2]), self._leg.complete(fault.group, self.attempt)
        markers: Iterable[Any] = read_markers(self._leg).values()
        if sum(bool(each) and (each.group, each.attempt) == (fault.group, self.attempt) for each in markers) >= size:
            complete.touch()
        deadline_s = self.world.now + GROUP_LIMIT_S
        self.world.after(GROUP_LIMIT_S + 0.001, self._team.look)
        yield lambda: complete.exists() or self.world.now > deadline_s


class RankKilled(Exception):
    """By nobody that it knows, in the middle of what it does."""


@functools.cache
def rank_state(step: int, rank: int) -> bytes:
    """The same training comes to the same state."""
    return json.dumps({"step": step, "rank": rank, "state": "x" * 40}).encode()
