"""The course of a leg: attempts and ranks over time, faults, saves and rolled-back steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from chaosrun.records import events as recorded
from chaosrun.records.grouping import grouped
from chaosrun.records.history import Attempt
from chaosrun.records.traces import SaveRecord
from chaosrun.report.html.page import Scale, Shown, since, ticks
from chaosrun.report.html.source import PageSource
from chaosrun.report.sentences import EventText, folded, sentence
from chaosrun.verify.lineage import Lineage
from chaosrun.verify.recovery_times import events_by_attempt, first_s, from_first_attempt, paused_s, pauses
from chaosrun.wording import count, listed

LANE = 26.0
HEAD = 24.0
MOST_LANES = 24
"""Of more ranks, those that something happened to, and one lane for the others."""
OTHERS = -1
"""In the place of their rank."""
NAME = 0.09
"""Share of the width that an attempt's number takes, on a phone; what finds no room is in the tables."""
MOST_TOLD = 600
MOST_MARKS = 400


class TimelineClock:
    """Seconds since the leg's first attempt began, without the time in which it was interrupted."""

    def __init__(self, journal: Sequence[recorded.JournalEvent]) -> None:
        journal = from_first_attempt(journal)
        times = [record.time_s for record in journal]
        self.began_s = times[0] if times else 0.0
        self._pauses = pauses(journal)
        self.length_s = max((self.at(time) for time in times), default=0.0) or 1.0

    def at(self, time_s: float) -> float:
        return max(0.0, time_s - self.began_s - paused_s(self._pauses, time_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """One rank in one attempt, by the clock."""

    rank: int
    attempt: int
    begin: float
    trains: float
    """From here on it computes steps."""
    lost: float
    """From here on its steps were rolled back."""
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at: float
    shape: str
    """A key of `shapes` in templates/figures.html."""
    label: str
    rank: int | None = None
    """None: the row of checkpoints."""
    y: float = 0.0
    """In pixels from the top."""


def timeline(source: PageSource) -> Shown | None:
    """The timeline of the shown leg; None when it is empty. `shapes`: kinds of marks used; `left_out`: how many are not drawn;
    `told`: the same in words."""
    leg = source.shown.history
    if not leg.attempts or not leg.journal:
        return None
    clock = TimelineClock(leg.journal)
    scale = Scale(0.0, clock.length_s)
    followed = zip(leg.attempts, [*leg.attempts[1:], None], strict=True)
    own = events_by_attempt(leg.journal)
    bars = [bar for attempt, after in followed for bar in _bars(source, attempt, after, clock, own[attempt.number])]
    every = list(_marks(source, clock))
    marks = every[:MOST_MARKS]  # the last checkpoints are left out first
    struck = {mark.rank for mark in marks if mark.rank is not None}
    ranks = sorted({bar.rank for bar in bars} | struck)
    lanes = _lanes(ranks, struck)
    others = len(ranks) - len(lanes)
    bars = [bar for bar in bars if bar.rank in lanes] + _of_the_others([bar for bar in bars if bar.rank not in lanes])
    place = {rank: HEAD + LANE * (number + 0.5) for number, rank in enumerate([*lanes, OTHERS] if others else lanes)}
    saved_y = HEAD + LANE * (len(place) + 0.5)
    last_y = max(place.values(), default=HEAD)
    placed = [replace(mark, y=saved_y if mark.rank is None else place.get(mark.rank, last_y)) for mark in marks]
    placed += [_attempt_mark(source, attempt, clock) for attempt in leg.attempts[:MOST_MARKS]]
    placed.sort(key=lambda mark: (mark.at, mark.y))
    bottom = HEAD + LANE * (len(place) + 1)
    began = [(attempt.number, at) for attempt in leg.attempts if (at := _attempt_began(attempt, clock)) is not None]
    words = list(_event_lines(leg.journal, clock))
    return {
        "scale": scale,
        "bottom": bottom,
        "rules": [HEAD + LANE * number for number in range(len(place) + 2)],
        "lanes": [
            (y, f"+{count(others, 'rank')}" if rank == OTHERS else f"rank {rank}", _paths(bars, rank, scale))
            for rank, y in place.items()
        ],
        "saved_y": saved_y,
        "heads": list(_heads(began, scale)),
        "marks": placed,
        "clock": _clock_labels(scale.high),
        "shapes": {mark.shape for mark in placed},
        "rolled_back": any(bar.lost < bar.end for bar in bars),
        "left_out": len(every) - len(marks),
        "told": words[:MOST_TOLD],
        "untold": max(0, len(words) - MOST_TOLD),
    }


def _lanes(ranks: list[int], busy: set[int]) -> list[int]:
    """Ranks with their own lane; further ranks share one."""
    if len(ranks) <= MOST_LANES:
        return ranks
    return sorted(busy)[: MOST_LANES - 1] or ranks[:1]


def _of_the_others(bars: Sequence[_Bar]) -> list[_Bar]:
    """One bar for each attempt: from the first rank that began to the last that ended; it trains once all ranks do."""
    found: list[_Bar] = []
    for attempt, own in grouped(bars, lambda bar: bar.attempt).items():
        begin, trains, end = min(bar.begin for bar in own), max(bar.trains for bar in own), max(bar.end for bar in own)
        # Only of ranks whose steps were rolled back.
        lost = max((bar.lost for bar in own if bar.lost < bar.end), default=end)
        found.append(_Bar(rank=OTHERS, attempt=attempt, begin=begin, trains=trains, lost=max(trains, lost), end=end))
    return found


def _bars(
    source: PageSource, attempt: Attempt, after: Attempt | None, clock: TimelineClock, own: Sequence[recorded.JournalEvent]
) -> Iterator[_Bar]:
    """`own`: the attempt's events."""
    chain = source.shown.chain
    begin_s = first_s(own, recorded.AttemptStarted) or first_s(own, recorded.AttemptStarting)
    if begin_s is None:
        return
    stopped_s = first_s(own, recorded.AttemptStopped)
    taken_over_s = first_s(own, recorded.SupervisorResumed)
    last_s = stopped_s or taken_over_s or clock.began_s + clock.length_s
    died = {death.rank: death.died_s for death in attempt.exits}
    for rank in sorted({*attempt.pids, *attempt.traces}):
        trace = attempt.traces.get(rank)
        ended_s = died.get(rank) or last_s
        if ended_s == taken_over_s and trace and trace.steps:  # nobody saw when it ended, perhaps long before
            ended_s = trace.steps[trace.steps.last].time_s
        end = clock.at(ended_s)
        begin = min(clock.at(begin_s), end)
        start = trace.start if trace else None
        trains = end if start is None else min(max(clock.at(start.time_s), begin), end)
        lost_s = None if after is None else _last_kept(attempt, rank, chain)
        lost = end if after is None else trains if lost_s is None else min(max(clock.at(lost_s), trains), end)
        if after is not None and trace and trace.steps and after.start_of(rank) >= trace.steps.last:
            lost = end
        yield _Bar(rank=rank, attempt=attempt.number, begin=begin, trains=trains, lost=lost, end=end)


def _last_kept(attempt: Attempt, rank: int, chain: Lineage) -> float | None:
    """When the rank recorded its last step that leads to the final weights."""
    last = next((span for span in reversed(chain.of(rank).spans) if span.trace is attempt.traces.get(rank)), None)
    return last and last.at(last.last).time_s


def _paths(bars: Sequence[_Bar], rank: int, scale: Scale) -> dict[str, str]:
    """One path per kind and lane keeps the page small with thousands of bars."""
    own = [bar for bar in bars if bar.rank == rank]
    spans = {
        "rise": [(bar.begin, bar.trains) for bar in own],
        "work": [(bar.trains, bar.lost) for bar in own],
        "lost": [(bar.lost, bar.end) for bar in own],
    }
    return {
        kind: "".join(_box(begin, end, scale) for begin, end in found if end > begin)
        for kind, found in spans.items()
        if any(end > begin for begin, end in found)
    }


def _box(begin: float, end: float, scale: Scale) -> str:
    left, right = scale.units(begin), scale.units(end)
    return f"M{left} 0H{max(right, left + 8)}V14H{left}Z"


def _heads(began: Sequence[tuple[int, float]], scale: Scale) -> Iterator[tuple[float, int | None, bool]]:
    """Where attempts begin, their numbers where there is room next to the previous one, and whether these are on the left."""
    free = 0.0
    for number, at in began:
        place = scale.at(at)
        is_left = place > 1 - NAME
        begin = place - NAME if is_left else place
        has_room = begin >= free
        free = begin + NAME if has_room else free
        yield at, number if has_room else None, is_left


def _attempt_began(attempt: Attempt, clock: TimelineClock) -> float | None:
    times = [trace.start.entered_s or trace.start.time_s for trace in attempt.traces.values() if trace.start]
    return clock.at(min(times)) if times else None


def _attempt_mark(source: PageSource, attempt: Attempt, clock: TimelineClock) -> _Mark:
    summary = next((each for each in source.view.verdict.attempts if each.attempt == attempt.number), None)
    steps = [step for trace in attempt.traces.values() for step in trace.steps]
    place = f"step {attempt.resume_step}" if attempt.by == "script" and attempt.went_on else "the beginning"
    parts = [f"Attempt {attempt.number}, from {attempt.resume or place}"]
    parts.append(f"steps {min(steps)} to {max(steps)}" if steps else "no step recorded")
    if summary is not None and source.shown is source.chaos:
        parts.append(f"ended by {summary.ended_by.replace('_', ' ')}")
        if summary.lost_steps:
            parts.append(f"{count(summary.lost_steps, 'step')} rolled back")
    began = _attempt_began(attempt, clock)
    return _Mark(at=0.0 if began is None else began, y=10.0, shape="attempt", label="\n".join(parts))


def _clock_labels(high_s: float) -> list[tuple[float, str]]:
    unit, each = ("min", 60.0) if high_s >= 180 else ("s", 1.0)
    values = ticks(0.0, high_s / each, 5)
    return [(value * each, f"{value:g}{f' {unit}' if value == values[-1] else ''}") for value in values]


def _marks(source: PageSource, clock: TimelineClock) -> Iterator[_Mark]:
    leg = source.shown.history
    rows = {row.id: row for row in source.view.faults}
    seen: set[str] = set()
    for record in leg.events(recorded.FaultObserved):
        time_s = record.time_s if record.died_s is None else record.died_s
        fault = record.fault
        seen.add(fault)
        row, when = rows.get(fault), f"{since(clock.at(time_s))}, attempt {record.attempt}"
        what, evidence = ("not in the plan", "NOT SHOWN: not in the plan") if row is None else (row.description, row.seen)
        shape = "unseen" if row is None or not row.landed else row.kind if row.kind in ("kill", "preempt") else "fault"
        label = f"Fault {fault}: {what}\n{when}\n{evidence}"
        yield _Mark(rank=record.rank, at=clock.at(time_s), shape=shape, label=label)
    for record in leg.events(recorded.FaultRequested):
        if record.fault not in seen:
            seen.add(record.fault)
            at = clock.at(record.time_s)
            label = f"Fault {record.fault} was asked for, and not seen to happen\n{since(at)}"
            yield _Mark(rank=record.rank, at=at, shape="unseen", label=label)
    yield from _mishaps(source, clock)
    yield from _saves(source, clock)


def _mishaps(source: PageSource, clock: TimelineClock) -> Iterator[_Mark]:
    leg = source.shown.history
    planned = {record.attempt for record in leg.events(recorded.FaultObserved) if record.how == "hang"}
    found: list[tuple[recorded.JournalEvent, int | None, str]] = [
        *((record, record.rank or 0, "unplanned") for record in leg.events(recorded.DeathUnplanned)),
        # A death caused by a fault is shown by the fault's own mark.
        *((record, record.first, "hang") for record in leg.events(recorded.HangDeclared) if record.attempt not in planned),
        *((record, None, "aside") for record in leg.events(recorded.CheckpointQuarantined)),
    ]
    for record, rank, shape in found:
        at, said = clock.at(record.time_s), sentence(record)
        yield _Mark(rank=rank, at=at, shape=shape, label=f"{said[:1].upper()}{said[1:400]}\n{since(at)}")


def _saves(source: PageSource, clock: TimelineClock) -> Iterator[_Mark]:
    chosen = {attempt.resume: attempt.number for attempt in source.shown.history.attempts if attempt.resume}
    for attempt in source.shown.history.attempts:
        last_rank_first = sorted(attempt.traces.items(), reverse=True)
        for name, saved in {saved.name: saved for _, trace in last_rank_first for saved in trace.checkpoints}.items():
            at = clock.at(saved.time_s)
            use = f"\nattempt {chosen[name]} resumed from it" if name in chosen else ""
            took = f"{saved.duration_s * 1000:.0f} ms"
            label = f"Checkpoint {name}, attempt {attempt.number}\n{since(at)}, saved in {took}{use}"
            yield _Mark(at=at, shape="save", label=label)
        for step, records in sorted(_own_saves(attempt).items()):
            at = clock.at(max(record.time_s for record in records))
            names = listed(list(dict.fromkeys(record.path for record in records)), 3)
            label = f"Saved by the script after step {step}, attempt {attempt.number}\n{since(at)}, {names}"
            yield _Mark(at=at, shape="save", label=label)


def _own_saves(attempt: Attempt) -> Mapping[int, Sequence[SaveRecord]]:
    """The script's own saves, by step; where torch or safetensors wrote, only those."""
    made = [record for _, trace in sorted(attempt.traces.items()) for record in trace.saves if record.how != "remove"]
    written = [record for record in made if record.how not in ("open", "rename")] or made
    return grouped(written, lambda saved: saved.step)


def _event_lines(journal: Sequence[recorded.JournalEvent], clock: TimelineClock) -> Iterator[tuple[str, str]]:
    for told in folded(EventText.of("", record) for record in journal):
        at_s = told.time_s or 0.0
        yield "before" if at_s < clock.began_s else since(clock.at(at_s)), told.sentence
