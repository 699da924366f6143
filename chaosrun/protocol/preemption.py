"""Preemption notices: what a rank does on a SIGTERM, from a planned fault or from outside.

A rank that got a notice announces at the end of a step s, in the rendezvous store, that all ranks leave after step s + 1. No
other rank can be beyond that step by then: its gradients need this rank's, which are sent only after the announcement. Every
rank reads the store at the end of every step, after its gradients were reduced, so all of them see the announcement at the end
of s + 1; they take a checkpoint, whether or not one is due, and leave with PREEMPTED_EXIT_CODE. A step costs one read (some 30
µs), no collective. A single rank leaves after s. After the last step no rank leaves: the training ends.

A script that installs its own SIGTERM handler replaces this one: chaosrun then does nothing on a SIGTERM, and the rank's end
record says so. A script that resumes by itself has its own handler or dies of the signal: chaosrun only notes that the handler
was called, as a rank that leaves after that has not completed the training, whatever its exit code. In production the same
holds for other signals by which schedulers announce an end to scripts (SLURM's --signal, Grid Engine).
"""

import contextlib
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import torch

from chaosrun.errors import LeftApartError
from chaosrun.faults.kind import LEFT_ON_NOTICE, PREEMPTED_EXIT_CODE
from chaosrun.records.events import RaisedError
from chaosrun.records.layout import RUN
from chaosrun.records.markers import WorkerEnd
from chaosrun.records.order import WorkerOrder

KEY = "chaosrun/preemption"
GATHER_LIMIT = timedelta(seconds=10)
ANNOUNCED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""In a drill the second and third are a script's own: nobody sends them but the script."""
LEAVING_S = 600.0
"""A script that ends so soon after a notice has left on it; later, it has not heeded it."""


@contextlib.contextmanager
def unsignalled() -> Iterator[None]:
    """Block signals for threads started in this block: signals that a script blocks, to wait for them, would otherwise be
    delivered to such a thread and end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Preemption:
    """The preemption notice of one rank: whether it arrived, and after which step all ranks leave."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._store: torch.distributed.Store | None = None
        self._leaving: dict[str, int] | None = None
        """What the store says: {step, rank (the first that was told)}."""
        self._told = False
        self._held = threading.local()
        """The signals that the forking thread had blocked before."""
        self._listens = False
        self._notices = ANNOUNCED if order.leg == RUN else (signal.SIGTERM,)
        """The signals that are notices for a script that resumes by itself."""
        self._heard: tuple[signal.Signals, float] | None = None
        """The first that it handled itself, and when."""
        self.left: int | None = None
        """The step after which this rank has left the training."""

    def begin(self) -> None:
        """Listen for notices. A script that saves its own checkpoints handles a notice itself, or dies of it."""
        if self._order.by == "chaosrun":
            self.listen()
        else:
            self.record_handled_notices()

    def listen(self) -> None:
        """Treat SIGTERM as a notice from now on. Call in the main thread."""
        signal.signal(signal.SIGTERM, self._hear)
        self._listens = True
        # Do not interrupt system calls of native code: the notice can wait until the end of the step.
        signal.siginterrupt(signal.SIGTERM, False)
        # A process that the script forks (of a pool, say) ends by a SIGTERM as usual, even by one that comes at once.
        os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._forget)

    def record_handled_notices(self) -> None:
        """Record from now on each notice that the script itself handles, or waits for.

        Replaces what Python's functions call, not the functions: a script may have imported them by name before it became a
        rank.
        """
        system = signal._signal  # pyright: ignore[reportAttributeAccessIssue]

        def noted(handler: Any) -> Any:
            @functools.wraps(handler)
            def hear(number: int, frame: FrameType | None) -> Any:
                self._note(number)
                return handler(number, frame)

            return hear

        def of_script(handler: Any) -> Any:
            return getattr(handler, "__wrapped__", handler) if getattr(handler, "__code__", None) is code else handler

        def install(number: int, handler: Any) -> Any:
            heard = noted(handler) if number in self._notices and callable(handler) else handler
            return of_script(system.signal(number, heard))

        def waiting(name: str) -> Any:
            wait = getattr(system, name)

            @functools.wraps(wait)
            def told(*args: Any) -> Any:
                got = wait(*args)
                self._note(getattr(got, "si_signo", got))
                return got

            return told

        code = noted(lambda *_: None).__code__
        asked = {"signal": install, "getsignal": lambda number: of_script(system.getsignal(number))}
        asked["sigwait"] = waiting("sigwait")
        signal._signal = SimpleNamespace(**{**vars(system), **asked})  # pyright: ignore[reportAttributeAccessIssue]
        for name in ("sigwaitinfo", "sigtimedwait"):  # not Python functions
            setattr(signal, name, waiting(name))
        for notice in self._notices if threading.current_thread() is threading.main_thread() else ():
            if callable(before := system.getsignal(notice)):
                install(notice, before)

    def _note(self, number: int | None) -> None:
        if number in self._notices and self._heard is None:
            self._heard = signal.Signals(number), time.monotonic()

    @property
    def has_handled_notice(self) -> bool:
        """Whether the script has recently handled a notice."""
        return self._heard is not None and time.monotonic() - self._heard[1] < LEAVING_S

    @property
    def replaced(self) -> bool:
        """Whether the script's own handler has replaced this one."""
        return self._listens and signal.getsignal(signal.SIGTERM) != self._hear

    def use_store(self, store: "torch.distributed.Store | None" = None) -> None:
        """Use this store, which all ranks share, to announce notices; by default that of the process group.

        A separate connection is avoided: torch makes DNS lookups for one, which take 5 s when an answer gets lost.
        """
        if self._order.world_size > 1:
            self._store = store or torch.distributed.distributed_c10d._get_default_store()

    def due(self, step: int) -> bool:
        """Whether all ranks leave after this step, which this rank has done. Call once at the end of every step.

        Raises LeftApartError when the ranks cannot leave together because another one is beyond this rank's next step.
        """
        if self._store is None:
            if self._told and self._leaving is None:
                self._leaving = {"step": step, "rank": self._order.rank}
        elif self._leaving is None and (self._told or self._store.check([KEY])):
            mine = json.dumps({"step": step + 1, "rank": self._order.rank})
            # Returns only when the store has it; if two ranks get a notice at once, the first decides.
            self._leaving = json.loads(self._store.compare_set(KEY, "", mine))
        if self._leaving is None:
            return False
        if step > self._leaving["step"]:
            raise LeftApartError(
                f"rank {self._order.rank} had done step {step} when rank {self._leaving['rank']}, told to leave, announced the "
                f"end of step {self._leaving['step']}",
                hint="ranks that do not reduce gradients at every step cannot leave together",
            )
        return step == self._leaving["step"]

    def leave(self, step: int) -> NoReturn:
        """End the training here, its checkpoint committed."""
        self.left = step
        if self._store is not None:
            self._gather(self._store)
        raise SystemExit(PREEMPTED_EXIT_CODE)  # a normal end: the script's `finally` blocks and exit handlers run

    def _gather(self, store: "torch.distributed.Store") -> None:
        """Wait until all ranks are done with the checkpoint before any of them closes its sockets (hazard P8); but not for the
        script's own cleanup.
        """
        # If the rank that serves the store has left, all ranks have reached this point.
        with contextlib.suppress(RuntimeError):
            if store.add(f"{KEY}/left", 1) == self._order.world_size:
                store.set(f"{KEY}/all left", "1")
            store.wait([f"{KEY}/all left"], GATHER_LIMIT)

    def end(self) -> WorkerEnd:
        """The end record of a rank that left on notice."""
        assert self.left is not None and self._leaving is not None
        rank, first = self._order.rank, self._leaving["rank"]
        why = "was told to leave (SIGTERM) and left" if self._told else f"left with rank {first}, which was told to (SIGTERM),"
        message = f"rank {rank} {why} after step {self.left}, the checkpoint of that step committed"
        return _left(message, told=rank if self._told else first)

    def end_of_script(self, end: WorkerEnd, step: int) -> WorkerEnd:
        """The end record of a rank whose script handled the notice itself, and ended as `end` says."""
        rank, how = self._order.rank, end.status if end.error is None else end.error.type
        by = self._heard[0] if self._heard else signal.SIGTERM
        message = f"rank {rank} was told to leave ({by.name}) and left after step {step} ({how})"
        return _left(message, told=rank, handled=by.name)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._told = True

    def _hold(self) -> None:
        self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.mask)

    def _forget(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._let_go()


def _left(message: str, told: int, handled: str | None = None) -> WorkerEnd:
    error = RaisedError(type="Preempted", message=message, exit_code=PREEMPTED_EXIT_CODE, traceback="")
    return WorkerEnd(status=LEFT_ON_NOTICE, exit_code=PREEMPTED_EXIT_CODE, error=error, told=told, handled=handled)
