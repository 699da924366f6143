"""The course that a job takes under a plan: which faults strike in which attempt, and what each attempt goes on from. Pure.

A model of the job by its steps: it does not run, it is reckoned from one fault to the next, however far apart they lie. Ranks
keep step at their collectives and race in between. Where faults of several ranks strike between the same two collectives,
any of them may be the first, or several, so a plan may have many courses. Faults that strike from outside, after a delay, are
not in it: nobody knows at which step they come.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, permutations
from typing import Literal, TypeVar

from chaosrun.faults.effects import damages, is_notice, outlives
from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, RESTORE_PHASES
from chaosrun.plan.track import AFTER_THE_STEP, LEAVING, Place, Track

MOST_COURSES = 500
"""Branches of one plan that are followed."""
MOST_RACING = 3
"""So many faults are tried in every combination; of more none, each alone, and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    number: int
    resume: int
    """Step of the checkpoint that it went on from, 0: from the beginning."""
    ended_by: tuple[int, ...]
    """Faults, by their place in the plan; none when it ran to the end."""
    step: int | None
    """The step that was computed, or saved, when it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why a fault could not be shown to have happened, though the job comes by its point. Faults by their place in the plan."""

    how: Literal["cut_short", "unheeded", "told", "parted", "bare", "too_late"]
    """Another fault ends the attempt meanwhile, or before the ranks have left on the notice; another has told the rank to
    leave; another hangs a rank that the others of its group wait for; there is no checkpoint to damage; the training is
    complete before it is over."""
    fault: int
    by: int
    leave: int | None = None
    """The step after which the ranks leave on a notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    attempts: tuple[Attempt, ...]
    fired: bytes
    """Of each fault: 0 it did not strike, 1 it did, 2 and a later start met what it had done."""
    obstacle: Obstacle | None = None
    """The course is not followed any further than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What an attempt begins with."""

    fired: bytes
    attempt: int = 1
    resume: int = 0
    restores: int = 0
    """Its own among them."""
    store: tuple[tuple[int, int], ...] = ()
    """Checkpoints, oldest first: step, and the fault that damaged it or -1."""
    past: tuple[Attempt, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passed:
    """A fault that the job lives through."""

    fault: int
    place: Place
    epoch: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strike:
    """What ends an attempt: one fault, or several that strike together, or the leaving that a notice leads to."""

    faults: tuple[int, ...]
    place: Place
    epoch: tuple[int, int]
    leaving: bool = False


_Outcome = _State | Course
_Item = TypeVar("_Item")


def courses(track: Track, faults: Sequence[Fault]) -> Iterator[Course]:
    """Every course that the job may take, up to MOST_COURSES of them; `faults` without those from outside."""
    order = sorted(range(len(faults)), key=lambda index: _sort_key(track, faults[index], index))
    reckoner = _Reckoner(track, [faults[index] for index in order], order)
    unfollowed = [_State(fired=bytes(len(faults)))]
    met: set[_State] = set()
    ended = 0
    while unfollowed and ended < MOST_COURSES:
        following = reckoner.attempt(unfollowed.pop())
        states: list[_State] = []
        for outcome in following:
            if isinstance(outcome, Course):
                ended += 1
                yield _in_plan_order(outcome, order)
            elif len(following) == 1:
                states.append(outcome)
            elif outcome not in met and len(met) < MOST_COURSES:
                met.add(outcome)
                states.append(outcome)
        unfollowed += reversed(states)


def _is_fixed(track: Track, fault: Fault) -> bool:
    """It strikes at its step, in whatever attempt and however many checkpoints: its place can be reckoned once."""
    if fault.at_step is None or fault.attempt is not None or fault.phase == "rendezvous" or fault.phase in RESTORE_PHASES:
        return False
    return track.reaches(fault.at_step) and (fault.phase not in CHECKPOINT_PHASES or track.saves(fault.at_step))


def _sort_key(track: Track, fault: Fault, index: int) -> tuple[int, ...]:
    """The fixed ones first, in the order in which the job comes by them."""
    if fault.at_step is None or not _is_fixed(track, fault):
        return 1, index
    return 0, *track.place(fault, fault.at_step), index


def _in_plan_order(course: Course, order: Sequence[int]) -> Course:
    """`order`: of each of the reckoner's faults, its place in the plan."""
    fired = bytearray(len(order))
    for index, value in enumerate(course.fired):
        fired[order[index]] = value
    attempts = tuple(replace(each, ended_by=tuple(order[index] for index in each.ended_by)) for each in course.attempts)
    met = course.obstacle
    obstacle = replace(met, fault=order[met.fault], by=order[met.by]) if met else None
    return Course(attempts=attempts, fired=bytes(fired), obstacle=obstacle)


class _Reckoner:
    """From the beginning of one attempt to that of the next."""

    def __init__(self, track: Track, faults: Sequence[Fault], order: Sequence[int]) -> None:
        self._track = track
        self._faults = faults
        self._order = order
        """Of each fault its place in the plan: of two at one moment the earlier comes first."""
        self._groups: dict[str, list[int]] = {}
        for index, fault in enumerate(faults):
            if fault.group is not None:
                self._groups.setdefault(fault.group, []).append(index)
        self._damaging = [index for index, fault in enumerate(faults) if damages(fault)]
        self._notices = [index for index, fault in enumerate(faults) if is_notice(fault)]
        fixed = [fault for fault in faults if _is_fixed(track, fault)]
        assert fixed == faults[: len(fixed)], "faults come as `_sort_key` sorts them"
        self._fixed_places = [
            (*track.place(fault, step), order[index]) for index, fault in enumerate(fixed) if (step := fault.at_step)
        ]
        self._moving = range(len(fixed), len(faults))

    def attempt(self, state: _State) -> list[_Outcome]:
        """What may become of one attempt."""
        leaving = self._leaving(state)
        extra = leaving.place[0] if leaving else None
        passed, strikes, obstacle = self._until_struck(state, extra, leaving)
        if obstacle is not None:
            return [Course(attempts=state.past, fired=state.fired, obstacle=obstacle)]
        if not strikes:
            return self._struck(state, [leaving], passed, extra) if leaving else [self._ended(state, passed)]
        racing = [strike for strike in strikes if all(strike.epoch[0] <= other.epoch[1] for other in strikes)]
        outcomes: list[_Outcome] = []
        for struck in _subsets(racing)[1:]:
            if self._only_hangs(struck):
                reached = max(strike.epoch[0] for strike in struck)
                if any(strike not in struck and strike.epoch[0] <= reached for strike in racing):
                    continue  # the others come to theirs before the hang is declared
            outcomes += self._struck(state, struck, passed, extra)
        return list(dict.fromkeys(outcomes))

    def _leaving(self, state: _State) -> _Strike | None:
        """When the ranks leave, that the first notice tells to: after the step that follows it; one rank alone at once.

        All together, so that each has come by everything before it: where anything ends the attempt sooner, nobody leaves.
        """
        due = [
            (place, index)
            for index in self._notices
            if not state.fired[index] and (place := self._due_place(index, state, None)) is not None
        ]
        if not due:
            return None
        (step, _), index = min(due)
        leave = step + (self._track.workers > 1)
        if not self._track.reaches(leave):
            return None
        return _Strike(faults=(index,), place=(leave, LEAVING), epoch=self._track.epoch((leave, LEAVING), 0), leaving=True)

    def _until_struck(
        self, state: _State, extra: int | None, leaving: _Strike | None
    ) -> tuple[list[_Passed], list[_Strike], Obstacle | None]:
        """Faults that the job lives through and those that end the attempt, as far as any rank may come."""
        bound: int | None = None
        passed: list[_Passed] = []
        strikes: dict[tuple[int, ...], _Strike] = {}
        # By rank what keeps it: the fault that ends it, or the one that ends a rank which it waits for.
        kept: dict[int, int] = {}
        told: dict[int, int] = {}
        for place, index in self._due(state, extra):
            fault, epoch = self._faults[index], self._track.epoch(place, state.resume)
            if (bound is not None and epoch[0] > bound) or (leaving and place > leaving.place):
                break
            if fault.rank in kept:
                continue  # this rank goes no further
            members = self._members(index)
            keeping = [kept[rank] for member in members if (rank := self._faults[member].rank) in kept]
            missed = next((by for by in keeping if self._faults[by].group != fault.group), None)
            if missed is not None and self._faults[missed].facts.evidence == "hang":
                return [], [], Obstacle(how="parted", fault=index, by=missed)
            if missed is not None:
                kept[fault.rank] = missed  # its group is let off, and meets in a later attempt
            elif fault.facts.ends_attempt and not is_notice(fault):
                kept[fault.rank] = index
                strikes[members] = _Strike(faults=members, place=place, epoch=epoch)
                bound = epoch[1] if bound is None else min(bound, epoch[1])
            elif damages(fault) and fault.kind != "stale_staging" and not self._track.newest(place, state.resume, extra):
                return [], [], Obstacle(how="bare", fault=index, by=index)
            elif fault.kind == "preempt" and fault.rank in told:
                return [], [], Obstacle(how="told", fault=index, by=told[fault.rank], leave=extra)
            else:
                passed.append(_Passed(fault=index, place=place, epoch=epoch))
                if fault.kind == "preempt":
                    told[fault.rank] = index
        return passed, list(strikes.values()), None

    def _members(self, index: int) -> tuple[int, ...]:
        group = self._faults[index].group
        return (index,) if group is None else tuple(self._groups[group])

    def _struck(self, state: _State, struck: Sequence[_Strike], passed: Sequence[_Passed], extra: int | None) -> list[_Outcome]:
        """The beginnings of the attempt after this one."""
        stopped = all(self._faults[index].kind == "stop" for strike in struck for index in strike.faults)
        for strike, other in permutations(struck, 2):
            # Of several processes that are stopped, all are found so.
            if not stopped and not all(outlives(self._faults[index]) for index in strike.faults):
                return [self._blocked(state, "cut_short", strike.faults[0], other.faults[0])]
        places = {each.fault: each.place for each in passed}
        sure = {each.fault for each in passed if self._is_past(each.place, each.fault, state, struck)}
        lucky = [each.fault for each in passed if each.fault not in sure]
        place, by = max((strike.place, strike.faults) for strike in struck)
        for each in passed:
            fault = self._faults[each.fault]
            if is_notice(fault) and not struck[0].leaving:
                return [self._blocked(state, "unheeded" if extra else "too_late", each.fault, by[0], leave=extra)]
            over = (each.place[0] + fault.option("steps"), AFTER_THE_STEP) if fault.kind == "slow" else each.place
            takes_time = fault.kind in ("slow", "pause") or fault.group is not None
            if takes_time and not self._is_past(over, each.fault, state, struck):
                return [self._blocked(state, "cut_short", each.fault, by[0])]
        ended_by = tuple(index for strike in struck for index in strike.faults)
        lucky.sort(key=lambda index: places[index])
        return [
            self._restarted(state, place, ended_by, {index: places.get(index) for index in happened}, extra)
            for happened in (sure.union(some) for some in _subsets(lucky) if self._in_order(some, lucky, places))
        ]

    def _in_order(self, some: Sequence[int], lucky: Sequence[int], places: Mapping[int, Place]) -> bool:
        """Whether no rank has come to the later of its faults without having come to the earlier."""
        missed = [index for index in lucky if index not in some]
        return not any(
            self._faults[sooner].rank == self._faults[later].rank and places[sooner] <= places[later]
            for sooner in missed
            for later in some
        )

    def _is_past(self, place: Place, index: int, state: _State, struck: Sequence[_Strike]) -> bool:
        """Whether the rank of a fault is certain to have been at `place` when the attempt ends by these."""
        rank = self._faults[index].rank
        for strike in struck:
            if strike.leaving or any(self._faults[other].rank == rank for other in strike.faults):
                return place <= strike.place
        low, high = self._track.epoch(place, state.resume)
        reached = max(strike.epoch[0] for strike in struck)
        # After a hang the others go on until they wait. Else only what lies before a collective that is over is certain: who is
        # inside an all-reduce has launched its share, and may not have come to its fault.
        return low <= reached if self._only_hangs(struck) else high < reached

    def _only_hangs(self, struck: Sequence[_Strike]) -> bool:
        return all(self._faults[strike.faults[0]].facts.evidence == "hang" for strike in struck)

    def _blocked(
        self,
        state: _State,
        how: Literal["cut_short", "unheeded", "too_late"],
        fault: int,
        by: int,
        *,
        leave: int | None = None,
    ) -> Course:
        obstacle = Obstacle(how=how, fault=fault, by=by, leave=leave)
        return Course(attempts=state.past, fired=state.fired, obstacle=obstacle)

    def _restarted(
        self,
        state: _State,
        place: Place,
        ended_by: tuple[int, ...],
        lived_through: Mapping[int, Place | None],
        extra: int | None,
    ) -> _State:
        fired = bytearray(state.fired)
        for index in (*ended_by, *lived_through):
            fired[index] = fired[index] or 1
        for index in self._damaging:
            if self._faults[index].kind == "stale_staging" and fired[index]:
                fired[index] = 2  # the folder is gone at the next start
        store = self._store(state, place, extra, lived_through)
        while store and store[-1][1] >= 0:
            fired[store[-1][1]] = 2
            store = store[:-1]
        resume = store[-1][0] if store else 0
        ended = Attempt(number=state.attempt, resume=state.resume, ended_by=ended_by, step=place[0] or None)
        return _State(
            fired=bytes(fired),
            attempt=state.attempt + 1,
            resume=resume,
            restores=state.restores + bool(resume),
            store=store,
            past=(*state.past, ended),
        )

    def _store(
        self, state: _State, place: Place, extra: int | None, lived_through: Mapping[int, Place | None]
    ) -> tuple[tuple[int, int], ...]:
        """The checkpoints that are there when an attempt has ended at `place`: no more of them than damage can make matter."""
        damaged = {
            self._track.newest(where, state.resume, extra): index
            for index, where in lived_through.items()
            if where is not None and damages(self._faults[index]) and self._faults[index].kind != "stale_staging"
        }
        wanted = min(self._track.keep, len(self._damaging) + 1)
        newest_first: list[tuple[int, int]] = []
        step = self._track.newest(place, state.resume, extra)
        while step > state.resume and wanted:
            newest_first.append((step, damaged.get(step, -1)))
            wanted -= step not in damaged
            step = self._track.newest_save(step - 1)
        for step, by in reversed(state.store):
            if not wanted:
                break
            newest_first.append((step, damaged.get(step, by)))
            wanted -= newest_first[-1][1] < 0
        return tuple(reversed(newest_first))

    def _ended(self, state: _State, passed: Sequence[_Passed]) -> Course:
        fired = bytearray(state.fired)
        for each in passed:
            fired[each.fault] = fired[each.fault] or 1
        last = Attempt(number=state.attempt, resume=state.resume, ended_by=(), step=self._track.last)
        late = next((each.fault for each in passed if self._is_too_late(each)), None)
        obstacle = None if late is None else Obstacle(how="too_late", fault=late, by=late)
        return Course(attempts=(*state.past, last), fired=bytes(fired), obstacle=obstacle)

    def _is_too_late(self, passed: _Passed) -> bool:
        """Told to leave where no step follows, or to last longer than the training does."""
        fault = self._faults[passed.fault]
        return is_notice(fault) or (fault.kind == "slow" and not self._track.reaches(passed.place[0] + fault.option("steps")))

    def _due(self, state: _State, extra: int | None) -> Iterator[tuple[Place, int]]:
        """Faults that have not struck, in the order in which the attempt comes by them."""
        moving = sorted(
            ((*place, self._order[index]), index)
            for index in self._moving
            if not state.fired[index] and (place := self._due_place(index, state, extra)) is not None
        )
        end = len(self._fixed_places)
        at = state.fired.find(0, bisect_left(self._fixed_places, (state.resume + 1, 0)), end)
        for key, index in moving:
            while at >= 0 and self._fixed_places[at] <= key:
                yield self._fixed_places[at][:2], at
                at = state.fired.find(0, at + 1, end)
            yield key[:2], index
        while at >= 0:
            yield self._fixed_places[at][:2], at
            at = state.fired.find(0, at + 1, end)

    def _due_place(self, index: int, state: _State, extra: int | None) -> Place | None:
        return self._track.due(
            self._faults[index], attempt=state.attempt, resume=state.resume, restores=state.restores, extra=extra
        )


def _subsets(of: Sequence[_Item]) -> list[tuple[_Item, ...]]:
    sizes = range(len(of) + 1) if len(of) <= MOST_RACING else (0, 1, len(of))
    return list(chain.from_iterable(combinations(of, size) for size in sizes))
