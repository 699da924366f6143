"""Virtual time, and everything that happens in it: one queue of events, in an order that the seed alone decides.

The supervisor runs for real and blocks; whatever it waits for, it waits by `World.wait`, which lets the world go on. So there
is one thread, and nothing is left to the kernel.
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any

EPOCH_S = 1_700_000_000.0
FIRST_PID = 5_000_000
"""Above what Linux gives out: no simulated process can be taken for a real one."""


class Killed(BaseException):
    """The supervisor is killed here: nothing after this runs in it."""


class Violation(AssertionError):
    """The real code did what it never may, or did not come to an end."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class SteppedLoop(asyncio.BaseEventLoop):
    """An event loop that runs what is ready when it is told to, and never waits: it has no files to look at."""

    def drain(self) -> None:
        previous, ready = asyncio._get_running_loop(), self._ready  # type: ignore[attr-defined]
        asyncio._set_running_loop(self)
        try:
            while ready:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(previous)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        """asyncio's own looks first whether another thread calls, or the loop is closed."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def get_debug(self) -> bool:
        return False

    def call_at(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("no timer of asyncio's own: time is the world's")


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        """Seconds that have passed: a clock that nobody corrects."""
        self.jumped_s = 0.0
        """By how much the wall clock has been set."""
        self.loop = SteppedLoop()
        self.story: list[str] = []
        """What happened, for whoever looks at a seed."""
        self.waits = 0
        self.after_each: Callable[[], None] = lambda: None
        """Called after every event: the invariants."""
        self.on_wait: Callable[[int], None] = lambda number: None
        """Called at every wait of the supervisor, which it may end."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._pid = FIRST_PID
        self._streams: dict[str, random.Random] = {}

    def close(self) -> None:
        self._events.clear()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.drain()
        self.loop.close()

    def wall(self) -> float:
        return EPOCH_S + self.now + self.jumped_s

    def monotonic(self) -> float:
        return self.now

    def random(self, stream: str) -> random.Random:
        """A stream of its own for each subject: what is left out elsewhere does not change it."""
        if stream not in self._streams:
            self._streams[stream] = random.Random(f"{self.seed}:{stream}")
        return self._streams[stream]

    def new_pid(self) -> int:
        self._pid += 1
        return self._pid

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:10.4f}  {what}")

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + max(0.0, delay_s), self._number, act))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        return self.loop.create_task(coroutine)

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Of the supervisor: let the world go on until this is so. False when it was not in time."""
        self.waits += 1
        self.on_wait(self.waits)
        deadline_s = self.now + max(0.0, timeout_s)
        while not until():
            if not self._events or self._events[0][0] > deadline_s:
                self.now = max(self.now, deadline_s)
                return until()
            self.step()
        return True

    def let_pass(self, seconds: float) -> None:
        """Nobody waits for anything: between one supervisor and the next."""
        deadline_s = self.now + seconds
        while self._events and self._events[0][0] <= deadline_s:
            self.step()
        self.now = deadline_s

    def step(self) -> None:
        when, _, act = heapq.heappop(self._events)
        self.now = max(self.now, when)
        act()
        if self.loop._ready:  # type: ignore[attr-defined]
            self.loop.drain()
        self.after_each()
