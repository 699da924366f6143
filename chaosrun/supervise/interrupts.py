"""What Ctrl-C, SIGTERM and the SIGHUP of a closed terminal do.

While a drill runs in this process (`Interrupts`): they end it cleanly, and say how to resume. While another process supervises
it and this one only follows it at a terminal (`follow`): Ctrl-C asks whether to detach, cancel or go on; SIGTERM cancels.
"""

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from chaosrun.errors import InterruptedRunError
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument

if TYPE_CHECKING:
    from chaosrun.supervise.process import SupervisorProcess

Answer = Literal["detach", "cancel", "go on"]
ANSWERS: dict[str, Answer] = {"d": "detach", "c": "cancel", "\x04": "cancel", "g": "go on"}
"""By key; Ctrl-D, which ends an input, among them."""
MEANWHILE = """
The drill goes on meanwhile. d: leave it to itself, g: go on following it,
c, or Ctrl-C once more: end it in order.
"""
QUESTION = "detach, cancel or go on? Press a key [d/c/g] "
CANCELLING = "cancelling: every process of the drill is ended in order\n"


class RunningLeg(Protocol):
    """The target of a first signal: the supervisor of a leg, or the child process that has one."""

    @property
    def is_waiting_for_places(self) -> bool: ...

    def interrupt(self) -> None: ...


class Interrupts:
    """Handles SIGINT, SIGTERM and, unless it is ignored already (nohup), SIGHUP: they end a running leg cleanly, and anything
    else by KeyboardInterrupt, which leaves the context as an InterruptedRunError with `again` as its hint. If a library
    swallows the KeyboardInterrupt, `check` and `watch` raise it again."""

    def __init__(self, again: str = "`chaosrun resume {run}` continues the run") -> None:
        self._again = again
        self._supervisor: RunningLeg | None = None
        self._former: dict[int, Any] = {}
        self._run: RunLayout | None = None
        self._requested = False
        self._postponed = False

    def __enter__(self) -> Self:
        # Read when Ray is imported: its handler prints a stack trace at a SIGTERM, and has crashed this process in doing so.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
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
        if self._requested:
            raise KeyboardInterrupt

    def request(self) -> None:
        """Do what a SIGINT would, from another thread; a second request while signals are postponed takes effect at once. Does
        not wait."""
        if self._requested and not self._postponed:
            return
        if self._former:
            # A real signal, as it wakes the main thread from a blocking call.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return
        self._requested = True
        if self._supervisor is not None:
            self._supervisor.interrupt()

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Delay a first signal until `check`, as leaving Ray half started or half stopped may crash. A second one is not
        delayed."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False

    def watch(self, supervisor: RunningLeg | None) -> None:
        self._supervisor = supervisor
        if supervisor is not None:
            self.check()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._requested = not self._requested, True
        if self._postponed and first:
            return
        if self._supervisor is None or self._supervisor.is_waiting_for_places:
            raise KeyboardInterrupt
        self._supervisor.interrupt()


class OneOfMany(Interrupts):
    """The interrupts of one of several drills in this process, in any thread: signals concern all of them, and their handler
    learns by `watch` whom to interrupt; a request ends this drill alone."""

    def __init__(self, watch: Callable[[Any], None]) -> None:
        super().__init__()
        self._tell = watch

    def __enter__(self) -> Self:
        return self

    def watch(self, supervisor: RunningLeg | None) -> None:
        self._tell(supervisor)
        super().watch(supervisor)


def at_a_terminal() -> bool:
    """Whether there is a user to ask."""
    return all(stream is not None and not stream.closed and stream.isatty() for stream in (sys.stdin, sys.stderr))


def follow(process: "SupervisorProcess", show: Callable[[], None]) -> bool:
    """`show` a drill that another process supervises until it has ended. Ctrl-C asks; SIGTERM cancels. True when the user has
    detached it."""
    cancelled = False
    with _signals(process), redirect_stdout(sys.stderr):
        asking = False
        while True:
            try:
                if asking:
                    asking = False
                    answer = _ask(process)
                    if answer == "detach" and process.detach():
                        return True
                    if answer == "cancel":
                        process.interrupt()
                        cancelled = True
                        _say(CANCELLING)
                show()
                return False
            except KeyboardInterrupt:
                if asking or cancelled:
                    # Interrupted between the two, or again: nothing is left to ask.
                    process.interrupt()
                    cancelled, asking = True, False
                    _say(CANCELLING)
                else:
                    asking = True


def _ask(process: "SupervisorProcess") -> Answer:
    """A second Ctrl-C, the end of the input, or no user at the terminal means cancel. If the drill has ended meanwhile: go
    on."""
    descriptor = sys.stdin.fileno()
    with suppress(OSError):  # no terminal: there is no user to wait for
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            return "cancel"  # in the background: reading would stop this process
    try:
        with _key_by_key(descriptor):
            _say(MEANWHILE)
            while True:
                _say(QUESTION)
                ready, _, _ = select.select([descriptor, process], [], [])
                if descriptor not in ready:
                    _say("\n")
                    return "go on"
                pressed = os.read(descriptor, 1024)
                if not pressed:
                    return "cancel"
                # Input that begins with another key (an arrow key sends Escape) is not an answer.
                key = pressed.decode(errors="replace").strip(" \r\n\t").lower()[:1]
                _say(f"{key if key.isprintable() else ''}\n")
                if answer := ANSWERS.get(key):
                    return answer
    except KeyboardInterrupt:
        _say("\n")
        return "cancel"
    except OSError:
        return "cancel"  # the terminal is gone


@contextmanager
def _key_by_key(descriptor: int) -> Iterator[None]:
    """Read keys as they are typed, without Enter, and discard earlier input. Ctrl-C still interrupts."""
    try:
        former = termios.tcgetattr(descriptor)
    except termios.error:  # not a terminal: input comes in lines
        yield
        return
    try:
        tty.setcbreak(descriptor, termios.TCSAFLUSH)
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSANOW, former)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal is gone
        sys.stderr.write(text)
        sys.stderr.flush()


@contextmanager
def _signals(process: "SupervisorProcess") -> Iterator[None]:
    """SIGTERM cancels. SIGINT interrupts, even if the parent process had it ignored (a shell does, in the background)."""
    former: dict[int, Any] = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.interrupt()),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
