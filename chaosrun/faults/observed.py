"""What was seen of a fault, and why that does not prove it: values that every family judges and tells by."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from chaosrun.faults.fault import Fault
    from chaosrun.records.events import FaultObserved

Found = Mapping[str, Any]
"""What was written down of a fault when it was seen: its note, or what was found of a process (`faults.landed`)."""
BRIEF = 60
"""Characters of a value or an error that are told."""


class Problem(NamedTuple):
    """Why what was written down does not show that a fault happened."""

    code: str
    words: str


NOTHING_SAID = Problem("nothing_said", "nothing was written down of what it did")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One `fault.observed`."""

    fault: Fault
    pid: int
    attempt: int = 0
    exit_code: int | None = None
    signal: int | None = None
    found: Found = field(default_factory=dict)

    @classmethod
    def of(cls, fault: Fault, record: FaultObserved) -> Observation:
        """From `fault.observed`."""
        ended = {"exit_code": record.exit_code, "signal": record.signal}
        return cls(fault=fault, pid=record.pid, attempt=record.attempt, found=record.found or {}, **ended)

    @property
    def process(self) -> str:
        return f"pid {self.pid}"

    @property
    def end(self) -> str:
        """How its process ended: "SIGKILL", "exit code 1"."""
        if self.signal is not None:
            return signal_name(self.signal)
        return "seen" if self.exit_code is None else f"exit code {self.exit_code}"

    @property
    def error(self) -> str:
        """ "Type: message" of the end record, empty without one."""
        return (self.found.get("end") or {}).get("error") or ""

    @property
    def note(self) -> Found:
        """Of a death: what the fault had written down before."""
        return self.found.get("note") or {}

    @property
    def silence(self) -> str:
        silent_s = self.found.get("silent_s")
        return "" if silent_s is None else f", no progress for {silent_s:.0f} s"

    @property
    def words(self) -> str:
        """In a few words: "pid 4211: SIGKILL"; "model.safetensors of step-00000008: 4096 bytes, now 2048; quarantined"."""
        plain, tell = f"{self.process}: {self.end}", self.fault.facts.tell
        if tell is None:
            return plain
        try:
            return tell(self)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return plain  # a note with values of other types than its writer's: it proves what it proves, and tells less


def alive(seen: Observation) -> Problem | None:
    """A rank that hangs is there, and not stopped by a signal."""
    state = seen.found.get("state")
    told = f"its process was in state {state}, a fault of kind {seen.fault.kind} leaves it alive"
    return Problem("other_state", told) if state in (None, "T", "Z") else None


def signal_name(number: int | None) -> str:
    """SIGKILL; "signal 40" of one that has no name, as the real-time signals."""
    if number is None:
        return "no signal"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def brief(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"
