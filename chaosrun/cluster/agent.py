"""The node agent: keeps a node's fork server running, passes orders to it and its events on to the supervisor.

A plain class with async methods; `ray_cluster` makes a Ray actor of it. Events are pushed: the supervisor always has one
`events` call waiting, which returns as soon as there is an event. Imports neither ray nor torch and decides nothing: the
supervisor decides when to restart and what a death means. Only the cleanup after a dead fork server is its own decision.
"""

import asyncio
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaosrun.cluster.forkserver import PRELOAD, TARGET
from chaosrun.cluster.messages import (
    AgentEvent,
    Announced,
    Configure,
    Exited,
    LauncherFailed,
    RanksStarted,
    RanksStopped,
    RankStack,
    Ready,
    ServerEvent,
    ServerFailed,
    StartFailed,
    StartRanks,
    StopRanks,
    decode_event,
    line,
)
from chaosrun.cluster.stacks import read_activities, write_stacks
from chaosrun.errors import ChaosrunError, RecoveryError, ResourcesError, UsageError
from chaosrun.faults.node_evidence import RankEnd
from chaosrun.faults.outside import NodeProcesses, OutsideStrike, StrikeOrder
from chaosrun.processes import (
    MARK_VARIABLE,
    ProcessIdentity,
    catches,
    identify,
    kill_marked,
    remove_shared_memory_leftovers,
    shared_memory_entries,
    wait_gone,
    with_package,
)
from chaosrun.records.heartbeat import Activity
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder

MESSAGE_LIMIT = 1 << 24
# No thread pools while modules are imported: threads do not survive a fork, and make it unsafe.
IMPORT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    # pyarrow's allocator; scikit-learn, pandas, datasets and the Trainer import pyarrow where it is installed.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # Make torch detect GPUs through NVML: through CUDA that would initialise it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# Set by Ray for its own workers; training processes must have the environment they would have without Ray.
RAY_SETTINGS = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")


@dataclass(slots=True, kw_only=True)
class Server:
    """A running fork server, seen from the agent."""

    key: str
    mark: str
    process: subprocess.Popen[bytes]
    temporary: Path
    """TMPDIR of its ranks: what killed ranks leave there is removed after the attempt."""
    output: int
    """memfd with the server's own output: the reason of a crash, without a file on disk."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ready: asyncio.Future[Ready]
    started: asyncio.Future[RanksStarted] | None = None
    stopped: dict[int, asyncio.Future[tuple[int, ...]]] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)
    """By rank, pids of ranks of the running attempt that have not exited."""
    ranks: dict[int, ProcessIdentity] = field(default_factory=dict)
    """All ranks of the running attempt, except those that were gone before they could be identified."""
    ends: dict[int, RankEnd] = field(default_factory=dict)
    """How ranks of the running attempt have ended."""
    attempt: int | None = None
    shared_memory: frozenset[str] = frozenset()
    listening: asyncio.Task[None] | None = None


class NodeAgent:
    def __init__(self, mark: str, node_id: str) -> None:
        """`mark` goes into the environment of every process below this agent, so that a cleaner can find them."""
        self._mark = mark
        self._node_id = node_id
        self._server: Server | None = None
        self._settings: tuple[dict[str, str], tuple[str, ...], str, int] | None = None
        self._launching = asyncio.Lock()
        self._events: list[AgentEvent] = []
        """All events so far, kept so that a lost answer can be requested again."""
        self._news = asyncio.Event()
        self._over = 0
        """The attempt that was reported as stopped, until the next one begins."""

    async def start_server(
        self, env: Mapping[str, str], preload: Sequence[str] = PRELOAD, target: str = TARGET, standbys: int = 0
    ) -> Ready:
        """Ensure that a fork server with this environment runs: start one, or keep the running one when it has the same.

        `standbys` is the number of ranks to expect: their processes are forked before the first start needs them. Raises
        ChaosrunError when the preloads fail or are not safe to fork.
        """
        async with self._launching:
            self._settings = (dict(env), tuple(preload), target, standbys)
            return await self._have_server()

    async def _have_server(self) -> Ready:
        assert self._settings is not None, "start_server comes first"
        env, preload, target, standbys = self._settings
        key = hashlib.sha256(json.dumps([sorted(env.items()), preload, target]).encode()).hexdigest()
        server = self._server
        if server is not None:
            if server.key == key:
                return await server.ready
            await self._close_server(server)
        wanted = {**{name: value for name, value in os.environ.items() if not name.startswith(RAY_SETTINGS)}, **env}
        temporary = Path(tempfile.mkdtemp(prefix="ranks-", dir=env.get("TMPDIR") or self._folder()))
        self._server = server = await self._launch(key, wanted, temporary)
        after_imports = {name: wanted.get(name) for name in IMPORT_ENVIRONMENT}
        configure = Configure(target=target, preload=preload, env=after_imports, standbys=standbys, temporary=str(temporary))
        server.writer.write(line(configure))
        return await server.ready

    def _folder(self) -> str | None:
        """The folder of a private Ray, which is removed with it; else None, for the default temporary folder."""
        folder = self._mark.partition("#")[0]
        return folder if os.path.isabs(folder) else None

    async def _launch(self, key: str, env: Mapping[str, str], temporary: Path) -> Server:
        mark = f"{self._mark}#{uuid.uuid4().hex}"
        environment = {**with_package(env), **IMPORT_ENVIRONMENT, MARK_VARIABLE: mark}
        output = os.memfd_create("forkserver", os.MFD_CLOEXEC)
        try:
            process, ours = start_program("forkserver", env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        except OSError:
            os.close(output)
            raise
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MESSAGE_LIMIT)
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        server = Server(
            key=key, mark=mark, process=process, temporary=temporary, output=output, reader=reader, writer=writer, ready=ready
        )
        server.listening = asyncio.create_task(self._listen(server))
        return server

    async def _listen(self, server: Server) -> None:
        while True:
            try:
                received = await server.reader.readline()
            except ConnectionResetError:
                received = b""
            if not received.endswith(b"\n"):
                break
            self._hear(server, decode_event(received))
        await self._server_ended(server)

    def _hear(self, server: Server, event: ServerEvent) -> None:
        match event:
            case Ready():
                server.ready.set_result(event)
            case ServerFailed(message=why, traceback=trace):
                hint = (
                    "the modules named in the traceback must import here" if trace else "docs/job.md says what may be preloaded"
                )
                message = f"the fork server cannot start: {why}" + (f"\n{trace}" if trace else "")
                server.ready.set_exception(UsageError(message, hint=hint))
            case StartFailed():
                if server.started is not None:
                    server.started.set_exception(ResourcesError(f"{platform.node()}: {event.message}"))
            case RanksStarted():
                server.live.update(event.pids)
                # None of them can have been reaped yet, as that is reported later.
                found = {rank: identify(pid) for rank, pid in server.live.items()}
                server.ranks = {rank: identity for rank, identity in found.items() if identity is not None}
                if server.started is not None:
                    server.started.set_result(event)
            case Announced():
                server.live[event.rank] = event.pid
                server.ranks[event.rank] = ProcessIdentity(event.pid, event.start_ticks)
                self._tell(event)
            case LauncherFailed():
                self._tell(event)
            case Exited():
                server.live.pop(event.rank, None)
                server.ends[event.rank] = RankEnd(exit_code=event.exit_code, signal=event.signal)
                self._tell(event)
            case RanksStopped():
                server.attempt = None
                server.stopped.pop(event.attempt).set_result(event.killed)
                self._over = event.attempt
                self._tell(event)

    def _tell(self, event: AgentEvent) -> None:
        self._events.append(event)
        self._news.set()

    async def _server_ended(self, server: Server) -> None:
        """After the end of a fork server: kill all processes of its attempt, and fail every pending call."""
        await asyncio.to_thread(kill_marked, server.mark)
        # Ranks that the kernel kills with their server may lose their mark before they are gone.
        await asyncio.to_thread(wait_gone, server.ranks.values(), timeout_s=10.0)
        status = await asyncio.to_thread(server.process.wait)
        printed = os.pread(server.output, 1 << 16, max(0, os.fstat(server.output).st_size - (1 << 16))).decode(errors="replace")
        os.close(server.output)
        server.writer.close()
        await asyncio.to_thread(shutil.rmtree, server.temporary, ignore_errors=True)
        if self._server is server:
            self._server = None
        how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
        message = f"the fork server on {platform.node()} ended {how}" + (f":\n{printed}" if printed else "")
        for waiting in (server.ready, server.started):
            if waiting is not None and not waiting.done():
                waiting.set_exception(RecoveryError(message))
        if server.attempt is not None:
            remove_shared_memory_leftovers(server.shared_memory)
            attempt, died_s, killed = server.attempt, time.time(), tuple(sorted(server.live))
            for rank in killed:
                self._tell(Exited(attempt=attempt, rank=rank, pid=server.live[rank], died_s=died_s))
            server.stopped.pop(attempt).set_result(killed)
            self._over = attempt
            self._tell(RanksStopped(attempt=attempt, killed=killed))

    async def _close_server(self, server: Server) -> None:
        if server.ready.done():
            # At the end of the socket the server kills everything and exits; only then does `_listen` end.
            server.writer.write_eof()
        else:
            # The server does not read the socket while it imports.
            server.process.kill()
        assert server.listening is not None
        await server.listening

    async def start(self, attempt: int, orders: Sequence[WorkerOrder], listen: bool) -> RanksStarted:
        """Fork the node's ranks of an attempt; its port is None unless `listen`.

        Starts a lost fork server again. Raises ResourcesError if a log cannot be opened, or no process or port is available:
        then the attempt is over, and the ranks that had been forked are dead. Raises RecoveryError if the attempt was stopped
        meanwhile, or the fork server died.
        """
        self._over = 0
        async with self._launching:
            await self._have_server()
            server = self._server
            assert server is not None
            if self._over == attempt:
                raise RecoveryError(f"attempt {attempt} was stopped before it could start on {platform.node()}")
            if server.attempt is not None:
                raise ChaosrunError(f"attempt {server.attempt} is still running on {platform.node()}")
            loop = asyncio.get_running_loop()
            server.attempt = attempt
            server.shared_memory = shared_memory_entries()
            server.live.clear()
            server.ranks.clear()
            server.ends = {}
            server.stopped[attempt] = loop.create_future()
            server.started = started = loop.create_future()
            server.writer.write(line(StartRanks(attempt=attempt, orders=tuple(orders), listen=listen)))
            return await started

    async def stop(self, attempt: int) -> Sequence[int]:
        """SIGKILL all ranks of an attempt; returns those killed once all are gone. Tells RanksStopped even if none began."""
        server = self._server
        waiting = None if server is None else server.stopped.get(attempt)
        if server is None or waiting is None:
            if self._over != attempt:
                self._over = attempt
                self._tell(RanksStopped(attempt=attempt, killed=()))
            return ()
        server.writer.write(line(StopRanks(attempt=attempt)))
        return await asyncio.shield(waiting)

    async def identify_rank(self, attempt: int, rank: int, listening: bool = False) -> tuple[int, int] | None:
        """(pid, start time in ticks) of a rank that runs here in this attempt, None if it does not.

        `listening`: only if it already handles SIGTERM as a notice; before that it would die of it.
        """
        server = self._server
        here = server is not None and server.attempt == attempt and rank in server.live
        found = server.ranks.get(rank) if server is not None and here else None
        if found is None or (listening and not catches(found, signal.SIGTERM)):
            return None
        return found.pid, found.start_ticks

    async def strike(self, orders: Sequence[StrikeOrder]) -> list[bool]:
        """Carry out faults on ranks, or on this node, at once; False for one whose rank was gone, so that nothing was done.

        A fault that takes time continues after this has returned. A separate process carries out one that ends this agent.
        """
        server = self._server
        if server is None:
            return [False] * len(orders)
        node = NodeProcesses(
            node_id=self._node_id, server_pid=server.process.pid, mark=server.mark, ranks=dict(server.ranks), ends=server.ends
        )

        def strike(order: StrikeOrder) -> bool:
            outside = order.fault.facts.outside
            assert outside is not None, order.fault.kind
            here = order.attempt == server.attempt and server.ranks.get(order.fault.rank) == order.victim
            return here and outside(OutsideStrike(order=order, node=node))

        return [strike(order) for order in orders]

    async def events(self, heard: int) -> list[AgentEvent]:
        """All events after the first `heard` ones, as soon as there is one."""
        while len(self._events) <= heard:
            self._news.clear()
            await self._news.wait()
        return self._events[heard:]

    async def hello(self) -> int:
        """The agent's pid, which shows that it answers."""
        # When this process ends, so does its end of the socket: the fork server then kills everything below.
        leave_with_the_raylet()
        return os.getpid()

    async def activities(self, leg_path: str, attempt: int, ranks: Sequence[int]) -> dict[int, Activity]:
        """The activity of these ranks of this node."""
        live = {} if self._server is None else self._server.live
        return read_activities(LegLayout(Path(leg_path)).attempt(attempt), ranks, live)

    async def stacks(self, leg_path: str, attempt: int, wait_s: float) -> dict[int, RankStack]:
        """Make the live ranks of an attempt write their stacks to their logs; returns the stacks by rank."""
        server = self._server
        if server is None or server.attempt != attempt:
            return {}
        live = {rank: server.ranks[rank] for rank in server.live if rank in server.ranks}
        return await write_stacks(live, LegLayout(Path(leg_path)), attempt, wait_s)

    async def shutdown(self) -> None:
        """Kill everything below this agent and wait until it is gone."""
        if self._server is not None:
            await self._close_server(self._server)


def start_program(
    name: str, *arguments: str, env: Mapping[str, str], stdin: int, stdout: int, stderr: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a program of this package, in a session of its own, whose first argument is its end of a socket to this process;
    returns the other end as well."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", f"chaosrun.cluster.{name}", str(theirs.fileno()), *arguments]
        try:
            started = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=True
            )
        except OSError:
            ours.close()
            raise
    return started, ours


def leave_with_the_raylet() -> None:
    """End this process when its raylet ends: Ray would let it live, and reassign its resources. Call it in an event loop."""
    if is_raylet(os.getppid()):
        asyncio.get_running_loop().add_reader(os.pidfd_open(os.getppid()), os._exit, 1)


def is_raylet(pid: int) -> bool:
    return "raylet" in Path(f"/proc/{pid}/comm").read_text()
