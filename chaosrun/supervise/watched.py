"""Runs a command that drills in its own process (a suite) in a watched child: when Ray's head dies, Ray ends a process after a
minute without a message. The watchdog does so at once, and the command can report what happened.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

from chaosrun.cluster import joining
from chaosrun.errors import RecoveryError, ResourcesError
from chaosrun.processes import die_with_parent
from chaosrun.supervise.watchdog import Watchdog

AGAIN = "the same command continues with --resume latest, where it takes that"


def watched(command: Callable[[], int]) -> int:
    """The exit code of `command`, which runs in a child of this process; the child returns from here as well. Signals are
    passed on. Raises ResourcesError when Ray's head has died, RecoveryError when the child was killed."""
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
        raise ResourcesError(f"{watchdog.lost}, and no planned fault was the cause", hint=f"was memory short? {AGAIN}")
    if code < 0:
        raise RecoveryError(
            f"the process that carried out the drills (pid {child}) died of {signal.Signals(-code).name}", hint=AGAIN
        )
    return code


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
