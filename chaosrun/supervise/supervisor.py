"""Runs one leg: takes events, lets `lifecycle.decide` decide, journals, acts. The only place that restarts anything."""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chaosrun.checkpoint.object_store import checkpoint_store
from chaosrun.cluster.messages import AgentDied, Announced, Exited, LauncherFailed, NodeEvent, RanksStopped
from chaosrun.errors import RecoveryError, ResourcesError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.power_cut import cut_power
from chaosrun.records import events as recorded
from chaosrun.records.codec import to_plain
from chaosrun.records.events import EventRecord
from chaosrun.records.history import journal_events
from chaosrun.records.journal import Journal
from chaosrun.records.layout import LegLayout, checkpoint_step
from chaosrun.records.markers import read_end, read_markers
from chaosrun.records.order import WorkerOrder
from chaosrun.records.trace_writer import sync_traces
from chaosrun.spec.model import RecoverySpec
from chaosrun.supervise import early_end, lifecycle
from chaosrun.supervise.deaths import failure_of_launcher, last_step, went_on_from
from chaosrun.supervise.hangs import HangDetector, HangWatch
from chaosrun.supervise.judging import RecoveryJudge
from chaosrun.supervise.observations import Observations
from chaosrun.supervise.striking import OutsideFaults
from chaosrun.supervise.taking_over import take_over
from chaosrun.supervise.workers import AddFaults, InterruptLeg, Woken, resume_values

if TYPE_CHECKING:
    from chaosrun.cluster.workers import ClusterWorkers

STOP_LIMIT_S = 60.0
INTERRUPTED = lifecycle.EndLeg(lifecycle.Finish(outcome="interrupted", message="interrupted"))
TICK_S = 0.5
"""How often deadlines and heartbeats are looked at while nothing happens; deaths do not wait for it."""


class Supervisor:
    """One leg from its first to its last attempt. `run` may be called once."""

    def __init__(
        self,
        *,
        name: str,
        leg: LegLayout,
        template: WorkerOrder,
        plan: FaultPlan,
        workers: "ClusterWorkers",
        recovery: RecoverySpec,
        deadline_s: float | None,
        on_record: Callable[[EventRecord], None],
        judge: RecoveryJudge | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._leg = leg
        self._template = template
        self._plan = plan
        self._workers = workers
        self._recovery = recovery
        self._deadline_s = deadline_s
        self._on_record = on_record
        self._judge = judge
        self._clock = clock
        self._store = checkpoint_store(leg, template.keep)
        self._pending: deque[lifecycle.LegEvent] = deque()
        self._stopped_nodes: set[str] = set()
        self._is_open = False
        """An attempt has been started, and not every node of it has stopped."""
        self._killed: list[int] = []
        self._stop_reason, self._stop_began_s = "", 0.0
        self._rest_until_s: float | None = None
        self._looked_s, self._attempt, self._audited = 0.0, 0, ""
        self.is_waiting_for_places = False
        """No event is read meanwhile: a KeyboardInterrupt raised into `run` ends the leg, `interrupt` would have to wait."""
        self._observations = Observations(leg, plan, self._record, by_script=template.by == "script")
        self.outside_faults = OutsideFaults(leg=leg, plan=plan, observations=self._observations, workers=workers)
        self._detector = HangDetector(
            workers=workers,
            leg=leg,
            script=template.script,
            watch=HangWatch.of(recovery, template.world_size, inspecting=bool(template.inspect)),
            observations=self._observations,
            record=self._record,
        )
        self._passed: Counter[str] = Counter()
        self._journal: Journal | None = None

    @property
    def ray(self) -> str:
        return self._workers.ray

    def interrupt(self) -> None:
        """End the leg as soon as its processes are gone. May be called from a signal handler or another thread."""
        self._workers.wake(InterruptLeg(to=self))

    def inject(self, faults: Sequence[Fault]) -> None:
        """Add faults to the leg; they are in the run's plan.json already. May be called from another thread; does not wait."""
        self._workers.wake(AddFaults(to=self, faults=tuple(faults)))

    def run(self) -> recorded.LegFinished:
        """Supervise to the end and return how it ended. Every process of the leg is gone when this returns or raises."""
        took_over = self._leg.journal.exists()
        self._journal = Journal(self._leg.journal, clock=self._clock)
        limits = self._template.world_size, self._recovery.max_restarts, self._recovery.backoff
        state, actions = lifecycle.begin(*limits, fault_free=self.name in ("reference", "confirm"))
        if took_over:
            state, _ = lifecycle.decide(state, self._take_over())
        else:
            about = {"workers": self._template.world_size, "supervisor_pid": os.getpid(), "plan": self._plan.digest()}
            self._record(recorded.LegStarted(leg=self.name, **about))
        try:
            while True:
                for action in actions:
                    if isinstance(action, lifecycle.Finish):
                        return self._finish(early_end.ending(action, self._leg, self._attempt, self._template.world_size))
                    self._act(action)
                event = self._next_event(state)
                if isinstance(event, lifecycle.Stopped):
                    self._observations.attempt_ended(self._attempt, state.planned, state.failure)
                    self._observations.of_notes()
                    self.outside_faults.attempt_stopped()
                    self._observations.of_broken_groups(self._attempt)
                    cut_power(self._leg, self._plan, self._attempt, self._template.outputs, self._record)
                    self._record_failure(state.failure)
                    if self._judge:
                        self._judge.ended(self._attempt)
                state, actions = lifecycle.decide(state, event)
        except BaseException:
            # A bug or a second interrupt: stop all processes, then let the exception through.
            self._workers.stop(self._attempt)
            raise
        finally:
            self._journal.close()

    def _next_event(self, state: lifecycle.LegState) -> lifecycle.LegEvent:
        while True:
            if self._pending:
                return self._pending.popleft()
            running = state.phase == "running"
            patience_s = self.outside_faults.patience_s(TICK_S, running=running)
            raw = self.outside_faults.look(running=running) or self._workers.next_event(patience_s)
            event = None if raw is None else self._as_lifecycle_event(*raw)
            if (raw is None and patience_s >= TICK_S) or time.monotonic() > self._looked_s + TICK_S:
                # Checked also while irrelevant events keep coming.
                self._look_at_clocks(state)
            if event is not None:
                return event

    def _as_lifecycle_event(self, node: str, event: "NodeEvent | Woken") -> lifecycle.LegEvent | None:
        match event:
            case Exited() if event.attempt == self._attempt:
                return self._death(event)
            case Announced() if event.attempt == self._attempt:
                self._record(recorded.WorkerStarted(attempt=event.attempt, rank=event.rank, pid=event.pid), durable=False)
                self._detector.announced(event.rank, event.pid)
            case LauncherFailed() if event.attempt == self._attempt:
                failure = failure_of_launcher(event, self._leg.attempt(event.attempt), self._template.world_size)
                return lifecycle.RankDeath(rank=event.rank or 0, failure=failure)
            case RanksStopped() if event.attempt == self._attempt and not self.outside_faults.is_terminating(node):
                return next(self._node_stopped(node, event.killed), None)
            case AgentDied():
                if event.fault:
                    self._stop_reason = f"planned fault {event.fault}"
                self._pending += self._node_stopped(node, ())
                return lifecycle.AgentLost(message=f"the agent on node {node[:8]} died: {event.message}", fault=event.fault)
            case InterruptLeg() if event.to is self:
                return INTERRUPTED
            case AddFaults() if event.to is self:
                self._take_in(event.faults)
        return None  # of an attempt, or a leg, that is already over

    def _take_in(self, faults: Sequence[Fault]) -> None:
        self._plan = replace(self._plan, faults=(*self._plan.faults, *faults))
        for fault in faults:
            self._observations.add(fault)
            about = {"kind": fault.kind, "rank": fault.rank, "what": fault.describe(), "plan": fault.digest()}
            self._record(recorded.FaultInjected(fault=fault.id, **about))
        self.outside_faults.add(faults)

    def _node_stopped(self, node: str, killed: Sequence[int]) -> Iterator[lifecycle.LegEvent]:
        """Stopped, once the last node has stopped."""
        self._stopped_nodes.add(node)
        self._killed += killed
        if self._is_open and self._stopped_nodes >= set(self._workers.nodes):
            self._is_open = False
            stopped = recorded.AttemptStopped(
                attempt=self._attempt, reason=self._stop_reason, killed=tuple(sorted(self._killed))
            )
            # The record of the next attempt's start or the leg's end is durable, and flushes this one with it.
            self._record(stopped, durable=False)
            yield lifecycle.Stopped()

    def _death(self, exited: Exited) -> lifecycle.RankDeath:
        attempt, rank, pid = exited.attempt, exited.rank, exited.pid
        ended = {"exit_code": exited.exit_code, "signal": exited.signal, "died_s": exited.died_s}
        # Not flushed by itself: the next record that matters flushes it too, and a recovery should not wait for the disk.
        record = recorded.WorkerExited(attempt=attempt, rank=rank, pid=pid, stopped=exited.killed, **ended)
        self._record(record, durable=False)
        self._detector.exited(rank)
        if fault := self._observations.of_death(exited) or self.outside_faults.of_death(exited):
            leaving = self._observations.leaves(fault, exited)
            return lifecycle.RankDeath(rank=rank, fault=fault, leaving=leaving, stopped=exited.killed)
        if exited.killed:
            return lifecycle.RankDeath(rank=rank, failure=lifecycle.Failure(message="stopped with its attempt"), stopped=True)
        return lifecycle.RankDeath(rank=rank, failure=self._observations.failure_of(exited))

    def _record_failure(self, failure: lifecycle.Failure | None) -> None:
        """Called when the attempt is over: only then is it certain that no planned fault caused the death."""
        if failure is None:
            return
        end = None if failure.rank is None else read_end(self._leg.attempt(self._attempt), failure.rank)
        told = {"code": failure.code, "reason": failure.message, "step": failure.step, "error": end and end.error}
        self._record(recorded.DeathUnplanned(attempt=self._attempt, rank=failure.rank, **told))

    def _look_at_clocks(self, state: lifecycle.LegState) -> None:
        for found in self._judge.found() if self._judge else ():
            self._record_judgement(found)
        self._looked_s = now = time.monotonic()  # the wall clock may be set
        if self._deadline_s is not None and now > self._deadline_s:
            self._deadline_s = None
            self._end("timeout", "the run's timeout has passed")
        if state.phase == "stopping" and now > self._stop_began_s + STOP_LIMIT_S:
            missing = sorted(set(self._workers.nodes) - self._stopped_nodes)
            nodes = ", ".join(node[:8] for node in missing)
            message = f"processes of attempt {self._attempt} on node {nodes} did not go within {STOP_LIMIT_S:.0f} s of SIGKILL"
            self._pending.append(lifecycle.ProcessesRemain(message=message))
        if state.phase == "resting" and self._rest_until_s is not None and now >= self._rest_until_s:
            self._rest_until_s = None
            self._pending.append(lifecycle.Rested())
        if state.phase == "running" and (hang := self._detector.look(now)):
            self._pending.append(hang)

    def _record_judgement(self, found: recorded.Judgement) -> None:
        self._record(found)
        if isinstance(found, recorded.RecoveryDiverged) and self._recovery.on_divergence == "stop":
            said = f"attempt {found.attempt} is not what was recorded: {found.what} (step {found.step}, rank {found.rank})"
            self._end("diverged", said, "everything is kept; `chaosrun resume` continues the run all the same")

    def _take_over(self) -> lifecycle.Resume:
        """Continue a leg whose journal another supervisor began."""
        past = journal_events(self._leg.journal)
        self._record(recorded.SupervisorResumed(supervisor_pid=os.getpid()))
        for record in past:
            if isinstance(record, recorded.AttemptStarting):
                self._count_passed_phases(record.resume)
        if self._judge:
            self._judge.take_over(past)
        return take_over(
            past,
            self._leg,
            now_s=self._clock(),
            observations=self._observations,
            outside_faults=self.outside_faults,
            store=self._store,
            record_quarantined=self._record,
        )

    def _act(self, action: lifecycle.Action) -> None:
        match action:
            case lifecycle.AcquirePlaces():
                self._place()
            case lifecycle.Audit():
                self._audit()
            case lifecycle.Start():
                self._start(action)
            case lifecycle.Stop():
                self._stop_reason, self._stop_began_s = action.reason, time.monotonic()
                self._workers.stop(action.attempt)
            case lifecycle.SetAside():
                step = checkpoint_step(action.name)
                if step is not None and (aside := self._store.set_aside(step, action.reason)):
                    self._record(aside)
            case lifecycle.Rest():
                self._rest_until_s = time.monotonic() + action.seconds

    def _place(self) -> None:
        self.is_waiting_for_places = True
        try:
            placed = self._workers.acquire()
        except (ResourcesError, RecoveryError) as error:
            self._end("resources", error.message, error.hint)
            return
        except KeyboardInterrupt:
            self._pending.append(INTERRUPTED)
            return
        finally:
            self.is_waiting_for_places = False
        self._record(placed)
        if problem := self.outside_faults.misplaced():
            hint = "join the cluster from a node that runs no ranks, or let the fault strike another rank"
            self._end("resources", problem, hint)
            return
        self._pending.append(lifecycle.Placed())

    def _audit(self) -> None:
        if self._template.by == "script":  # only the script knows where it resumes
            step = went_on_from(self._leg, self._attempt, self._template.world_size)
            return self._pending.append(lifecycle.Audited(resume=None, step=step))
        if cleared := self._store.clear_staging():
            self._record(recorded.StagingCleared(names=tuple(cleared)), durable=False)
        selection = self._store.newest_valid()
        for bad in selection.quarantined:
            self._record(bad)
        self._audited = selection.signature
        step = selection.manifest.step if selection.manifest else 0
        if missed := self._observations.missed(self._template, resume=step, passed=self._passed):
            hint = None if missed.taken else "which rank is first is chance: give the faults different steps, or run it again"
            return self._end("fault_missed", missed.message(), hint, "notice_taken" if missed.taken else None)
        self._pending.append(lifecycle.Audited(resume=selection.name, step=step))

    def _end(
        self, outcome: recorded.Outcome, message: str, hint: str | None = None, code: recorded.EndCode | None = None
    ) -> None:
        self._pending.append(lifecycle.EndLeg(lifecycle.Finish(outcome=outcome, message=message, hint=hint, code=code)))

    def _start(self, action: lifecycle.Start) -> None:
        fired = read_markers(self._leg)
        armed = [fault for fault in self._plan.faults if fault.id not in fired]
        self._attempt = action.attempt
        self._stopped_nodes.clear()
        self._is_open = True
        self._killed.clear()
        self._stop_reason = "all ranks ended"
        self._record(
            recorded.AttemptStarting(
                attempt=action.attempt,
                resume=action.resume,
                resume_step=action.resume_step if action.resume else 0,
                by=self._template.by,
                armed=tuple(fault.id for fault in armed),
                distributed_debug=action.distributed_debug,
            )
        )
        settle = early_end.early_end_orders(self._template, action.attempt, self._plan, self._observations.observed)
        if self._judge:
            self._judge.began(action.attempt)
        template = replace(
            self._template,
            attempt=action.attempt,
            resume=action.resume,
            passed=dict(self._passed),
            distributed_debug=action.distributed_debug,
            **{**resume_values(self._template, action.attempt, self._plan), "settle": settle, "audited": self._audited},
        )
        orders = [self._order(template, rank, armed) for rank in range(template.world_size)]
        self._count_passed_phases(action.resume)
        self._leg.attempt(action.attempt).path.mkdir(parents=True, exist_ok=True)
        try:
            pids, address = self._workers.start(orders)
        except ResourcesError as error:
            self._end("resources", error.message, error.hint)
            return
        except RecoveryError as error:
            # An agent died since the last attempt. Its AgentDied event also reports that its node has stopped.
            self._pending.append(lifecycle.AgentLost(message=error.message))
            return
        self.outside_faults.attempt_started(action.attempt)
        self._detector.attempt_started(action.attempt, pids)
        self._record(recorded.AttemptStarted(attempt=action.attempt, pids=dict(pids), address=address))
        self._pending.append(lifecycle.Started())

    def _count_passed_phases(self, resume: str | None) -> None:
        """Count the phases that occur once an attempt, for the attempts after it."""
        self._passed.update(("rendezvous", "restore.begin", "restore.end") if resume else ("rendezvous",))

    def _order(self, template: WorkerOrder, rank: int, armed: Sequence[Fault]) -> WorkerOrder:
        faults = tuple(fault.to_json() for fault in armed if fault.rank == rank or fault.facts.witnessed)
        return self._workers.place(replace(template, rank=rank, faults=faults))

    def _finish(self, action: lifecycle.Finish) -> recorded.LegFinished:
        self._observations.conclude()
        for found in self._judge.close() if self._judge else ():
            self._record_judgement(found)
        if action.outcome in recorded.TRAINED:
            sync_traces(self._leg, self._template.world_size)
        how = {"outcome": action.outcome, "code": action.code, "message": action.message, "hint": action.hint}
        finished = recorded.LegFinished(by=self._template.by, final_step=self._final_step(), **how)
        self._record(finished)
        return finished

    def _final_step(self) -> int:
        """The step of the newest checkpoint; of a script that saves by itself, the last that all ranks recorded."""
        if self._template.by == "script":
            return min(last_step(self._leg, self._attempt, rank) for rank in range(self._template.world_size))
        return max(self._store.steps(), default=0)

    def _record(self, event: recorded.JournalEvent, *, durable: bool = True) -> None:
        assert self._journal is not None
        self._on_record({"leg": self.name, **to_plain(self._journal.append(event, durable=durable))})
