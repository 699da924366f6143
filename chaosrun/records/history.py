"""The records of a leg, read back as typed values: its journal, its attempts with their traces, its environment.

Anything damaged, missing or contradictory becomes one of `LegHistory.problems`; a leg with problems is never judged exact.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from chaosrun.errors import RecoveryError
from chaosrun.records import events as recorded
from chaosrun.records.began import Began, read_began
from chaosrun.records.codec import sound_records
from chaosrun.records.grouping import grouped
from chaosrun.records.heartbeat import read_heartbeat
from chaosrun.records.layout import LegLayout
from chaosrun.records.left import NOTHING_LEFT, Left, read_left
from chaosrun.records.opened import OpenedFile, of_other_legs, opened_records
from chaosrun.records.run_file import read_object, readable
from chaosrun.records.trace_reader import read_trace
from chaosrun.records.traces import EndRecord, RankTrace, Source, StartRecord, StepRecord

_NOT_WRITTEN = "a machine that goes down loses what it has not yet written to its disk"
_Event = TypeVar("_Event", bound=recorded.JournalEvent)
TraceReader = Callable[[Path, int, int, list[str]], RankTrace]
"""A function such as `records.trace_reader.read_trace`."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt: what the journal says about it, and the traces that its ranks left."""

    number: int
    resume: str | None
    """Name of the checkpoint that the journal ordered."""
    resume_step: int
    """The checkpoint's step; for a script that resumes by itself, the step that its ranks recorded as their start."""
    pids: Mapping[int, int]
    exits: tuple[recorded.WorkerExited, ...]
    unplanned: tuple[recorded.DeathUnplanned, ...]
    stopped: str | None
    quarantined: tuple[str, ...]
    """Checkpoints quarantined between the previous attempt and this one."""
    traces: Mapping[int, RankTrace]
    by: Literal["chaosrun", "script"] = "chaosrun"

    @cached_property
    def starts(self) -> Mapping[int, StartRecord]:
        """Start records of the ranks that began to train, in the order of ranks."""
        return {rank: trace.start for rank, trace in sorted(self.traces.items()) if trace.start}

    @cached_property
    def steps(self) -> Mapping[int, Mapping[int, StepRecord]]:
        """By step, in time order, the record of each rank."""
        return _ByStep(self.traces)

    @property
    def went_on(self) -> bool:
        """Whether it resumed from a checkpoint."""
        return self.resume is not None if self.by == "chaosrun" else self.resume_step > 0

    @property
    def source(self) -> Source | None:
        """Where its ranks restored from: the same for all. None if no rank restored."""
        return next((start.source for start in self.starts.values() if start.restored), None)

    def start_of(self, rank: int) -> int:
        """The step that this rank resumed at: as it recorded, else as requested in the journal."""
        trace = self.traces.get(rank)
        return trace.start.position.step if trace and trace.start else self.resume_step


class _ByStep(Mapping[int, Mapping[int, StepRecord]]):
    """By step, the record of each rank; read from the files on access."""

    def __init__(self, traces: Mapping[int, RankTrace]) -> None:
        self._traces = sorted(traces.items())
        blocks = {block.steps for _, trace in self._traces for block in trace.blocks}
        self._steps = sorted({step for steps in blocks for step in steps})

    def __getitem__(self, step: int) -> Mapping[int, StepRecord]:
        found = {rank: record for rank, trace in self._traces if (record := trace.steps.get(step))}
        if not found:
            raise KeyError(step)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


@dataclass(frozen=True, kw_only=True)
class LegHistory:
    name: str
    layout: LegLayout
    journal: tuple[recorded.JournalEvent, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    environment: Mapping[str, object] | None = None
    opened: tuple[OpenedFile, ...] = ()
    """Files of other legs that this leg read."""
    read_again: tuple[OpenedFile, ...] = ()
    """Files of this leg that an attempt read and an earlier attempt had written."""
    began: Began | None = None
    """The checkpoints that it was given to start from; None if it starts at step 0."""
    left: Left = NOTHING_LEFT
    """Contents of the script's files at the end."""
    problems: tuple[str, ...] = ()

    @property
    def by_script(self) -> bool:
        return any(attempt.by == "script" for attempt in self.attempts)

    @property
    def finished(self) -> recorded.LegFinished | None:
        """The `leg.finished` that closes the journal; None while the leg runs, or if it continued after one (`chaosrun
        resume`)."""
        last = self.journal[-1] if self.journal else None
        return last if isinstance(last, recorded.LegFinished) else None

    @property
    def outcome(self) -> recorded.Outcome | None:
        return self.finished.outcome if self.finished else None

    @cached_property
    def ends(self) -> Mapping[int, EndRecord]:
        """`end` records of the last attempt by rank."""
        return {rank: trace.end for rank, trace in self.attempts[-1].traces.items() if trace.end} if self.attempts else {}

    def events(self, kind: type[_Event]) -> tuple[_Event, ...]:
        return tuple(event for event in self.journal if isinstance(event, kind))

    @property
    def traces(self) -> Iterator[RankTrace]:
        """The traces of all attempts and ranks, in order."""
        return (trace for attempt in self.attempts for _, trace in sorted(attempt.traces.items()))

    def attempt(self, number: int) -> Attempt:
        """The attempt of this number, which must exist."""
        return next(each for each in self.attempts if each.number == number)

    def trace(self, attempt: int, rank: int) -> RankTrace | None:
        return next((entry.traces.get(rank) for entry in self.attempts if entry.number == attempt), None)


def changed_settings(environment: Mapping[str, object] | None) -> list[str]:
    """The settings of a leg's environment that its script has changed while it trained: a restart begins with others, or with
    those of another step."""
    changed = (environment or {}).get("changed")
    return [str(name) for name in changed] if isinstance(changed, list) else []


def read_leg(layout: LegLayout, traces: TraceReader | None = read_trace) -> LegHistory:
    """Read all records of a leg. `traces` reads a trace; None: none is read. Raises OSError for an unreadable file."""
    problems: list[str] = []
    history = history_of(layout, _read_journal(layout.journal, problems), traces, problems)
    environment = readable(lambda: read_object(layout.environment), problems) if layout.environment.exists() else None
    opened, began, left = opened_records(layout, problems), read_began(layout, problems), read_left(layout, problems)
    files = {"opened": of_other_legs(opened), "read_again": tuple(record for record in opened if not record.left_by)}
    problems.extend(_lost_in_a_crash(history, began.step if began else 0))
    return replace(history, environment=environment, **files, began=began, left=left, problems=tuple(problems))


def history_of(
    layout: LegLayout, journal: Sequence[recorded.JournalEvent], traces: TraceReader | None, problems: list[str]
) -> LegHistory:
    """The history that these events describe. Only this function folds a journal."""
    attempts = _attempts(layout, journal, traces, problems)
    return LegHistory(name=layout.path.name, layout=layout, journal=tuple(journal), attempts=attempts, problems=tuple(problems))


def journal_events(path: Path) -> list[recorded.JournalEvent]:
    """The events of a journal that a resumed run appends to. Raises RecoveryError if it is damaged."""
    problems: list[str] = []
    events = _read_journal(path, problems)
    if problems:
        hint = "submit the job again; this run cannot be resumed"
        raise RecoveryError(f"the journal is damaged: {problems[0]}", hint=hint)
    return events


def _read_journal(path: Path, problems: list[str]) -> list[recorded.JournalEvent]:
    found: list[recorded.JournalEvent] = []
    for number, event in sound_records(path, recorded.EVENTS, problems):
        if event.seq == number:
            found.append(event)
        else:
            problems.append(f"{path}:{number}: seq is {event.seq} where {number} follows: a record is missing")
    return found


def _attempts(
    layout: LegLayout, journal: Sequence[recorded.JournalEvent], traces: TraceReader | None, problems: list[str]
) -> tuple[Attempt, ...]:
    starting = [event for event in journal if isinstance(event, recorded.AttemptStarting)]
    numbers = [event.attempt for event in starting]
    if numbers != sorted(set(numbers)):
        problems.append(f"attempts start in the order {numbers}")
    by_attempt = grouped((event for event in journal if isinstance(event, recorded.OfAttempt)), lambda event: event.attempt)
    for number in sorted({*layout.attempts(), *by_attempt} - set(numbers)):
        problems.append(f"attempt {number} left records, but the journal never started it")
    quarantines = [event for event in journal if isinstance(event, recorded.CheckpointQuarantined)]
    found: list[Attempt] = []
    since = 0
    for start in starting:
        own = by_attempt[start.attempt]
        pids = [event.pids for event in own if isinstance(event, recorded.AttemptStarted)]
        announced = {event.rank: event.pid for event in own if isinstance(event, recorded.WorkerStarted)}
        of_ranks = {} if traces is None else _read_traces(layout, start.attempt, traces, problems)
        began = [trace.start.position.step for trace in of_ranks.values() if trace.start]
        found.append(
            Attempt(
                number=start.attempt,
                resume=start.resume,
                resume_step=min(began, default=0) if start.by == "script" else start.resume_step,
                by=start.by,
                pids={**(pids[-1] if pids else {}), **announced},
                exits=tuple(event for event in own if isinstance(event, recorded.WorkerExited)),
                unplanned=tuple(event for event in own if isinstance(event, recorded.DeathUnplanned)),
                stopped=next((event.reason for event in own if isinstance(event, recorded.AttemptStopped)), None),
                quarantined=tuple(event.name for event in quarantines if since < event.seq < start.seq),
                traces=of_ranks,
            )
        )
        since = start.seq
        problems.extend(() if traces is None else _contradictions(layout, found[-1]))
    return tuple(found)


def _contradictions(layout: LegLayout, attempt: Attempt) -> Iterator[str]:
    """Traces of other processes; a lost folder; of an attempt that finished, traces that lack steps which the heartbeat has
    passed: records come before beats."""
    for rank, trace in attempt.traces.items():
        started = attempt.pids.get(rank)
        if trace.start and started is not None and trace.start.pid != started:
            yield f"attempt {attempt.number} rank {rank} was process {started}, its trace is of process {trace.start.pid}"
    if attempt.pids and not layout.attempt(attempt.number).path.is_dir():
        yield f"attempt {attempt.number} was started, but its folder is missing"
    for rank in sorted(attempt.pids) if attempt.stopped is not None else ():
        beat, trace = read_heartbeat(layout.attempt(attempt.number).heartbeat(rank)), attempt.traces.get(rank)
        last = max(trace.start.position.step, trace.steps.last) if trace and trace.start else 0
        if beat and beat.recorded > last:
            ends = f"ends at step {last}" if last else "is missing, or empty"
            yield f"attempt {attempt.number}: the trace of rank {rank} {ends}, its heartbeat is at step {beat.recorded}"


def _lost_in_a_crash(history: LegHistory, given: int) -> Iterator[str]:
    """Under a new supervisor, a rank went on from a step that its traces had not reached: where a machine goes down, a synced
    checkpoint outlives them. `given`: the step at which the leg began."""
    taken_over = min((event.seq for event in history.events(recorded.SupervisorResumed)), default=None)
    reached: dict[int, int] = {}
    for attempt, start in zip(history.attempts, history.events(recorded.AttemptStarting), strict=True):
        furthest = max(reached.values(), default=given)
        for rank in attempt.starts if taken_over is not None and taken_over < start.seq else ():
            base, last = attempt.start_of(rank), reached.get(rank, given)
            # A rank may have died in a step that the others have recorded.
            if base > furthest or base > last + 1:
                lost = f"the traces of rank {rank} end at step {last}, but attempt {attempt.number} went on from step {base}"
                yield f"{lost}: {_NOT_WRITTEN}"
        for rank in attempt.pids if attempt.stopped is None and attempt is not history.attempts[-1] else ():
            # A rank that was killed leaves a whole one.
            beat = history.layout.attempt(attempt.number).heartbeat(rank)
            if rank not in attempt.starts and beat.exists() and not beat.stat().st_size:
                yield f"attempt {attempt.number}: the records of rank {rank} are empty: {_NOT_WRITTEN}"
        for rank, trace in attempt.traces.items():
            reached[rank] = max(reached.get(rank, given), attempt.start_of(rank), trace.steps.last)


def _read_traces(layout: LegLayout, attempt: int, read: TraceReader, problems: list[str]) -> Mapping[int, RankTrace]:
    traces: dict[int, RankTrace] = {}
    # Also traces of JSON lines, which an earlier chaosrun wrote.
    found = {path.with_suffix("").with_suffix(".trace") for path in layout.attempt(attempt).path.glob("rank-*.trace*")}
    for path in sorted(found):
        rank_text = path.name.removeprefix("rank-").removesuffix(".trace")
        if not (rank_text.isascii() and rank_text.isdecimal()):
            problems.append(f"{path}: not the name of a trace")
            continue
        traces[int(rank_text)] = read(path, attempt, int(rank_text), problems)
    return traces
