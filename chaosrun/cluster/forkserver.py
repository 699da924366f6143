"""The warm fork server of a node: imports torch once, then has one fresh process per rank and attempt in milliseconds.

`python -m chaosrun.cluster.forkserver FD`, FD being an inherited socket to the node's agent; `cluster.messages` has what is
said on it.

It stays single-threaded and away from CUDA, or a fork would not be safe. It is the subreaper of everything below it and an
attempt is over only when it has no child left: nothing can outlive an attempt, and no pid it signals can be anybody else's, for
an unreaped child keeps its pid. The end of the socket means that the agent died: all is killed and the server exits. What a
rank does is the target's business; this module imports neither ray nor, by itself, torch.
"""

import gc
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
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from chaosrun.cluster.messages import (
    Configure,
    Exited,
    Failed,
    Ready,
    ServerCommand,
    ServerEvent,
    Start,
    Started,
    StartFailed,
    Stop,
    Stopped,
    decode_command,
    line,
)
from chaosrun.cluster.preloads import import_all
from chaosrun.cluster.standby import Standby, Target, fork_standby
from chaosrun.faults.kind import LEFT_ON_NOTICE, PREEMPTED_EXIT_CODE
from chaosrun.processes import become_subreaper, children, remove_shared_memory_leftovers, shared_memory_entries
from chaosrun.records.layout import AttemptLayout, LegLayout
from chaosrun.records.markers import read_end
from chaosrun.records.order import WorkerOrder

TARGET = "chaosrun.protocol.worker:main"
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "accelerate",
    "accelerate.checkpointing",
    "accelerate.data_loader",
    "accelerate.optimizer",
    "accelerate.scheduler",
    "accelerate.utils",
    "safetensors.torch",
    "chaosrun.protocol.recorder",
    "chaosrun.protocol.session",
)

# Forking standbys at once would take the CPU from the ranks just when they start.
REPLENISH_AFTER_S = 0.5


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    number: int
    layout: AttemptLayout
    ranks: dict[int, int] = field(default_factory=dict)
    """pid → rank, of all ranks ever started here."""
    live: set[int] = field(default_factory=set)
    """pids of ranks whose death has not been seen."""
    killed: set[int] = field(default_factory=set)
    """Ranks that this server killed."""
    shared_memory: frozenset[str]


class ForkServer:
    def __init__(self, channel: socket.socket, target: Target, standbys: int, temporary: Path) -> None:
        self._channel = channel
        self._temporary = temporary
        self._target = target
        self._unread = b""
        self._attempt: RunningAttempt | None = None
        self._standbys: list[Standby] = []
        self._wanted = standbys
        self._replenish_s = time.monotonic()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The kernel's SIGCHLD becomes a byte in a pipe: one poll waits for the agent and for deaths alike.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def send(self, event: ServerEvent) -> None:
        self._channel.sendall(line(event))

    def serve(self) -> None:
        """Obey until the agent closes the socket or dies; nothing below this process is left then."""
        try:
            self._serve()
        except (BrokenPipeError, ConnectionResetError):
            # The agent died between our reading and our writing: the same as the end of the socket.
            pass
        finally:
            self._kill_everything()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(self._replenish_in_ms())}
            if not ready:
                # One at a time, so that a death or an order waits for one fork at most.
                self._add_standby()
            if self._woken in ready:
                with suppress(BlockingIOError):
                    while os.read(self._woken, 4096):
                        pass
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
            case Start():
                self._start(command)
            case Stop():
                if self._attempt is not None and self._attempt.number == command.attempt:
                    self._kill_ranks(self._attempt)
                    self._see_deaths()
            case Configure():
                raise AssertionError("it is configured once")

    # Starting

    def _start(self, command: Start) -> None:
        assert self._attempt is None, "the agent starts an attempt only after the last one has stopped"
        number, orders = command.attempt, command.orders
        layout = LegLayout(Path(orders[0].leg_path)).attempt(number)
        attempt = RunningAttempt(number=number, layout=layout, shared_memory=shared_memory_entries())
        self._attempt = attempt
        self._wanted = len(orders)
        self._replenish_s = math.inf
        listener: socket.socket | None = None
        port: int | None = None
        try:
            # All before the listener is opened: none of them can hold the port.
            while len(self._standbys) < len(orders):
                self._add_standby()
            if command.listen:
                master_addr = next(order.master_addr for order in orders if order.rank == 0)
                listener = _listen(master_addr)
                port = listener.getsockname()[1]
            for order in orders:
                told = order if port is None else replace(order, master_port=port)
                self._start_rank(attempt, told, listener if order.rank == 0 else None)
        except OSError as error:
            self.send(StartFailed(attempt=number, message=f"cannot start the ranks: {error}"))
            self._kill_ranks(attempt)
            self._see_deaths()
        else:
            self._replenish_s = time.monotonic() + REPLENISH_AFTER_S
            self.send(Started(attempt=number, pids={rank: pid for pid, rank in attempt.ranks.items()}, port=port))
        finally:
            if listener is not None:
                listener.close()

    def _start_rank(self, attempt: RunningAttempt, order: WorkerOrder, listener: socket.socket | None) -> None:
        attempt.layout.path.mkdir(parents=True, exist_ok=True)
        output = os.open(attempt.layout.log(order.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            standby = self._standbys.pop(0)
            attempt.ranks[standby.pid] = order.rank
            attempt.live.add(standby.pid)
            # One that died while it waited breaks the pipe here: an OSError that fails the start.
            standby.become(order, output, listener)
        finally:
            os.close(output)

    def _add_standby(self) -> None:
        close = [self._channel.fileno(), self._woken, self._waker, *(standby.channel.fileno() for standby in self._standbys)]
        self._standbys.append(fork_standby(self._target, close))

    # Deaths

    def _see_deaths(self) -> None:
        """Kill what dead ranks leave behind, and the other ranks when one died badly; then reap and tell."""
        self._forget_dead_standbys()
        attempt = self._attempt
        if attempt is not None:
            self._see_dead_ranks(attempt)
            if attempt.live:
                self._reap_orphans(attempt.live)
                return
        # No rank lives, so every other child is an orphan of one, come here because this is the subreaper.
        for pid in self._orphans():
            _kill_group(pid)
        if self._reap_orphans(()) and attempt is not None:
            self._attempt = None
            remove_shared_memory_leftovers(attempt.shared_memory)
            self._empty_temporary()
            self.send(Stopped(attempt=attempt.number, killed=tuple(sorted(attempt.killed))))

    def _see_dead_ranks(self, attempt: RunningAttempt) -> None:
        # Seen before they are reaped: a zombie keeps its pid and its process group from being given out again.
        looked = (os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in attempt.live)
        # Signals first: of ranks that died at once, the one that exited with an error often only lost its peer.
        dead = sorted((seen for seen in looked if seen is not None), key=lambda seen: seen.si_code == os.CLD_EXITED)
        died_s = time.time()
        completed: dict[int, bool] = {}
        in_order: list[bool] = []
        for seen in dead:
            attempt.live.remove(seen.si_pid)
            _kill_group(seen.si_pid)
            end = read_end(attempt.layout, attempt.ranks[seen.si_pid])
            exit_code = seen.si_status if seen.si_code == os.CLD_EXITED else None
            completed[seen.si_pid] = exit_code == 0 and end is not None and end.completed
            # On notice all ranks leave after the same step: the others are on their way.
            on_notice = exit_code == PREEMPTED_EXIT_CODE and end is not None and end.status == LEFT_ON_NOTICE
            in_order.append(completed[seen.si_pid] or on_notice)
        if not all(in_order):
            self._kill_ranks(attempt)
        for seen in dead:
            os.waitid(os.P_PID, seen.si_pid, os.WEXITED)
            exited = seen.si_code == os.CLD_EXITED
            rank = attempt.ranks[seen.si_pid]
            how = {"exit_code": seen.si_status} if exited else {"signal": seen.si_status}
            told = {"completed": completed[seen.si_pid], "killed": rank in attempt.killed, "died_s": died_s}
            self.send(Exited(attempt=attempt.number, rank=rank, pid=seen.si_pid, **how, **told))

    def _kill_ranks(self, attempt: RunningAttempt) -> None:
        for pid in attempt.live:
            attempt.killed.add(attempt.ranks[pid])
            _kill_group(pid)

    def _forget_dead_standbys(self) -> None:
        """A standby that something killed while it waited, for want of memory perhaps, is replaced at the next start."""
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
            _kill_group(pid)
        with suppress(ChildProcessError):
            while True:
                for pid in children(os.getpid()):
                    _kill_group(pid)
                os.waitid(os.P_ALL, 0, os.WEXITED)
        if self._attempt is not None:
            remove_shared_memory_leftovers(self._attempt.shared_memory)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _empty_temporary(self) -> None:
        """A killed rank leaves the sockets of its loader workers behind, each in a directory of its own."""
        if any(os.scandir(self._temporary)):
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(mode=0o700, exist_ok=True)


def _listen(master_addr: str) -> socket.socket:
    """A listening socket on a free port, held from here on: nobody can take the port between choosing and using it."""
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


def _kill_group(pid: int) -> None:
    """SIGKILL a child that has not been reaped, and its process group."""
    with suppress(ProcessLookupError):
        # Not yet a group of its own when it has only just been forked.
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    # Ray makes its workers nice (15), which training would inherit; taking that back needs a privilege that we may lack.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    # It also starts them with SIGINT blocked; a mask survives exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # `-m` put the working directory first; a training script must not find modules there that it would not find alone.
    sys.path.pop(0)
    with channel.makefile("rb", buffering=0) as lines:
        first = lines.readline()
    if not first:
        return 0
    configure = decode_command(first)
    assert isinstance(configure, Configure)
    target = _warm_up(configure, channel)
    if target is None:
        return 1
    server = ForkServer(channel, target, configure.standbys, Path(configure.temporary))
    server.send(Ready(pid=os.getpid(), import_s=time.monotonic() - began))
    server.serve()
    return 0


def _warm_up(configure: Configure, channel: socket.socket) -> Target | None:
    """Import everything and get ready to fork. None, which the agent is told, when that cannot be."""
    try:
        usual, own = ([name for name in configure.preload if (name in PRELOAD) is ours] for ours in (True, False))
        target, unsafe = import_all(usual, own, configure.target)
        trace = None
    except Exception as error:
        # Whatever a user's module raises while it is imported is an answer, not an accident.
        target, unsafe, trace = None, f"{type(error).__name__}: {error}", traceback.format_exc()
    if unsafe is not None:
        channel.sendall(line(Failed(message=unsafe, traceback=trace)))
        return None
    for name, value in configure.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Only now: torch puts its compiler's cache, which is to last, into the usual place while it is imported.
    os.environ["TMPDIR"] = configure.temporary
    tempfile.tempdir = None
    become_subreaper()
    gc.collect()
    # Nothing imported so far is ever looked at by a collection again: its pages stay shared with every rank.
    gc.freeze()
    gc.disable()
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
