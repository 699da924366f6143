"""Looks for a hang, and when there is one, has everything written down that a kill would destroy, before anybody kills.

The shell around `supervise.hangs`, which decides. Restarts nothing.
"""

from collections.abc import Mapping
from typing import Protocol

from chaosrun.cluster.messages import RankStack
from chaosrun.records.codec import to_plain
from chaosrun.records.heartbeat import Pulse
from chaosrun.records.layout import LegLayout
from chaosrun.supervise.deaths import reach_of
from chaosrun.supervise.events import Hang
from chaosrun.supervise.hangs import HangWatch, Standstill
from chaosrun.supervise.observations import Observations, Record

STACKS_LIMIT_S = 3.0
"""For the ranks to write their stacks down; those that are stopped never will."""


class Monitor(Protocol):
    """How the ranks are looked at, on their own machines."""

    def pulses(self, leg: LegLayout, attempt: int) -> Mapping[int, Pulse] | None:
        """What there is to see of every rank; None when that cannot be said now, because an agent has just died."""
        ...

    def stacks(self, attempt: int, *, wait_s: float) -> Mapping[int, RankStack] | None:
        """Have all live ranks write their stacks to their logs, and say where each is: `cluster.stacks.collect_stacks`."""
        ...


class Detector:
    """Of one leg."""

    def __init__(
        self, *, monitor: Monitor, leg: LegLayout, script: str, watch: HangWatch, observations: Observations, record: Record
    ) -> None:
        self._monitor = monitor
        self._leg = leg
        self._script = script
        self._watch = watch
        self._observations = observations
        self._record = record
        self._attempt = 0
        self._live: dict[int, int] = {}

    def attempt_started(self, attempt: int, pids: Mapping[int, int]) -> None:
        self._attempt, self._live = attempt, dict(pids)
        self._watch.begin()

    def exited(self, rank: int) -> None:
        self._live.pop(rank, None)

    def look(self, now_s: float) -> Hang | None:
        """To be called every second or so while an attempt runs."""
        pulses = self._monitor.pulses(self._leg, self._attempt)
        silence = None if pulses is None else self._watch.look(now_s, pulses, self._live)
        if pulses is None or silence is None:
            return None
        seen = self._monitor.stacks(self._attempt, wait_s=STACKS_LIMIT_S)
        if seen is None:
            return None
        found = Standstill.of(self._attempt, silence, pulses, self._live, seen)
        message = found.message(self._script)
        self._record(found.declared(message))
        first = found.first
        fault = self._observations.of_hang(self._attempt, first.rank, to_plain(first.recorded()))
        if fault is not None:
            for other in found.also_stopped():
                self._observations.of_hang(self._attempt, other.rank, to_plain(other.recorded()))
        step = None if first.beat is None else first.beat.step
        return Hang(message=message, rank=first.rank, step=step, reach=reach_of(first.beat), fault=fault)
