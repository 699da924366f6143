"""A node: the real agent on a stepped event loop, and a fork server that speaks the real protocol and forks simulated ranks."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from chaosrun.cluster import agent as agents
from chaosrun.cluster.attempts import RunningAttempt
from chaosrun.cluster.command import EndedRank
from chaosrun.cluster.messages import (
    Configure,
    RanksStarted,
    RanksStopped,
    RankStack,
    Ready,
    ServerCommand,
    ServerEvent,
    StartRanks,
    StopRanks,
    decode_command,
    line,
)
from chaosrun.records.heartbeat import Activity, read_heartbeat
from chaosrun.records.layout import LegLayout
from tests.simulation.ranks import SimulatedRank

if TYPE_CHECKING:
    from tests.simulation.drill import Simulation

WITHIN_A_NODE_S = 0.0002


@dataclass(slots=True, kw_only=True)
class SimulatedAttempt(RunningAttempt):
    """The real one, whose processes are simulated."""

    processes: dict[int, SimulatedRank] = field(default_factory=dict)
    """By pid."""

    def kill_all(self) -> None:
        self.killed.update(self.ranks[pid] for pid in self.live if pid in self.ranks)
        for pid in sorted(self.live):
            self.processes[pid].send(signal.SIGKILL)

    def see_ends(self, send: Any) -> None:
        dead = [self.processes[pid] for pid in sorted(self.live) if not self.processes[pid].is_alive]
        dead.sort(key=lambda rank: rank.signal is None)
        self._tell(
            [EndedRank(rank=rank.rank, pid=rank.pid, exit_code=rank.exit_code, signal=rank.signal) for rank in dead], send
        )


class SimulatedForkServer:
    """Stands for the process, and for both ends of its socket."""

    def __init__(self, node: "SimulatedNode", reader: asyncio.StreamReader) -> None:
        self.node = node
        self.simulation, self.world = node.simulation, node.simulation.world
        self.reader = reader
        self.pid = self.world.new_pid()
        self.is_alive = True
        self.status = 0
        self.attempt: SimulatedAttempt | None = None
        self._unread = b""

    # As the agent sees it: a process, and a writer

    def write(self, data: bytes) -> None:
        self.world.after(WITHIN_A_NODE_S, lambda: self._receive(data))

    def write_eof(self) -> None:
        self.world.after(WITHIN_A_NODE_S, lambda: self.end(0))

    def close(self) -> None:
        pass

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def wait(self) -> int:
        return self.status

    # What it does

    def send(self, event: ServerEvent) -> None:
        data = line(event)

        def arrive() -> None:
            if not self.reader.at_eof():
                self.reader.feed_data(data)

        self.world.after(WITHIN_A_NODE_S, arrive)

    def end(self, status: int) -> None:
        """The kernel kills its children with it; the agent sees the end of the socket."""
        if not self.is_alive:
            return
        self.is_alive, self.status = False, status
        if self.attempt is not None:
            for rank in self.attempt.processes.values():
                rank.send(signal.SIGKILL)
        self.world.after(WITHIN_A_NODE_S * 2, self.reader.feed_eof)

    def _receive(self, data: bytes) -> None:
        if not self.is_alive:
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for each in lines:
            self._obey(decode_command(each))

    def _obey(self, command: ServerCommand) -> None:
        match command:
            case Configure():
                self.world.after(0.05, lambda: self.send(Ready(pid=self.pid)) if self.is_alive else None)
            case StartRanks():
                self._start(command)
            case StopRanks():
                if self.attempt is not None and self.attempt.number == command.attempt:
                    self.attempt.kill_all()
                    self._see_deaths()

    def _start(self, command: StartRanks) -> None:
        assert self.attempt is None, "the agent starts an attempt only after the last one has stopped"
        leg = LegLayout(Path(command.orders[0].leg_path))
        self.attempt = attempt = SimulatedAttempt(number=command.attempt, leg=leg, shared_memory=frozenset())
        attempt.layout.path.mkdir(parents=True, exist_ok=True)
        for order in command.orders:
            rank = SimulatedRank(self.simulation, order, lambda rank: self.world.after(WITHIN_A_NODE_S, self._see_deaths))
            attempt.ranks[rank.pid] = rank.rank
            attempt.live.add(rank.pid)
            attempt.processes[rank.pid] = rank
            self.simulation.rank_began(rank)
        port = 20_000 + command.attempt if command.listen else None
        self.send(RanksStarted(pids={rank: pid for pid, rank in attempt.ranks.items()}, port=port))

    def _see_deaths(self) -> None:
        attempt = self.attempt
        if not self.is_alive or attempt is None:
            return
        attempt.see_ends(self.send)
        if not attempt.live:
            self.attempt = None
            self.send(RanksStopped(attempt=attempt.number, killed=tuple(sorted(attempt.killed))))


class SimulatedAgent(agents.NodeAgent):
    """The real agent; what it asks the kernel it asks the simulation."""

    def __init__(self, node: "SimulatedNode") -> None:
        super().__init__(f"{node.simulation.folder}#{node.name}", node.name)
        self._node = node

    async def _launch(self, key: str, env: Mapping[str, str], temporary: Path) -> agents.Server:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        process = cast("Any", SimulatedForkServer(self._node, reader))
        self._node.servers.append(process)
        server = agents.Server(
            key=key,
            mark=f"{self._mark}#{process.pid}",
            process=process,
            temporary=temporary,
            output=agents.os.memfd_create("forkserver"),
            reader=reader,
            writer=process,
            ready=loop.create_future(),
        )
        server.listening = asyncio.create_task(self._listen(server))
        self._node.tasks.append(server.listening)
        return server

    async def hello(self) -> int:
        return self._node.agent_pid

    async def activities(self, leg_path: str, attempt: int, ranks: Sequence[int]) -> dict[int, Activity]:
        layout = LegLayout(Path(leg_path)).attempt(attempt)
        live = {} if self._server is None else self._server.live
        world = self._node.simulation.world
        found: dict[int, Activity] = {}
        for rank in ranks:
            process = self._node.simulation.processes.get(live.get(rank, 0))
            beat = read_heartbeat(layout.heartbeat(rank), clock=world.monotonic)
            found[rank] = Activity(beat=beat, cpu_s=0.0, is_stopped=process is not None and process.is_stopped)
        return found

    async def stacks(self, leg_path: str, attempt: int, wait_s: float) -> dict[int, RankStack]:
        server = self._server
        if server is None or server.attempt != attempt:
            return {}
        processes = {rank: self._node.simulation.processes[pid] for rank, pid in server.live.items()}
        return {
            rank: RankStack(pid=process.pid, state="T" if process.is_stopped else "S", stack=self._stack(process))
            for rank, process in processes.items()
        }

    def _stack(self, process: SimulatedRank) -> tuple[str, ...]:
        return ("/x/torch/distributed/c10d.py:1 in wait",) if process.waits_for_peers else ("/x/train.py:1 in step",)


class SimulatedNode:
    """A machine: an agent, its fork servers, its ranks."""

    def __init__(self, simulation: "Simulation", name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.is_alive = True
        """The machine."""
        self.servers: list[SimulatedForkServer] = []
        self.agent: SimulatedAgent | None = None
        self.agent_pid = 0
        self.is_agent_alive = False
        self.agent_hangs_until_s = 0.0
        self.tasks: list[asyncio.Task[Any]] = []
        """Of the agent's process."""
        self.on_break: list[Callable[[], None]] = []
        self.on_agent_end: list[Callable[[], None]] = []

    def break_connection(self) -> None:
        """To its agent: whoever waits for an answer hears of it, and what is on the way is lost."""
        for lose in list(self.on_break):
            lose()

    def start_agent(self) -> None:
        self.agent, self.agent_pid = SimulatedAgent(self), self.simulation.world.new_pid()
        self.is_agent_alive = True
        self.agent_hangs_until_s = 0.0

    def end_agent(self) -> None:
        """Its process is gone: the end of the socket tells its fork server, which kills everything."""
        if not self.is_agent_alive:
            return
        self._forget_agent()
        self.simulation.world.tell(f"the agent of {self.name} dies")
        for server in self.servers:
            self.simulation.world.after(WITHIN_A_NODE_S, lambda server=server: server.end(0))
        self.servers = []

    def end(self) -> None:
        """The machine is gone at once, with everything on it."""
        self.is_alive = False
        self.simulation.world.tell(f"node {self.name} dies")
        for server in self.servers:
            if server.attempt is not None:
                for rank in server.attempt.processes.values():
                    rank.vanish()
            server.is_alive = False
        self._forget_agent()
        self.servers = []

    def _forget_agent(self) -> None:
        self.is_agent_alive = False
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.cancel()
        self.on_break = []
        told, self.on_agent_end = self.on_agent_end, []
        for tell in told:
            tell()
