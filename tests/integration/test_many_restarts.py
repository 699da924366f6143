"""Restarts in a row: none fails, nothing piles up in the processes that live through them all, and nothing is left behind."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaosrun.cluster.processes import ProcessIdentity, identify, marked, shared_memory_entries
from chaosrun.records.trace import read_lines
from tests.integration.ranks import alive, eventually

REPOSITORY = Path(__file__).parents[2]
KINDS = ("supervisor", "agent", "fork server")
SETTLED_AFTER = 5
"""Attempts until caches, pools and allocators have their working size."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a long-lived process holds while an attempt runs."""

    descriptors: int
    resident_bytes: int
    listening: int
    children: int


@dataclass(slots=True)
class Watch:
    """Looks at the long-lived processes each time an attempt has started; the listener of a drill."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    pids: dict[str, set[int]] = field(default_factory=lambda: {kind: set() for kind in KINDS})
    seen: set[ProcessIdentity] = field(default_factory=set)
    """Every process met below the agent."""
    addresses: list[str] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)

    def __call__(self, record: dict[str, Any]) -> None:
        if record["leg"] != "chaos" or record["event"] != "attempt.started":
            return
        self.addresses.append(record["address"])
        # A rank's parent is the fork server, whose parent is the agent. The last rank of an attempt may be dead by now.
        server = self._server(record["pids"].values())
        agent = server.parent()
        assert agent is not None
        self.marks.add(server.environ()["CHAOSRUN_SESSION"])
        for kind, process in zip(KINDS, (psutil.Process(), agent, server), strict=True):
            self.pids[kind].add(process.pid)
            self.samples[kind].append(look_at(process))
        for process in (agent, server, *server.children(recursive=True)):
            if (identity := identify(process.pid)) is not None:
                self.seen.add(identity)

    def _server(self, ranks: Any) -> psutil.Process:
        if self.pids["fork server"]:
            return psutil.Process(next(iter(self.pids["fork server"])))
        parents = {psutil.Process(pid).ppid() for pid in ranks}
        assert len(parents) == 1, "the first attempt's ranks have one fork server"
        return psutil.Process(parents.pop())


def look_at(process: psutil.Process) -> Sample:
    connections = process.net_connections(kind="inet")
    return Sample(
        descriptors=process.num_fds(),
        resident_bytes=process.memory_info().rss,
        listening=sum(connection.status == psutil.CONN_LISTEN for connection in connections),
        children=len(process.children()),
    )


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_20_restarts_in_a_row(submit: Callable[..., Any]) -> None:
    restart_in_a_row(submit, 20)


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_200_restarts_in_a_row(submit: Callable[..., Any]) -> None:
    restart_in_a_row(submit, 200)


def restart_in_a_row(submit: Callable[..., Any], restarts: int) -> None:
    """Every step ends with a checkpoint and the death of a rank; the probe has one loader worker a rank to leave behind."""
    watch = Watch()
    shared_memory_before = shared_memory_entries()
    result = submit(
        REPOSITORY / "jobs" / "probe" / "job.yaml",
        f"args=[--steps, {restarts + 5}, --loader-workers, 1, --cpu]",
        "per_worker.gpu=0",
        "checkpoint={every_steps: 1, keep: 2}",
        f"faults.schedule=[{{rank: random, every_steps: 1, until_step: {restarts}}}]",
        "timeout=15m",
        on_event=watch,
    )
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert len(verdict.attempts) == restarts + 1
    assert verdict.lost_steps == 0
    assert sum(fault.landed for fault in verdict.faults) == restarts
    journal = list(read_lines(result.run.leg("chaos").journal))
    assert [record for record in journal if record["event"] == "death.unplanned"] == []
    assert len(watch.addresses) == restarts + 1

    for kind in KINDS:
        assert len(watch.pids[kind]) == 1, f"one {kind} lived through all restarts"
        check_bounded(kind, watch.samples[kind], restarts)
    # Ray ends the agent's process a moment after it was told to.
    eventually(lambda: not alive(list(watch.seen)), timeout_s=10)
    assert [process for mark in watch.marks for process in marked(mark)] == []
    assert shared_memory_entries() <= shared_memory_before
    assert listening_ports().isdisjoint(int(address.rpartition(":")[2]) for address in watch.addresses)


def check_bounded(kind: str, samples: list[Sample], restarts: int) -> None:
    """What a process holds after the last restart is what it held when it had settled, but for a few spare processes' pipes."""
    settled, last = samples[SETTLED_AFTER : SETTLED_AFTER + 3], samples[-3:]
    assert min(s.descriptors for s in last) <= max(s.descriptors for s in settled) + 2, kind
    assert min(s.listening for s in last) <= max(s.listening for s in settled), kind
    assert min(s.children for s in last) <= max(s.children for s in settled), kind
    grown = min(s.resident_bytes for s in last) - max(s.resident_bytes for s in settled)
    print(f"{kind}: {grown / MIB:+.2f} MiB in {restarts - SETTLED_AFTER} restarts; now {last[-1]}")
    assert grown < 2 * MIB + restarts * 16 * 1024, f"{kind} grew by {grown / MIB:.1f} MiB"


def listening_ports() -> set[int]:
    """Ports that processes of this test listen on: itself and what is below it."""
    me = psutil.Process(os.getpid())
    ports: set[int] = set()
    for process in (me, *me.children(recursive=True)):
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:
            continue  # it has ended, and its ports with it
        ports |= {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return ports
