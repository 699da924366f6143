"""The clauses that describe a run to people: one for each event of its journals, and for notices that are in no file."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.faults.observed import signal_name
from chaosrun.records import events
from chaosrun.records.codec import to_plain
from chaosrun.report.escapes import on_one_line
from chaosrun.wording import count, duration, listed, rank_list

_NOTICES = {
    "run.created": "created in {path}",
    "control.failed": "{message}: the run cannot be cancelled or get faults from elsewhere",
    "reference.cached": "taken from the cache: the reference run of an earlier drill of this job",
    "reference.named": "taken from run {whose}",
    "plan.made": "no faults were named: the default plan has {plan}",
    "reference.replaced": "the one in the cache differs from a run made now ({difference}): replaced",
    "reference.uncached": "not kept in the cache for other drills: {message}",
    "chaos.begins": "begins at the beginning: {why}",
    "attempt.placed": "attempt {attempt} resumes from {place}",
    "supervisor.lost": "the supervisor (pid {pid}) {how}: another one takes over",
    "faults.not_struck": "faults that the job file plans are not struck in a run: `chaosrun submit` drills the job with them",
    "run.left_behind": "begins anew; run {other} of this job has not ended: `chaosrun resume {again}` continues it",
    "supervisor.ended": "{faults} ended the supervisor (pid {pid}): another one takes over",
}
"""Notices that a supervisor gives besides the events of its journals."""
_LONGEST_S = 1e9
MOST_ALONE = 4
"""So many ranks that end in the same way have a line each; more of them share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventText:
    leg: str | None
    event: str
    sentence: str
    time_s: float | None
    """When it happened, which may be before it was recorded; None if unknown."""
    record: events.JournalEvent | events.EventRecord

    @classmethod
    def of(cls, leg: str, event: events.JournalEvent) -> "EventText":
        time_s = event.time_s
        if isinstance(event, events.WorkerExited):
            time_s = event.died_s
        elif isinstance(event, events.FaultRequested) and event.requested_s is not None:
            time_s = event.requested_s
        return cls(leg=leg, event=event.event, sentence=sentence(event), time_s=time_s, record=event)

    @classmethod
    def notice(cls, record: events.EventRecord) -> "EventText":
        """A notice, which a listener gets but no journal holds."""
        name = str(record["event"])
        about = {**record, "faults": ", ".join(record.get("faults", ()))}
        words = _NOTICES.get("reference.named" if record.get("whose") else name, name).format_map(about)
        return cls(leg=record.get("leg"), event=name, sentence=words, time_s=record.get("time_s"), record=record)

    def field(self, name: str) -> object:
        return self.record.get(name) if isinstance(self.record, Mapping) else getattr(self.record, name, None)

    def line(self, elapsed_s: float) -> str:
        minutes, seconds = divmod(int(min(max(0.0, elapsed_s), _LONGEST_S)), 60)
        return on_one_line(f"[{minutes}:{seconds:02}] {self.leg or 'run'}: {self.sentence}")

    def dated_line(self, began_s: float | None) -> str:
        at_s = 0.0 if self.time_s is None else self.time_s
        clock = "--:--:--" if self.time_s is None else time.strftime("%H:%M:%S", time.localtime(at_s))
        return f"{clock} {self.line(at_s - (at_s if began_s is None else began_s))}"

    def to_json(self) -> dict[str, object]:
        record = to_plain(self.record) if isinstance(self.record, events.Event) else self.record
        return {"leg": self.leg, "time_s": self.time_s, "sentence": self.sentence, "record": {**record, "leg": self.leg}}


def folded(told: Iterable[EventText]) -> Iterator[EventText]:
    """Fold consecutive ranks that ended in the same way into one line: a thousand lines of them would hide the rest."""

    def way(entry: EventText) -> object:
        event = entry.record
        if not isinstance(event, events.WorkerExited):
            return object()  # equal to nothing
        return entry.leg, event.attempt, event.exit_code, event.signal, event.stopped

    for _, group in groupby(told, way):
        entries = list(group)
        ends = [entry.record for entry in entries if isinstance(entry.record, events.WorkerExited)]
        if len(ends) <= MOST_ALONE:
            yield from entries
            continue
        words = f"attempt {ends[0].attempt}: {rank_list(end.rank for end in ends)} {_end_of_process(ends[0], several=True)}"
        yield replace(entries[0], sentence=words)


def sentence(event: events.JournalEvent) -> str:
    """One event as a clause, without the leg's name."""
    return _SENTENCES[type(event)](event)


def raised(error: events.RaisedError | None) -> str | None:
    """A rank's error: "ValueError: no such file"."""
    return error and ": ".join(part for part in (error.type, error.message) if part)


def _placed(event: events.PlacementAcquired) -> str:
    ranks = sum(len(node.ranks) for node in event.nodes.values())
    more = "; oversubscribed: more workers than cores" if event.oversubscribed else ""
    few = event.gpus_too_few
    more += f"; without GPUs: {count(few, 'GPU')} for {count(ranks, 'rank')} (per_worker.gpu: auto)" if few else ""
    warm = f", {len(event.stood_by)} of which stood by" if event.stood_by else ""
    alone = "".join(f"; {not_preloaded(each)}" for each in event.not_preloaded)
    return f"{count(ranks, 'rank')} placed on {count(len(event.nodes), 'node')}{warm}{more}{alone}"


def not_preloaded(module: events.NotPreloaded) -> str:
    """Which modules the ranks do not share, why, and the cost."""
    starts = "uses CUDA" if module.cuda else f"starts {count(len(module.threads), 'thread')} ({listed(module.threads)})"
    costs = f"each restart imports it again, {duration(module.import_s)}"
    return f"{module.module} is not preloaded, for its import {starts}, which a fork would lose: {costs}"


def _starting(event: events.AttemptStarting) -> str:
    how = ", with TORCH_DISTRIBUTED_DEBUG=DETAIL" if event.distributed_debug else ""
    if event.by == "script" and event.attempt > 1:
        return f"attempt {event.attempt} starts: the script looks for a checkpoint of its own{how}"
    return f"attempt {event.attempt} starts from {event.resume or 'the beginning'}{how}"


def _end_of_process(event: events.WorkerExited | events.FaultObserved, *, several: bool = False) -> str:
    if isinstance(event, events.WorkerExited) and event.stopped:
        return "were stopped with their attempt" if several else "was stopped with its attempt"
    if event.signal:
        return f"died of {signal_name(event.signal)}"
    if event.exit_code is None:
        return "were lost with their node's fork server" if several else "was lost with its node's fork server"
    exited = f"exited with code {event.exit_code}"
    return {0: "ended", PREEMPTED_EXIT_CODE: f"left on notice: {exited}"}.get(event.exit_code, exited)


def _requested(event: events.FaultRequested) -> str:
    at = "" if event.step is None else f"step {event.step}"
    where = ", ".join(part for part in (at, "" if event.phase == "step" else event.phase or "from outside") if part)
    return f"{event.fault} fired: rank {event.rank}, {where}"


_EVIDENCE = {
    "note": "seen before and after",
    "hang": "stopped first",
    "node": "gone with its node",
    "successor": "seen by the next supervisor",
}


def _observed(event: events.FaultObserved) -> str:
    if problem := (event.found or {}).get("problem"):
        return f"{event.fault} did not happen as planned: {problem}"
    what = _EVIDENCE.get(event.how) or _end_of_process(event)
    return f"{event.fault} seen: rank {event.rank} {what} (pid {event.pid})"


def _unplanned(event: events.DeathUnplanned) -> str:
    if event.rank is None or not event.error:
        return f"{'attempt failed' if event.rank is None else 'unplanned'}: {_first_line(event.reason)}"
    at = "" if event.step is None else f" at step {event.step}"
    return f"unplanned death of rank {event.rank}{at}: {_first_line(raised(event.error) or '')}"


def _stopped(event: events.AttemptStopped) -> str:
    # Why, its neighbours say: the fault, the death, the hang, the alarm, or how the leg ended.
    return f"attempt {event.attempt} stopped" + (f"; stopped {rank_list(event.killed)}" if event.killed else "")


def _started(event: events.AttemptStarted) -> str:
    what = count(len(event.pids), "process", "processes") if event.pids else "started by the command"
    return f"attempt {event.attempt} runs, {what}"


def _replaced(event: events.OutputsReplaced) -> str:
    if event.problem:
        return f"{event.fault}: the outputs were not changed: {event.problem}"
    parts = [(event.torn, "torn"), (event.gone, "gone"), (event.back, "back")]
    changes = [f"{count(len(paths), 'file')} {how}" for paths, how in parts if paths]
    return f"{event.fault}: of the outputs {', '.join(changes) or 'nothing was lost'}"


def _agreed(event: events.RecoveryAgreed) -> str:
    how = f"{count(event.steps, 'step')} done twice, up to step {event.last}, equal"
    if not event.steps:
        what = "the restored state" if event.source else "the weights and the optimizer that it began with"
        how = f"no step was done twice, so only {what} could be compared: equal"
    return f"recovery of attempt {event.attempt}{' from copies in memory' if event.source == 'memory' else ''}: {how}"


def _finished(event: events.LegFinished) -> str:
    outcome, message = event.outcome.replace("_", " "), event.message
    # The newest of chaosrun's own checkpoints: the journal does not record where an incomplete leg ended.
    others = ", saved up to step" if event.by == "chaosrun" else " after step"
    saved = " at step" if event.outcome in events.TRAINED else others
    needless = not message or outcome in ("completed", message)
    at = f"{saved} {event.final_step}" if event.final_step else ""
    return f"{outcome}{at}" + ("" if needless else f": {_first_line(message or '')}")


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


_SENTENCES: Mapping[type[events.JournalEvent], Callable[[Any], str]] = {
    events.LegStarted: lambda event: f"started, {count(event.workers, 'worker')}",
    events.SupervisorResumed: lambda event: f"a new supervisor took over (pid {event.supervisor_pid})",
    events.PlacementAcquired: _placed,
    events.StagingCleared: lambda event: f"cleared away what was left half-written: {', '.join(event.names)}",
    events.CheckpointQuarantined: lambda event: f"checkpoint {event.name} quarantined: {event.reason}",
    events.AttemptStarting: _starting,
    events.AttemptStarted: _started,
    events.WorkerStarted: lambda event: f"rank {event.rank} of attempt {event.attempt} begins to train, process {event.pid}",
    events.WorkerExited: lambda event: f"attempt {event.attempt}: rank {event.rank} {_end_of_process(event)}",
    events.FaultRequested: _requested,
    events.FaultObserved: _observed,
    events.FaultInjected: lambda event: f"{event.fault} injected: {event.what}",
    events.FaultWithdrawn: lambda event: f"{event.fault} has not struck ({event.reason}): it is to strike again",
    events.HangDeclared: lambda event: event.message,
    events.DeathUnplanned: _unplanned,
    events.AttemptStopped: _stopped,
    events.RecoveryAgreed: _agreed,
    events.RecoveryDiverged: lambda event: (
        f"ALARM: attempt {event.attempt} was not restored to what it had been: {event.what}: step {event.step}, rank "
        f"{event.rank}" + (f", {event.tensor}" if event.tensor else "")
    ),
    events.RecoveryUnjudged: lambda event: f"recovery of attempt {event.attempt} cannot be judged: {event.why}",
    events.OutputsReplacing: lambda event: f"{event.fault} cut the power: what was not synced is {event.unsynced}",
    events.OutputsReplaced: _replaced,
    events.LegFinished: _finished,
}
