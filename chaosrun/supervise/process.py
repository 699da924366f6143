"""`python -m chaosrun.supervise.process`: supervises one run for the process that started it, in a session of its own.

It is told on its standard input what to do, and tells on its standard output what becomes of it: `chaosrun.supervise.guard` has
the messages, and both ways of being started. When the input ends and it has not been detached, whoever began the drill is gone,
and it is cancelled: only a detached drill goes on that nobody follows. A cancel is a SIGINT to this process; what that does is
in `chaosrun.supervise.interrupts`.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from chaosrun.errors import ChaosrunError
from chaosrun.processes import die_with_parent
from chaosrun.records.layout import RunLayout
from chaosrun.records.supervision import described
from chaosrun.supervise.guard import Answer, Detach, Detached, Ended, Recorded, Supervising, Task, decode_command, encode
from chaosrun.supervise.interrupts import Interrupts

Listener = Callable[[dict[str, Any]], None]
Supervise = Callable[[RunLayout, str | None, Listener], int]
"""(run, address, who is told every record) → exit code."""


class Ties:
    """Both ends of the pipes to whoever started this process."""

    def __init__(self) -> None:
        # Out of the way: nothing that is started here may read or write there.
        self.commands: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._telling = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._over = False
        self._interrupted = False

    def tell(self, answer: Answer) -> None:
        with suppress(BrokenPipeError):  # nobody follows any more
            os.write(self._telling, encode(answer) + b"\n")

    def hold(self) -> None:
        """Do what is said, until detached or let go."""
        for line in self.commands:
            if isinstance(decode_command(line), Detach):
                self.tell(Detached())
                return
            self._interrupt()
        if not self._interrupted:
            self._interrupt()

    def let_go(self) -> None:
        """The drill is over: nothing is interrupted from now on."""
        with self._lock:
            self._over = True

    def _interrupt(self) -> None:
        """A second time it does not wait for a cluster that is being started: see `Interrupts.postponed`."""
        with self._lock:
            if not self._over:
                self._interrupted = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def main(supervise: Supervise | None = None) -> int:
    """`supervise`: what a process does that is tied; one that is held always does the same."""
    # Whatever this process inherited. A handler, not SIG_IGN, which the workers would inherit.
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ties = Ties()
    first = ties.commands.readline()
    if not first.endswith(b"\n"):
        return 130  # whoever started it was gone before it could say anything
    task = decode_command(first)
    assert isinstance(task, Task)
    run = RunLayout(Path(task.run))
    try:
        if task.parent is not None:
            die_with_parent(task.parent)
        threading.Thread(target=ties.hold, name="chaosrun-ties", daemon=True).start()
        exit_code = _held(run, task, ties) if supervise is None else _tied(run, task, ties, supervise)
    except BaseException as error:
        ties.let_go()
        if not isinstance(error, ChaosrunError | KeyboardInterrupt):
            traceback.print_exc()
        about = described(error, run)
        if task.lock is None:
            print(f"error: {about['message']}", file=sys.stderr)
        ties.tell(Ended(error=about))
        return about["exit_code"]
    ties.let_go()
    ties.tell(Ended())
    return exit_code


def _tied(run: RunLayout, task: Task, ties: Ties, supervise: Supervise) -> int:
    def on_record(record: dict[str, Any]) -> None:
        if record["event"] == "run.created":
            ties.tell(Supervising(pid=os.getpid()))

    return supervise(run, task.address, on_record)


def _held(run: RunLayout, task: Task, ties: Ties) -> int:
    from chaosrun.supervise.run import execute

    assert task.lock is not None
    # Held until this process is gone; nothing that it starts may hold it longer.
    os.set_inheritable(task.lock, False)
    with Interrupts() as interrupts:
        execute(
            run,
            Path(task.root),
            task.address,
            lambda record: ties.tell(Recorded(record=record)),
            interrupts,
            has_successor=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
