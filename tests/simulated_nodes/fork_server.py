"""A fork server that forks nothing, an attempt whose ranks are entries of a table, and the agent before it.

The agent is the real one: only what it starts and what it strikes is simulated. Pids are beyond the kernel's largest, so that
no signal of anybody's can ever reach a process by one.
"""

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaosrun.cluster.agent import MESSAGE_LIMIT, NodeAgent, Server
from chaosrun.cluster.messages import (
    Configure,
    Exited,
    RanksStarted,
    RanksStopped,
    Ready,
    ServerEvent,
    StartRanks,
    StopRanks,
    decode_command,
    line,
)
from chaosrun.faults.node_evidence import EndNote, NamedProcess
from chaosrun.faults.outside import StrikeOrder
from chaosrun.processes import ProcessIdentity
from chaosrun.records.heartbeat import Activity
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import write_note
from tests.simulated_nodes.training import SimulatedRank, save, write_inputs

FIRST_PID = 1 << 23
"""The kernel gives out none above 1 << 22."""
_pids = itertools.count(FIRST_PID)
Note = Callable[..., None]
"""`note(what, node=…)`: what happened on the nodes, and when, for those who measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a simulated training goes."""

    steps: int
    step_s: float
    fork_s: float = 0.002
    """For a node to make a rank of a standby."""
    peers_raise: bool = False
    """A rank that loses a peer raises an error at once, as with gloo; else it waits, as with NCCL."""
    slow: str | None = None
    """A node whose agent says nothing of its ranks before their attempt is over."""
    wrong: int | None = None
    """A rank that trains on other batches after a restart."""


@dataclass(slots=True, kw_only=True)
class World:
    """All ranks of one attempt, wherever they are: they get on together, or not at all."""

    pace: Pace
    note: Note
    ranks: dict[int, SimulatedRank] = field(default_factory=dict)
    servers: dict[int, "SimulatedForkServer"] = field(default_factory=dict)
    stops: bool = False
    """A rank is gone, so that the others wait for it."""
    hanging: set[int] = field(default_factory=set)
    training: asyncio.Task[None] | None = None

    def join(self, rank: SimulatedRank, server: "SimulatedForkServer") -> None:
        self.ranks[rank.order.rank], self.servers[rank.order.rank] = rank, server
        if len(self.ranks) == rank.order.world_size:
            self.training = asyncio.create_task(self._train())

    def lose(self, rank: int) -> None:
        """A rank is gone, or stands still."""
        if not self.stops:
            self.stops = True
            if self.pace.peers_raise:
                asyncio.get_running_loop().call_later(0.002, self._raise_everywhere)

    def _raise_everywhere(self) -> None:
        for rank, server in sorted(self.servers.items()):
            if server.is_live(rank):
                self.ranks[rank].lose_a_peer()
                server.die({rank: (1, None)})

    async def _train(self) -> None:
        ordered = [self.ranks[rank] for rank in sorted(self.ranks)]
        if await self._together(ordered, lambda rank: rank.begin()):
            self.note("training", attempt=ordered[0].order.attempt)
            while not self.stops and ordered[0].step < self.pace.steps:
                began_s = time.monotonic()
                if not await self._together(ordered, lambda rank: rank.take_step()):
                    return
                step, order = ordered[0].step, ordered[0].order
                self._strike(ordered, "step")
                if self.stops:
                    return
                if step % order.every_steps == 0 or step == self.pace.steps:
                    await asyncio.to_thread(save, ordered)
                await asyncio.sleep(max(0.0, began_s + self.pace.step_s - time.monotonic()))
            if not self.stops:
                write_inputs(ordered[0].leg, Path(ordered[0].order.script))
                for rank in ordered:
                    rank.finish()
                for server in dict.fromkeys(self.servers.values()):
                    server.die({rank: (0, None) for rank in server.live})

    async def _together(self, ranks: Sequence[SimulatedRank], act: Callable[[SimulatedRank], None]) -> bool:
        """Each rank, without keeping the nodes from answering for long; False when one was lost meanwhile."""
        for number, rank in enumerate(ranks):
            if self.stops:
                return False
            act(rank)
            if number % 4 == 3:
                await asyncio.sleep(0)
        return not self.stops

    def _strike(self, ranks: Sequence[SimulatedRank], phase: str) -> None:
        """Ranks come to their points. One that is to be killed dies here; what comes from outside, it waits for."""
        due = {rank.order.rank: faults for rank in ranks if (faults := rank.due(phase))}
        if not due:
            return
        self.note("struck", ranks=sorted(due))
        killed = {rank for rank, faults in due.items() if any(fault.kind == "kill" for fault in faults)}
        by_server: dict[SimulatedForkServer, dict[int, tuple[int | None, int | None]]] = {}
        for rank in killed:
            by_server.setdefault(self.servers[rank], {})[rank] = (None, signal.SIGKILL)
        self.stops = self.stops or bool(due.keys() - killed)
        for server, ends in by_server.items():
            server.die(ends)


class SimulatedForkServer:
    """Of one node: obeys and tells as `chaosrun.cluster.forkserver` does."""

    def __init__(self, node: str, channel: socket.socket, worlds: Mapping[tuple[str, int], World], note: Note) -> None:
        self._node = node
        self._channel = channel
        self._worlds = worlds
        self._note = note
        self._writer: asyncio.StreamWriter | None = None
        self._attempt = 0
        self._ranks: dict[int, SimulatedRank] = {}
        self._world: World | None = None
        self.live: set[int] = set()
        self._killed: set[int] = set()
        self.pid = next(_pids)
        self.serving = asyncio.create_task(self._serve())

    def is_live(self, rank: int) -> bool:
        return rank in self.live

    def _send(self, *events: ServerEvent) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(b"".join(map(line, events)))

    async def _serve(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel, limit=MESSAGE_LIMIT)
        while received := await reader.readline():
            match decode_command(received):
                case Configure():
                    self._send(Ready(pid=self.pid))
                case StartRanks() as start:
                    await self._start(start)
                case StopRanks() as stop:
                    self._note("told to stop", node=self._node, attempt=stop.attempt)
                    if self._ranks and self._attempt == stop.attempt:
                        self._kill_all()
                        self._see_whether_over()
        self.end()
        self._writer.close()

    async def _start(self, start: StartRanks) -> None:
        self._attempt, self._killed = start.attempt, set()
        self._world = self._worlds[start.orders[0].leg_path, start.attempt]
        layout = LegLayout(Path(start.orders[0].leg_path)).attempt(start.attempt)
        layout.path.mkdir(parents=True, exist_ok=True)
        port = 29500 + start.attempt if start.listen else None
        await asyncio.sleep(self._world.pace.fork_s * len(start.orders))
        for order in start.orders:
            told = order if port is None else replace(order, master_port=port)
            wrong = order.rank == self._world.pace.wrong and order.attempt > 1
            self._ranks[order.rank] = SimulatedRank(told, next(_pids), wrong=wrong)
        self.live = set(self._ranks)
        self._note("started", node=self._node, attempt=start.attempt)
        self._send(RanksStarted(pids={r: each.pid for r, each in self._ranks.items()}, port=port))
        for rank in self._ranks.values():
            self._world.join(rank, self)

    def die(self, ends: Mapping[int, tuple[int | None, int | None]]) -> None:
        """Ranks of this node have ended at once, by exit code or signal: the others go with them unless that was in order."""
        ends = {rank: end for rank, end in ends.items() if rank in self.live}
        self.live -= ends.keys()
        in_order = all(code == 0 for code, _ in ends.values())
        self._send(*(self._exited(rank, *end, completed=in_order) for rank, end in ends.items()))
        if not in_order:
            self._kill_all()
        self._see_whether_over()

    def _exited(self, rank: int, code: int | None, number: int | None, **how: bool) -> Exited:
        assert self._world is not None
        self._ranks[rank].close()
        if code != 0:
            self._world.lose(rank)
        about = {"attempt": self._attempt, "rank": rank, "pid": self._ranks[rank].pid, "died_s": time.time()}
        return Exited(exit_code=code, signal=number, **about, **how)

    def _kill_all(self) -> None:
        killed, self.live = self.live, set()
        self._killed |= killed
        self._send(*(self._exited(rank, None, signal.SIGKILL, killed=True) for rank in sorted(killed)))

    def _see_whether_over(self) -> None:
        if self._ranks and not self.live:
            self._ranks = {}
            self._send(RanksStopped(attempt=self._attempt, killed=tuple(sorted(self._killed))))

    def end(self) -> None:
        """Gone without a word."""
        for rank in self.live:
            self._ranks[rank].close()
            if self._world is not None:
                self._world.lose(rank)
        self.live, self._ranks = set(), {}


class _NoProcess:
    """In the place of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None: ...


class SimulatedAgent(NodeAgent):
    """A node's agent whose fork server is simulated."""

    def __init__(self, node: str, worlds: Mapping[tuple[str, int], World], note: Note, die: Callable[[], None]) -> None:
        super().__init__(f"simulated#{node}", node)
        self._worlds = worlds
        self._note = note
        self._die = die
        self._pid = next(_pids)
        self.fork_server: SimulatedForkServer | None = None

    async def _launch(self, key: str, env: Mapping[str, str], temporary: Path) -> Server:
        temporary.rmdir()
        ours, theirs = socket.socketpair()
        self.fork_server = SimulatedForkServer(self._node_id, theirs, self._worlds, self._note)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MESSAGE_LIMIT)
        about: dict[str, Any] = {"process": _NoProcess(self.fork_server.pid), "temporary": temporary, "output": -1}
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        server = Server(key=key, mark=self._mark, reader=reader, writer=writer, ready=ready, **about)
        server.listening = asyncio.create_task(self._listen(server))
        return server

    def _hear(self, server: Server, event: ServerEvent) -> None:
        super()._hear(server, event)
        if isinstance(event, RanksStarted):
            server.ranks = {rank: ProcessIdentity(pid, 1) for rank, pid in event.pids.items()}

    async def _server_ended(self, server: Server) -> None:
        server.writer.close()
        if self._server is server:
            self._server = None

    async def hello(self) -> int:
        return self._pid

    async def activities(self, leg_path: str, attempt: int, ranks: Sequence[int]) -> dict[int, Activity]:
        world = self._worlds[leg_path, attempt]
        while self._node_id == world.pace.slow and self._server is not None and self._server.attempt == attempt:
            await asyncio.sleep(0.01)
        return await super().activities(leg_path, attempt, ranks)

    async def strike(self, orders: Sequence[StrikeOrder]) -> list[bool]:
        """Kinds "kill" and "node"."""
        server, fork_server = self._server, self.fork_server
        if server is None or fork_server is None:
            return [False] * len(orders)
        done: list[bool] = []
        for order in orders:
            here = order.attempt == server.attempt and server.ranks.get(order.fault.rank) == order.victim
            done.append(here and fork_server.is_live(order.fault.rank))
            if done[-1] and order.fault.kind == "node":
                asyncio.get_running_loop().call_soon(self._end_node, order, server)
            elif done[-1]:
                fork_server.die({order.fault.rank: (None, signal.SIGKILL)})
        return done

    def _end_node(self, order: StrikeOrder, server: Server) -> None:
        """The node goes; its witness says so."""
        assert self.fork_server is not None
        self._note("struck", ranks=[order.fault.rank])
        own = [NamedProcess(what="agent", pid=self._pid, start_ticks=1)]
        own.append(NamedProcess(what="fork server", pid=self.fork_server.pid, start_ticks=1))
        own += [NamedProcess(what=f"rank {r}", pid=i.pid, start_ticks=i.start_ticks) for r, i in server.ranks.items()]
        gone = tuple(own)
        self._die()
        note = EndNote(struck=gone, gone=gone, left=(), node=self._node_id, agent=self._pid)
        write_note(LegLayout(Path(order.leg_path)), order.fault.id, note)


def no_sync(_descriptor: int) -> None:
    """In the place of os.fsync: nothing here is about power cuts, and all nodes have this one disk."""


def spare_the_disk() -> None:
    os.fsync = no_sync
