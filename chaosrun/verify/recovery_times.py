"""How long each restart took, by phase; how much work was repeated; how much of the time was useful. Judges nothing. If a time
was not recorded, or clocks disagree, the span is None: nothing is guessed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from chaosrun.records import events
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.verify.lineage import Lineage

PHASES: Mapping[str, str] = {
    # The death by the kernel's time; if it could not be observed (a lost node, a dead supervisor): the last recorded step.
    "detect": "from the death, or a hang's last sign of life, until the supervisor knew",
    "stop": "until no process of the attempt was left",
    # Restart decided, ranks forked, script imported, process group joined, model built.
    "start": "until the new ranks had built their training and turned to the checkpoint",
    "restore": "until the last rank held the saved state",
    "first_step": "until the first new step was recorded, DDP's buckets primed on the way",
}
"""The spans of a recovery, in order, and what they are: they follow each other without a gap."""
Pauses = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """Seconds from the end of the previous attempt to the first step of this one, without pauses."""

    attempt: int
    phases: Mapping[str, float | None]
    """By `PHASES`."""
    total_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How a leg's time was spent. Seconds of steps are those of the slowest rank."""

    kept_s: float
    """Of steps that lead to the final weights, each counted once."""
    lost_s: float
    lost_steps: int
    before_s: float | None
    """Before the first attempt: placement and, if Ray was not running yet, its start."""
    wall_s: float | None
    """From the first attempt on, without the time in which the leg was interrupted and had no supervisor."""

    @property
    def goodput(self) -> float | None:
        return self.kept_s / self.wall_s if self.wall_s else None


def recoveries_of(leg: LegHistory) -> tuple[RecoveryTimes, ...]:
    own, paused = events_by_attempt(leg.journal), pauses(leg.journal)
    restarts = pairwise(leg.attempts)
    return tuple(_recovery(before, own[before.number], attempt, paused) for before, attempt in restarts)


def reached(attempt: Attempt) -> int:
    """The newest step that any rank recorded; without one, the step that the attempt resumed at."""
    return max((trace.steps.last for trace in attempt.traces.values() if trace.steps), default=attempt.resume_step)


def lost_steps(attempts: Sequence[Attempt]) -> Mapping[int, int]:
    """By attempt, the steps done or restored from which the next one did not resume."""
    # If a script's attempt never began to train, the step that it would have resumed at is unknown.
    known = [each for each in attempts if each.by == "chaosrun" or each.number == 1 or each.starts]
    return {before.number: max(0, reached(before) - after.resume_step) for before, after in pairwise(known)}


def events_by_attempt(journal: Sequence[events.JournalEvent]) -> defaultdict[int, list[events.JournalEvent]]:
    """The events of each attempt; a supervisor that took over belongs to the newest one."""
    found: defaultdict[int, list[events.JournalEvent]] = defaultdict(list)
    newest = 0
    for record in journal:
        if isinstance(record, events.OfAttempt):
            newest = max(newest, record.attempt)
            found[record.attempt].append(record)
        elif isinstance(record, events.SupervisorResumed):
            found[newest].append(record)
    return found


def first_s(own: Sequence[events.JournalEvent], *kinds: type[events.JournalEvent]) -> float | None:
    """When the first event of one of these kinds came."""
    return next((record.time_s for record in own if isinstance(record, kinds)), None)


def _recovery(ended: Attempt, how: Sequence[events.JournalEvent], attempt: Attempt, paused: Pauses) -> RecoveryTimes:
    """`how`: the events of the previous attempt."""
    known = list(attempt.starts.values())
    entered = [start.entered_s for start in known if start.entered_s is not None]
    # Ranks that recorded nothing may have been the last ones.
    whole = bool(known) and len(known) == len(attempt.pids or attempt.traces)
    gone_s = first_s(how, events.AttemptStopped, events.SupervisorResumed)
    last_s = max((trace.steps[trace.steps.last].time_s for trace in ended.traces.values() if trace.steps), default=None)
    began_s, told_s = _end_of(how) or (last_s, gone_s)
    moments = (
        began_s,
        told_s,
        gone_s,
        max(entered) if whole and len(entered) == len(known) else None,
        max(start.time_s for start in known) if whole else None,
        min((next(iter(trace.steps.values())).time_s for trace in attempt.traces.values() if trace.steps), default=None),
    )
    moments = tuple(None if moment is None else moment - paused_s(paused, moment) for moment in moments)
    spans = [_span(*pair) for pair in pairwise(moments)]
    return RecoveryTimes(
        attempt=attempt.number, phases=dict(zip(PHASES, spans, strict=True)), total_s=_span(moments[0], moments[-1])
    )


def _end_of(attempt: Sequence[events.JournalEvent]) -> tuple[float | None, float] | None:
    """When the attempt's end began, and when the supervisor learnt of it; None if it saw neither hang nor death."""
    for record in attempt:
        if isinstance(record, events.HangDeclared) and record.silent_s is not None:
            return record.time_s - record.silent_s, record.time_s
    deaths = [
        (record.died_s, record.time_s)
        for record in attempt
        if isinstance(record, events.WorkerExited) and (record.signal or record.exit_code)
    ]
    return min(deaths, default=None)


def _span(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None or end_s < begin_s else end_s - begin_s


def work_of(leg: LegHistory, chain: Lineage) -> Work:
    kept_s = lost_s = 0.0
    lost_steps = 0
    kept: defaultdict[int, set[int]] = defaultdict(set)
    for span in (span for steps in chain.steps.values() for span in steps.spans):
        kept[span.trace.attempt].update(span.steps)
    for attempt in leg.attempts:
        before = max((start.time_s for start in attempt.starts.values()), default=0.0)
        for is_kept, steps in groupby(attempt.steps, kept[attempt.number].__contains__):
            done = list(steps)
            # The last rank's record of the last step counts: the other steps need not be read.
            end_s = max(record.time_s for record in attempt.steps[done[-1]].values())
            kept_s += max(0.0, end_s - before) if is_kept else 0.0
            lost_s += 0.0 if is_kept else max(0.0, end_s - before)
            lost_steps += 0 if is_kept else len(done)
            before = end_s
    trained = from_first_attempt(leg.journal)
    return Work(
        kept_s=kept_s,
        lost_s=lost_s,
        lost_steps=lost_steps,
        before_s=wall_s(leg.journal[: len(leg.journal) - len(trained) + 1]),
        wall_s=wall_s(trained),
    )


def from_first_attempt(journal: Sequence[events.JournalEvent]) -> Sequence[events.JournalEvent]:
    """The leg's events since its first attempt was decided on, after its ranks were placed; all events if there was no
    attempt."""
    begins = next((number for number, record in enumerate(journal) if isinstance(record, events.AttemptStarting)), 0)
    return journal[begins:]


def pauses(journal: Sequence[events.JournalEvent]) -> Pauses:
    """Start and end of each interruption, in which the leg had no supervisor."""
    between = [
        (before.time_s, after.time_s)
        for before, after in pairwise(journal)
        if isinstance(before, events.LegFinished) and isinstance(after, events.SupervisorResumed)
    ]
    return [(begin, end) for begin, end in between if end > begin]


def paused_s(pauses: Pauses, until_s: float) -> float:
    return sum(min(end, until_s) - begin for begin, end in pauses if until_s > begin)


def wall_s(journal: Sequence[events.JournalEvent]) -> float | None:
    """Between its first event and its last, without pauses; None for clocks that disagree."""
    if not journal:
        return None
    whole_s = _span(journal[0].time_s, journal[-1].time_s)
    return None if whole_s is None else whole_s - sum(end - begin for begin, end in pauses(journal))
