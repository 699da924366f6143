"""A child that does one thing and tells of it in JSON lines, and dies with this process; and steps that may hang, since storage
may, done by such a child and watched by a parent that never touches the storage itself. A child that goes on is slow, one that
does not is taken for dead.
"""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from chaosrun.processes import die_with_parent
from chaosrun.records.codec import convert

Say = Callable[[Any], None]
GONE_S = 1.0
SIGN_S = 0.05
"""Between two signs of life: more would cost time."""


def forked(act: Callable[[Say], None]) -> tuple[int, int]:
    """(pid, descriptor to read from) of a child that does this and ends."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        os.close(reading)
        die_with_parent(parent)
        act(lambda said: _write(writing, said))
        code = 0
    finally:
        os._exit(code)


def _write(writing: int, said: Any) -> None:
    rest = memoryview(json.dumps(msgspec.to_builtins(said)).encode() + b"\n")
    while rest:
        rest = rest[os.write(writing, rest) :]


class Failed(Struct, frozen=True, kw_only=True):
    """An error of the operating system."""

    error: str
    errno: int
    path: str = ""

    @classmethod
    def of(cls, error: OSError) -> "Failed":
        path = os.fsdecode(error.filename or "")
        return cls(error=error.strerror or str(error), errno=error.errno or 0, path=path)

    def again(self) -> OSError:
        return OSError(self.errno, self.error, self.path)


class Watched(Struct, frozen=True, kw_only=True):
    """What steps found, each in a field of its own; None: it was not done."""

    failed: dict[str, Failed] = {}
    """By the step's name."""
    stopped: Literal["", "hung", "slow"] = ""
    """In the first step that was not done: hung gave no sign for `patience_s`, slow went on until `limit_s` in all."""
    patience_s: float = 0.0
    limit_s: float = 0.0


T = TypeVar("T")
W = TypeVar("W", bound=Watched)


class Report:
    """`report(name, act)`: do a step, tell what it found and return it. An OSError is told, and None is returned; anything else
    raises."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._signed_s = 0.0

    def __call__(self, name: str, act: Callable[[], T]) -> T | None:
        self._say({"begun": name})
        try:
            found = act()
        except OSError as error:
            self._say({"done": name, "failed": Failed.of(error)})
            return None
        self._say({"done": name, "found": found})
        return found

    def goes_on(self) -> None:
        """The storage has answered once more. May be called by a step's own children."""
        now_s = time.monotonic()
        if now_s - self._signed_s > SIGN_S:
            self._signed_s = now_s
            self._say({})


def watched(steps: Callable[[Report], None], facts: type[W], *, patience_s: float, limit_s: float) -> W:
    """Raises RuntimeError when the child ended otherwise. Its processes die with it."""

    def act(say: Say) -> None:
        os.setpgid(0, 0)
        try:
            steps(Report(say))
        except BaseException as error:
            say({"raised": f"{type(error).__name__}: {error}"})
            raise

    child, reading = forked(act)
    try:
        told = _watch(reading, patience_s, limit_s)
    finally:
        os.close(reading)
        _end(child)
    return convert({**told, "patience_s": patience_s, "limit_s": limit_s}, facts)


def _watch(reading: int, patience_s: float, limit_s: float) -> dict[str, object]:
    end_s = time.monotonic() + limit_s
    failed: dict[str, object] = {}
    told: dict[str, object] = {"failed": failed}
    step, rest = "", b""
    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return {**told, "stopped": "slow"}
        if not select.select([reading], [], [], min(patience_s, left_s))[0]:
            if patience_s > left_s:
                continue
            return {**told, "stopped": "hung"}
        part = os.read(reading, 1 << 16)
        *lines, rest = (rest + part).split(b"\n")
        for said in map(json.loads, lines):
            if "raised" in said:
                raise RuntimeError(said["raised"])
            step = said.get("begun", step)
            if "found" in said:
                told[said["done"]] = said["found"]
            elif "failed" in said:
                failed[said["done"]] = said["failed"]
        if not part:
            if step not in told and step not in failed:
                raise RuntimeError(f"the process ended during {step or 'its start'}")
            return told


def _end(child: int) -> None:
    """It, and what it has started; one that waits in the kernel is left to whoever cleans up after this process."""
    for kill in (lambda: os.killpg(child, signal.SIGKILL), lambda: os.kill(child, signal.SIGKILL)):
        with suppress(ProcessLookupError):
            kill()
    deadline = time.monotonic() + GONE_S
    while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
