"""What SIGINT, SIGTERM and a closed terminal's SIGHUP do while something runs: end it in order, and say how to go on."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from chaosrun.errors import InterruptedRunError
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument


class Interruptible(Protocol):
    """What a first signal is passed on to: a leg's supervisor, or the child process that has one."""

    @property
    def is_waiting_for_places(self) -> bool: ...

    def interrupt(self) -> None: ...


class Interrupts:
    """SIGINT, SIGTERM and, unless somebody has seen to it (nohup), SIGHUP end the running leg in order, and anything else with
    KeyboardInterrupt; that leaves the context as an InterruptedRunError, with `again` as its hint. Should a library swallow the
    KeyboardInterrupt, `check` and `watch` raise it again."""

    def __init__(self, again: str = "`chaosrun resume {run}` goes on with the run") -> None:
        self._again = again
        self._supervisor: Interruptible | None = None
        self._former: dict[int, Any] = {}
        self._run: RunLayout | None = None
        self._wished = False
        self._postponed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            hangup = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else ()
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt):
            hint = self._again.format(run=run_argument(self._run)) if self._run else None
            raise InterruptedRunError("interrupted", hint=hint) from error

    def check(self, run: RunLayout | None = None) -> None:
        """`run`: what there is to resume from now on."""
        self._run = run or self._run
        if self._wished:
            raise KeyboardInterrupt

    def request(self) -> None:
        """What a SIGINT would do, at the wish of another thread; a second wish, where the first has to wait. Does not wait."""
        if self._wished and not self._postponed:
            return
        if self._former:
            # Through the kernel: it wakes the main thread out of whatever it waits for.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return
        self._wished = True
        if self._supervisor is not None:
            self._supervisor.interrupt()

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Let a first signal wait for `check`: to leave Ray half started or half stopped may crash. A second does not wait."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False

    def watch(self, supervisor: Interruptible | None) -> None:
        self._supervisor = supervisor
        if supervisor is not None:
            self.check()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._wished = not self._wished, True
        if self._postponed and first:
            return
        if self._supervisor is None or self._supervisor.is_waiting_for_places:
            raise KeyboardInterrupt
        self._supervisor.interrupt()


class OneOfMany(Interrupts):
    """Of one drill among those of this process, in whichever thread: signals are meant for all of them, and whoever takes those
    is told by `watch` whom to interrupt; a wish ends this drill alone."""

    def __init__(self, watch: Callable[[Any], None]) -> None:
        super().__init__()
        self._tell = watch

    def __enter__(self) -> Self:
        return self

    def watch(self, supervisor: Interruptible | None) -> None:
        self._tell(supervisor)
        super().watch(supervisor)
