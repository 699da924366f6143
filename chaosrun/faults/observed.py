"""Observations of a fault, and why they do not prove it: values by which every family judges and reports."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from chaosrun.records.codec import Record, convert
from chaosrun.records.events import FaultObserved, SilentRank

if TYPE_CHECKING:
    from chaosrun.faults.fault import Fault

BRIEF = 60
"""How many characters of a value or an error are shown."""


class Disproof(NamedTuple):
    """Why the records do not show that a fault happened."""

    code: str
    words: str


class RecordedEnd(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The parts needed here of the end record of a rank that a fault ended."""

    status: str
    error: str | None = None
    """ "Type: message"."""
    fault: str | None = None
    errno: int | None = None
    """Set if its storage failed."""
    told: bool = False
    """Whether it left because it got the notice itself."""


class Death(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The observation of a death, apart from its exit code or signal."""

    end: RecordedEnd | None = None
    """None when it left no end record."""
    note: Mapping[str, object] | None = None
    """What the fault recorded before it did harm."""
    after_s: float | None = None
    """Time from the marker to the death."""
    killed: bool = False
    """Whether chaosrun itself killed it, because its attempt was over."""
    collected: bool = False
    """Only its launcher knows the signal or exit code: the files it left must show the rest."""
    alone: bool = False
    """Its fault was one of a group that strikes together, and the others had not reached their points."""
    of_script: bool = False
    """Its script resumes by itself, and handles a notice in its own way."""


class HungRank(SilentRank, frozen=True, kw_only=True):
    """The observation of the rank that stopped first."""

    problem: str | None = None
    """Why it did not stop by the fault."""


_UNSEEN = Death()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One `fault.observed`: a death, a standstill, or a note."""

    fault: Fault
    pid: int
    attempt: int = 0
    exit_code: int | None = None
    signal: int | None = None
    death: Death = _UNSEEN
    hang: HungRank | None = None
    note: Any = None
    """The note of the fault's kind; for a death, what the fault recorded before."""

    @classmethod
    def of(cls, fault: Fault, record: FaultObserved) -> Observation:
        """Raises ValueError when the record's contents do not have the form for this kind of fault."""
        about = {"pid": record.pid, "attempt": record.attempt, "exit_code": record.exit_code, "signal": record.signal}
        found = record.found
        if record.how == "death":
            death = convert(found or {}, Death)
            return cls(fault=fault, death=death, note=_note(fault, death.note), **about)  # type: ignore[arg-type]
        if record.how == "hang":
            return cls(fault=fault, hang=convert(found, HungRank) if found else None, **about)  # type: ignore[arg-type]
        return cls(fault=fault, note=_note(fault, found), **about)  # type: ignore[arg-type]

    @property
    def problem(self) -> Disproof | None:
        """Why it failed, according to the process that should have struck or observed it."""
        if self.hang:
            return Disproof("said", self.hang.problem) if self.hang.problem else None
        return Disproof(self.note.problem_code, self.note.problem) if self.note is not None and self.note.problem else None

    @property
    def process(self) -> str:
        return f"pid {self.pid}"

    @property
    def end(self) -> str:
        """How its process ended: "SIGKILL", "exit code 1"."""
        if self.signal is not None:
            return signal_name(self.signal)
        if self.exit_code is None:
            return "gone; its launcher alone knows how" if self.death.collected else "seen"
        return f"exit code {self.exit_code}"

    @property
    def error(self) -> str:
        """ "Type: message" of the end record, empty without one."""
        return (self.death.end and self.death.end.error) or ""

    @property
    def standstill(self) -> str:
        """ "(state S), no progress for 20 s"."""
        assert self.hang is not None
        silence = "" if self.hang.silent_s is None else f", no progress for {self.hang.silent_s:.0f} s"
        return f"(state {self.hang.state}){silence}"

    @property
    def words(self) -> str:
        """In a few words: "pid 4211: SIGKILL"; "model.safetensors of step-00000008: 4096 bytes, now 2048; quarantined"."""
        tell = self.fault.facts.tell
        return tell(self) if tell else f"{self.process}: {self.end}"


def _note(fault: Fault, found: Mapping[str, object] | None) -> Any:
    return convert(found, fault.facts.note) if found else None


def alive(seen: Observation) -> Disproof | None:
    """Why the rank was gone, or stopped by a signal, instead of hanging; None when it hung."""
    assert seen.hang is not None
    state = seen.hang.state
    told = f"its process was in state {state}, a fault of kind {seen.fault.kind} leaves it alive"
    return Disproof("other_state", told) if state in (None, "T", "Z") else None


def other_error(seen: Observation, *, unless: bool) -> Disproof | None:
    """Why the rank did not leave with the error that exactly this fault causes; None when it did, according to `unless`."""
    if not seen.error:
        return Disproof("no_error", f"the process left no error behind, a fault of kind {seen.fault.kind} does")
    return None if unless else Disproof("other_error", f"the process left with another error: {seen.error}")


def own_error(seen: Observation) -> Disproof | None:
    """Why the rank's error is not the one that exactly this fault raised; None when it is."""
    end = seen.death.end
    return other_error(seen, unless=end is not None and end.fault == seen.fault.id)


def signal_name(number: int | None) -> str:
    """SIGKILL; "signal 40" for a signal without a name, such as the real-time signals."""
    if number is None:
        return "no signal"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def brief(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"
