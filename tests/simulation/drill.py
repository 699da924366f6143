"""One simulated leg from its first supervisor to its end, on virtual time, with its troubles."""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from chaosrun.cluster.workers import ClusterWorkers
from chaosrun.errors import DISK_FAILS, ChaosrunError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.processes import ProcessIdentity
from chaosrun.records.events import EventRecord
from chaosrun.records.filesystem import Moment, Operation
from chaosrun.records.layout import LegLayout
from chaosrun.records.manifest import Manifest
from chaosrun.records.order import WorkerOrder
from chaosrun.spec.model import JobSpec, RecoverySpec
from chaosrun.supervise.supervisor import Supervisor
from tests.records import order_of
from tests.simulation.cluster import Network, Ray, SimulatedCluster
from tests.simulation.disk import SimulatedDisk
from tests.simulation.invariants import Invariants
from tests.simulation.nodes import SimulatedNode
from tests.simulation.ranks import Life, RankKilled, SimulatedRank, Team
from tests.simulation.scenario import Scenario, Trouble
from tests.simulation.world import Killed, Violation, World

LONGEST_S = 3600.0
"""Of simulated time, in all: whatever happens, a leg has ended by then."""
LONGEST_WAITS = 20_000
MOST_SUPERVISORS = 8
OF_DISK = ("killed_at_disk", "killed_at_quarantine", "power_cut")
"""Troubles that come with an operation on the disk."""
_FAST = Path("/dev/shm")

__all__ = ["Ended", "Simulation", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a simulated leg ended; or what it did that it never may."""

    outcome: str
    """Of the leg, or the name of the error that ended it."""
    message: str
    violation: Violation | None
    story: tuple[str, ...]
    simulated_s: float
    fired: Mapping[str, int]
    """How often each kind of trouble came to anything."""


class Simulation:
    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.world = World(scenario.seed)
        self.leg = LegLayout(folder / "run" / "chaos")
        self.leg.path.mkdir(parents=True)
        cuts = any(trouble.kind == "power_cut" for trouble in scenario.troubles)
        self.disk = SimulatedDisk(self.leg.path, modelled=cuts)
        self.network = Network(self)
        self.nodes = [SimulatedNode(self, f"node{number}") for number in range(scenario.nodes + scenario.spares)]
        self.processes: dict[int, SimulatedRank] = {}
        self.living: Counter[int] = Counter()
        """How many of them live, by attempt."""
        self.teams: dict[int, Team] = {}
        self.is_supervisor_alive = False
        self.supervisors = 0
        self.supervisor: Supervisor | None = None
        self.fired: dict[str, int] = {}
        self._acting: SimulatedRank | None = None
        self._known_dead_s: dict[str, float] = {}
        self._hung: set[int] = set()
        self._full_until_s = -1.0
        self._slow_until_s = -1.0
        self._late: list[tuple[float, float, float, str]] = []
        self._twice: list[tuple[float, float, str]] = []
        self._lose = [each for each in scenario.troubles if each.kind in ("reply_lost", "strike_reply_lost")]
        self._pending = [each for each in scenario.troubles if each.kind in self._acts]
        self._at_waits = [each for each in scenario.troubles if each.kind == "supervisor_killed"]
        self._at_disk = [each for each in scenario.troubles if each.kind in OF_DISK]
        self._tear: list[Trouble] = [each for each in scenario.troubles if each.kind == "end_is_torn"]
        self._cutting = False
        self._records = 0
        self.invariants = Invariants(self)
        self.world.after_each = self.invariants.check
        self.world.on_wait = self._at_wait
        self.disk.on_moment = self._at_operation
        self.disk.refuses = self._is_full

    # The real code's surroundings

    def team(self, attempt: int) -> Team:
        return self.teams.setdefault(attempt, Team())

    def is_known_dead(self, node: SimulatedNode) -> bool:
        """Ray has noticed."""
        return not node.is_alive and self.world.now > self._known_dead_s.get(node.name, 0.0)

    def dying_s(self) -> float:
        """From a signal to the end of a process."""
        return self.world.random("dying").uniform(0.0001, 0.02)

    def let_act(self, rank: SimulatedRank, life: Life) -> Callable[[], bool] | float:
        """What is done to the disk meanwhile, this rank does."""
        self._acting = rank
        try:
            return next(life)
        finally:
            self._acting = None

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        world = self.world
        clock = SimpleNamespace(time=world.wall, monotonic=world.monotonic, sleep=lambda seconds: None)
        replaced: Mapping[str, Any] = {
            "chaosrun.records.markers.time": clock,
            "chaosrun.cluster.agent.time": clock,
            "chaosrun.cluster.attempts.time": clock,
            "chaosrun.cluster.workers.time": clock,
            "chaosrun.cluster.agent_client.time": clock,
            "chaosrun.cluster.ray_cluster.time": clock,
            "chaosrun.supervise.supervisor.time": clock,
            "chaosrun.supervise.striking.OutsideFaults.__init__.__kwdefaults__": {"clock": world.monotonic},
            "chaosrun.cluster.agent_client.ray": Ray(self),
            "chaosrun.cluster.agent.identify": self._identify,
            "chaosrun.cluster.agent.catches": lambda identity, number: True,
            "chaosrun.cluster.agent.kill_marked": lambda mark: None,
            "chaosrun.cluster.agent.wait_gone": self._wait_gone,
            "chaosrun.cluster.agent.shared_memory_entries": lambda: frozenset(),
            "chaosrun.cluster.agent.remove_shared_memory_leftovers": lambda entries: None,
            "chaosrun.cluster.agent.asyncio.to_thread": _at_once,
            "chaosrun.faults.outside.send_signal": self._send_signal,
            "chaosrun.records.journal.Filesystem": lambda: self.disk,
            "chaosrun.checkpoint.store.Filesystem": lambda: self.disk,
            "chaosrun.checkpoint.audit.hashlib": SimpleNamespace(file_digest=_file_digest),
            "chaosrun.checkpoint.audit.Manifest": SimpleNamespace(from_bytes=_manifest_of),
            "chaosrun.supervise.deaths.last_step": self._last_step,
        }
        before = {name: getattr(*_place(name)) for name in replaced}
        try:
            for name, value in replaced.items():
                setattr(*_place(name), value)
            yield
        finally:
            for name, value in before.items():
                setattr(*_place(name), value)

    def _identify(self, pid: int) -> ProcessIdentity | None:
        process = self.processes.get(pid)
        return process.identity if process is not None else None

    def _send_signal(self, identity: ProcessIdentity, number: int) -> bool:
        process = self.processes.get(identity.pid)
        sent = process is not None and process.send(number)
        if sent and process is not None:
            self.invariants.struck_from_outside(process)
        return sent

    async def _wait_gone(self, identities: Any, *, timeout_s: float) -> None:
        processes = [self.processes[identity.pid] for identity in identities]
        future = self.world.loop.create_future()

        def look() -> None:
            if future.done():
                return
            if any(process.is_alive for process in processes):
                self.world.after(0.01, look)
            else:
                future.set_result(None)

        look()
        await future

    def _last_step(self, leg: LegLayout, attempt: int, rank: int) -> int:
        """A trace would say it."""
        return next((each.step for each in self.team(attempt).members if each.rank == rank), 0)

    # What ranks tell

    def rank_began(self, rank: SimulatedRank) -> None:
        self.processes[rank.pid] = rank
        self.living[rank.attempt] += 1

    def rank_ended(self, rank: SimulatedRank) -> None:
        self.living[rank.attempt] -= 1
        if not self.living[rank.attempt]:
            del self.living[rank.attempt]
        how = f"signal {rank.signal}" if rank.signal else f"exit code {rank.exit_code}"
        self.world.tell(f"rank {rank.rank} of attempt {rank.attempt} (pid {rank.pid}) ends: {how}, after step {rank.step}")

    def struck(self, fault: Fault, rank: SimulatedRank) -> None:
        self.world.tell(f"{fault.id} strikes rank {rank.rank} of attempt {rank.attempt}: {fault.describe()}")
        self.invariants.struck(fault.id, rank)

    def committed(self, rank: SimulatedRank, step: int) -> None:
        self.world.tell(f"checkpoint of step {step} committed by attempt {rank.attempt}")
        self.invariants.committed(step)

    def restored(self, rank: SimulatedRank, name: str, manifest: Manifest) -> None:
        self.invariants.restored(rank, name, manifest)

    def hangs(self, rank: SimulatedRank) -> bool:
        return rank.pid in self._hung

    def tears_end(self, rank: SimulatedRank) -> bool:
        for trouble in self._tear:
            if trouble.number == rank.rank:
                self._tear.remove(trouble)
                self._came("end_is_torn")
                return True
        return False

    # Troubles

    def late_s(self, node: SimulatedNode, what: str) -> float:
        if not self._late:
            return 0.0
        now = self.world.now
        longest = max(
            (amount for begins, ends, amount, name in self._late if begins <= now < ends and name == node.name), default=0
        )
        return self.world.random("late").uniform(0.0, longest) if longest else 0.0

    def loses_reply(self, node: SimulatedNode, what: str) -> bool:
        for trouble in self._lose:
            to_strike = trouble.kind == "strike_reply_lost" and what == "strike"
            if to_strike or (trouble.kind == "reply_lost" and trouble.at_s <= self.world.now and self._node(trouble) is node):
                self._lose.remove(trouble)
                self._came(trouble.kind)
                self.world.tell(f"{node.name}: the reply to {what} is lost")
                return True
        return False

    def sends_twice(self, node: SimulatedNode, what: str) -> bool:
        now = self.world.now
        twice = any(begins <= now < begins + lasts and name == node.name for begins, lasts, name in self._twice)
        if twice:
            self._came("messages_twice")
        return twice

    def _node(self, trouble: Trouble) -> SimulatedNode:
        return self.nodes[trouble.number % len(self.nodes)]

    def _came(self, kind: str) -> None:
        self.fired[kind] = self.fired.get(kind, 0) + 1

    def _is_full(self, operation: Operation) -> bool:
        full = self.world.now < self._full_until_s
        if full:
            self._came("disk_full")
        return full

    def _at_wait(self, number: int) -> None:
        if not self.is_supervisor_alive:
            return
        self._end_if_endless()
        for trouble in [t for t in self._at_waits if t.number <= number]:
            self._at_waits.remove(trouble)
            self._came(trouble.kind)
            raise Killed

    def _end_if_endless(self) -> None:
        if self.world.now > LONGEST_S or self.world.waits > LONGEST_WAITS:
            raise Violation("ends", f"after {self.world.now:.0f} s and {self.world.waits} waits the leg has not ended")

    def _at_operation(self, operation: Operation, moment: Moment) -> None:
        if operation.target is not None and moment == "after":
            self.invariants.renamed(operation.path, operation.target)
        if self._acting is None and moment == "before" and self.world.now < self._slow_until_s and self.is_supervisor_alive:
            self._came("disk_slow")
            slow_until_s = self._slow_until_s
            self.world.wait(lambda: False, min(0.3, slow_until_s - self.world.now))
        if not self.is_supervisor_alive:
            return
        for trouble in [*self._at_disk]:
            if self._is_due(trouble, operation, moment):
                self._at_disk.remove(trouble)
                of_rank = trouble.kind == "killed_at_disk" and self._acting is not None
                self._came("rank_dies" if of_rank else trouble.kind)
                if trouble.kind == "power_cut":
                    self._cutting = True
                self._kill_who_acts(trouble)

    def _is_due(self, trouble: Trouble, operation: Operation, moment: Moment) -> bool:
        if trouble.kind != "killed_at_quarantine":
            return trouble.number <= self.disk.operations
        aside = operation.kind == "rename" and operation.target is not None and operation.target.parent == self.leg.quarantine
        return aside and moment == "after" and self._acting is None

    def _kill_who_acts(self, trouble: Trouble) -> None:
        if trouble.kind == "power_cut":
            if self._acting is not None:
                # The supervisor dies as soon as this event is over; nothing else happens before.
                self.world.after(0.0, self._kill_supervisor)
                raise RankKilled
            raise Killed
        if self._acting is not None:
            raise RankKilled
        raise Killed

    def _kill_supervisor(self) -> None:
        if self.is_supervisor_alive:
            raise Killed

    def _schedule(self, record: int) -> None:
        """What comes after this record of the journal."""
        for trouble in [each for each in self._pending if each.record == record]:
            self._pending.remove(trouble)
            self.world.after(trouble.at_s, lambda trouble=trouble: self._do(trouble))

    @cached_property
    def _acts(self) -> Mapping[str, Callable[[Trouble], None]]:
        return {
            "rank_dies": lambda trouble: self._to_rank(trouble, lambda rank: rank.send(9)),
            "rank_leaves": lambda trouble: self._to_rank(trouble, lambda rank: rank.leave(0)),
            "rank_hangs": lambda trouble: self._to_rank(trouble, lambda rank: self._hung.add(rank.pid)),
            "server_dies": self._server_dies,
            "agent_dies": lambda trouble: self._node(trouble).end_agent(),
            "agent_hangs": self._agent_hangs,
            "node_dies": self._node_dies,
            "messages_late": self._messages_late,
            "messages_twice": self._messages_twice,
            "connection_breaks": lambda trouble: self._node(trouble).break_connection(),
            "clock_jumps": self._clock_jumps,
            "disk_full": self._disk_full,
            "disk_slow": self._disk_slow,
            "checkpoint_damaged": self._damage,
        }

    def _do(self, trouble: Trouble) -> None:
        self._came(trouble.kind)
        self.world.tell(f"trouble: {trouble.kind} (number {trouble.number}, amount {trouble.amount:.3f})")
        self._acts[trouble.kind](trouble)

    def _to_rank(self, trouble: Trouble, act: Callable[[SimulatedRank], Any]) -> None:
        alive = [
            each for each in self.processes.values() if each.is_alive and each.rank == trouble.number % self.scenario.workers
        ]
        if alive:
            act(alive[-1])

    def _server_dies(self, trouble: Trouble) -> None:
        for server in self._node(trouble).servers:
            server.end(-9)

    def _agent_hangs(self, trouble: Trouble) -> None:
        self._node(trouble).agent_hangs_until_s = self.world.now + trouble.amount

    def _node_dies(self, trouble: Trouble) -> None:
        node = self._node(trouble)
        self._known_dead_s[node.name] = self.world.now + trouble.amount * 3
        node.end()

    def _messages_late(self, trouble: Trouble) -> None:
        self._late.append((self.world.now, self.world.now + 2.0, trouble.amount, self._node(trouble).name))

    def _messages_twice(self, trouble: Trouble) -> None:
        self._twice.append((self.world.now, trouble.amount, self._node(trouble).name))

    def _clock_jumps(self, trouble: Trouble) -> None:
        self.world.jumped_s += trouble.amount

    def _disk_full(self, trouble: Trouble) -> None:
        self._full_until_s = self.world.now + trouble.amount

    def _disk_slow(self, trouble: Trouble) -> None:
        self._slow_until_s = self.world.now + trouble.amount

    def _damage(self, trouble: Trouble) -> None:
        if not self.leg.checkpoints.is_dir():
            return
        newest = max(self.leg.checkpoints.iterdir(), default=None)
        files = sorted(newest.iterdir()) if newest is not None else []
        if newest is not None and files:
            victim = files[trouble.number % len(files)]
            content = bytearray(victim.read_bytes())
            content[len(content) // 2] ^= 1
            victim.write_bytes(bytes(content))
            self.invariants.damaged(newest.name)

    # The drill

    def carry_out(self) -> tuple[str, str]:
        """Supervisors one after the other, until the leg has ended. Returns its outcome, or its error, and its message."""
        self._schedule(0)
        while True:
            self.supervisors += 1
            assert self.supervisors <= MOST_SUPERVISORS
            try:
                return self._supervise()
            except Killed:
                self._after_a_kill()

    def _supervise(self) -> tuple[str, str]:
        self.is_supervisor_alive = True
        self.world.tell(f"supervisor {self.supervisors} begins")
        spec = _spec(self.scenario.max_restarts, self.scenario.hang_timeout_s, self.scenario.seed % 4 % 3)
        cluster = SimulatedCluster(self)
        workers = ClusterWorkers(cluster, spec)
        self.supervisor = Supervisor(
            name="chaos",
            leg=self.leg,
            template=self._template(),
            plan=FaultPlan(seed=0, faults=self.scenario.faults),
            workers=workers,
            recovery=spec.recovery,
            deadline_s=None,
            on_record=self._on_record,
            clock=self.world.wall,
        )
        try:
            result = self.supervisor.run()
        except (ChaosrunError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in DISK_FAILS:
                raise
            cluster.close()
            self.is_supervisor_alive = False
            return type(error).__name__, str(error)
        cluster.close()
        self.is_supervisor_alive = False
        self.invariants.finished(result)
        return result.outcome, result.message or ""

    def _on_record(self, record: EventRecord) -> None:
        about = {key: value for key, value in record.items() if key not in ("leg", "v", "event", "seq", "time_s")}
        self.world.tell(f"journal: {record['event']} {about}")
        self.invariants.recorded(record)
        self._records += 1
        self._schedule(self._records)

    def _after_a_kill(self) -> None:
        """What Ray does to the actors of a driver that is gone; and after a power cut, what the disk still holds."""
        self.is_supervisor_alive = False
        self.world.tell("the supervisor is killed" + (", the power is cut" if self._cutting else ""))
        for node in self.nodes:
            if self._cutting and node.is_alive:
                node.end()
                node.is_alive = True
            elif node.is_agent_alive:
                self.world.after(self.world.random("driver").uniform(0.01, 0.5), node.end_agent)
        power_cut, self._cutting = self._cutting, False
        if power_cut:
            self.disk.cut_power(self.world.random("power"))
        self.invariants.supervisor_is_gone(power_cut=power_cut)
        self.world.let_pass(2.0)

    def _template(self) -> WorkerOrder:
        about = self.scenario
        sizes = {"world_size": about.workers, "local_world_size": about.workers, "max_steps": about.steps}
        return order_of(self.leg.path, attempt=0, **sizes, every_steps=about.every, keep=about.keep)


@cache
def _spec(max_restarts: int, hang_timeout_s: float | None, standby: int) -> JobSpec:
    times = {"hang_timeout": hang_timeout_s, "start_timeout": 30.0, "acquire_timeout": 20.0}
    recovery = RecoverySpec.model_validate({"max_restarts": max_restarts, "standby": standby, **times})
    return JobSpec.model_construct(env={}, seed=0, command=None, recovery=recovery)


@cache
def _place(name: str) -> tuple[Any, str]:
    """An object, and which of its attributes."""
    owner, _, attribute = name.rpartition(".")
    return resolve_name(owner), attribute


def _file_digest(file: Any, algorithm: Callable[[bytes], Any]) -> Any:
    """`hashlib`'s own takes 256 KiB of memory for each of these files, which have 60 bytes."""
    return algorithm(file.readall())


@lru_cache(maxsize=64)
def _manifest_of(data: bytes) -> Manifest:
    """Every rank of every attempt reads it, and it is not changed."""
    return Manifest.from_bytes(data)


def _remove(folder: str) -> None:
    """Only what is simulated is in there: nobody else makes links meanwhile, as `shutil.rmtree` has to expect."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _remove(entry.path)
            else:
                os.unlink(entry.path)
    os.rmdir(folder)


async def _at_once(act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    result = act(*arguments, **named)
    return await result if hasattr(result, "__await__") else result


def run(scenario: Scenario) -> Ended:
    """Simulate one leg. A violation of the invariants is returned, not raised."""
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=_FAST if _FAST.is_dir() else None))
    simulation = Simulation(scenario, folder)
    violation: Violation | None = None
    outcome, message = "violation", ""
    gc.disable()  # one collection for each leg takes less than hundreds while it goes on
    try:
        with simulation.surroundings():
            outcome, message = simulation.carry_out()
            simulation.world.let_pass(5.0)
            simulation.invariants.at_last(outcome)
    except Violation as found:
        violation = found
    except Exception as error:
        violation = Violation("crash", f"{type(error).__name__}: {error}")
        violation.__cause__ = error
    finally:
        with simulation.surroundings():
            simulation.is_supervisor_alive = False
            simulation.world.close()
        gc.enable()
        _remove(str(folder))
    about = {"outcome": outcome, "message": message, "violation": violation, "fired": simulation.fired}
    return Ended(story=tuple(simulation.world.story), simulated_s=simulation.world.now, **about)
