"""Runs drills on the Ray that this process is connected to, several at a time, each in its own thread."""

import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chaosrun.campaign.drill import drill_on, new_run
from chaosrun.campaign.scheduler import RunningSupervisors
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.errors import ChaosrunError, InterruptedRunError
from chaosrun.preflight.checks.drill import DrillOutcome, DrillRequest, Terms
from chaosrun.preflight.earlier_run import costs_of
from chaosrun.records.codec import changed
from chaosrun.records.events import EventRecord
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import read_run, recorded_leg
from chaosrun.supervise.find_runs import remove_run
from chaosrun.supervise.run import Watch
from chaosrun.verify.verdict import Verdict

JOB = Path(__file__).parent / "job" / "job.yaml"
AT_ONCE = 64
"""Drills at a time: their supervisors are threads of this one process."""
END_WITHIN_S = 30.0
"""What interrupted drills need to end, placement included."""


def run_drills(wanted: Sequence[DrillRequest], terms: Terms) -> list[DrillOutcome]:
    """See `preflight.checks.drill.Drills`. This process must stay connected to the Ray meanwhile."""
    work = _Work(wanted=wanted, terms=terms)
    try:
        work.begin()
        work.wait(work.until_s)
    finally:
        work.working.interrupt()
        work.wait(time.monotonic() + END_WITHIN_S)
    unended = DrillOutcome(status="ERROR", cause=f"it did not end within {terms.limit_s:g} s", seconds=terms.limit_s)
    late = DrillOutcome(status="LATE")
    return [work.told.get(number, unended if number in work.begun else late) for number in range(len(wanted))]


@dataclass(slots=True, kw_only=True)
class _Work:
    """The work that the threads share."""

    wanted: Sequence[DrillRequest]
    terms: Terms
    told: dict[int, DrillOutcome] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    working: RunningSupervisors = field(default_factory=RunningSupervisors)
    began_s: float = field(default_factory=time.monotonic)
    _waiting: "queue.SimpleQueue[int]" = field(default_factory=queue.SimpleQueue)
    _ended: "list[Future[None]]" = field(default_factory=list)
    """One future for each thread's end. Threads are not joined: after an interrupted join, Python 3.11 takes a running thread
    for ended."""

    def begin(self) -> None:
        # In random order, so that time does not always run out for the same nodes.
        for number in random.sample(range(len(self.wanted)), len(self.wanted)):
            self._waiting.put(number)
        for _ in range(min(AT_ONCE, len(self.wanted))):
            # A daemon, as a thread that waits for a silent node must not keep this process alive.
            self._ended.append(ended := Future())
            threading.Thread(target=self._work, args=(ended,), daemon=True).start()

    def wait(self, until_s: float | None) -> None:
        """Wait until every thread has ended, or until `until_s`."""
        futures.wait(self._ended, None if until_s is None else max(0.0, until_s - time.monotonic()))

    @property
    def until_s(self) -> float | None:
        """The time by which all drills should have ended; None: unknown, as more than AT_ONCE drills run in turn without a
        limit."""
        if self.terms.begin_within_s is None and len(self.wanted) > AT_ONCE:
            return None
        return self.began_s + (self.terms.begin_within_s or 0.0) + self.terms.repeat_s + self.terms.limit_s

    def _work(self, ended: "Future[None]") -> None:
        try:
            self._drill_on()
        finally:
            ended.set_result(None)

    def _drill_on(self) -> None:
        """Run one drill after the other, until none is left, or it is too late to begin."""
        watch, within_s = self.working.watch(), self.terms.begin_within_s
        while not self.working.interrupted and (within_s is None or time.monotonic() <= self.began_s + within_s):
            try:
                number = self._waiting.get_nowait()
            except queue.Empty:
                return
            self.begun.add(number)
            began_s = time.monotonic()
            try:
                told = _drill(self.wanted[number], self.terms, watch)
            except InterruptedRunError:
                if self.working.interrupted:
                    return
                told = DrillOutcome(status="ERROR", cause="it was cancelled", hint="run the preflight again")
            except ChaosrunError as error:
                told = DrillOutcome(status="ERROR", cause=error.message, hint=error.hint)
            except Exception as error:
                # Any error goes into this node's row, and the drills of other nodes continue.
                told = DrillOutcome(status="ERROR", cause=f"{type(error).__name__}: {error}")
            self.told[number] = changed(told, seconds=time.monotonic() - began_s)


def _drill(request: DrillRequest, terms: Terms, watch: Watch) -> DrillOutcome:
    """Run a drill, repeatedly for as long as the terms say and it passes."""
    until_s = time.monotonic() + terms.repeat_s
    names = {node.node_id: node.name for node in request.nodes}
    cluster = RayCluster(
        None, workers=request.workers, cpu=request.cpu, gpu=request.gpu, only_on=names.keys(), spread=len(names) > 1
    )
    rounds = 0
    # Its own root, as another node's cached reference would make this a comparison of nodes.
    with cluster, tempfile.TemporaryDirectory(prefix="chaosrun-preflight-") as references:
        carry_out = partial(drill_on, cluster, root=Path(references), watch=watch)
        while True:
            rounds += 1
            told = changed(_round(carry_out, (*request.overrides, f"args[3]={rounds}"), terms, names), rounds=rounds)
            if told.status != "PASS" or time.monotonic() >= until_s:
                return told


def _round(carry_out: Callable[..., Verdict], overrides: Sequence[str], terms: Terms, names: Mapping[str, str]) -> DrillOutcome:
    ranks: dict[int, str] = {}

    def on_record(record: EventRecord) -> None:
        if record["event"] == "placement.acquired":
            ranks.update({rank: names[node] for node, about in record["nodes"].items() for rank in about["ranks"]})

    run = new_run(terms.root, JOB, overrides, reference="fresh")
    try:
        verdict = carry_out(run, on_record=on_record)
    except InterruptedRunError:
        remove_run(run)
        raise
    told = changed(_outcome(run, verdict), ranks=ranks)
    if verdict.status == "PASS":
        remove_run(run)
        return told
    return changed(told, run=str(run.path), run_argument=run_argument(run))


def _outcome(run: RunLayout, verdict: Verdict) -> DrillOutcome:
    info = read_run(run)
    first = verdict.divergence
    tensor = f", {first.tensor}" if first and first.tensor else ""
    return DrillOutcome(
        status=verdict.status,
        outcome=verdict.outcome,
        cause=verdict.cause,
        hint=verdict.hint,
        irreproducible=bool(info.irreproducible),
        difference=f"{first.kind} differs first at step {first.step}, rank {first.rank}{tensor}" if first else "",
        why=first.cause if first else "",
        differing=first.ranks if first else (),
        landed=sum(fault.landed for fault in verdict.faults),
        planned=len(verdict.faults),
        costs=costs_of([read_leg(recorded_leg(run, info, name)) for name in ("reference", "chaos")]),
    )
