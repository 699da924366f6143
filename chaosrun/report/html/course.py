"""What happened in a leg, by its own clock: marks with their labels for the timeline, and the same in words."""

from collections.abc import Iterator, Sequence

from chaosrun.records.events import (
    CheckpointQuarantined,
    DeathUnplanned,
    FaultObserved,
    FaultRequested,
    HangDeclared,
    JournalEvent,
)
from chaosrun.report.html.drawing import Mark
from chaosrun.report.html.page import since
from chaosrun.report.html.source import Source
from chaosrun.report.sentences import sentence
from chaosrun.verify.recovery_times import finite, from_first_attempt, pauses

MOST_MARKS = 400
Placed = tuple[int | None, Mark]
"""A mark and its rank; None for what belongs to the row of checkpoints."""


class Clock:
    """Seconds since the leg's first attempt began; time in which it was interrupted does not pass."""

    def __init__(self, journal: Sequence[JournalEvent]) -> None:
        journal = from_first_attempt(journal)
        times = [time for record in journal if (time := finite(record.time_s)) is not None]
        self.began_s = times[0] if times else 0.0
        self._pauses = pauses(journal)
        self.length_s = max((self.at(time) for time in times), default=0.0) or 1.0

    def at(self, time_s: float) -> float:
        paused = sum(min(end, time_s) - begin for begin, end in self._pauses if time_s > begin)
        return max(0.0, time_s - self.began_s - paused)


def marks_of(source: Source, clock: Clock) -> tuple[list[Placed], int]:
    """Of the leg that is told, and how many were too many: checkpoints go first."""
    marks = list(_marks(source, clock))
    if len(marks) <= MOST_MARKS:
        return marks, 0
    telling = [entry for entry in marks if entry[1].shape != "save"][:MOST_MARKS]
    saves = [entry for entry in marks if entry[1].shape == "save"]
    room = MOST_MARKS - len(telling)
    kept = saves[:: max(1, -(-len(saves) // room))][:room] if room else []
    return [*telling, *kept], len(marks) - len(telling) - len(kept)


def _marks(source: Source, clock: Clock) -> Iterator[Placed]:
    leg = source.told.history
    rows = {row.id: row for row in source.view.faults}
    seen: set[str] = set()
    for record in leg.events(FaultObserved):
        died_s, at_s = finite(record.died_s), finite(record.time_s)
        time_s = at_s if died_s is None else died_s
        if time_s is None:
            continue
        fault = record.fault
        seen.add(fault)
        row, when = rows.get(fault), f"{since(clock.at(time_s))}, attempt {record.attempt}"
        what, evidence = ("not in the plan", "NOT SHOWN: not in the plan") if row is None else (row.what, row.seen)
        shape = "unseen" if row is None or not row.landed else "kill" if row.kind == "kill" else "fault"
        label = f"Fault {fault}: {what}\n{when}\n{evidence}"
        yield record.rank, Mark(at=clock.at(time_s), y=0, shape=shape, label=label)
    for record in leg.events(FaultRequested):
        time_s = finite(record.time_s)
        if record.fault not in seen and time_s is not None:
            seen.add(record.fault)
            label = f"Fault {record.fault} was asked for, and not seen to happen\n{since(clock.at(time_s))}"
            yield record.rank, Mark(at=clock.at(time_s), y=0, shape="unseen", label=label)
    yield from _mishaps(source, clock)
    yield from _saves(source, clock)


def _mishaps(source: Source, clock: Clock) -> Iterator[Placed]:
    leg = source.told.history
    for record in leg.events(DeathUnplanned):
        if (time_s := finite(record.time_s)) is not None:
            yield record.rank or 0, _mark(record, clock.at(time_s), "unplanned")
    planned = {record.attempt for record in leg.events(FaultObserved) if record.how == "hang"}
    for record in leg.events(HangDeclared):
        # One that a fault was the cause of is told by the fault's own mark.
        if record.attempt not in planned and (time_s := finite(record.time_s)) is not None:
            yield record.first, _mark(record, clock.at(time_s), "hang")
    for record in leg.events(CheckpointQuarantined):
        if (time_s := finite(record.time_s)) is not None:
            yield None, _mark(record, clock.at(time_s), "aside")


def _mark(record: JournalEvent, at: float, shape: str) -> Mark:
    said = sentence(record)
    return Mark(at=at, y=0, shape=shape, label=f"{said[:1].upper()}{said[1:400]}\n{since(at)}")


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


def told(journal: Sequence[JournalEvent], clock: Clock) -> Iterator[tuple[str, str]]:
    for record in journal:
        time_s = finite(record.time_s)
        when = "–" if time_s is None else "before" if time_s < clock.began_s else since(clock.at(time_s))
        yield when, sentence(record)
