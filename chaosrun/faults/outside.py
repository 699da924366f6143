"""Strikes from outside the rank: the values that the agent of its node, or the supervisor itself, needs to carry one out.

An agent signals only processes known by pid and start time: itself, its raylet, its fork server and those below that one. The
supervisor has claimed the fault before.
"""

import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.faults.node_evidence import UNNAMED, EndNote, NamedProcess, RankEnd, named
from chaosrun.faults.witness import WitnessOrder, call_witness
from chaosrun.processes import ProcessIdentity, children, send_signal
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import Note, write_note

if TYPE_CHECKING:
    from chaosrun.faults.fault import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcesses:
    """A node's part of a running attempt, as its agent knows it."""

    node_id: str
    server_pid: int
    mark: str
    ranks: Mapping[int, ProcessIdentity]
    ends: Mapping[int, RankEnd]
    """How ranks have ended; filled in as they do."""

    def everybody(self) -> tuple[NamedProcess, ...]:
        """All processes of the node, from the agent down, ordered so that those that would notice the loss of the others come
        first."""
        ranks = {identity.pid: f"rank {rank}" for rank, identity in self.ranks.items()}
        known = [("agent", os.getpid()), ("fork server", self.server_pid)]
        known += [(ranks.get(pid, UNNAMED), pid) for pid in _descendants(self.server_pid)]
        found = [each for what, pid in known if (each := named(what, pid)) is not None]
        # A rank that has just ended is also listed, as it was meant to end.
        listed = {each.pid for each in found}
        gone = [each for each in self.ranks.items() if each[1].pid not in listed]
        return (*found, *(NamedProcess(what=f"rank {r}", pid=i.pid, start_ticks=i.start_ticks) for r, i in gone))


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeOrder:
    """The supervisor's order to an agent to strike one rank, or its node, now."""

    fault: "Fault"
    leg_path: str
    attempt: int
    victim: ProcessIdentity
    """The rank's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideStrike:
    """A strike order that the agent carries out."""

    order: StrikeOrder
    node: NodeProcesses

    @property
    def victim(self) -> ProcessIdentity:
        return self.order.victim

    def option(self, name: str) -> Any:
        return self.order.fault.option(name)

    def signal(self, number: int) -> bool:
        """Signal the rank; False when it is gone."""
        return send_signal(self.victim, number)

    def later(self, act: Callable[[], None]) -> bool:
        """Start `act`, which takes time, in a separate thread. Returns True: the strike is under way."""
        threading.Thread(target=act, name=f"fault {self.order.fault.id}", daemon=True).start()
        return True

    def note(self, note: Note) -> None:
        """Record what the fault did."""
        write_note(LegLayout(Path(self.order.leg_path)), self.order.fault.id, note)

    def end(self, strike: Collection[NamedProcess], *, watch: Collection[NamedProcess] = (), **more: Any) -> bool:
        """Make a witness kill these processes, and record which of them, of `watch` and of the node are gone then."""
        node = self.node
        about = EndNote(node=node.node_id, agent=os.getpid(), **more)
        whom = {"strike": tuple(strike), "watch": (*watch, *node.everybody()), "mark": node.mark}
        call_witness(WitnessOrder(leg_path=self.order.leg_path, fault=self.order.fault.id, about=about, **whom))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalStrike:
    """A strike by the supervisor that the supervisor does not outlive."""

    leg: LegLayout
    fault: str
    head: Callable[[], ProcessIdentity | None]
    """Returns Ray's head process, if this process started it."""


def _descendants(pid: int) -> list[int]:
    found = children(pid)
    return [each for child in found for each in (child, *_descendants(child))]
