"""Following, at a terminal, a drill that another process supervises: what is shown meanwhile, and what Ctrl-C asks."""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from chaosrun.supervise.guard import SupervisorProcess

Answer = Literal["detach", "cancel", "go on"]
ANSWERS: dict[str, Answer] = {"d": "detach", "c": "cancel", "\x04": "cancel", "g": "go on"}
"""By key; Ctrl-D, which ends an input, among them."""
MEANWHILE = """
The drill goes on meanwhile. d: leave it to itself, g: go on following it,
c, or Ctrl-C once more: end it in order.
"""
QUESTION = "detach, cancel or go on? Press a key [d/c/g] "
CANCELLING = "cancelling: every process of the drill is ended in order\n"


def at_a_terminal() -> bool:
    """Somebody can be asked."""
    return all(stream is not None and not stream.closed and stream.isatty() for stream in (sys.stdin, sys.stderr))


def follow(process: "SupervisorProcess", *, quiet: bool) -> bool:
    """Show the drill until it has ended. Ctrl-C asks; SIGTERM cancels. True when the user has detached it."""
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
                        process.cancel()
                        cancelled = True
                        _say(CANCELLING)
                _show(process, quiet=quiet)
                return False
            except KeyboardInterrupt:
                if asking or cancelled:
                    # Between the two, or once more: there is nothing to ask any more.
                    process.cancel()
                    cancelled, asking = True, False
                    _say(CANCELLING)
                else:
                    asking = True


def _show(process: "SupervisorProcess", *, quiet: bool) -> None:
    if quiet:
        process.wait()
        return
    from chaosrun.report.live import is_live_terminal
    from chaosrun.report.watch import watch

    watch(process.run, stream=sys.stderr, terminal=is_live_terminal(sys.stderr, os.environ), ended=process.ended)


def _ask(process: "SupervisorProcess") -> Answer:
    """A second Ctrl-C, the end of the input, or nobody at the terminal: cancel. A drill that has ended meanwhile: go on."""
    descriptor = sys.stdin.fileno()
    with suppress(OSError):  # no terminal: there is nobody to wait for
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            return "cancel"  # in the background; to read would stop this process
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
                # What begins with another key (an arrow's is Escape) is no answer, whatever follows.
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
    """What is typed is there at once, without an Enter; what was typed before is gone. Ctrl-C stays what it is."""
    try:
        former = termios.tcgetattr(descriptor)
    except termios.error:  # no terminal, whose lines have an end
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
    """SIGTERM cancels. SIGINT interrupts, also where whoever began this command had it ignored (a shell, in the background)."""
    former: dict[int, Any] = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.cancel()),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
