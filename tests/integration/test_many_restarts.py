"""Random faults in a row: no restart fails, nothing piles up in the processes that live through them, and nothing is left."""

import json
import os
import random
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaosrun import api
from chaosrun.processes import ProcessIdentity, identify, marked, shared_memory_entries, unused_shared_memory
from chaosrun.records.layout import RunLayout
from tests.integration.ranks import alive, eventually
from tests.records import read_lines

REPOSITORY = Path(__file__).parents[2]
KINDS = ("supervisor", "agent", "fork server")
SETTLED_AFTER = 5
"""Attempts until caches, pools and allocators have their working size."""
MIB = 1 << 20
KEEP = 2
DEATHS = ("kill", "kill", "kill", "segfault", "exception", "exit")
RECORDS = r"rank-[01]\.(trace|log|end\.json|heartbeat|effects)|\.rank-[01]\.end\.json\.\d+\.tmp"
"""What an attempt leaves; the last is the record of an error that a survivor was killed over."""
PHASES = (
    "fetch",
    "forward",
    "reduce",
    "optimizer",
    "record",
    "checkpoint.begin",
    "checkpoint.file",
    "checkpoint.precommit",
    "checkpoint.postcommit",
    "checkpoint.retention",
    "step",
)


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
        # A rank's parent is the fork server, whose parent is the agent.
        server = self._server(record["pids"].values())
        if server is None:
            return
        agent = server.parent()
        assert agent is not None
        self.marks.add(server.environ()["CHAOSRUN_SESSION"])
        for kind, process in zip(KINDS, (psutil.Process(), agent, server), strict=True):
            self.pids[kind].add(process.pid)
            self.samples[kind].append(look_at(process))
        for process in (agent, server, *server.children(recursive=True)):
            if (identity := identify(process.pid)) is not None:
                self.seen.add(identity)

    def _server(self, ranks: Any) -> psutil.Process | None:
        """None: all ranks of the attempt are dead by now, and nothing is known of others."""
        if self.pids["fork server"]:
            return psutil.Process(next(iter(self.pids["fork server"])))
        parents: set[int] = set()
        for pid in ranks:
            with suppress(psutil.NoSuchProcess):
                parents.add(psutil.Process(pid).ppid())
        assert len(parents) <= 1, "the first attempt's ranks have one fork server"
        return psutil.Process(parents.pop()) if parents else None


def look_at(process: psutil.Process) -> Sample:
    connections = process.net_connections(kind="inet")
    return Sample(
        descriptors=process.num_fds(),
        resident_bytes=resident_bytes(process.pid),
        listening=sum(connection.status == psutil.CONN_LISTEN for connection in connections),
        children=len(process.children()),
    )


def resident_bytes(pid: int) -> int:
    """Counted page by page: VmRSS may be off by some hundred KiB for each processor."""
    pages = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(next(line for line in pages.splitlines() if line.startswith("Rss")).split()[1])


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_10_random_faults_in_one_run(local_ray: None, tmp_path: Path) -> None:
    in_own_process(strike_at_random, tmp_path, 10)


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_1000_random_faults_in_one_run(local_ray: None, tmp_path: Path) -> None:
    in_own_process(strike_at_random, tmp_path, 1000)


def in_own_process(function: Callable[..., None], *values: Any) -> None:
    """Where a supervisor's memory is its own: a process of pytest also holds what other tests have left."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(function, *values).result()


def random_faults(count: int) -> list[dict[str, Any]]:
    """One every other step, which no rank gets ahead of the others by: some way to die, somewhere in that step or in the
    checkpoint after it, on some rank."""
    draw = random.Random(count)
    return [
        {"kind": draw.choice(DEATHS), "phase": draw.choice(PHASES), "rank": draw.randrange(2), "at_step": 2 * number}
        for number in range(1, count + 1)
    ]


def strike_at_random(root: Path, count: int) -> None:
    """Every step has a checkpoint, and a fault; the probe has one loader worker a rank to leave behind."""
    watch = Watch()
    shared_memory_before = shared_memory_entries()
    overrides = (
        f"args=[--steps, {2 * count + 5}, --loader-workers, 1, --cpu]",
        "per_worker.gpu=0",
        f"checkpoint={{every_steps: 1, keep: {KEEP}}}",
        f"faults.schedule={json.dumps(random_faults(count))}",
        "timeout=50m",
    )
    result = api.submit(REPOSITORY / "jobs" / "probe" / "job.yaml", overrides=overrides, root=root, on_event=watch)
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert len(verdict.attempts) == count + 1
    assert sum(fault.landed for fault in verdict.faults) == count
    journal = list(read_lines(result.run.leg("chaos").journal))
    assert [record for record in journal if record["event"] == "death.unplanned"] == []
    assert len(watch.addresses) == count + 1

    for kind in KINDS:
        assert len(watch.pids[kind]) == 1, f"one {kind} lived through all restarts"
        check_bounded(kind, watch.samples[kind], count)
    # Ray ends the agent's process a moment after it was told to.
    eventually(lambda: not alive(list(watch.seen)))
    eventually(lambda: not [process for mark in watch.marks for process in marked(mark)])
    # What another process holds just now is its own.
    eventually(lambda: not unused_shared_memory(shared_memory_entries() - shared_memory_before))
    assert listening_ports().isdisjoint(int(address.rpartition(":")[2]) for address in watch.addresses)
    check_disk(result.run, count)


def check_disk(run: RunLayout, count: int) -> None:
    """What a run leaves: records of each attempt and fault, and as many checkpoints as are to be kept."""
    leg = run.leg("chaos")
    assert len(list(leg.checkpoints.iterdir())) == KEEP
    assert not leg.staging.exists() or not list(leg.staging.iterdir())
    assert not leg.quarantine.exists() or not list(leg.quarantine.iterdir())
    own = ("chaos", "job.yaml", "lock", "plan.json", "reference", "run.json", "supervisor.json", "verdict.json")
    assert sorted(run.path.iterdir()) == sorted(run.path / name for name in (*own, "junit.xml", "report.html", "report.md"))
    folders = {"attempts", "checkpoints", "faults", "output", "quarantine", "staging"}
    unknown = {path.name for path in leg.path.iterdir()} - folders
    assert unknown <= {"began.json", "environment.json", "inputs.json", "journal.jsonl", "left.json"}, unknown
    assert len([path for path in leg.faults.iterdir() if path.is_file()]) == count
    assert leg.attempts() == list(range(1, count + 2))
    strangers = [
        path.name
        for number in leg.attempts()
        for path in leg.attempt(number).path.iterdir()
        if not re.fullmatch(RECORDS, path.name)
    ]
    assert not strangers, strangers


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
    """Ports that processes of this test listen on: pytest's, and what is below it: the supervisor, and Ray."""
    tests = psutil.Process(os.getppid())
    ports: set[int] = set()
    for process in (tests, *tests.children(recursive=True)):
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:
            continue  # it has ended, and its ports with it
        ports |= {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return ports
