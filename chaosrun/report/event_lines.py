"""The events of a run's journals as sentences, for `chaosrun logs --events`: also while they come."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chaosrun.records.layout import RunLayout
from chaosrun.report.follow import RunFollower
from chaosrun.report.live import Teller, happened_s, plain_line
from chaosrun.report.progress import sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    leg: str
    time_s: float | None
    """When it happened, which may be before it was written down; None when nothing says it."""
    elapsed_s: float
    """Since the run was created."""
    record: Mapping[str, Any]

    @property
    def line(self) -> str:
        clock = "--:--:--" if self.time_s is None else time.strftime("%H:%M:%S", time.localtime(self.time_s))
        return f"{clock} {plain_line(self.record, elapsed_s=self.elapsed_s)}"

    def to_json(self) -> dict[str, Any]:
        return {"leg": self.leg, "time_s": self.time_s, "sentence": sentence(dict(self.record)), "record": dict(self.record)}


class EventFollower:
    """`poll` returns the events that have come since; all of them at first."""

    def __init__(self, run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None) -> None:
        """Those of this leg, and those that are about this attempt, this rank."""
        self._follower = RunFollower(run)
        self._teller = Teller()
        self._leg, self._about = leg, {"attempt": attempt, "rank": rank}

    def poll(self) -> list[Event]:
        fresh = self._teller.new(self._follower.poll_events())
        began_s = self._follower.picture.created_s
        events: list[Event] = []
        for record in fresh:
            at_s = happened_s(record)
            elapsed_s = 0.0 if at_s is None or began_s is None else at_s - began_s
            if self._leg in (None, record["leg"]) and self._is_about(record):
                events.append(Event(leg=record["leg"], time_s=at_s, elapsed_s=elapsed_s, record=record))
        return events

    def _is_about(self, record: Mapping[str, Any]) -> bool:
        return all(wanted is None or record.get(key) == wanted for key, wanted in self._about.items())
