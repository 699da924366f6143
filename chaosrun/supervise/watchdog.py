"""Kills a process that supervises a drill when it cannot end by itself: Ray's head (gcs_server), or the only node (raylet) of a
private Ray, is gone, or its time is over.

Without its head Ray blocks for a minute, in C++ and perhaps with the GIL held, and then ends the process. So the parent process
watches it and kills it at once when the head dies, or when it should have ended and Ray holds it up. What it had done is in the
run's files. A command that drills in its own process (a suite) is run in a child, to be watched (`watched`).
"""

import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from chaosrun.cluster import joining
from chaosrun.errors import RecoveryError, ResourcesError
from chaosrun.processes import (
    EXIT_STATUS_FIELD,
    ProcessIdentity,
    child_called,
    children,
    die_with_parent,
    identify,
    send_signal,
    stat_fields,
    state_of,
    wait_gone,
)

LOOK_EVERY_S = 0.2
ANSWER_S = 1.0
"""For a head on another machine to take a connection."""
SILENT_LOOKS = 3
"""So many looks in a row without an answer: then a joined Ray's head is lost."""
CLEAN_UP_S = 10.0
"""How long the cleanup process of a private Ray may take once its driver is gone."""
LIMITS = (
    (resource.RLIMIT_NOFILE, 256, "n"),
    (resource.RLIMIT_FSIZE, 1 << 30, "f"),
    (resource.RLIMIT_NPROC, 1024, "u"),
    (resource.RLIMIT_AS, 8 << 30, "v"),
)
"""Limits of a process, which of them Ray needs about, and ulimit's option for it."""
AGAIN = "the same command continues with --resume latest, where it takes that"


class Watchdog:
    """Watches one supervising process; use as a context manager while listening to that process."""

    def __init__(self, pid: int, limit_s: float | None = None) -> None:
        """`limit_s`: when the process must have ended, by CLOCK_MONOTONIC, which nobody sets."""
        self.lost: str | None = None
        """In words, how Ray's head or only node was lost, for which the process was killed."""
        self.overdue = False
        """The process was killed because its time was over."""
        self.limit_s = limit_s
        self.head: ProcessIdentity | None = None
        """The head's process of a private Ray, once it has been found."""
        self.node: ProcessIdentity | None = None
        """Likewise, that of its only node."""
        self._pid = pid
        self._address: tuple[str, int] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaosrun-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def joined(self, address: str) -> None:
        """It joined an existing Ray, whose head listens at this address."""
        host, _, port = address.rpartition(":")
        self._address = (host.strip("[]"), int(port))

    def _watch(self) -> None:
        supervisor = identify(self._pid)
        while supervisor is not None and not self._over.wait(LOOK_EVERY_S):
            if self.limit_s is not None and time.monotonic() > self.limit_s:
                self.overdue = True
                return _end(supervisor)
            self.head = self.head or child_called("gcs_server", self._pid)
            self.node = self.node or child_called("raylet", self._pid)
            for what, program, process in (("head", "gcs_server", self.head), ("node", "raylet", self.node)):
                if process is None or wait_gone([process], timeout_s=LOOK_EVERY_S):
                    continue
                self._over.wait(LOOK_EVERY_S)
                if state_of(process) == "Z":
                    if _was_killed(supervisor):
                        return  # first, and Ray's processes end with it: its parent tells how
                    self.lost = f"Ray's {what} ({program}, process {process.pid}) has died"
                    return _end(supervisor)
                if process is self.head:
                    return  # reaped by a parent that ended it in order, last of its Ray
            if self._address is not None and not self._answers(self._address):
                host, port = self._address
                self.lost = f"Ray's head at {host}:{port} has died: nobody listens there any more"
                return _end(supervisor)

    def _answers(self, address: tuple[str, int]) -> bool:
        """Whether one of several attempts to connect succeeds; also True once watching is over."""
        for _ in range(SILENT_LOOKS):
            try:
                socket.create_connection(address, timeout=ANSWER_S).close()
            except OSError:
                self._over.wait(ANSWER_S / 2)
            else:
                self._over.wait(ANSWER_S)
                return True
        return self._over.is_set()


def _was_killed(supervisor: ProcessIdentity) -> bool:
    """Whether it has died of a signal, other than an abort, by which Ray ends a process that has lost it."""
    fields = stat_fields(supervisor.pid)
    if fields is None or state_of(supervisor) is None:
        return True
    return os.WTERMSIG(int(fields[EXIT_STATUS_FIELD])) not in (0, signal.SIGABRT)


def _end(supervisor: ProcessIdentity) -> None:
    """Kill the supervisor and wait for the processes below it: Ray's, and the one that cleans up after them."""
    below = [identity for child in children(supervisor.pid) if (identity := identify(child))]
    send_signal(supervisor, signal.SIGKILL)
    wait_gone(below, timeout_s=CLEAN_UP_S)


def watched(command: Callable[[], int]) -> int:
    """The exit code of `command`, which runs in a child of this process; the child returns from here as well. Signals are
    passed on. Raises ResourcesError when Ray has died, RecoveryError when the child was killed."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCHLD}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        numbers.add(signal.SIGHUP)
    sys.stdout.flush()
    sys.stderr.flush()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    starter = os.getpid()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        die_with_parent(starter)
        os.close(reading)
        joining.on_joined.append(lambda head: os.write(writing, head.encode() + b"\n"))
        os.setpgid(0, 0)  # a terminal's signals are passed on from here, once
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        return command()
    os.close(writing)
    with Watchdog(child) as watchdog:
        threading.Thread(target=_hear, args=(reading, watchdog), name="chaosrun-joined", daemon=True).start()
        code = os.waitstatus_to_exitcode(_ended(child, numbers))
    signal.pthread_sigmask(signal.SIG_SETMASK, former)
    if watchdog.lost is not None:
        raise ResourcesError(f"{watchdog.lost}, and no planned fault was the cause", hint=f"{suspicion()} {AGAIN}")
    if code < 0:
        raise RecoveryError(
            f"the process that carried out the drills (pid {child}) died of {signal.Signals(-code).name}", hint=AGAIN
        )
    return code


def suspicion() -> str:
    """What may have ended a process of Ray's, as a question: a low limit of this process, which Ray's have as well."""
    for number, needed, option in LIMITS:
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY and limit < needed:
            return f"is `ulimit -{option}` too low here?"
    return "was memory short?"


def _hear(reading: int, watchdog: Watchdog) -> None:
    """Hear from the child which Ray it joins, until it has ended."""
    while told := os.read(reading, 1024):
        watchdog.joined(told.decode().split()[-1])
    os.close(reading)


def _ended(child: int, numbers: set[signal.Signals]) -> int:
    """Its wait status, once it has ended."""
    while True:
        number = signal.sigwaitinfo(numbers).si_signo
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif number == signal.SIGTSTP:
            os.kill(child, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(child, signal.SIGCONT)
        else:
            os.kill(child, number)
