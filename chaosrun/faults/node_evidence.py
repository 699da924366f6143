"""Evidence of the end of a node, or of the supervisor and Ray's head: which processes were struck and seen gone, by pid and
start time.

The note of a node's end is written by `faults.witness`, that of the supervisor's by `faults.control_plane`.
"""

from collections.abc import Callable, Iterable

import msgspec

from chaosrun.faults.observed import Disproof, Observation
from chaosrun.processes import ProcessIdentity, identify
from chaosrun.records.codec import Record
from chaosrun.records.events import FaultRequested, PlacementAcquired
from chaosrun.records.history import LegHistory
from chaosrun.records.markers import Note

BELOW = ("agent", "fork server", "{rank}")
"""Processes that end with an agent."""
UNNAMED = "process below"
_ORDER = ("raylet", "head", "supervisor", "agent", "fork server")


class NamedProcess(Record, frozen=True, kw_only=True):
    what: str
    """ "agent", "fork server", "raylet", "rank 1", …"""
    pid: int
    start_ticks: int

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks)


class RankEnd(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The end of a rank, as its fork server saw it."""

    exit_code: int | None = None
    signal: int | None = None


class EndNote(Note, frozen=True, kw_only=True):
    """The note of a fault that ends a node, an agent, a supervisor or Ray's head."""

    struck: tuple[NamedProcess, ...] = ()
    gone: tuple[NamedProcess, ...] = ()
    left: tuple[NamedProcess, ...] | None = None
    """Processes that still existed. None: not checked yet."""
    node: str | None = None
    agent: int | None = None
    told: tuple[int, ...] = ()
    """Ranks that got a preemption notice."""
    ends: dict[int, RankEnd] = msgspec.field(default_factory=dict)
    waited_s: float = 0.0
    host: str | None = None
    """For the end of a supervisor: the machine, until its next restart."""
    successor: int | None = None

    def left_in_order(self, rank: int) -> bool:
        return rank in self.ends and self.ends[rank].exit_code is not None


def named(what: str, pid: int) -> NamedProcess | None:
    """The live process with this pid, under the name `what`; None when there is none."""
    identity = identify(pid)
    return None if identity is None else NamedProcess(what=what, pid=pid, start_ticks=identity.start_ticks)


def ended(struck: tuple[str, ...], gone: tuple[str, ...], *, alone: bool = False) -> Callable[[Observation], Disproof | None]:
    """The check for a fault that strikes the processes `struck` (if `alone`, no others) and ends the processes `gone`."""

    def shows(seen: Observation) -> Disproof | None:
        note: EndNote = seen.note
        hit, over = ({each.what for each in listed} for listed in (note.struck, note.gone))
        if note.left != ():
            return Disproof("somebody_left", f"the record does not say that none were left: {note.left and _names(note.left)}")
        for lack, listed, expected in (("struck", hit, struck), ("seen gone", over, gone)):
            for name in expected:
                if (what := name.format(rank=f"rank {seen.fault.rank}")) not in listed:
                    return Disproof(f"not_{lack.replace(' ', '_')}", f"the {what} was not {lack}")
        if alone and hit - set(struck):
            return Disproof("others_struck", f"others were struck too: {', '.join(sorted(hit - set(struck)))}")
        if not {each.identity for each in note.struck} <= {each.identity for each in note.gone}:
            return Disproof("struck_not_gone", "some that were struck were not seen gone")
        if seen.fault.facts.evidence == "node":
            for what, pid in ((f"rank {seen.fault.rank}", seen.pid), ("agent", note.agent)):
                if pid not in {each.pid for each in note.gone if each.what == what}:
                    return Disproof("other_process_gone", f"the {what}, process {pid}, was not seen gone")
        return None

    return shows


def on_its_node(seen: Observation, asked: FaultRequested, leg: LegHistory) -> Disproof | None:
    """Why the ended node was not the rank's node at that time; None when it was."""
    placed = [event.nodes for event in leg.events(PlacementAcquired) if event.seq < asked.seq]
    here = [node for node, about in (placed[-1] if placed else {}).items() if seen.fault.rank in about.ranks]
    if (node := seen.note.node) in here:
        return None
    where = ", ".join(here) or "no known node"
    return Disproof("other_node", f"node {node} was ended, rank {seen.fault.rank} was on {where}")


def describe_node(seen: Observation) -> str:
    """The processes that are gone, by name."""
    return f"gone: {_names(_ordered(seen.note))}"


def describe_process(seen: Observation) -> str:
    """The process that was struck, with its pid, and those that ended with it, by name."""
    struck = {each.identity for each in seen.note.struck}
    direct = [f"{each.what} {each.pid}" for each in _ordered(seen.note) if each.identity in struck]
    below = _names(each for each in _ordered(seen.note) if each.identity not in struck)
    return f"gone: {', '.join(direct) or 'none'}" + (f", with it {below}" if below else "")


def _ordered(note: EndNote) -> list[NamedProcess]:
    order = {name: place for place, name in enumerate(_ORDER)}
    known = (each for each in note.gone if each.what != UNNAMED)
    return sorted(known, key=lambda each: (order.get(each.what, len(order)), each.what))


def _names(processes: Iterable[NamedProcess]) -> str:
    return ", ".join(dict.fromkeys(each.what for each in processes))
