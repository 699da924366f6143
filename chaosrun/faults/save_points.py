"""The points inside the script's own saves: from the first change of a file below its outputs after a step, to the first step
that changes none.

strace is attached to the rank only during a save that has an armed fault, is witnessed, or is surveyed.
"""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from chaosrun.errors import ResourcesError
from chaosrun.faults.points import FaultPoints
from chaosrun.faults.strace import HINT
from chaosrun.faults.strike import Strike
from chaosrun.faults.tracer import Act, TraceOrder
from chaosrun.processes import PACKAGE_ROOT, identify
from chaosrun.records.codec import encode
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder

PR_SET_PTRACER = 0x59616D61
ANYBODY = ctypes.c_ulong(-1)


class SavePoints:
    """The save points of one rank. `begin` is called before each file change seen in Python; it costs a comparison."""

    def __init__(self, faults: FaultPoints, order: WorkerOrder, leg: LegLayout) -> None:
        self._faults = faults
        self._order = order
        self._leg = leg
        self._pid = os.getpid()
        self._step: int | None = None
        self._lock = threading.RLock()
        self._is_busy = False
        """Files that change now are changed by this class."""
        self._operations = leg.attempt(order.attempt).operations(order.rank)
        self._size: int | None = None
        """Size of the file of operations when the last step ended."""
        self._tracer: subprocess.Popen[bytes] | None = None
        self._over = ExitStack()
        self.began_s = 0.0

    def begin(self, step: int) -> None:
        """Note that the script, after `step` steps, is about to change a file."""
        if step == self._step or os.getpid() != self._pid:
            return
        with self._lock:  # other saving threads wait until strace is attached
            if step == self._step or self._is_busy:
                return
            with self._busy():
                self._end()
                self.began_s, self._size = time.time(), None
                if self._faults.awaits("save"):
                    self._faults.reach("save", step, points=self)
                if self._tracer is None and (self._order.survey or self._faults.witnesses("save", step)):
                    self._start(step)
                self._step = step

    def step_done(self, step: int) -> None:
        """Note that the script goes from this step to the next. A save is over once a step passes without an operation."""
        if self._step is None:
            return
        size = self._operations.stat().st_size if self._operations.exists() else 0
        if self._tracer is None or (step > self._step and size == self._size):
            self.end()
        self._size = size

    def end(self) -> None:
        """End the save under way, if any, as it or the training is over."""
        with self._lock, self._busy():
            self._end()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    # For the faults that strike here

    def when_over(self, act: Callable[[], None]) -> None:
        self._over.callback(act)

    def trace(self, strike: Strike, act: Act, *, before: int | None = None, error: str = "", wait_s: float = 0.0) -> None:
        """Make strace count the operations of this save, and strike."""
        whose = {"leg": str(self._leg.path), "fault": strike.fault.id, "file": strike.fault.options.get("file")}
        self._start(strike.step, act=act, before=before, error=error, wait_s=wait_s, **whose)

    def _start(self, step: int, **more: Any) -> None:
        """`more`: orders for the tracer besides recording the operations."""
        own = identify(self._pid)
        assert own is not None
        order = TraceOrder(
            pid=own.pid,
            start_ticks=own.start_ticks,
            outputs=tuple(map(os.path.realpath, self._order.outputs)),
            save=step,
            operations=str(self._operations),
            **more,
        )
        # Where the kernel restricts tracing (yama), only its parents may trace a process that is not root's.
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANYBODY, 0, 0, 0)
        command = [sys.executable, "-P", "-m", "chaosrun.faults.tracer", encode(order).decode()]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
        tracer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert tracer.stdout is not None
        if tracer.stdout.readline() != b"ready\n":
            raise ResourcesError(f"rank {self._order.rank} could not be traced by strace, its log says why", hint=HINT)
        self._tracer = tracer

    def _end(self) -> None:
        if self._tracer is not None:
            tracer, self._tracer = self._tracer, None
            tracer.communicate()
        over, self._over = self._over, ExitStack()
        over.close()
        self._step = None
