"""A standby: a process that the fork server has forked in advance, waiting for the order that makes it a rank.

Owns everything between the fork and the target: session, signals, descriptors, death with the parent, the exit code. A standby
has run only this module, so a rank made of it is as fresh as one that is forked on demand, and some milliseconds faster.
Knows nothing of attempts.
"""

import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from chaosrun.cluster.messages import decode_order, encode
from chaosrun.processes import answer_with_stacks, die_with_parent, leave_at_once
from chaosrun.records.order import COPIES, WorkerOrder

Target = Callable[[WorkerOrder, int | None], int]
"""What a rank runs: (order, listening socket of rank 0 or None) → exit code."""

HEADER_BYTES = 8
MOST_DESCRIPTORS = 2 + 2 * COPIES
"""The output, a listener, and descriptors of memory: this rank's, and those for what ranks share."""


@dataclass(frozen=True, slots=True)
class Standby:
    """The server's handle of a waiting process."""

    pid: int
    channel: socket.socket

    def become(self, order: WorkerOrder, output: int, listener: socket.socket | None, memory: tuple[int, ...] = ()) -> None:
        """Make it a rank that writes to the file `output` and keeps copies in `memory`: file descriptors, which the order
        then names. Raises BrokenPipeError or ConnectionResetError if it is dead."""
        body = encode(replace(order, memory=memory))
        descriptors = [output, *memory, *([] if listener is None else [listener.fileno()])]
        socket.send_fds(self.channel, [len(body).to_bytes(HEADER_BYTES)], descriptors)
        self.channel.sendall(body)
        self.channel.close()


def fork_standby(target: Target, close: Iterable[int]) -> Standby:
    """Fork a process that waits for `Standby.become` and then runs `target`; `close`: descriptors that it must not hold."""
    server_pid = os.getpid()
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        _live(target, theirs, (*close, ours.fileno()), server_pid)
    theirs.close()
    return Standby(pid, ours)


def _live(target: Target, channel: socket.socket, close: Iterable[int], server_pid: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        die_with_parent(server_pid)
        _reset_signals()
        for descriptor in close:
            os.close(descriptor)
        faulthandler.enable()
        gc.enable()
        _descendants_die_with_rank()
        order, output, listen_fd = _wait_for_order(channel)
        channel.close()
        os.dup2(output, 1)
        os.dup2(output, 2)
        # The log's own descriptor, kept open: some scripts redirect 1 and 2.
        answer_with_stacks(output)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
        code = target(order, listen_fd)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        # The outermost frame of the process: errors can only go to the log.
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # whatever the script has put there: None, or something that only writes
                stream.flush()
        leave_at_once(code)


def _wait_for_order(channel: socket.socket) -> tuple[WorkerOrder, int, int | None]:
    header, descriptors, _, _ = socket.recv_fds(channel, HEADER_BYTES, MOST_DESCRIPTORS)
    if not header:
        # Never needed: the server is ending.
        os._exit(0)
    size = int.from_bytes(header)
    with channel.makefile("rb") as file:
        body = file.read(size)
    if len(body) < size:
        os._exit(0)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    order, (output, *others) = decode_order(body), descriptors
    held = len(order.memory)
    memory, listen = others[:held], others[held:]
    return replace(order, memory=tuple(memory)), output, listen[0] if listen else None


def _reset_signals() -> None:
    """Remove the server's signal handlers and masks, as in a program that a shell starts."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _descendants_die_with_rank() -> None:
    """Make processes that a rank's main thread forks (loader workers) die with the rank, even if all processes of the node are
    killed.

    Only those of the main thread: PR_SET_PDEATHSIG follows the forking thread, and another thread may end long before the rank.
    """
    main_thread = threading.get_ident()
    parent_pid = os.getpid()

    def in_child() -> None:
        nonlocal parent_pid
        forked_by, parent_pid = parent_pid, os.getpid()
        if threading.get_ident() == main_thread:
            die_with_parent(forked_by)

    os.register_at_fork(after_in_child=in_child)
