"""The course of a leg: attempts and ranks over time, what struck them, what was saved and what was rolled back.

Where each attempt went on, and how many steps that cost, its mark and the table of attempts say.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from chaosrun.records.events import (
    AttemptStarted,
    AttemptStarting,
    AttemptStopped,
    CheckpointQuarantined,
    DeathUnplanned,
    FaultObserved,
    FaultRequested,
    HangDeclared,
    JournalEvent,
)
from chaosrun.records.history import Attempt
from chaosrun.records.traces import SaveRecord
from chaosrun.report.html.drawing import Mark, Scale, beneath, figure_mark, join, rules, text, ticks
from chaosrun.report.html.page import Shown, since
from chaosrun.report.html.source import Source
from chaosrun.report.sentences import Told, folded, sentence
from chaosrun.verify.lineage import Lineage
from chaosrun.verify.recovery_times import from_first_attempt, pauses
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
"""Events in words."""


MOST_MARKS = 400
Placed = tuple[int | None, Mark]
"""A mark and its rank; None for what belongs to the row of checkpoints."""
Times = Mapping[tuple[str, int], float]
"""When an attempt was starting, started, stopped: by event and attempt."""


class Clock:
    """Seconds since the leg's first attempt began; time in which it was interrupted does not pass."""

    def __init__(self, journal: Sequence[JournalEvent]) -> None:
        journal = from_first_attempt(journal)
        times = [record.time_s for record in journal]
        self.began_s = times[0] if times else 0.0
        self._pauses = pauses(journal)
        self.length_s = max((self.at(time) for time in times), default=0.0) or 1.0

    def at(self, time_s: float) -> float:
        paused = sum(min(end, time_s) - begin for begin, end in self._pauses if time_s > begin)
        return max(0.0, time_s - self.began_s - paused)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """One rank in one attempt, by the clock."""

    rank: int
    attempt: int
    begin: float
    trains: float
    """From here on it does steps."""
    lost: float
    """From here on what it did was rolled back."""
    end: float


def timeline(source: Source) -> Shown | None:
    """Of the leg that is told; None when it has nothing to show. `shapes`: kinds of marks that are there; `left_out`: how many
    marks were too many to draw; `told`: the same in words."""
    leg = source.told.history
    if not leg.attempts or not leg.journal:
        return None
    clock = Clock(leg.journal)
    scale = Scale(0.0, clock.length_s)
    times = _times(leg.journal)
    bars = [bar for attempt, after in _followed(leg.attempts) for bar in _bars(source, attempt, after, clock, times)]
    marks, left_out = _marks_of(source, clock)
    ranks = sorted({bar.rank for bar in bars} | {rank for rank, _ in marks if rank is not None})
    lanes = _lanes(ranks, {rank for rank, _ in marks if rank is not None})
    others = len(ranks) - len(lanes)
    bars = [bar for bar in bars if bar.rank in lanes] + _of_the_others([bar for bar in bars if bar.rank not in lanes])
    place = {rank: HEAD + LANE * (number + 0.5) for number, rank in enumerate([*lanes, OTHERS] if others else lanes)}
    saved_y = HEAD + LANE * (len(place) + 0.5)
    last_y = max(place.values(), default=HEAD)
    placed = [replace(mark, y=saved_y if rank is None else place.get(rank, last_y)) for rank, mark in marks]
    placed += [_attempt_mark(source, attempt, clock) for attempt in leg.attempts[:MOST_MARKS]]
    placed.sort(key=lambda mark: (mark.at, mark.y))
    rows = len(place) + 1
    bottom = HEAD + LANE * rows
    began = [(attempt.number, at) for attempt in leg.attempts if (at := _attempt_began(attempt, clock)) is not None]
    drawn = [
        rules([HEAD + LANE * number for number in range(rows + 1)]),
        *_drawn_bars(bars, place, scale),
        *_heads(began, scale, bottom),
        *(figure_mark(mark, scale) for mark in placed),
        _clock_axis(scale, bottom + 18),
    ]
    labels = [text("0", 14, "attempt")]
    labels += [text("0", y + 4, f"+{count(others, 'rank')}" if rank == OTHERS else f"rank {rank}") for rank, y in place.items()]
    words = list(_told(leg.journal, clock))
    return {
        "axis": join([*labels, text("0", saved_y + 4, "saved")]),
        "plot": join(drawn),
        "height": bottom + 26,
        "shapes": {mark.shape for mark in placed},
        "rolled_back": any(bar.lost < bar.end for bar in bars),
        "left_out": left_out,
        "told": words[:MOST_TOLD],
        "untold": max(0, len(words) - MOST_TOLD),
    }


def _followed(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, Attempt | None]]:
    return zip(attempts, [*attempts[1:], None], strict=False)


def _lanes(ranks: list[int], busy: set[int]) -> list[int]:
    """Ranks with a lane of their own; where there are more, the others share one."""
    if len(ranks) <= MOST_LANES:
        return ranks
    return sorted(busy)[: MOST_LANES - 1] or ranks[:1]


def _of_the_others(bars: Sequence[_Bar]) -> list[_Bar]:
    """One for each attempt: from the first that began to the last that ended, training when all of them did."""
    by_attempt: dict[int, list[_Bar]] = {}
    for bar in bars:
        by_attempt.setdefault(bar.attempt, []).append(bar)
    found: list[_Bar] = []
    for attempt, own in by_attempt.items():
        end = max(bar.end for bar in own)
        trains = max(bar.trains for bar in own)
        # Of ranks that were rolled back; those that were lost with it had nothing to lose.
        lost = max((bar.lost for bar in own if bar.lost < bar.end), default=end)
        found.append(
            _Bar(
                rank=OTHERS,
                attempt=attempt,
                begin=min(bar.begin for bar in own),
                trains=trains,
                lost=max(trains, lost),
                end=end,
            )
        )
    return found


def _times(journal: Sequence[JournalEvent]) -> Times:
    times: dict[tuple[str, int], float] = {}
    for record in journal:
        if isinstance(record, AttemptStarting | AttemptStarted | AttemptStopped):
            times.setdefault((record.event, record.attempt), record.time_s)
    return times


def _bars(source: Source, attempt: Attempt, after: Attempt | None, clock: Clock, times: Times) -> Iterator[_Bar]:
    chain = source.told.chain
    begin_s = times.get(("attempt.started", attempt.number), times.get(("attempt.starting", attempt.number)))
    if begin_s is None:
        return
    stopped_s = times.get(("attempt.stopped", attempt.number))
    last_s = clock.began_s + clock.length_s if stopped_s is None else stopped_s
    died = {death.rank: death.died_s for death in attempt.exits}
    for rank in sorted({*attempt.pids, *attempt.traces}):
        trace = attempt.traces.get(rank)
        end = clock.at(died.get(rank) or last_s)
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


def _drawn_bars(bars: Sequence[_Bar], place: Mapping[int, float], scale: Scale) -> Iterator[Markup]:
    """One path a kind and lane keeps thousands of them small."""
    for rank, y in place.items():
        own = [bar for bar in bars if bar.rank == rank]
        spans = {
            "rise": [(bar.begin, bar.trains) for bar in own],
            "work": [(bar.trains, bar.lost) for bar in own],
            "lost": [(bar.lost, bar.end) for bar in own],
        }
        inner = [
            Markup('<path class="{}" d="{}"/>').format(kind, "".join(_box(*span, scale) for span in found if span[1] > span[0]))
            for kind, found in spans.items()
            if any(end > begin for begin, end in found)
        ]
        stretched = Markup('<svg y="{:g}" width="100%" height="14" viewBox="0 0 10000 14" preserveAspectRatio="none">{}</svg>')
        yield stretched.format(y - 7, join(inner))


def _box(begin: float, end: float, scale: Scale) -> str:
    left, right = scale.units(begin), scale.units(end)
    return f"M{left} 0H{max(right, left + 8)}V14H{left}Z"


def _heads(began: Sequence[tuple[int, float]], scale: Scale, bottom: float) -> Iterator[Markup]:
    """Where attempts begin, and their numbers where there is room beside the one before."""
    names: list[Markup] = []
    free = 0.0
    for number, at in began:
        yield Markup('<line class="resumed" x1="{0}" x2="{0}" y1="4" y2="{1:g}"/>').format(scale.percent(at), bottom)
        place = scale.at(at)
        end = place > 1 - NAME
        left = place - NAME if end else place
        if left >= free:
            free = left + NAME
            dx, anchor = (-5.0, "end") if end else (5.0, "start")
            names.append(text(scale.percent(at), 14, str(number), anchor=anchor, dx=dx, strong=True))
    yield Markup('<g class="names">{}</g>').format(join(names))


def _attempt_began(attempt: Attempt, clock: Clock) -> float | None:
    times = [trace.start.entered_s or trace.start.time_s for trace in attempt.traces.values() if trace.start]
    return clock.at(min(times)) if times else None


def _attempt_mark(source: Source, attempt: Attempt, clock: Clock) -> Mark:
    own = attempt.number - 1
    found = source.view.verdict.attempts[own : own + 1]
    summary = found[0] if found and found[0].attempt == attempt.number else None
    steps = [step for trace in attempt.traces.values() for step in trace.steps]
    place = f"step {attempt.resume_step}" if attempt.by == "script" and attempt.went_on else "the beginning"
    parts = [f"Attempt {attempt.number}, from {attempt.resume or place}"]
    parts.append(f"steps {min(steps)} to {max(steps)}" if steps else "no step recorded")
    if summary is not None and source.told is source.chaos:
        parts.append(f"ended by {summary.ended_by.replace('_', ' ')}")
        if summary.lost_steps:
            parts.append(f"{count(summary.lost_steps, 'step')} rolled back")
    began = _attempt_began(attempt, clock)
    return Mark(at=0.0 if began is None else began, y=10.0, shape="attempt", label="\n".join(parts))


def _clock_axis(scale: Scale, y: float) -> Markup:
    unit, each = ("min", 60.0) if scale.high >= 180 else ("s", 1.0)
    values = [value * each for value in ticks(0.0, scale.high / each, 5)]
    words = [f"{value / each:g}{f' {unit}' if number == len(values) - 1 else ''}" for number, value in enumerate(values)]
    return beneath(values, words, scale, y)


def _marks_of(source: Source, clock: Clock) -> tuple[list[Placed], int]:
    """Of the leg that is told, and how many were too many: the last checkpoints are left out first."""
    marks = list(_marks(source, clock))
    return marks[:MOST_MARKS], max(0, len(marks) - MOST_MARKS)


def _marks(source: Source, clock: Clock) -> Iterator[Placed]:
    leg = source.told.history
    rows = {row.id: row for row in source.view.faults}
    seen: set[str] = set()
    for record in leg.events(FaultObserved):
        time_s = record.time_s if record.died_s is None else record.died_s
        fault = record.fault
        seen.add(fault)
        row, when = rows.get(fault), f"{since(clock.at(time_s))}, attempt {record.attempt}"
        what, evidence = ("not in the plan", "NOT SHOWN: not in the plan") if row is None else (row.what, row.seen)
        shape = "unseen" if row is None or not row.landed else row.kind if row.kind in ("kill", "preempt") else "fault"
        label = f"Fault {fault}: {what}\n{when}\n{evidence}"
        yield record.rank, Mark(at=clock.at(time_s), y=0, shape=shape, label=label)
    for record in leg.events(FaultRequested):
        if record.fault not in seen:
            seen.add(record.fault)
            at = clock.at(record.time_s)
            label = f"Fault {record.fault} was asked for, and not seen to happen\n{since(at)}"
            yield record.rank, Mark(at=at, y=0, shape="unseen", label=label)
    yield from _mishaps(source, clock)
    yield from _saves(source, clock)


def _mishaps(source: Source, clock: Clock) -> Iterator[Placed]:
    leg = source.told.history
    planned = {record.attempt for record in leg.events(FaultObserved) if record.how == "hang"}
    found: list[tuple[JournalEvent, int | None, str]] = [
        *((record, record.rank or 0, "unplanned") for record in leg.events(DeathUnplanned)),
        # One that a fault was the cause of is told by the fault's own mark.
        *((record, record.first, "hang") for record in leg.events(HangDeclared) if record.attempt not in planned),
        *((record, None, "aside") for record in leg.events(CheckpointQuarantined)),
    ]
    for record, rank, shape in found:
        at, said = clock.at(record.time_s), sentence(record)
        yield rank, Mark(at=at, y=0, shape=shape, label=f"{said[:1].upper()}{said[1:400]}\n{since(at)}")


def _saves(source: Source, clock: Clock) -> Iterator[Placed]:
    chosen = {attempt.resume: attempt.number for attempt in source.told.history.attempts if attempt.resume}
    for attempt in source.told.history.attempts:
        told: set[str] = set()
        for _, trace in sorted(attempt.traces.items()):
            for checkpoint in trace.checkpoints:
                if checkpoint.name in told:
                    continue
                told.add(checkpoint.name)
                at = clock.at(checkpoint.time_s)
                use = f"\nattempt {chosen[checkpoint.name]} went on from it" if checkpoint.name in chosen else ""
                took = f"{checkpoint.duration_s * 1000:.0f} ms"
                label = f"Checkpoint {checkpoint.name}, attempt {attempt.number}\n{since(at)}, saved in {took}{use}"
                yield None, Mark(at=at, y=0, shape="save", label=label)
        for step, records in sorted(_own_saves(attempt).items()):
            at = clock.at(max(record.time_s for record in records))
            names = listed(list(dict.fromkeys(record.path for record in records)), 3)
            label = f"Saved by the script after step {step}, attempt {attempt.number}\n{since(at)}, {names}"
            yield None, Mark(at=at, y=0, shape="save", label=label)


def _own_saves(attempt: Attempt) -> Mapping[int, Sequence[SaveRecord]]:
    """What the script saved by itself, by step; where torch or safetensors wrote, that alone."""
    made = [record for _, trace in sorted(attempt.traces.items()) for record in trace.saves if record.how != "remove"]
    written = [record for record in made if record.how not in ("open", "rename")] or made
    return {step: [each for each in written if each.step == step] for step in {record.step for record in written}}


def _told(journal: Sequence[JournalEvent], clock: Clock) -> Iterator[tuple[str, str]]:
    for told in folded(Told.of("", record) for record in journal):
        at_s = told.time_s or 0.0
        yield "before" if at_s < clock.began_s else since(clock.at(at_s)), told.sentence
