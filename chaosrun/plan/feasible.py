"""Which faults of a plan cannot be relied on to happen, and why. Pure.

A drill whose fault never strikes proves nothing, so this is said before anything starts: of each fault what can be said of it
alone, and of all together what `plan.course` finds. What nobody can know is not held against a plan: how long a script trains
that has no `max_steps`, and whereto a fault from outside leads that comes after a delay.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from chaosrun.faults.effects import damages, is_notice
from chaosrun.faults.fault import INJECTED, Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, RESTORE_PHASES
from chaosrun.plan.course import Course, courses
from chaosrun.plan.track import Track
from chaosrun.spec.model import JobSpec
from chaosrun.wording import count

RANK_ZERO_PHASES = frozenset({"checkpoint.rename.before", "checkpoint.rename.after"})
_RANK_FILES = ("chaosrun-rank-{}.pt", "random_states_{}.pkl")
"""What each rank writes into a checkpoint itself; all else is rank 0's."""
ONCE_AN_ATTEMPT = RESTORE_PHASES | {"rendezvous"}


def first_checkpoint(spec: JobSpec) -> int:
    """The step of the first checkpoint that an undisturbed job saves."""
    return Track.of(spec).first_save


def only_rank(kind: str, phase: str | None, target: str | None) -> int | None:
    """The one rank that comes by there, or that it can be done to; None: any rank may be."""
    if phase in RANK_ZERO_PHASES or kind in ("port_taken", "failed_rename"):
        return 0
    if phase is None or not phase.startswith("checkpoint.fsync") or target is None:
        return None
    return _writer(target)


def objections(spec: JobSpec, faults: Sequence[Fault]) -> list[str]:
    """One sentence for each fault that can never happen, or only by chance; `faults` in the order of the plan."""
    track = Track.of(spec)
    # A notice is followed by a checkpoint of its own, where none is due.
    told = [fault for fault in faults if is_notice(fault) and fault.at_step is not None]
    unusual = {step for fault in told for step in (fault.at_step or 0, (fault.at_step or 0) + 1)}
    if any(is_notice(fault) and fault.at_step is None for fault in faults):
        unusual = None
    alone = [f"{fault.source}: {sentence}" for fault in faults for sentence in _alone(track, fault, unusual)]
    alone += [f"{fault.source}: {sentence}" for fault in faults for sentence in _beyond_the_timeout(spec, fault)]
    return list(dict.fromkeys(alone or _together(track, faults)))


def _alone(track: Track, fault: Fault, unusual: set[int] | None) -> Iterator[str]:
    """Objections to one fault, whatever the others do. `unusual`: steps at which a checkpoint may be saved before it is due;
    None: any."""
    workers, step = track.workers, fault.at_step
    if fault.rank >= workers:
        yield f"rank {fault.rank} does not exist, {count(workers, 'worker')} have ranks 0 to {workers - 1}"
    yield from _alone_at_its_place(track, fault)
    if fault.kind == "pause" and fault.option("duration_s") >= track.patience_s:
        yield (
            f"a rank that is stopped for {fault.option('duration_s'):g} s is a hang after {track.patience_s:g} s "
            "(recovery.hang_timeout): kind stop is that"
        )
    if step is None:
        return
    if not track.reaches(step):
        yield f"step {step} is never reached, max_steps is {track.last}"
    elif (
        fault.phase in CHECKPOINT_PHASES | RESTORE_PHASES and not track.saves(step) and not (unusual is None or step in unusual)
    ):
        yield (
            f"no checkpoint is saved at step {step}, "
            f"only at multiples of {track.every} (checkpoint.every_steps) and at max_steps"
        )
    elif fault.kind == "slow" and not track.reaches(step + fault.option("steps")):
        after = (track.last or 0) - step
        yield f"it slows {fault.option('steps')} steps down, and {after or 'none'} follow{'s' * (after == 1)} step {step}"
    elif step == 1 and fault.phase == "optimizer" and fault.options.get("state") == "moment":
        yield "the optimizer holds no moment before its first step"


def _beyond_the_timeout(spec: JobSpec, fault: Fault) -> Iterator[str]:
    # A run that is gone on with has its whole timeout again: what is asked for while it runs is let be.
    if fault.source != INJECTED and fault.required and fault.after_s and spec.timeout and fault.after_s >= spec.timeout:
        yield f"it comes {fault.after_s:g} s after the start, when the run has been stopped ({spec.timeout:g} s, timeout)"


def _alone_at_its_place(track: Track, fault: Fault) -> Iterator[str]:
    """Of the rank and the phase alone."""
    if track.workers == 1:
        if fault.phase == "reduce":
            yield "one worker alone reduces no gradients, phase reduce needs at least 2 workers"
        if fault.kind in ("diverge", "port_taken"):
            what = "has no replicas" if fault.kind == "diverge" else "needs no rendezvous port"
            yield f"one worker alone {what}, a fault of kind {fault.kind} needs at least 2 workers"
    path = fault.target or fault.options.get("file")
    if path is not None and (path.startswith("/") or ".." in path.split("/")):
        yield f"{path!r} is no path within a checkpoint"
        return
    alone = only_rank(fault.kind, fault.phase, fault.target)
    if alone not in (None, fault.rank):
        does = f"syncs {fault.target}" if fault.target else f"comes by {fault.phase}"
        if fault.kind == "port_taken":
            does = "has the rendezvous port"
        yield f"rank {fault.rank} never {does}, only rank {alone} does"


def _writer(target: str) -> int:
    """The rank that writes, and syncs, this file of a checkpoint: its own, or for all rank 0."""
    for pattern in _RANK_FILES:
        before, after = pattern.split("{}")
        number = target.removeprefix(before).removesuffix(after)
        if number.isdecimal() and pattern.format(number) == target:
            return int(number)
    return 0


def _together(track: Track, faults: Sequence[Fault]) -> list[str]:
    """Objections to what becomes of the faults together: those of the first course that goes wrong."""
    inside = [fault for fault in faults if fault.phase is not None]
    # Where these lead to, and when, is not known beforehand.
    vague = any(fault.phase is None or _is_vague(fault) for fault in faults)
    for course in courses(track, inside):
        found = _obstacle(track, inside, course) if course.obstacle else list(_unmet(inside, course, vague=vague))
        if found:
            return found
    return []


def _is_vague(fault: Fault) -> bool:
    return fault.kind == "drain" or (bool(fault.phase and fault.phase.startswith("checkpoint.fsync")) and fault.occurrence > 1)


def _obstacle(track: Track, faults: Sequence[Fault], course: Course) -> list[str]:
    assert course.obstacle
    fault, other = faults[course.obstacle.fault], faults[course.obstacle.by]
    leave = course.obstacle.leave or 0
    match course.obstacle.how:
        case "bare":
            reason = "there is no checkpoint yet that it could strike"
        case "parted":
            hung = f"{other.source} hangs one of them: who is then found to hang, nobody knows"
            reason = f"its ranks wait for one another, and {hung}"
        case "too_late":
            reason = "the training may be complete before it is over"
            if is_notice(fault):
                reason = "ranks leave after the step that follows the notice, and none may follow"
        case "cut_short":
            reason = f"it may be cut short, since {other.source} ends the attempt meanwhile"
        case "unheeded":
            then = f"let it strike at step {leave + 1} or later, in the next attempt"
            if not track.reaches(leave + 1):
                then = "let the notice come earlier"
            by = f"{other.source} ({other.describe()})"
            reason = f"the ranks leave after step {leave}, and {by} may end the attempt before; {then}"
        case "told":
            reason = f"{other.source} may have told this rank before, which leaves once, after step {leave}"
    return [f"{fault.source}: {fault.describe()}: {reason}"]


def _unmet(faults: Sequence[Fault], course: Course, *, vague: bool) -> Iterator[str]:
    for index, fault in enumerate(faults):
        if not fault.required:
            continue
        if not course.fired[index]:
            moved = fault.attempt is not None or fault.phase in ONCE_AN_ATTEMPT or fault.at_step is None
            if not (vague and moved):
                yield f"{fault.source}: {_why(faults, fault, course)}"
        elif course.fired[index] == 1 and damages(fault) and not vague:
            yield (
                f"{fault.source}: {fault.describe()}: nobody reads the checkpoint again before there is a newer one; "
                "a fault that ends the attempt has to follow it"
            )


def _why(faults: Sequence[Fault], fault: Fault, course: Course) -> str:
    """Why a fault does not strike in this course."""
    resumed = sorted({attempt.resume for attempt in course.attempts} - {0})
    steps = ", ".join(map(str, resumed))
    attempts = len(course.attempts)
    if fault.phase in RESTORE_PHASES:
        if not resumed:
            return "nothing is ever restored, no other fault ends an attempt after the job's first checkpoint"
        if fault.at_step is not None and fault.at_step not in resumed:
            return f"step {fault.at_step} is never restored; the other faults lead to a restore of step {steps}"
    if fault.attempt is not None and fault.attempt > attempts:
        return f"attempt {fault.attempt} may never begin, the other faults lead to {count(attempts, 'attempt')}"
    if fault.attempt is not None:
        attempt = course.attempts[fault.attempt - 1]
        begin = f"from step {attempt.resume}" if attempt.resume else "from the beginning"
        end = "to the end" if not attempt.ended_by else f"until {faults[attempt.ended_by[0]].source} ends it"
        return f"{fault.describe()} may never happen: that attempt goes {begin} {end}, and does not come by there"
    if fault.at_step is not None and fault.phase not in RESTORE_PHASES:
        for attempt, following in pairwise(course.attempts):
            if following.resume >= fault.at_step:
                return (
                    f"{fault.describe()} may never happen, since {faults[attempt.ended_by[0]].source} ends the attempt "
                    f"there too and the job then goes on from the checkpoint of step {following.resume}"
                )
        return f"{fault.describe()} may never happen, the job does not come by there"
    led = f"the faults lead to {count(attempts, 'attempt')}"
    if fault.phase in RESTORE_PHASES:
        led = f"the other faults lead to {count(sum(attempt.resume > 0 for attempt in course.attempts), 'restore')}"
    elif fault.phase != "rendezvous":
        led = f"no attempt comes by there {count(fault.occurrence, 'time')}"
    return f"{fault.describe()} may never happen, {led}"
