"""Which faults of a plan can never happen, by simple rules, before anything starts. Pure.

1. Alone: a rank, step or checkpoint that does not exist; a point that this rank never reaches; a notice, or steps to slow down,
   with no step left. 2. Unled: an attempt, or a restore, that no other fault causes; a damaged checkpoint that no fault causes
   to be read. 3. Colliding: two faults at one point, which the job does not reach again after the first; or a fault that ends
   the attempt before another is over: before ranks leave on a notice, a hang is declared, slow steps pass.

Plans that depend on chance (which of two racing ranks is first, for instance) are accepted: the supervisor ends a drill in
which a fault can no longer happen (`plan.missed`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaosrun.faults.fault import INJECTED, Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, ONCE_AN_ATTEMPT, RESTORE_PHASES
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.save_rules import elsewhere, two_in_one_save
from chaosrun.plan.timeline import END_OF_STEP, Moment, Timeline
from chaosrun.records.object_urls import is_url
from chaosrun.spec.bounds import never_reached, no_such_rank
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Objection
from chaosrun.wording import count

RANK_ZERO_PHASES = frozenset({"checkpoint.rename.before", "checkpoint.rename.after"})
_RANK_FILES = ("chaosrun-rank-{}.pt", "random_states_{}.pkl")
"""Files that each rank writes into a checkpoint itself; rank 0 writes all others."""


def only_rank(kind: str, phase: str | None, target: str | None) -> int | None:
    """The only rank that reaches this phase, or that this kind can strike; None: any rank."""
    if (alone := KINDS[kind].only_rank) is not None:
        return alone
    if phase in RANK_ZERO_PHASES:
        return 0
    if phase is None or not phase.startswith("checkpoint.fsync") or target is None:
        return None
    return _writer(target)


def objections(spec: JobSpec, faults: Sequence[Fault], *, some_missing: bool = False) -> list[Objection]:
    """An objection for each fault that can never happen, or only by chance; `faults` in the order of the plan. `some_missing`:
    other faults could not be planned, so collisions cannot be judged."""
    timeline = Timeline.of(spec)
    misplaced = elsewhere(spec, faults)
    sound = [fault for fault in faults if fault.source not in {each.entry for each in misplaced}]
    # After a notice a checkpoint is taken even where none is due.
    noticed = [fault.at_step for fault in faults if fault.facts.notice]
    unusual = {step + more for step in noticed if step is not None for more in (0, 1)}
    alone = [
        Objection(fault.source, sentence)
        for fault in sound
        for sentence in (*_alone(timeline, fault, None if None in noticed else unusual), *_of_this_job(spec, fault))
    ]
    if misplaced or alone or some_missing:
        found = [*misplaced, *alone]
    elif spec.by == "script":
        # Only the script knows where it resumes.
        found = list(two_in_one_save(faults))
    else:
        strikes = _strikes(timeline, faults)
        found = [*_collisions(timeline, strikes), *_unled(timeline, faults, strikes)]
    return list(dict.fromkeys(found))


# One fault by itself


def _alone(timeline: Timeline, fault: Fault, unusual: set[int] | None) -> Iterator[str]:
    """`unusual`: steps at which a checkpoint may be saved before it is due; None: any."""
    workers, step = timeline.workers, fault.at_step
    if fault.rank >= workers:
        yield no_such_rank(fault.rank, workers)
    yield from _alone_at_its_place(timeline, fault)
    if fault.kind == "pause" and fault.option("duration_s") >= timeline.patience_s:
        yield (
            f"a rank that is stopped for {fault.option('duration_s'):g} s is a hang after {timeline.patience_s:g} s "
            "(recovery.hang_timeout): use kind stop for a hang"
        )
    if step is None:
        yield from _too_often(timeline, fault, 0 if unusual is None else len(unusual))
    elif not timeline.reaches(step):
        yield never_reached(step, timeline.last or 0)
    elif (
        fault.phase in CHECKPOINT_PHASES | RESTORE_PHASES
        and not timeline.saves(step)
        and not (unusual is None or step in unusual)
    ):
        yield (
            f"no checkpoint is saved at step {step}, "
            f"only at multiples of {timeline.every} (checkpoint.every_steps) and at max_steps"
        )
    elif fault.kind == "slow" and not timeline.reaches(step + fault.option("steps")):
        after = (timeline.last or 0) - step
        yield f"it slows {fault.option('steps')} steps down, and {after or 'none'} follow{'s' * (after == 1)} step {step}"
    elif step == 1 and fault.phase == "optimizer" and fault.options.get("state") == "moment":
        yield "the optimizer holds no moment before its first step"
    elif fault.facts.notice and not timeline.reaches(timeline.leaving((step, 0))[0]):
        yield "ranks leave after the step that follows the notice, and none may follow"
    elif (
        fault.facts.damages == "checkpoint"
        and unusual == set()
        and (moment := timeline.moment(fault))
        and not timeline.newest(moment)
    ):
        yield f"{fault.describe()}: there is no checkpoint yet that it could strike"


def _too_often(timeline: Timeline, fault: Fault, unusual: int) -> Iterator[str]:
    if timeline.last is None or fault.phase is None or fault.phase in ONCE_AN_ATTEMPT:
        return
    most = timeline.last
    if fault.phase.startswith("checkpoint.fsync"):
        return  # their number is unknown
    if fault.phase in CHECKPOINT_PHASES:
        most = -(-timeline.last // timeline.every) + unusual
    if fault.occurrence > most:
        yield f"{fault.describe()} may never happen, no attempt gets there {count(fault.occurrence, 'time')}"


def _of_this_job(spec: JobSpec, fault: Fault) -> Iterator[str]:
    # A resumed run has its whole timeout again, so injected faults are not refused.
    if fault.source != INJECTED and fault.required and fault.after_s and spec.timeout and fault.after_s >= spec.timeout:
        yield f"it comes {fault.after_s:g} s after the start, when the run has been stopped ({spec.timeout:g} s, timeout)"
    if fault.facts.needs_objects and not is_url(spec.checkpoint.storage or ""):
        yield f"a fault of kind {fault.kind} strikes requests to an object store, and checkpoint.storage names none (s3://…)"


def _alone_at_its_place(timeline: Timeline, fault: Fault) -> Iterator[str]:
    if timeline.workers == 1:
        if fault.phase == "reduce":
            yield "one worker alone reduces no gradients, phase reduce needs at least 2 workers"
        if fault.facts.needs_peers:
            yield f"one worker alone {fault.facts.needs_peers}, a fault of kind {fault.kind} needs at least 2 workers"
    path = fault.target or fault.options.get("file")
    if isinstance(path, str) and (path.startswith("/") or ".." in path.split("/")):
        yield f"{path!r} is not a path within a checkpoint"
        return
    alone = only_rank(fault.kind, fault.phase, fault.target)
    if alone not in (None, fault.rank):
        does = f"syncs {fault.target}" if fault.target else f"reaches {fault.phase}"
        if fault.phase == "rendezvous":
            does = "has the rendezvous port"
        yield f"rank {fault.rank} never {does}, only rank {alone} does"


def _writer(target: str) -> int:
    """The rank that writes and syncs this file of a checkpoint: the rank in its name, else rank 0."""
    for pattern in _RANK_FILES:
        before, after = pattern.split("{}")
        number = target.removeprefix(before).removesuffix(after)
        if number.isdecimal() and pattern.format(number) == target:
            return int(number)
    return 0


# Two faults


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strike:
    """One fault, or all faults of a group, at the moment when the job first reaches them."""

    key: str
    fault: Fault
    ranks: frozenset[int]
    moment: Moment

    @property
    def ends_attempt(self) -> bool:
        return self.fault.facts.ends_attempt and not self.fault.facts.notice

    def lasts(self) -> Moment:
        step, slot = self.moment
        return (step + self.fault.option("steps"), END_OF_STEP) if self.fault.kind == "slow" else (step, slot)


def _keys(faults: Sequence[Fault]) -> list[str]:
    """A key for each fault, the same for all faults of a group."""
    return [fault.group or str(index) for index, fault in enumerate(faults)]


def _strikes(timeline: Timeline, faults: Sequence[Fault]) -> list[_Strike]:
    """The strikes in the order in which the job reaches them, without those whose moment is unknown."""
    members: dict[str, list[Fault]] = defaultdict(list)
    for key, fault in zip(_keys(faults), faults, strict=True):
        members[key].append(fault)
    found = [
        _Strike(key=key, fault=group[0], ranks=frozenset(fault.rank for fault in group), moment=moment)
        for key, group in members.items()
        if (moment := timeline.moment(group[0])) is not None
    ]
    return sorted(found, key=lambda strike: strike.moment)


def _collisions(timeline: Timeline, strikes: Sequence[_Strike]) -> Iterator[Objection]:
    for place, first in enumerate(strikes):
        # Including the next step, in which a notice takes effect; ranks also race across the end of a step.
        until = max(first.moment[0] + 1, first.lasts()[0])
        for second in strikes[place + 1 :]:
            if second.moment[0] > until:
                break
            if first.fault.attempt == second.fault.attempt and (found := _collision(timeline, first, second)):
                yield found
                break


def _collision(timeline: Timeline, first: _Strike, second: _Strike) -> Objection | None:
    """Why one of two strikes can never happen; the job reaches the point of `first` first."""
    for notice, other in ((first, second), (second, first)):
        if notice.fault.facts.notice and (found := _leaving_collision(timeline, notice, other, after=other is second)):
            return found
    race = timeline.race(first.moment, second.moment)
    if race and first.fault.facts.evidence == "hang" and second.fault.group and first.ranks < second.ranks:
        hung = f"{first.fault.source} hangs one of them: which rank is then found to hang is chance"
        return Objection(second.fault.source, f"{second.fault.describe()}: its ranks wait for one another, and {hung}")
    for cut, by in ((first, second), (second, first)):
        # Ranks of a group wait for one another: if one never arrives, none is struck.
        exposed = race and (bool(cut.ranks - by.ranks) if by is second else cut.ranks.isdisjoint(by.ranks))
        if by.ends_attempt and _is_cut_short(timeline, cut, by, after=by is second, race=exposed):
            return Objection(
                cut.fault.source,
                f"{cut.fault.describe()}: it may be cut short, since {by.fault.source} ends the attempt meanwhile",
            )
        resumed = timeline.newest(by.moment)
        if by.ends_attempt and resumed >= (cut.fault.at_step or resumed + 1) and (by is first or exposed):
            in_turn = "; on one rank they strike in turn: name it in both" if exposed and not by.fault.group else ""
            return Objection(
                cut.fault.source,
                f"{cut.fault.describe()} may never happen, since {by.fault.source} ends the attempt there "
                f"too and the job then resumes from the checkpoint of step {resumed}{in_turn}",
            )
    return None


def _leaving_collision(timeline: Timeline, notice: _Strike, other: _Strike, *, after: bool) -> Objection | None:
    """Why the ranks may not leave on the notice; `after`: the point of `other` comes later."""
    leaving = timeline.leaving(notice.moment)
    step = leaving[0]
    if other.fault.kind == notice.fault.kind == "preempt":
        if after and other.ranks & notice.ranks and other.moment <= leaving:
            told = f"{notice.fault.source} has given this rank notice before; it leaves once, after step {step}"
            return Objection(other.fault.source, f"{other.fault.describe()}: {told}")
        return None
    if not other.ends_attempt or other.moment > leaving:
        return None
    if not after and (other.ranks & notice.ranks or not timeline.race(other.moment, notice.moment)):
        return None
    then = f"let it strike at step {step + 1} or later, in the next attempt"
    if not timeline.reaches(step + 1):
        then = "let the notice come earlier"
    by = f"{other.fault.source} ({other.fault.describe()})"
    leaves = f"the ranks leave after step {step}, and {by} may end the attempt before; {then}"
    return Objection(notice.fault.source, f"{notice.fault.describe()}: {leaves}")


def _is_cut_short(timeline: Timeline, cut: _Strike, by: _Strike, *, after: bool, race: bool) -> bool:
    """Whether the attempt may end before `cut` can be observed, or is over; `after`: the point of `by` comes later."""
    fault = cut.fault
    if fault.facts.ends_attempt:
        return (
            race
            and not fault.facts.notice
            and not fault.facts.outlives_its_attempt
            and not (fault.kind == by.fault.kind == "stop")
        )
    if fault.kind == "slow":
        over = cut.lasts()
        meanwhile = by.moment < over or (by.ranks != cut.ranks and timeline.race(by.moment, over))
        return race or (after and meanwhile)
    return race and (fault.kind == "pause" or fault.group is not None)


# A fault that needs others to cause it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restart:
    key: str
    by: Fault
    moment: Moment
    resume: int
    """The step of the checkpoint at which the job resumes; 0: the beginning."""
    unusable: frozenset[int]
    """Steps of damaged checkpoints that it tries first."""


def _restarts(timeline: Timeline, strikes: Sequence[_Strike]) -> list[_Restart]:
    """The restarts caused by faults with a known moment, in order."""
    found: list[_Restart] = []
    damaged: set[int] = set()
    noticed = 0
    for strike in strikes:
        if strike.fault.attempt is not None:
            continue
        moment = strike.moment
        if strike.fault.facts.notice:
            moment = timeline.leaving(moment)
            noticed = moment[0]
        newest = max(timeline.newest(moment), noticed)
        if strike.fault.facts.damages == "checkpoint":
            damaged.add(newest)
        elif strike.fault.facts.ends_attempt:
            resume = newest
            while resume in damaged:
                resume = timeline.newest_save(resume - 1)
            unusable = frozenset(step for step in damaged if step > resume)
            damaged -= unusable
            found.append(_Restart(key=strike.key, by=strike.fault, moment=moment, resume=resume, unusable=unusable))
    return found


def _unled(timeline: Timeline, faults: Sequence[Fault], strikes: Sequence[_Strike]) -> Iterator[Objection]:
    keys = _keys(faults)
    ending = {key: fault for key, fault in zip(keys, faults, strict=True) if fault.facts.ends_attempt}
    restarts = _restarts(timeline, strikes)
    at_once = {key for key, fault in ending.items() if fault.phase in ONCE_AN_ATTEMPT}
    # Their step is unknown: they come after a delay, or depend on where another fault leads the job.
    unknown = ending.keys() - {each.key for each in restarts} - at_once
    for key, fault in zip(keys, faults, strict=True):
        if not fault.required:
            continue
        others, known = len(ending) - (key in ending), not unknown - {key}
        if fault.phase in RESTORE_PHASES:
            found = _unled_restore(fault, [each.resume for each in restarts], others, known=known)
        else:
            found = _unled_attempt(fault, restarts, others, known=known and not at_once)
        if found is None and fault.facts.damages and known and fault.attempt is None:
            found = _unread(timeline, fault, restarts)
        if found:
            yield Objection(fault.source, found)


def _unled_restore(fault: Fault, resumed: Sequence[int], others: int, *, known: bool) -> str | None:
    after = sorted({step for step in resumed if step})
    if known and not after:
        return "nothing is ever restored, no other fault ends an attempt after the job's first checkpoint"
    if known and fault.at_step is not None and fault.at_step not in after:
        steps = ", ".join(map(str, after))
        return f"step {fault.at_step} is never restored; the other faults lead to a restore of step {steps}"
    restores = others - sum(not step for step in resumed)
    if fault.occurrence > restores:
        return f"{fault.describe()} may never happen, the other faults lead to {count(restores, 'restore')}"
    return _never_begins(fault, others)


def _never_begins(fault: Fault, others: int) -> str | None:
    number = max(fault.attempt or 1, fault.occurrence if fault.phase == "rendezvous" else 1)
    if number <= others + 1:
        return None
    return f"attempt {number} may never begin, the other faults lead to {count(others + 1, 'attempt')}"


def _unled_attempt(fault: Fault, restarts: Sequence[_Restart], others: int, *, known: bool) -> str | None:
    if found := _never_begins(fault, others):
        return found
    if fault.attempt is None or fault.at_step is None or not known:
        return None
    before = restarts[: fault.attempt - 1]
    resume = before[-1].resume if before else 0
    until = restarts[fault.attempt - 1] if len(restarts) >= fault.attempt else None
    if fault.at_step > resume and not (until and until.moment[0] < fault.at_step):
        return None
    begin = f"from step {resume}" if resume else "from the beginning"
    end = f"until {until.by.source} ends it" if until else "to the end"
    return f"{fault.describe()} may never happen: that attempt goes {begin} {end}, and does not get there"


def _unread(timeline: Timeline, fault: Fault, restarts: Sequence[_Restart]) -> str | None:
    """Why the damaged checkpoint is never read: no restore reads a checkpoint once there is a newer one."""
    moment = timeline.moment(fault)
    if moment is None:
        return None
    later = [each for each in restarts if each.moment >= moment]
    spoiled = timeline.newest(moment)
    if any(spoiled in each.unusable or each.moment[0] == moment[0] or fault.facts.damages == "staging" for each in later):
        return None
    return (
        f"{fault.describe()}: nobody reads the checkpoint again before there is a newer one; "
        "a fault that ends the attempt has to follow it"
    )
