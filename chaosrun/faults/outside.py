"""What an agent does to the processes of its own node on the supervisor's word: signals to a rank, the end of the node.

Every signal goes to a process known by pid and start time that this agent's own fork server forked, to the agent itself, or to
its raylet; nothing else is ever struck. Knows nothing of plans and verdicts: the supervisor has claimed the fault before.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaosrun.faults import delayed_signal
from chaosrun.faults.witness import Seen, call_witness, seen_as
from chaosrun.processes import ProcessIdentity, children, is_alive, send_signal
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import write_note

TELL_LIMIT_S = 5.0
"""For the fork server to say how ranks have ended that are gone."""
POLL_S = 0.005
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}
"""Kinds that are one signal to one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One fault as the agent is told of it."""

    fault: str
    kind: str
    leg_path: str
    attempt: int
    rank: int
    pid: int
    start_ticks: int
    grace_s: float = 0.0
    duration_s: float = 0.0

    @property
    def victim(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks)

    def note(self, **found: Any) -> None:
        about = {"rank": self.rank, "attempt": self.attempt, "pid": self.pid, "start_ticks": self.start_ticks}
        write_note(LegLayout(Path(self.leg_path)), self.fault, **about, **found)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcesses:
    """A node's part of a running attempt."""

    node_id: str
    server_pid: int
    mark: str
    ranks: Mapping[int, ProcessIdentity]
    ends: Mapping[int, Mapping[str, Any]]
    """How ranks have ended; filled in as they do."""

    def seen(self) -> list[Seen]:
        """Everybody, from the agent down, those first that would notice the loss of the others."""
        below = list(_descendants(self.server_pid))
        ranks = {identity.pid: rank for rank, identity in self.ranks.items()}
        named = [("agent", os.getpid()), ("fork server", self.server_pid)]
        named += [(f"rank {ranks[pid]}" if pid in ranks else "process below", pid) for pid in below]
        found = [seen for what, pid in named if (seen := seen_as(what, pid)) is not None]
        # A rank that has just gone is told of too: it was meant to go.
        listed = {seen["pid"] for seen in found}
        gone = [(rank, identity) for rank, identity in self.ranks.items() if identity.pid not in listed]
        return found + [{"what": f"rank {r}", "pid": i.pid, "start_ticks": i.start_ticks} for r, i in gone]


def _descendants(pid: int) -> list[int]:
    found = children(pid)
    return [each for child in found for each in (child, *_descendants(child))]


def deliver(blow: Blow, node: NodeProcesses, go_on: Callable[[Coroutine[Any, Any, None]], None]) -> bool:
    """Strike; False when that rank is gone, and nothing was done. `go_on` is given what takes its time."""
    match blow.kind:
        case "kill" | "stop" | "segfault":
            return send_signal(blow.victim, SIGNALS[blow.kind])
        case "preempt":
            if not send_signal(blow.victim, signal.SIGTERM):
                return False
            go_on(_give_grace(blow))
        case "pause":
            go_on(_pause(blow))
        case "drain":
            go_on(_drain(blow, node))
        case "node" | "agent" | "raylet":
            _end(blow, node)
        case unknown:
            raise AssertionError(unknown)
    return True


async def _pause(blow: Blow) -> None:
    blow.note(**await asyncio.to_thread(delayed_signal.pause, blow.victim, blow.duration_s))


async def _give_grace(blow: Blow) -> None:
    await _gone_within((blow.victim,), blow.grace_s)
    send_signal(blow.victim, signal.SIGKILL)


async def _drain(blow: Blow, node: NodeProcesses) -> None:
    """A notice to every rank of this node, and when they have gone, or grace has run out, the end of the node."""
    began = time.monotonic()
    victims = node.seen()
    told = [rank for rank, identity in node.ranks.items() if send_signal(identity, signal.SIGTERM)]
    # A rank that has come to the fault's point waits for this.
    blow.note(final=False, told=told)
    left = await _gone_within(tuple(node.ranks[rank] for rank in told), blow.grace_s)
    waited_s = time.monotonic() - began
    while not left and not node.ends.keys() >= set(told) and time.monotonic() - began < waited_s + TELL_LIMIT_S:
        await asyncio.sleep(POLL_S)  # gone, and about to be told how
    how = {str(rank): dict(node.ends[rank]) for rank in told if rank in node.ends}
    _end(blow, node, watch=victims, told=told, ends=how, waited_s=round(waited_s, 3), grace_s=blow.grace_s)


def _end(blow: Blow, node: NodeProcesses, *, watch: list[Seen] | None = None, **more: Any) -> None:
    """Have a witness kill what this fault kills of the node, and write down who is gone then."""
    everybody = node.seen()
    if blow.kind == "raylet":
        raylet = seen_as("raylet", os.getppid())
        strike = [] if raylet is None else [raylet]
    elif blow.kind == "agent":
        strike = [seen for seen in everybody if seen["what"] == "agent"]
    else:
        strike = everybody
    about = {"kind": blow.kind, "node": node.node_id, "agent": os.getpid(), "rank": blow.rank, "pid": blow.pid, **more}
    call_witness(blow.leg_path, blow.fault, about=about, strike=strike, watch=[*(watch or ()), *everybody], mark=node.mark)


async def _gone_within(victims: tuple[ProcessIdentity, ...], limit_s: float) -> list[ProcessIdentity]:
    """Wait for these processes to end; those that have not in time."""
    deadline = time.monotonic() + limit_s
    while left := [each for each in victims if is_alive(each)]:
        if time.monotonic() >= deadline:
            return left
        await asyncio.sleep(POLL_S)
    return []
