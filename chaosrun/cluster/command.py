"""A command that starts the ranks of this node: torchrun, accelerate launch, python -m, or the team's own launcher.

Owns the command's inputs (arguments, environment, a hook that its interpreters load), the socket on which a process announces
that it begins to train, and how the end of such a rank is detected. A rank is not a child of the fork server: its pidfd shows
its end at once. How it ended is in /proc until its parent has collected the exit status, and in the pidfd afterwards (Linux
6.15). Knows neither Ray nor the supervisor.
"""

import faulthandler
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from chaosrun.cluster.messages import Announced, LauncherFailed
from chaosrun.faults.kinds import KINDS
from chaosrun.processes import (
    EXIT_STATUS_FIELD,
    MARK_VARIABLE,
    PACKAGE_ROOT,
    START_FIELD,
    ProcessIdentity,
    die_with_parent,
    identify,
    kill_marked,
    outlive_parent,
    peer,
    stat_fields,
)
from chaosrun.records.announcements import VARIABLE, Announcement, LauncherCode, Startup, StartupAnswer, decode_announcement
from chaosrun.records.codec import encode
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder

TARGET = "chaosrun.cluster.command:main"
HOOK = PACKAGE_ROOT / "chaosrun" / "protocol" / "startup"
"""First on the path of all interpreters below a command: Python imports the sitecustomize in it."""
NOT_FOUND_EXIT_CODE = 127
ANNOUNCEMENT_LIMIT_S = 5.0
SAID_BYTES, SAID_LINES = 8192, 12

_INFO = struct.Struct("QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
"""PIDFD_GET_INFO, see linux/pidfd.h."""


def main(order: WorkerOrder, _listener: int | None) -> int:
    """Run the command in a freshly forked process, whose output goes to its log already; none of its processes outlives the
    fork server.

    The fork server may be killed, together with the agent of a shared Ray. Its own children die with it, but processes that the
    command has started would train on during the next attempt.
    """
    os.chdir(order.cwd)
    mine, server = os.getpid(), os.pidfd_open(os.getppid())
    outlive_parent()
    command = os.fork()
    if command == 0:
        die_with_parent(mine)
        _become(filled_in(order), environment(order, os.environ))
    poller = select.poll()
    for descriptor in (ended := os.pidfd_open(command), server):
        poller.register(descriptor, select.POLLIN)
    if ended not in dict(poller.poll()):
        kill_marked(os.environ[MARK_VARIABLE])
    _, status = os.waitpid(command, 0)
    if os.WIFSIGNALED(status):
        faulthandler.disable()
        os.kill(mine, os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _become(arguments: list[str], variables: Mapping[str, str]) -> NoReturn:
    try:
        os.execvpe(arguments[0], arguments, variables)
    except OSError as error:
        print(f"cannot start {arguments[0]}: {error.strerror}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(NOT_FOUND_EXIT_CODE)


def filled_in(order: WorkerOrder) -> list[str]:
    """The command and its arguments, with placeholders replaced."""
    known = {name: getattr(order, name) for name in ("node_rank", "nodes", "master_addr", "master_port")}
    known |= {"workers_per_node": order.local_world_size, "output": LegLayout(Path(order.leg_path)).output}
    found: list[str] = []
    for argument in (*order.command, *order.args):
        for name, value in known.items():
            argument = argument.replace(f"{{{name}}}", str(value))
        found.append(argument)
    return found


def environment(order: WorkerOrder, inherited: Mapping[str, str]) -> dict[str, str]:
    """The command's environment: the job's variables, the leg's, devices, its own rendezvous, and chaosrun's hook."""
    path = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if path[-1:] == [str(PACKAGE_ROOT)]:
        # The entry is for the fork server; it would hide packages of the command's own interpreter.
        del path[-1]
    same = ("seed", "deterministic", "threads", "world_size")
    startup = Startup(socket=order.announcements, **{name: getattr(order, name) for name in same})
    told: dict[str, object] = {
        "CHAOSRUN_LEG": order.leg,
        "CHAOSRUN_ATTEMPT": order.attempt,
        "CHAOSRUN_OUTPUT": LegLayout(Path(order.leg_path)).output,
        VARIABLE: encode(startup).decode(),
        "PYTHONPATH": os.pathsep.join([str(HOOK), *path]),
        "OMP_NUM_THREADS": order.threads,
        "MKL_NUM_THREADS": order.threads,
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": order.master_port,
        # The default of torchrun's --master-port, which otherwise is 29500 for every job.
        "PET_MASTER_PORT": order.master_port,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, order.gpus)),
        # Launchers installed next to this Python are found even if its environment is not active in the shell.
        "PATH": os.pathsep.join([inherited.get("PATH", os.defpath), os.path.dirname(sys.executable)]),
    }
    if not order.gpus:
        told["ACCELERATE_USE_CPU"] = "true"
    known = {**inherited, **{name: str(value) for name, value in told.items()}, **order.resume_env}
    return {name: LegLayout(Path(order.leg_path)).filled_in(value) for name, value in known.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRank:
    """A rank that has ended; both exit code and signal are None if the kernel does not say how."""

    rank: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, rank: int, seen: os.waitid_result) -> "EndedRank":
        """From the status of a child."""
        how = {"exit_code" if seen.si_code == os.CLD_EXITED else "signal": seen.si_status}
        return cls(rank=rank, pid=seen.si_pid, **how)

    @property
    def is_unknown(self) -> bool:
        return self.exit_code is None and self.signal is None


class Command:
    """The command of one node in one attempt, and the ranks that have announced themselves."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._name = f"chaosrun-{uuid.uuid4().hex}"
        self._socket.bind(f"\0{self._name}")
        self._socket.listen(1024)
        self._news = select.epoll()
        self._news.register(self._socket, select.EPOLLIN)
        self._orders: dict[int, WorkerOrder] = {}
        self._live: dict[int, tuple[int, ProcessIdentity]] = {}
        """By pidfd, live ranks and their processes."""
        self._announced: set[int] = set()
        self.completed: set[int] = set()
        """Ranks that have completed the training."""

    def begin(self, orders: Sequence[WorkerOrder]) -> WorkerOrder:
        """The order that starts the command; `orders`: those of the node's ranks."""
        self._orders = {order.rank: order for order in orders}
        self._order = replace(orders[0], announcements=self._name)
        return self._order

    @property
    def log(self) -> Path:
        return LegLayout(Path(self._order.leg_path)).attempt(self._order.attempt).launcher_log(self._order.node_rank)

    @property
    def has_completed(self) -> bool:
        """Whether all ranks of the node have completed the training."""
        return self.completed == self._orders.keys()

    def fileno(self) -> int:
        """A descriptor that is readable when `look` has something to report."""
        return self._news.fileno()

    def look(self) -> Iterator[Announced | LauncherFailed | EndedRank]:
        """What has happened; deaths first."""
        ready = [descriptor for descriptor, _ in self._news.poll(0)]
        for pidfd in ready:
            if pidfd in self._live:
                rank, process = self._live.pop(pidfd)
                code = _exit_code(process, pidfd)
                os.close(pidfd)
                how = {} if code is None else {"exit_code": code} if code >= 0 else {"signal": -code}
                yield EndedRank(rank=rank, pid=process.pid, **how)
        if self._socket.fileno() in ready and (answered := self._take_announcement()) is not None:
            yield answered

    def kill_ranks(self) -> None:
        """SIGKILL the live ranks that have announced themselves."""
        for pidfd in self._live:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _take_announcement(self) -> Announced | LauncherFailed | None:
        """Answer a process that announces that it begins to train. None: it is gone, or belongs to another user."""
        connection, _ = self._socket.accept()
        with connection, suppress(OSError, ValueError):
            connection.settimeout(ANNOUNCEMENT_LIMIT_S)
            pid, user = peer(connection)
            if user != os.getuid():
                return None
            with connection.makefile("rb") as lines:
                announcement = decode_announcement(lines.readline())
            pidfd = os.pidfd_open(pid)
            # The process waits for the answer, so it is alive, and the pid is not another's.
            found = identify(pid)
            refused = self._refusal(announcement)
            if found is None or refused is not None:
                os.close(pidfd)
                if refused is not None:
                    _answer(connection, StartupAnswer(refused=refused.code))
                return refused
            self._live[pidfd] = announcement.rank, found
            self._news.register(pidfd, select.EPOLLIN)
            self._announced.add(announcement.rank)
            _answer(connection, StartupAnswer(order=self._orders[announcement.rank]))
            return Announced(attempt=self._order.attempt, rank=announcement.rank, pid=pid, start_ticks=found.start_ticks)
        return None

    def _refusal(self, announcement: Announcement) -> LauncherFailed | None:
        order = self._orders.get(announcement.rank)
        notices = any(KINDS[fault["kind"]].notice for fault in order.faults) if order else False
        why: tuple[tuple[LauncherCode, bool], ...] = (
            ("other_world_size", announcement.world_size != self._order.world_size),
            ("other_node", order is None),
            ("launcher_restarts", announcement.rank in self._announced or announcement.restarts > 0),
            ("signals_ignored", notices and announcement.ignores_sigterm),
        )
        return next((self.failed(code, announcement=announcement) for code, holds in why if holds), None)

    def failed(
        self, code: LauncherCode, *, announcement: Announcement | None = None, ended: EndedRank | None = None
    ) -> LauncherFailed:
        """The event for the supervisor, with the last lines of the command's output."""
        return LauncherFailed(
            attempt=self._order.attempt,
            node_rank=self._order.node_rank,
            code=code,
            rank=announcement and announcement.rank,
            seen=announcement and announcement.world_size,
            announced=len(self._announced),
            exit_code=ended and ended.exit_code,
            signal=ended and ended.signal,
            said=last_lines(self.log),
        )

    def close(self) -> None:
        """Release everything; the attempt is over."""
        self._news.close()
        self._socket.close()
        for pidfd in self._live:
            os.close(pidfd)
        self._live.clear()


def last_lines(log: Path) -> str:
    """The last lines that a command printed, without torchrun's report of failed ranks."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - SAID_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    account = next((number for number, line in enumerate(lines) if "torch/distributed/elastic/" in line), 0)
    lines = lines[:account] or lines
    return "\n".join([line for line in lines if line.strip()][-SAID_LINES:])


def _answer(connection: socket.socket, answer: StartupAnswer) -> None:
    connection.sendall(encode(answer) + b"\n")


def _exit_code(process: ProcessIdentity, pidfd: int) -> int | None:
    """Exit code of an ended process that is not our child; -N: signal N; None if unknown."""
    fields = stat_fields(process.pid)
    if fields is not None and fields[0] == b"Z" and int(fields[START_FIELD]) == process.start_ticks:
        return os.waitstatus_to_exitcode(int(fields[EXIT_STATUS_FIELD]))
    info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    with suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, info)
        mask, *_, status = _INFO.unpack(info)
        return os.waitstatus_to_exitcode(status) if mask & _INFO_EXIT else None
    return None
