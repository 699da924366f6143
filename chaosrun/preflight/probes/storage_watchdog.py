"""Steps that may hang, since storage may: done by a child, watched by a parent that never touches the storage itself.

The child's processes die with it, and it dies with the parent. One that goes on is slow, one that does not is taken for dead.
"""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.forked import Say, forked

GONE_S = 1.0
SIGN_S = 0.05
"""Between two signs of life: more would cost time."""


class Report:
    """`report(name, act)`: do a step and tell what it found; whether it could be done. An OSError is told, anything else
    raises."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._signed_s = 0.0

    def __call__(self, name: str, act: Callable[[], Any]) -> bool:
        self._say({"begun": name})
        try:
            told = {"found": act()}
        except OSError as error:
            path = None if error.filename is None else os.fsdecode(error.filename)
            told = {"failed": {"error": error.strerror or str(error), "errno": error.errno, "path": path}}
        self._say({"done": name, **told})
        return "found" in told

    def goes_on(self) -> None:
        """The storage has answered once more. May be called by a step's own children."""
        now_s = time.monotonic()
        if now_s - self._signed_s > SIGN_S:
            self._signed_s = now_s
            self._say({})


def watched(steps: Callable[[Report], None], *, patience_s: float, limit_s: float) -> Facts:
    """{"steps": {name: {"found": facts} or {"failed": {error, errno, path}}}, "hung": name of the step that gave no sign for
    `patience_s`, "slow": of that which was not done after `limit_s` in all, though it went on; None}. Raises RuntimeError when
    the child ended otherwise."""

    def act(say: Say) -> None:
        os.setpgid(0, 0)
        try:
            steps(Report(say))
        except BaseException as error:
            say({"raised": f"{type(error).__name__}: {error}"})
            raise

    child, reading = forked(act)
    try:
        return _watch(reading, patience_s, limit_s)
    finally:
        os.close(reading)
        _end(child)


def _watch(reading: int, patience_s: float, limit_s: float) -> Facts:
    end_s = time.monotonic() + limit_s
    done: dict[str, Facts] = {}
    step: str | None = None
    rest = b""

    def ended(hung: str | None = None, slow: str | None = None) -> Facts:
        return {"steps": done, "hung": hung, "slow": slow, "patience_s": patience_s, "limit_s": limit_s}

    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return ended(slow=step or "place")
        if not select.select([reading], [], [], min(patience_s, left_s))[0]:
            if patience_s > left_s:
                continue
            return ended(hung=step or "place")
        part = os.read(reading, 1 << 16)
        *lines, rest = (rest + part).split(b"\n")
        for said in map(json.loads, lines):
            if "raised" in said:
                raise RuntimeError(said["raised"])
            step = said.get("begun", step)
            if "done" in said:
                done[said.pop("done")] = said
                step = None
        if not part:
            if step is not None:
                raise RuntimeError(f"the process ended during {step}")
            return ended()


def _end(child: int) -> None:
    """It, and what it has started; one that waits in the kernel is left to whoever cleans up after this process."""
    for kill in (lambda: os.killpg(child, signal.SIGKILL), lambda: os.kill(child, signal.SIGKILL)):
        with suppress(ProcessLookupError):
            kill()
    deadline = time.monotonic() + GONE_S
    while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
