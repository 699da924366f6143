"""Checks of recovery: an unbroken lineage, the right checkpoint, replays that agree. Pure."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import PurePath

from chaosrun.errors import UserScriptError
from chaosrun.records.events import CheckpointQuarantined, DeathUnplanned, FaultObserved
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.layout import checkpoint_name, checkpoint_step
from chaosrun.records.position import Position
from chaosrun.records.traces import BucketsRecord, RankTrace, StepRecord
from chaosrun.verify.check import CheckResult, Drill, failed, inconclusive, passed, records_damaged, skipped
from chaosrun.verify.codes import Cause, Params
from chaosrun.verify.compare import completes
from chaosrun.wording import count

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
"""A frame of Python's traceback."""
_OF_A_RESTORE = ("load_state_dict", "load_state", "restore")
"""Functions that restore: torch's and the script's, accelerate's, and chaosrun's own."""


def lineage(drill: Drill) -> CheckResult:
    """The chaos leg's lineage holds each step of the reference, on every rank, exactly once."""
    chain, final = drill.chaos_lineage, drill.reference_lineage.final_step
    if not final:
        return inconclusive("reference_empty")
    absent = [rank for rank in drill.ranks if len(chain.steps.get(rank, ())) <= drill.given]
    strangers = sorted(chain.steps.keys() - set(drill.ranks))
    if absent or strangers:
        code = "ranks_without_steps" if absent else "strange_ranks"
        return inconclusive(code, absent=absent, strangers=strangers)
    if chain.repeated:
        record = chain.repeated[0]
        repeated = len(chain.repeated)
        return failed("step_done_twice", rank=record.rank, step=record.step, attempt=record.attempt, repeated=repeated)
    for rank in drill.ranks:
        own = chain.of(rank)
        missing = sorted({*chain.missing(rank, final)} - {*died_in(drill, rank)})
        beyond = [step for step in own if step > final] if own.last > final else []
        if missing or beyond:
            if missing and (damaged := records_damaged(drill.chaos.problems)):
                return damaged  # which may have held those steps
            code, step = ("step_missing", missing[0]) if missing else ("step_beyond_the_end", beyond[-1])
            about: Params = {"rank": rank, "step": step, "final": final, "missing": missing, "beyond": beyond}
            # It went on from what another rank had saved, which did not wait for it.
            ahead = next((attempt for attempt in _resumed_by_script(drill, rank) if attempt.start_of(rank) in missing), None)
            if ahead:
                about |= {"made": step - 1, "base": ahead.start_of(rank), "attempt": ahead.number}
            return failed(code, because="ahead" if ahead else None, **about)
    own = f", up to {drill.given} the reference's own" if drill.given else ""
    return passed(f"steps 1 to {final} without a gap on {len(drill.ranks)} ranks{own}", steps=final)


def died_in(drill: Drill, rank: int) -> list[int]:
    """The steps that this rank of a script that resumes by itself took part in, but died before it could record: all other
    ranks of its attempt recorded them, as the reference did, and a later attempt went on from what one of them had saved."""
    steps = {attempt.start_of(rank) for attempt in _resumed_by_script(drill, rank)}
    unrecorded = (step for step in sorted(steps) if step and drill.chaos_lineage.at(rank, step) is None)
    return [step for step in unrecorded if _died_in_it(drill, rank, step)]


def _died_in_it(drill: Drill, rank: int, step: int) -> bool:
    others = [drill.chaos_lineage.at(other, step) for other in drill.ranks if other != rank]
    made = {record.attempt if record and _as_in_reference(drill, record) else None for record in others}
    if len(made) != 1 or (attempt := made.pop()) is None:
        return False
    trace = drill.chaos.attempt(attempt).traces.get(rank)
    return trace is not None and trace.start is not None and trace.end is None and trace.steps.last == step - 1


def _as_in_reference(drill: Drill, record: StepRecord) -> bool:
    due = drill.reference_lineage.at(record.rank, record.step)
    return due is not None and (due.param, due.state) == (record.param, record.state)


def _resumed_by_script(drill: Drill, rank: int) -> list[Attempt]:
    """The attempts in which this rank, one of several, resumed by the script's own code."""
    several = len(drill.ranks) > 1
    return [each for each in drill.chaos.attempts[1:] if several and each.by == "script" and rank in each.starts]


def resume_points(drill: Drill) -> CheckResult:
    """Every attempt resumed from the newest valid checkpoint committed before it, on every rank, at the right position."""
    if not drill.chaos.attempts:
        return inconclusive("no_attempt")
    points: list[Params] = []
    for point, wrong in went_on_from(drill):
        if wrong:
            return failed(wrong.code, because=wrong.because, **wrong.params)
        points.append(point)
    restores = sum(attempt.resume is not None for attempt in drill.chaos.attempts)
    summary = f"{len(points)} attempts, {restores} restored from a checkpoint, each from the newest one, at the right position"
    aside = set_aside_unplanned(drill)
    if aside:
        summary += f"; {count(len(aside), 'checkpoint')} set aside that no fault had damaged: {aside[0].reason}"
    return passed(summary, restores=restores, points=points, unplanned=[record.name for record in aside])


def went_on_from(drill: Drill) -> Iterator[tuple[Params, Cause | None]]:
    """The checkpoint that each attempt resumed from, and any error in it."""
    began = drill.chaos.began if drill.began else None
    committed = {name: checkpoint_step(name) or 0 for name in began.states} if began else {}
    reached = began.step if began else 0
    for attempt in drill.chaos.attempts:
        # Retention may have deleted older checkpoints before the newer ones turned out to be damaged.
        kept = sorted(committed.values())[-drill.spec.checkpoint.keep :]
        for name in attempt.quarantined:
            committed.pop(name, None)
        newest = max((step for step in committed.values() if step in kept), default=0)
        point: Params = {"attempt": attempt.number, "resumed": attempt.resume, "newest_committed": newest}
        wrong = None
        if drill.chaos.problems:  # the records that are damaged may have held it
            reached = max(reached, attempt.resume_step)
        if refused := _not_taken_back(drill.chaos.attempts, attempt):
            name, death = refused
            at = _raised_by_the_script(death)
            about: Params = {"attempt": attempt.number, "checkpoint": name, "reason": death.reason, "at": at}
            wrong = Cause("checkpoint_not_taken_back", about, "raised" if at else None)
        elif problem := _wrong_resume(attempt, newest, reached) or _wrong_start(attempt, drill):
            wrong = Cause.of("wrong_resume_point", attempt=attempt.number, problem=problem, newest_committed=newest)
        yield point, wrong
        for trace in attempt.traces.values():
            committed.update({checkpoint_name(step): step for step in trace.committed})
            reached = max(reached, trace.steps.last)


def set_aside_unplanned(drill: Drill) -> list[CheckpointQuarantined]:
    """Checkpoints in quarantine that no planned fault had damaged: the storage did, or something external."""
    notes = [record.found for record in drill.chaos.events(FaultObserved)]
    spoiled = {str(note.get("checkpoint")) for note in notes if isinstance(note, Mapping)}
    return [record for record in drill.chaos.events(CheckpointQuarantined) if record.name not in spoiled]


def _not_taken_back(attempts: Sequence[Attempt], attempt: Attempt) -> tuple[str, DeathUnplanned] | None:
    """Name of a valid checkpoint that was quarantined because the script's objects twice failed to load it, and the last death
    of that."""
    for name in attempt.quarantined:
        tried = [other for other in attempts if other.number < attempt.number and other.resume == name and other.unplanned]
        if len(tried) > 1 and all(map(died_in_restore, tried)):
            return name, tried[-1].unplanned[-1]
    return None


def _raised_by_the_script(death: DeathUnplanned) -> str | None:
    """The script's own line that raised the error, if the restore called it: "train.py:12, in load_state_dict"."""
    if death.error is None or death.error.ours:
        return None
    frames = [(PurePath(file), line, name) for file, line, name in _FRAME.findall(death.error.traceback or "")]
    folder = next((file.parent for file, *_ in frames if file.is_absolute()), None)  # `python -m`: after Python's own frames
    if folder is None or not any(name in _OF_A_RESTORE for *_, name in frames[:-1]):
        return None
    file, line, name = frames[-1]
    own = file.is_relative_to(folder) and "site-packages" not in file.parts
    return f"{file.relative_to(folder)}:{line}, in {name}" if own else None


def died_in_restore(attempt: Attempt) -> bool:
    """Whether the attempt died because the script's objects refused to load the checkpoint."""
    deaths = attempt.unplanned
    return attempt.resume is not None and bool(deaths) and all(_raised_in_restore(attempt, death) for death in deaths)


def _raised_in_restore(attempt: Attempt, death: DeathUnplanned) -> bool:
    """Whether the script raised an error before it began to train, other than one of the machine (storage, memory)."""
    error, trace = death.error, None if death.rank is None else attempt.traces.get(death.rank)
    if error is None or (trace is not None and trace.start is not None):
        return False
    return error.exit_code == UserScriptError.exit_code and not re.search(r"\[Errno|out of memory", error.message)


def _wrong_resume(attempt: Attempt, newest: int, reached: int) -> str | None:
    """How an attempt's checkpoint is wrong. A checkpoint newer than the newest recorded one is right, too: its rank may have
    died before it recorded the commit."""
    step = attempt.resume_step
    named = checkpoint_step(attempt.resume) if attempt.resume is not None else 0
    if named != step:
        return f"resume step {step} does not belong to checkpoint {attempt.resume}"
    if step < newest:
        return f"resumed from step {step}, although step {newest} had been committed"
    if step > reached:
        return f"resumed from step {step}, which no attempt before it reached"
    return None


def _wrong_start(attempt: Attempt, drill: Drill) -> str | None:
    for rank, start in attempt.starts.items():
        if start.world_size != drill.spec.workers:
            return f"rank {rank} saw a world of {start.world_size}, the job has {drill.spec.workers} workers"
        if start.restored != attempt.resume or start.position.step != attempt.resume_step:
            return (
                f"rank {rank} restored {start.restored} at step {start.position.step} instead of {attempt.resume} at step "
                f"{attempt.resume_step}"
            )
        problem = wrong_position(start.position, rank, drill) or _wrong_first_step(attempt.traces[rank])
        if problem:
            return f"rank {rank} {problem}"
    return None


def wrong_position(position: Position, rank: int, drill: Drill) -> str | None:
    """How the position after a restore differs from the reference's. An epoch's end may be the next one's beginning (D13)."""
    if position.step == 0:
        began = f"began at epoch {position.epoch} batch {position.batches}"
        return None if position == Position() else began
    done = drill.reference_lineage.at(rank, position.step)
    if done is None:
        return None  # a shorter reference: the checks `reference`, `completed` and `lineage` say so
    if (position.epoch, position.batches) == (done.epoch, done.batches):
        return None
    following = drill.reference_lineage.at(rank, position.step + 1)
    if (position.epoch, position.batches) == (done.epoch + 1, 0) and (following is None or following.epoch == done.epoch + 1):
        return None
    return (
        f"resumed at epoch {position.epoch} batch {position.batches}, expected was epoch {done.epoch} batch {done.batches} "
        f"after step {position.step}"
    )


def _wrong_first_step(trace: RankTrace) -> str | None:
    first = trace.blocks[0].first if trace.blocks else None
    if trace.start and first is not None and first != trace.start.position.step + 1:
        return f"recorded step {first} first after resuming from step {trace.start.position.step}"
    return None


def replay_agreement(drill: Drill) -> CheckResult:
    """Steps that were rolled back and done again came out the same both times."""
    compared = 0
    for span in drill.chaos_lineage.cut_off:
        compared += drill.chaos_lineage.common(span)
        for again, tail in drill.chaos_lineage.unlike(span):
            if not completes(tail, again) and (found := drill.mismatch(tail, again, drill.fields)):
                return failed("replay_differs", field=found.field, place=found.place, before=tail.attempt, first=asdict(found))
    if not compared:
        return skipped("no step was computed twice", records=0)
    return passed(f"{compared} step records computed twice, equal", records=compared)


def bucket_layout(drill: Drill) -> CheckResult:
    """Gradients were reduced in the same bucket layout in every attempt of both legs (hazard C1)."""
    if drill.spec.workers == 1:
        return skipped("one worker reduces nothing")
    left = drill.left_unprimed
    if left or not drill.spec.prime_buckets:
        why = "the job file asks for prime_buckets: false"
        if left and left.left == "hook_state":
            why = f"not primed, as DDP's communication hook {left.left_by} keeps its own state"
        elif left:
            why = f"not primed, as {left.left_by} has a hook that runs after its gradient is accumulated"
        return skipped(f"{why}: the steps' gradients show the effect")
    compared = 0
    under_ddp = False
    unprimed: list[int] = []
    for attempt in drill.chaos.attempts:
        for rank, trace in sorted(attempt.traces.items()):
            for steps, other in _stretches(drill, trace):
                seen, expected = _in_force(trace, steps.start), _in_force(other, steps.start)
                if seen is None or expected is None:
                    leg = drill.reference.name if expected is None else drill.chaos.name
                    return inconclusive("bucket_layout_unrecorded", leg=leg, step=steps.start, rank=rank)
                compared += len(steps)
                under_ddp = under_ddp or seen.layout is not None
                primed = seen.layout is None or (seen.primed and expected.primed)
                if primed and reduces_alike(seen, expected):
                    continue
                # A script may have more models under DDP than those that made this step, or had them before.
                at = next((step for step in steps if not (drill.by_script and _same_gradient(drill, trace, step))), None)
                if at is None:
                    continue
                if not primed:
                    unprimed.append(attempt.number)
                if not reduces_alike(seen, expected):
                    why = "" if seen.primed and expected.primed else ": the buckets were not primed"
                    where = {"attempt": attempt.number, "step": at, "rank": rank}
                    layouts: Params = {"expected": expected.layout, "seen": seen.layout}
                    return failed("bucket_layout_differs", why=why, **where, **layouts)
    if not compared:
        return inconclusive("bucket_layout_unseen")
    if not under_ddp:
        return skipped("no model is under DistributedDataParallel", records=compared)
    if unprimed:
        return inconclusive("buckets_not_primed", attempt=unprimed[0], attempts=sorted(set(unprimed)))
    return passed(f"one layout in {len(drill.chaos.attempts) + 1} attempts of both legs", records=compared)


def reduces_alike(seen: BucketsRecord, expected: BucketsRecord) -> bool:
    """Whether both have the same layout for models that train in both: a model that trains only at times has no layout
    before."""
    if seen.layout is None or expected.layout is None:
        return seen.layout == expected.layout
    one, other = (Counter(map(tuple, each)) for each in (seen.layout, expected.layout))
    return not (one - other and other - one) and _whole((one - other) + (other - one))


def _whole(buckets: Counter[tuple[int, ...]]) -> bool:
    """Whether these are all the buckets of some models, or none: each model numbers its parameters from 0."""
    numbers = Counter(number for bucket in buckets.elements() for number in bucket)
    return all(numbers[number - 1] >= seen for number, seen in numbers.items() if number)


def layout_at(history: LegHistory, record: StepRecord) -> BucketsRecord | None:
    """The `buckets` record in force at a step: the last one not after it, else the first of the attempt; None without any."""
    return _in_force(history.trace(record.attempt, record.rank), record.step)


def _in_force(trace: RankTrace | None, step: int) -> BucketsRecord | None:
    if trace is None or not trace.buckets:
        return None
    return next((entry for entry in reversed(trace.buckets) if entry.step <= step), trace.buckets[0])


def _stretches(drill: Drill, trace: RankTrace) -> Iterator[tuple[range, RankTrace]]:
    """Ranges of a trace's steps that the reference has, too, in which no layout changes in either; and the reference's
    trace."""
    for own in trace.spans:
        for held in drill.reference_lineage.of(trace.rank).over(own.steps):
            steps = held.steps
            changes = {entry.step for each in (trace, held.trace) for entry in each.buckets if entry.step in steps[1:]}
            for begin, end in pairwise([steps.start, *sorted(changes), steps.stop]):
                yield range(begin, end), held.trace


def _same_gradient(drill: Drill, trace: RankTrace, step: int) -> bool:
    seen, expected = trace.steps.get(step), drill.reference_lineage.at(trace.rank, step)
    return seen is not None and expected is not None and seen.grad == expected.grad


def refused_by_load(message: str) -> str | None:
    """What torch.load refuses: since 2.6 it accepts only tensors and plain values, in pickles of protocol 2."""
    found = re.search(r"Weights only load failed.*Unsupported (?:global: GLOBAL (\S+)|operand 149\b)", message, re.DOTALL)
    return found and (found[1] or "a pickle of protocol 4 or newer")
