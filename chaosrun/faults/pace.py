"""How long the steps of a rank take, and the stretching of them that makes a straggler."""

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaosrun.faults.strike import Strike

MEASURED_STEPS = 20
"""Steps before the fault that are compared with those during it."""


class Pace:
    """The clock of one rank's steps: from the end of one to the end of the next; the first of an attempt from its first batch.

    The time of a step contains the waiting for other ranks, as it does in any training.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._took: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._stretches: list[_Stretch] = []

    def begin(self) -> None:
        """A batch is there: the first step of the attempt begins, if none has begun."""
        if self._since_s is None:
            self._since_s = time.monotonic()

    def step_done(self) -> None:
        """A step is over, but for its faults. Waits here when it is to be stretched."""
        if self._since_s is not None:
            own_s = time.monotonic() - self._since_s
            for stretch in self._stretches:
                stretch.delay(own_s)
            self._took.append(time.monotonic() - self._since_s)
            for stretch in self._stretches:
                stretch.note(self._took[-1])
            self._stretches = [stretch for stretch in self._stretches if stretch.left]
        self._since_s = time.monotonic()

    def stretch(self, strike: "Strike", *, factor: float, steps: int) -> None:
        """Make each of the next `steps` steps take `factor` times as long as steps took so far."""
        if not self._took:
            strike.note(problem="no step was timed before it")
            return
        self._stretches.append(_Stretch(strike, statistics.median(self._took), factor, steps))


class _Stretch:
    def __init__(self, strike: "Strike", before_s: float, factor: float, steps: int) -> None:
        self._strike = strike
        self._before_s = before_s
        self._factor = factor
        self._steps = steps
        self._took: list[float] = []
        self._tell()

    @property
    def left(self) -> int:
        return self._steps - len(self._took)

    def delay(self, own_s: float) -> None:
        time.sleep(max(0.0, self._factor * max(own_s, self._before_s) - own_s))

    def note(self, took_s: float) -> None:
        self._took.append(took_s)
        self._tell()

    def _tell(self) -> None:
        """Durably, at every step: the attempt may end before all steps are stretched."""
        done = len(self._took)
        during_s = statistics.median(self._took) if self._took else None
        problem = f"only {done} of {self._steps} steps were stretched" if self.left else None
        if during_s is not None and during_s < self._factor * self._before_s:
            problem = f"steps took {during_s:.3g} s, not {self._factor:g} times the {self._before_s:.3g} s of before"
        self._strike.note(
            final=not self.left,
            steps=done,
            before_s=round(self._before_s, 6),
            during_s=None if during_s is None else round(during_s, 6),
            **({} if problem is None else {"problem": problem}),
        )
