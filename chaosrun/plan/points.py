"""The points of a sweep: one small plan for each point that a job was observed to reach. Pure.

A point is a phase on a rank at a step; for the fsyncs of a checkpoint, also the file.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from chaosrun.faults.kind import CHECKPOINT_PHASES, ONCE_AN_ATTEMPT, PHASES, TRAINING_PHASES
from chaosrun.plan.timeline import Timeline
from chaosrun.spec.fragment import Entry
from chaosrun.spec.model import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One passage of a rank through a point."""

    rank: int
    phase: str
    step: int
    """The step that `Fault.at_step` means at this phase; 0 at a rendezvous."""
    target: str | None = None
    """At an fsync of the checkpoint, the file synced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One kill to try: which rank, and when."""

    id: str
    """The same for the same point of the same job."""
    phase: str
    rank: int
    step: int
    target: str | None
    recovering: bool
    """Whether it is in the attempt after a first kill, which is then part of the plan; if False, in the first attempt."""
    schedule: tuple[Entry, ...]
    """The faults of the drill that tries it; the last one strikes here."""

    @property
    def place(self) -> tuple[str, int, str | None, bool]:
        """The place of this point, without the step."""
        return self.phase, self.rank, self.target, self.recovering


def saved_steps(passed: Iterable[Passage]) -> list[int]:
    """The steps whose checkpoints were committed, ascending."""
    return sorted({passage.step for passage in passed if passage.phase == "checkpoint.postcommit"})


def chosen_steps(epoch_of_step: Mapping[int, int], saved: Collection[int]) -> tuple[int, ...]:
    """Representative steps: the first of the job, the first of its second epoch, the last, and, near the middle, one with a
    checkpoint and one without."""
    steps = sorted(epoch_of_step)
    if not steps:
        return ()
    chosen = {steps[0], steps[-1]}
    second = sorted(set(epoch_of_step.values()))[1:2]
    chosen.update([step for step in steps if epoch_of_step[step] in second][:1])
    middle = steps[len(steps) // 2]
    for alike in (set(saved), set(steps) - set(saved)):
        others = (set(steps) & alike) - chosen
        chosen.update(sorted(others, key=lambda step: (abs(step - middle), step))[:1])
    return tuple(sorted(chosen))


def first_kill(spec: JobSpec) -> Entry:
    """The kill that causes a restore: after the first checkpoint, or, where a script's own saves are unknown, after the first
    step."""
    rank = spec.workers - 1
    return {"rank": rank, "phase": "checkpoint.postcommit"} if spec.by == "chaosrun" else {"rank": rank, "occurrence": 1}


def enumerate_points(
    spec: JobSpec, fault_free: Iterable[Passage], recovering: Iterable[Passage], *, steps: Collection[int]
) -> list[Point]:
    """The points of a job: of its first attempt at these training steps, at the first, a middle and the last checkpoint; and,
    in the attempt after `first_kill`, up to the end of the first step. Passages are in rank-local order."""
    passed = list(fault_free)
    saved = saved_steps(passed)
    at_saved = {saved[0], saved[len(saved) // 2], saved[-1]} if saved else set()
    found = [
        _point(passage, times, (), spec)
        for passage, times in _numbered(passed)
        if passage.phase == "rendezvous"
        or (passage.phase in TRAINING_PHASES and passage.step in steps)
        or (passage.phase in CHECKPOINT_PHASES and passage.step in at_saved)
    ]
    if saved:
        found += [
            _point(passage, times, (first_kill(spec),), spec)
            for passage, times in _numbered(recovering)
            if passage.phase in ONCE_AN_ATTEMPT or (passage.phase in TRAINING_PHASES and passage.step == saved[0] + 1)
        ]
    if spec.workers == 1:
        # A single worker reduces nothing.
        found = [point for point in found if point.phase != "reduce"]
    return sorted(found, key=_place_in_table)


def save_points(passed: Iterable[Passage], step: int) -> list[Point]:
    """Points inside the script's save of a step: kills before each operation (except amid a file's writes) and at the end;
    power cuts after each rename and at the end. Operations are in rank-local order."""
    found: list[Point] = []
    of_rank: dict[int, list[str]] = {}
    for passage in passed:
        if passage.phase == "save" and passage.step == step and passage.target is not None:
            of_rank.setdefault(passage.rank, []).append(passage.target)
    for rank, operations in sorted(of_rank.items()):
        for number, what in enumerate([*operations, "end"], start=1):
            before = operations[number - 2] if number > 1 else ""
            if before != what or what != (operations[number] if number < len(operations) else ""):
                found.append(_save_point(rank, step, number, what, {}))
            if before.startswith("rename") and number <= len(operations):
                found.append(_save_point(rank, step, number, what, {"kind": "power_cut", "unsynced": "torn"}))
        for unsynced in ("lost", "empty", "torn"):
            end = len(operations) + 1
            found.append(_save_point(rank, step, end, "end", {"kind": "power_cut", "unsynced": unsynced}))
    return found


def _save_point(rank: int, step: int, number: int, what: str, more: Entry) -> Point:
    """`what`: the operation before which it strikes."""
    cut = [f"power_cut-{more['unsynced']}"] if more else []
    entry = {**more, "rank": rank, "phase": "save", "at_step": step, "operation": number}
    # Without the file's name, which may differ between runs.
    place = "/".join([f"save@{step}", f"rank{rank}", f"{number:03}-{what.partition(' ')[0]}", *cut])
    return Point(id=place, phase="save", rank=rank, step=step, target=what, recovering=False, schedule=(entry,))


def matching(points: Iterable[Point], patterns: Collection[str]) -> list[Point]:
    """The points whose id or phase matches one of the patterns, `*` and `?` as in file names; all without patterns."""
    return [
        point
        for point in points
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns for name in (point.id, point.phase))
    ]


_Times = tuple[int, int, int]
"""How often a rank has reached a point: at this step, in its attempt, and at how many different steps."""


def _numbered(passed: Iterable[Passage]) -> Iterator[tuple[Passage, _Times]]:
    """The passages with their counts, without repetitions within a step, except for those of fsyncs."""
    here: Counter[Passage] = Counter()
    ever: Counter[tuple[int, str, str | None]] = Counter()
    steps: Counter[tuple[int, str, str | None]] = Counter()
    for passage in passed:
        which = passage.rank, passage.phase, passage.target
        here[passage] += 1
        ever[which] += 1
        steps[which] += here[passage] == 1
        if here[passage] == 1 or passage.target is not None:
            yield passage, (here[passage], ever[which], steps[which])


def _point(passage: Passage, times: _Times, before: tuple[Entry, ...], spec: JobSpec) -> Point:
    phase, (here, ever, at_steps) = passage.phase, times
    parts = [phase if phase == "rendezvous" else f"{phase}@{passage.step}", f"rank{passage.rank}"]
    entry: dict[str, int | float | str | None] = {"rank": passage.rank, "phase": phase}
    if passage.target is not None:
        parts.append(passage.target)
        entry["file"] = passage.target
    if here > 1:
        parts.append(f"#{here}")
    if phase in ONCE_AN_ATTEMPT:
        # The first restore; for a rendezvous, the one of the attempt meant.
        entry["occurrence"] = len(before) + 1 if phase == "rendezvous" else 1
    elif phase in CHECKPOINT_PHASES and not Timeline.of(spec).saves(passage.step):
        # The checkpoint at the script's end, at a step that only the script knows.
        entry["occurrence"] = ever if passage.target is not None else at_steps
    else:
        entry["at_step"] = passage.step
        if here > 1:
            entry["occurrence"] = here
    if before:
        parts.insert(0, "recovery")
        if phase in TRAINING_PHASES:
            entry["attempt"] = len(before) + 1
    return Point(
        id="/".join(parts),
        phase=phase,
        rank=passage.rank,
        step=passage.step,
        target=passage.target,
        recovering=bool(before),
        schedule=(*before, entry),
    )


def _place_in_table(point: Point) -> tuple[bool, int, int, int, str, str]:
    return point.recovering, PHASES.index(point.phase), point.step, point.rank, point.target or "", point.id
