"""Faults that the supervisor strikes itself: those that come after a delay, and those for which a rank waits at its fault
point. Decides when such a fault is due; writes its claim and its `fault.requested`, both durable before it strikes; and
collects the evidence afterwards: a witness's note shows the end of a node, the next supervisor the end of this one. The target
process is identified by pid and start time; the agent that forked it sends the signal. Decides nothing about attempts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaosrun.cluster.messages import AgentDied, Exited
from chaosrun.faults.control_plane import completed_by_successor
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.faults.node_evidence import EndNote
from chaosrun.faults.outside import FinalStrike, StrikeOrder
from chaosrun.processes import ProcessIdentity
from chaosrun.records.events import AttemptStarted, FaultObserved, JournalEvent
from chaosrun.records.heartbeat import read_heartbeat
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import Marker, read_marker, read_markers, read_note, write_marker
from chaosrun.supervise.observations import Observations

if TYPE_CHECKING:
    from chaosrun.cluster.workers import ClusterWorkers

LOOK_EVERY_S = 0.025
"""While a rank may come to a point and wait there, or a witness is at work."""
WITNESS_LIMIT_S = 45.0


@dataclass(slots=True, kw_only=True)
class NodeTermination:
    """A node that a fault is ending."""

    fault: Fault
    limit_s: float
    """The deadline for its witness's note, by `OutsideFaults`' clock."""
    struck: dict[str, Marker] = field(default_factory=dict)
    """Marker by fault: more than one may end a node at once."""


class OutsideFaults:
    """The outside faults of one leg. The supervisor calls `look` when idle, at the latest after `patience_s`."""

    def __init__(
        self,
        *,
        leg: LegLayout,
        plan: FaultPlan,
        observations: Observations,
        workers: "ClusterWorkers",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leg, self._observations, self._workers, self._clock = leg, observations, workers, clock
        self._timed = sorted((fault for fault in plan.faults if fault.phase is None), key=_after_s)
        self._waited_for = [fault for fault in plan.faults if fault.phase is not None and fault.facts.inside is None]
        self._first_start_s: float | None = None
        self._attempt = 0
        self._ready: list[Fault] = []
        """Timed faults that have not been claimed."""
        self._parking: list[Fault] = []
        """Faults at whose point a rank may wait in this attempt. None of them has a group: see `plan.entries`."""
        self._claimed: dict[str, Fault] = {}
        """All faults that were claimed in this attempt."""
        self._ending: str | None = None
        """The fault that ends this attempt: no other one that ends it is begun."""
        self._terminating: dict[str, NodeTermination] = {}

    def take_over(self, past: Iterable[JournalEvent], now_s: float) -> None:
        """Continue from where a former supervisor of this leg ended: its clock, the nodes it had lost, evidence of its end.
        `now_s`: wall clock, like the times in the journal."""
        planned = {fault.id: fault for fault in (*self._timed, *self._waited_for)}
        for record in past:
            if isinstance(record, AttemptStarted) and self._first_start_s is None:
                self._first_start_s = self._clock() - max(0.0, now_s - record.time_s)
            elif isinstance(record, FaultObserved) and record.fault in planned:
                self._avoid(planned[record.fault], (record.found or {}).get("node"))
        for fault in planned.values():
            if fault.id in self._observations.observed or not (marker := read_marker(self._leg, fault.id)):
                continue
            note = read_note(self._leg, fault.id, fault.facts.note)
            if not isinstance(note, EndNote) or not note.final:
                continue
            if fault.facts.evidence == "successor":
                self._observations.see(fault.id, marker, how="successor", found=completed_by_successor(note))
            elif fault.facts.evidence == "node":
                self._observations.see(fault.id, marker, how="node", found=note)
                self._avoid(fault, note.node)

    def attempt_started(self, attempt: int) -> None:
        if self._first_start_s is None:
            self._first_start_s = self._clock()
        self._attempt, self._ending = attempt, None
        self._claimed.clear()
        claimed = read_markers(self._leg)
        self._ready = [fault for fault in self._timed if fault.id not in claimed]
        # Points that ranks have already reached count: every fault claimed in this attempt is checked.
        self._parking = [
            fault
            for fault in self._waited_for
            if fault.id not in self._observations.observed and fault.attempt in (None, attempt)
        ]

    def attempt_stopped(self) -> None:
        """Let faults strike again that were claimed in an attempt which ended for another reason."""
        for fault in (*self._claimed.values(), *self._parking):
            marker = read_marker(self._leg, fault.id)
            if fault.id in self._observations.observed or marker is None or marker.attempt != self._attempt:
                continue
            if fault.facts.evidence != "note":
                self._observations.withdraw(fault.id, "its attempt ended before it could be seen to strike")

    def add(self, faults: Sequence[Fault]) -> None:
        """Add injected faults that strike from outside; they strike like planned ones."""
        assert all(fault.phase is None for fault in faults)
        self._timed = sorted([*self._timed, *faults], key=_after_s)
        self._ready = sorted([*self._ready, *faults], key=_after_s)

    def elapsed_s(self) -> float:
        """Time since the leg's first start, 0 before it; may be read from any thread."""
        return 0.0 if self._first_start_s is None else max(0.0, self._clock() - self._first_start_s)

    def is_terminating(self, node: str) -> bool:
        """Whether this node is being ended: its attempt is not over until the node is gone."""
        return node in self._terminating

    def of_death(self, exited: Exited) -> str | None:
        """The fault on whose preemption notice this rank, on any node, left together with the others."""
        if exited.exit_code != PREEMPTED_EXIT_CODE:
            return None
        return next((each.fault.id for each in self._terminating.values() if each.fault.facts.notice), None)

    def misplaced(self, faults: Iterable[Fault] | None = None) -> str | None:
        """Why a fault of the plan, or one of these, cannot strike with the present placement of ranks."""
        for fault in (*self._timed, *self._waited_for) if faults is None else faults:
            open_still = fault.id not in self._observations.observed
            if open_still and fault.facts.ends_node and self._workers.is_on_own_node(fault.rank):
                return f"{fault.describe()}: rank {fault.rank} is on the node that the supervisor itself is connected to"
        return None

    def patience_s(self, tick_s: float, *, running: bool) -> float:
        """The longest time until `look` must be called again."""
        waits = [tick_s]
        if self._terminating or (running and self._parking):
            waits.append(LOOK_EVERY_S)
        if running and (coming := self._next_s()) is not None:
            waits.append(max(LOOK_EVERY_S if coming <= self._clock() else 0.0, coming - self._clock()))
        return min(waits)

    def look(self, *, running: bool) -> tuple[str, AgentDied] | None:
        """Strike what is due. Returns a node that has ended, and how."""
        if running:
            self._strike([*self._arrivals(), *self._claims()])
            self._see_notes()
        return self._end_of_a_node()

    def _next_s(self) -> float | None:
        if self._first_start_s is None or not self._ready:
            return None
        if self._ending is not None and self._ready[0].group != self._ending:
            return None
        return self._first_start_s + _after_s(self._ready[0])

    def _arrivals(self) -> Iterator[tuple[Fault, Marker]]:
        """Faults whose trigger point a rank has reached, with their markers."""
        for fault in list(self._parking):
            marker = read_marker(self._leg, fault.id)
            if marker is not None and marker.attempt == self._attempt:
                self._parking.remove(fault)
                yield fault, marker

    def _claims(self) -> Iterator[tuple[Fault, Marker]]:
        """Faults whose time has come and whose rank runs, claimed, with their markers."""
        now = self._clock()
        due = [f for f in self._ready if self._first_start_s is not None and self._first_start_s + _after_s(f) <= now]
        for name in dict.fromkeys(fault.group or fault.id for fault in due):
            members = [fault for fault in due if (fault.group or fault.id) == name]
            ends = any(fault.facts.ends_attempt for fault in members)
            if ends and self._ending not in (None, name):
                continue
            identify = self._workers.identify_rank
            awaited = {f.id: f.facts.notice and not self._trains(f.rank) for f in members}
            who = {f.id: identify(self._attempt, f.rank, listening=awaited[f.id]) for f in members}
            if None in who.values():
                continue  # all of them wait, perhaps until the next attempt
            if ends:
                self._ending = name
            for fault in members:
                self._ready.remove(fault)
                pid, ticks = who[fault.id] or (0, 0)
                about = {"rank": fault.rank, "attempt": self._attempt, "pid": pid, "ticks": ticks, "notice": fault.facts.notice}
                if marker := write_marker(self._leg, fault.id, **about, group=fault.group):
                    yield fault, marker

    def _trains(self, rank: int) -> bool:
        """Whether the rank has made a step: by then a script has set its SIGTERM handler, if it has one."""
        beat = read_heartbeat(self._leg.attempt(self._attempt).heartbeat(rank))
        return beat is not None and beat.step > 0

    def _strike(self, due: Sequence[tuple[Fault, Marker]]) -> None:
        for fault, marker in due:
            self._claimed[fault.id] = fault
            # Durable: if this process dies of the fault, its successor knows why.
            self._observations.request(fault.id, marker, durable=True)
        for fault, _ in due:
            if fault.facts.last_act is not None:
                fault.facts.last_act(FinalStrike(leg=self._leg, fault=fault.id, head=self._workers.head))
        self._strike_ranks_and_nodes(due)

    def _strike_ranks_and_nodes(self, due: Sequence[tuple[Fault, Marker]]) -> None:
        orders: list[StrikeOrder] = []
        for fault, marker in due:
            if fault.facts.evidence == "node":
                node = self._workers.node_of(fault.rank)
                known = self._terminating.get(node)
                if known is not None:
                    if known.fault.kind == fault.kind:
                        known.struck[fault.id] = marker
                    continue
                limit_s = self._clock() + WITNESS_LIMIT_S + (fault.option("grace_s") if fault.facts.notice else 0.0)
                self._terminating[node] = NodeTermination(fault=fault, limit_s=limit_s, struck={fault.id: marker})
            assert marker.start_ticks is not None
            victim = ProcessIdentity(marker.pid, marker.start_ticks)
            orders.append(StrikeOrder(fault=fault, leg_path=str(self._leg.path), attempt=marker.attempt, victim=victim))
        if not orders:
            return
        for order, done in zip(orders, self._workers.strike(orders), strict=True):
            if done is not False:
                continue  # otherwise it is unknown: the fault stays claimed until its attempt is over
            fault = order.fault
            self._terminating = {node: each for node, each in self._terminating.items() if each.fault.id != fault.id}
            self._claimed.pop(fault.id)
            self._observations.withdraw(fault.id, f"rank {fault.rank} was gone before it was struck")

    def _see_notes(self) -> None:
        """Record the notes of faults that left their rank alive as soon as these faults are over: a client may wait for
        them."""
        for fault in self._claimed.values():
            if fault.facts.evidence != "note" or fault.id in self._observations.observed:
                continue
            note, marker = read_note(self._leg, fault.id, fault.facts.note), read_marker(self._leg, fault.id)
            if note is not None and marker is not None and note.final:
                self._observations.see(fault.id, marker, how="note", found=note)

    def _end_of_a_node(self) -> tuple[str, AgentDied] | None:
        for node, termination in self._terminating.items():
            note = read_note(self._leg, termination.fault.id, EndNote)
            if note is None or not note.final:
                if self._clock() < termination.limit_s:
                    continue
                note = EndNote(problem="its witness did not speak")
            del self._terminating[node]
            for fault, marker in termination.struck.items():
                self._observations.see(fault, marker, how="node", found=note)
            self._avoid(termination.fault, note.node)
            self._workers.lose(node)
            message = f"planned fault {termination.fault.id}"
            return node, AgentDied(message=message, fault=termination.fault.id)
        return None

    def _avoid(self, fault: Fault, node: str | None) -> None:
        if fault.facts.ends_node and node:
            self._workers.avoid(node, f"{fault.id}: {fault.describe()}")


def _after_s(fault: Fault) -> float:
    return fault.after_s or 0.0
