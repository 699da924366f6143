"""The warm fork server of a node: imports torch once, then forks a fresh process for each rank and attempt in milliseconds.

`python -m chaosrun.cluster.forkserver FD`, FD being an inherited socket to the node's agent; `cluster.messages` defines the
messages on it.

It stays single-threaded and does not touch CUDA, or a fork would not be safe. It is the subreaper of everything below it, and
an attempt is over only when it has no child left. So nothing can outlive an attempt, and a pid that it signals is never another
process's, since an unreaped child keeps its pid. The end of the socket means that the agent died: all is killed and the server
exits. The target decides what a rank does; this module imports neither ray nor, by itself, torch.
"""

import gc
import importlib.util
import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NoReturn

import msgspec

from chaosrun.cluster.attempts import CommandAttempt, RunningAttempt, kill_group
from chaosrun.cluster.command import Command
from chaosrun.cluster.messages import (
    Configure,
    RanksStarted,
    RanksStopped,
    Ready,
    ServerCommand,
    ServerEvent,
    ServerFailed,
    StartFailed,
    StartRanks,
    StopRanks,
    decode_command,
    encode,
    line,
)
from chaosrun.cluster.preloads import import_all
from chaosrun.cluster.standby import Standby, Target, fork_standby
from chaosrun.processes import become_subreaper, children, remove_shared_memory_leftovers, set_variables, shared_memory_entries
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import COPIES, WorkerOrder

TARGET = "chaosrun.protocol.worker:main"
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.nn.parallel",
    "accelerate",
    "accelerate.checkpointing",
    "accelerate.data_loader",
    "accelerate.optimizer",
    "accelerate.scheduler",
    "accelerate.utils",
    "safetensors.torch",
    "torch.utils.serialization.config",
    "chaosrun.observe.unsaved",
    "chaosrun.protocol.recorder",
    "chaosrun.protocol.script",
    "chaosrun.protocol.session",
)
WHERE_INSTALLED = ("datasets", "torchdata.stateful_dataloader")
"""Preloaded if installed: accelerate would import them in every worker at every start, and datasets takes 0.5 s to 1.5 s."""

# Forking standbys at once would take the CPU from the ranks just when they start.
REPLENISH_AFTER_S = 0.5


class ForkServer:
    def __init__(self, channel: socket.socket, target: Target, standbys: int, temporary: Path) -> None:
        self._channel = channel
        self._temporary = temporary
        self._target = target
        self._unread = b""
        self._attempt: RunningAttempt | None = None
        self._standbys: list[Standby] = []
        self._memory_of_leg, self._memory = "", dict[int, tuple[int, ...]]()
        """By rank, file descriptors of memory that outlives the rank."""
        self._wanted = standbys
        self._replenish_s = time.monotonic()
        self._poller = select.poll()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The kernel's SIGCHLD becomes a byte in a pipe: one poll waits for the agent and for deaths alike.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def send(self, event: ServerEvent) -> None:
        self._channel.sendall(line(event))

    def serve(self) -> None:
        """Carry out orders until the agent closes the socket or dies; then no process is left below this one."""
        try:
            self._serve()
        except (BrokenPipeError, ConnectionResetError):
            # The agent died between our reading and our writing: the same as the end of the socket.
            pass
        finally:
            self._kill_everything()

    def _serve(self) -> None:
        self._poller.register(self._channel, select.POLLIN)
        self._poller.register(self._woken, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in self._poller.poll(self._replenish_in_ms())}
            if not ready:
                # One at a time, so that a death or an order has to wait for at most one fork.
                self._add_standby()
            if self._woken in ready:
                with suppress(BlockingIOError):
                    while os.read(self._woken, 4096):
                        pass
            if ready - {self._channel.fileno()}:
                self._see_deaths()
            if self._channel.fileno() in ready:
                received = self._channel.recv(1 << 20)
                if not received:
                    return
                *lines, self._unread = (self._unread + received).split(b"\n")
                for command in lines:
                    self._obey(decode_command(command))

    def _replenish_in_ms(self) -> float | None:
        if len(self._standbys) >= self._wanted or self._replenish_s == math.inf:
            return None
        return max(0.0, self._replenish_s - time.monotonic()) * 1000

    def _obey(self, command: ServerCommand) -> None:
        match command:
            case StartRanks():
                self._start(command)
            case StopRanks():
                if self._attempt is not None and self._attempt.number == command.attempt:
                    self._attempt.kill_all()
                    self._see_deaths()
            case Configure():
                raise AssertionError("it is configured once")

    def _start(self, command: StartRanks) -> None:
        assert self._attempt is None, "the agent starts an attempt only after the last one has stopped"
        number, orders = command.attempt, command.orders
        leg = LegLayout(Path(orders[0].leg_path))
        about = {"number": number, "leg": leg, "shared_memory": shared_memory_entries()}
        commanded = bool(orders[0].command)
        attempt = self._attempt = CommandAttempt(command=Command(), **about) if commanded else RunningAttempt(**about)
        self._wanted = 1 if commanded else len(orders)
        self._replenish_s = math.inf
        listener: socket.socket | None = None
        port: int | None = None
        try:
            attempt.layout.path.mkdir(parents=True, exist_ok=True)
            # All standbys are forked before the listener is opened: none of them can hold the port.
            while len(self._standbys) < self._wanted:
                self._add_standby()
            if command.listen:
                master_addr = next(order.master_addr for order in orders if order.rank == 0)
                listener = _listen(master_addr)
                port = listener.getsockname()[1]
            told = [order if port is None else replace(order, master_port=port) for order in orders]
            if isinstance(attempt, CommandAttempt):
                if listener is not None:
                    listener.close()  # the command listens itself
                self._poller.register(attempt.command, select.POLLIN)
                attempt.launcher = self._start_process(attempt, attempt.command.begin(told), attempt.command.log, None)
            else:
                memory = self._memory_of(told)
                for order in told:
                    own = listener if order.rank == 0 else None
                    given = (attempt.layout.log(order.rank), own, memory[order.rank])
                    attempt.ranks[self._start_process(attempt, order, *given)] = order.rank
        except OSError as error:
            self.send(StartFailed(message=f"cannot start the ranks: {error}"))
            attempt.kill_all()
            self._see_deaths()
        else:
            self._replenish_s = time.monotonic() + REPLENISH_AFTER_S
            self.send(RanksStarted(pids={rank: pid for pid, rank in attempt.ranks.items()}, port=port))
        finally:
            if listener is not None:
                listener.close()

    def _memory_of(self, orders: Sequence[WorkerOrder]) -> dict[int, tuple[int, ...]]:
        """By rank, descriptors of the memory for copies of its checkpoints, and of the node's memory for the state that ranks
        share. The memory outlives the attempt, until another leg begins."""
        leg = orders[0].leg_path
        if self._memory_of_leg != leg:
            for descriptor in chain.from_iterable(self._memory.values()):
                os.close(descriptor)
            self._memory_of_leg, self._memory = leg, {}
        for order in orders:
            if order.rank not in self._memory:
                names = (f"chaosrun-rank-{order.rank}-{number}" for number in range(COPIES))
                self._memory[order.rank] = tuple(os.memfd_create(name, os.MFD_CLOEXEC) for name in names)
        shared = min(orders, key=lambda order: order.local_rank).rank
        return {order.rank: (*self._memory[order.rank], *self._memory[shared]) for order in orders}

    def _start_process(
        self,
        attempt: RunningAttempt,
        order: WorkerOrder,
        log: Path,
        listener: socket.socket | None,
        memory: tuple[int, ...] = (),
    ) -> int:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            standby = self._standbys.pop(0)
            attempt.live.add(standby.pid)
            # If the standby died while it waited, the pipe is broken: the OSError fails the start.
            standby.become(order, output, listener, memory)
            return standby.pid
        finally:
            os.close(output)

    def _add_standby(self) -> None:
        close = [
            self._channel.fileno(),
            self._woken,
            self._waker,
            *chain.from_iterable(self._memory.values()),
            *(standby.channel.fileno() for standby in self._standbys),
        ]
        self._standbys.append(fork_standby(self._target, close))

    def _see_deaths(self) -> None:
        """Kill the processes that dead ranks leave behind, and the other ranks when one died badly; then reap and report."""
        self._forget_dead_standbys()
        attempt = self._attempt
        if attempt is not None:
            attempt.see_deaths(self.send)
            if attempt.live:
                self._reap_orphans(attempt.live)
                return
        # No rank lives, so every other child is an orphan of a rank, reparented here because this is the subreaper.
        for pid in self._orphans():
            kill_group(pid)
        if self._reap_orphans(()) and attempt is not None:
            self._attempt = None
            if isinstance(attempt, CommandAttempt):
                self._poller.unregister(attempt.command)
                attempt.command.close()
            remove_shared_memory_leftovers(attempt.shared_memory)
            self._empty_temporary()
            self.send(RanksStopped(attempt=attempt.number, killed=tuple(sorted(attempt.killed))))

    def _forget_dead_standbys(self) -> None:
        """Drop standbys that were killed while they waited (for lack of memory, say); the next start replaces them."""
        for standby in [each for each in self._standbys if os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOHANG)]:
            standby.channel.close()
            self._standbys.remove(standby)

    def _orphans(self) -> list[int]:
        standbys = {standby.pid for standby in self._standbys}
        return [pid for pid in children(os.getpid()) if pid not in standbys]

    def _reap_orphans(self, ranks: Collection[int]) -> bool:
        """Reap dead children other than `ranks` and standbys; True when there is none left, dead or alive."""
        for pid in self._orphans():
            if pid not in ranks:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        return not self._orphans()

    def _kill_everything(self) -> None:
        for pid in self._attempt.live if self._attempt is not None else ():
            kill_group(pid)
        with suppress(ChildProcessError):
            while True:
                for pid in children(os.getpid()):
                    kill_group(pid)
                os.waitid(os.P_ALL, 0, os.WEXITED)
        if self._attempt is not None:
            remove_shared_memory_leftovers(self._attempt.shared_memory)

    def _empty_temporary(self) -> None:
        """Empty the ranks' TMPDIR: killed ranks leave the sockets of loader workers there, each in its own directory."""
        if any(os.scandir(self._temporary)):
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(mode=0o700, exist_ok=True)


def _listen(master_addr: str) -> socket.socket:
    """A listening socket on a free port, which rank 0 takes over, so that nobody else can take the port before it is used."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Inherited by accepted connections: in TIME_WAIT they would keep the port taken after rank 0 is gone.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((master_addr if master_addr.startswith("127.") else "0.0.0.0", 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def main(arguments: list[str]) -> int:
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    # Ray runs its workers at niceness 15, which ranks would inherit; undoing it needs a privilege that may be missing.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    # It also starts them with SIGINT blocked; a mask survives exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # `-m` put the working directory first; a training script must not find modules there that it would not find alone.
    sys.path.pop(0)
    if len(arguments) > 1:
        first = arguments[1].encode()
    else:
        with channel.makefile("rb", buffering=0) as lines:
            first = lines.readline()
    if not first:
        return 0
    configure = decode_command(first)
    assert isinstance(configure, Configure)
    try:
        target = _warm_up(configure, channel)
        if target is None:
            return 1
        server = ForkServer(channel, target, configure.standbys, Path(configure.temporary))
        server.send(Ready(pid=os.getpid(), left_out=configure.left_out))
        server.serve()
    except BrokenPipeError:
        pass  # the agent died meanwhile
    finally:
        shutil.rmtree(configure.temporary, ignore_errors=True)
    return 0


def _warm_up(configure: Configure, channel: socket.socket) -> Target | None:
    """Import everything and get ready to fork. None if that fails, which is reported to the agent."""
    environment = dict(os.environ)
    # Imports make next to no garbage, and collections would take a quarter of the time.
    gc.disable()
    try:
        asked = configure.preload
        there = [name for name in asked if name not in WHERE_INSTALLED or importlib.util.find_spec(name.partition(".")[0])]
        usual, own = ([name for name in there if (name in (*PRELOAD, *WHERE_INSTALLED)) is ours] for ours in (True, False))
        found = import_all(usual, own, configure.target, without={each.module for each in configure.left_out})
    except Exception as error:
        # Any error of a user's module on import is reported as the answer.
        channel.sendall(line(ServerFailed(message=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())))
        return None
    if found.unsafe:
        _begin_again(msgspec.structs.replace(configure, left_out=(*configure.left_out, *found.unsafe)), channel, environment)
    if found.unfit is not None:
        channel.sendall(line(ServerFailed(message=found.unfit, traceback=None)))
        return None
    set_variables(configure.env)
    # Only now: on import, torch places its compiler's cache, which has to last, in the default TMPDIR.
    os.environ["TMPDIR"] = configure.temporary
    tempfile.tempdir = None
    become_subreaper()
    _keep_operators()
    if held := sys.modules.get("chaosrun.observe.held"):
        held.know_files()
    gc.collect()
    # No collection looks at anything imported so far again: its pages stay shared with every rank.
    gc.freeze()
    return found.target


def _keep_operators() -> None:
    """Keep ranks from unregistering torch's operators one by one as they end: the process ends anyway, and it would take 50 ms
    of CPU time."""
    library = sys.modules.get("torch.library")
    for registered in list(weakref.finalize._registry):  # pyright: ignore[reportAttributeAccessIssue]
        alive = registered.peek()
        if library is not None and alive is not None and alive[1] is library._del_library:
            registered.atexit = False


def _begin_again(configure: Configure, channel: socket.socket, environment: Mapping[str, str]) -> NoReturn:
    """Execute this program anew: that is the only way to end a thread that a module has started."""
    sys.stdout.flush()
    sys.stderr.flush()
    channel.set_inheritable(True)
    program = [sys.executable, "-m", "chaosrun.cluster.forkserver", str(channel.fileno())]
    os.execve(sys.executable, [*program, encode(configure).decode()], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
