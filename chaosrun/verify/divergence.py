"""The first place where the chaos leg differs from the reference, and its likely cause. Pure.

First in time: for each attempt the restored state, its steps (also those rolled back), the saved state; in a step by `FIELDS`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from chaosrun.records.codec import to_plain
from chaosrun.records.history import Attempt
from chaosrun.records.traces import StartRecord
from chaosrun.verify import causes
from chaosrun.verify.alignment import QUANTITIES, AttemptStart, attempt_start, cause_of, saved_while_training
from chaosrun.verify.check import Divergence, Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.compare import KINDS, Field, Kind, Mismatch, first_difference
from chaosrun.verify.draws import may_explain, past_the_order
from chaosrun.verify.kept import comparable, first_kept_difference
from chaosrun.verify.ledger import of_turns, of_updates
from chaosrun.verify.left import left_difference
from chaosrun.verify.moment import Moment
from chaosrun.verify.plain_values import values_restored
from chaosrun.verify.restored import COMPONENTS, StateDifference, restored_difference, saved_difference
from chaosrun.verify.steps import parameters_expected


def _found(moment: Moment, kind: Kind, ranks: Iterable[int], reason: Cause, **seen: Any) -> Divergence:
    return Divergence(
        step=moment.step, attempt=moment.attempt.number, kind=kind, ranks=tuple(sorted(ranks)), reason=reason, **seen
    )


def first_divergence(drill: Drill) -> Divergence | None:
    if found := divergence_of(drill, drill.chaos.attempts):
        return found
    # Differences that only checkpoints show.
    if drill.by_script and (kept := first_kept_difference(drill, drill.chaos.attempts, comparable(drill))):
        return kept
    return left_difference(drill)


def divergence_of(drill: Drill, attempts: Iterable[Attempt]) -> Divergence | None:
    """The first place where these attempts, in order, differ from the reference."""
    for attempt in attempts:
        for found, at in _divergences(drill, attempt):
            if found is not None:
                saved = causes.of_save(drill, attempt.number, found.step, at)
                return found if saved is None else replace(found, reason=saved)
    return None


def _divergences(drill: Drill, attempt: Attempt) -> Iterator[tuple[Divergence | None, causes.Place]]:
    """The differences in an attempt, in time order, each with the place where it was found."""
    if attempt.by == "script":
        yield _at_start(drill, attempt), "start"
    elif attempt.resume is not None:
        found = _at_restore(drill, attempt)
        yield found, "start" if found and found.kind == "weights" else "step"
    steps = attempt.steps
    saved = {checkpoint.step for trace in attempt.traces.values() for checkpoint in trace.checkpoints}
    began = {start.position.step + 1 for start in attempt.starts.values()}
    apart = drill.steps_that_differ(attempt)
    # At the other steps nothing differs.
    for step in (step for step in steps if step in saved or step in began or step in apart):
        moment = Moment(drill=drill, attempt=attempt, step=step, records=steps[step] if step in apart else {})
        if step in began or step in apart:
            found = _in_step(moment)
            yield found and (_of_streams(moment, found) or found), "step"
        if step in saved:
            yield _of_state(moment, saved_difference(drill, attempt, step), causes.of_saved_state), "checkpoint"
    if not steps:
        yield _weights(_opening(drill, attempt)), "step"


def _opening(drill: Drill, attempt: Attempt) -> Moment:
    return Moment(drill=drill, attempt=attempt, step=attempt.resume_step + 1, records={})


def _moments(drill: Drill, attempt: Attempt) -> Iterator[Moment]:
    for step, records in attempt.steps.items():
        yield Moment(drill=drill, attempt=attempt, step=step, records=records)


def _at_restore(drill: Drill, attempt: Attempt) -> Divergence | None:
    moment = _opening(drill, attempt)
    if found := _position(moment) or _weights(moment):
        return found
    return _of_state(moment, restored_difference(drill, attempt), causes.of_restored_state)


_STRANGE = (
    *(("data_order_not_restored", because) for because in (None, "hashes")),
    *(("batch_contents", because) for because in (None, "beside_tensors")),
)
"""Causes of batches that no step of the reference had."""


_NEVER_DRAWN = ("optimizer_settings_not_restored", "accumulation_window")
"""Causes that wrong random streams never explain."""


def _at_start(drill: Drill, attempt: Attempt) -> Divergence | None:
    """The difference if a script that resumes by itself began with state that is not of one step of the reference."""
    found = attempt_start(drill, attempt)
    if found is None or not found.wrong:
        return None
    if found.wrong == ("rng",) and (drill.exact_weights or not drill.streams_count):
        return None  # wrong streams show in the first number drawn from them
    opening = Moment(drill=drill, attempt=attempt, step=found.step + 1, records={})
    if mixed := saved_while_training(drill, attempt, found):
        return _found(opening, "weights", found.began, mixed, expected=f"all of step {mixed.params['base']}", seen=found.words)
    quantity, again = found.wrong[0], False
    if quantity == "data":
        # The batches of its first steps say more.
        first = next((moment for moment in _moments(drill, attempt)), None)
        seen = None if first is None else _in_step(first)
        strange = seen is not None and (seen.reason.code, seen.reason.because) in _STRANGE
        if seen is not None and found.nearest("rng"):
            # Where no step draws, streams of a known step give the orders that the reference drew from them.
            strange = strange and may_explain(drill, attempt, seen.rank, seen.step, seen.kind)
        streams_too = "rng" in found.wrong and not {*found.held["rng"]}.isdisjoint(found.held["data"])
        again = streams_too and first is not None and _drawn_again(first)
        drawn = "rng" in found.wrong and drill.streams_count and (strange or again)
        if seen is not None and seen.kind in ("data order", "batch") and not drawn:
            because = seen.reason.because
            if because in ("at_first", "broken") and streams_too:
                because = "as_drawn"
            return replace(seen, reason=seen.reason.explained(because, stood=found.words))
        # Batches that no step of the reference had, or the one that the streams are of, were drawn from wrong random streams.
        quantity = "rng" if drawn else quantity
    ranks = found.ranks[quantity]
    start = attempt.traces[ranks[0]].start
    reason = cause_of(drill, attempt, found, quantity)
    if quantity == "rng" and again and reason.because == "of_the_beginning":
        reason = reason.explained("with_data")
    if message := causes.other_order(drill, attempt):
        # The same parameters in another order are different weights to an optimizer, which identifies them by index.
        reason = Cause.of("parameter_order", message=message, stood=found.words)
    tensor = _first_tensor(drill, ranks[0], start, found.step) if start and quantity == "weights" else None
    return _found(opening, QUANTITIES[quantity][2], ranks, reason, tensor=tensor, **_stood(found))


def _drawn_again(moment: Moment) -> bool:
    """Whether batches are drawn from streams that began again: no loader numbers their samples, and the script's plain values,
    the place in its data among them, were restored."""
    unnumbered = not any(record.knows_ids or record.fetched for record in moment.records.values())
    return unnumbered and values_restored(moment.drill, moment.attempt)


def _stood(found: AttemptStart) -> dict[str, str]:
    return {"expected": f"all of step {found.step}", "seen": found.words}


def _of_streams(moment: Moment, found: Divergence) -> Divergence | None:
    """The difference with the random streams as its cause, if the script's streams were wrong and it drew from them."""
    drill, attempt = moment.drill, moment.attempt
    follows = attempt.by == "script" and found.code not in _NEVER_DRAWN and found.reason.because != "each_pass"
    if not follows or not may_explain(drill, attempt, found.rank, moment.step, found.kind):
        return None
    began = attempt_start(drill, attempt)
    if began and began.wrong == ("rng",):
        if past_the_order(drill, began, found.rank, found.reason):
            return None
        return _found(moment, "rng", began.ranks["rng"], cause_of(drill, attempt, began, "rng"), **_stood(began))
    # The first step of a restart from a save inside it has other streams at its first pass, though they were restored.
    first = attempt.traces[found.rank].steps.get(began.step + 1) if began and "rng" not in began.wrong else None
    judged = first.step if first and first.rng == attempt.starts[found.rank].rng else 0
    earlier = (each for each in _moments(drill, attempt) if judged < each.step <= moment.step)
    return next(filter(None, (_in_step(each, ("rng",)) for each in earlier)), None)


def _in_step(moment: Moment, fields: Sequence[Field] = ()) -> Divergence | None:
    """The first of these fields that differs; by default, of all fields except a script's random streams."""
    drill = moment.drill
    all_but_streams: list[Field] = [each for each in drill.fields if each != "rng" or moment.attempt.by == "chaosrun"]
    for field in fields or all_but_streams:
        if field == "loss" and (found := _weights(moment)):
            return found
        if mismatches := _mismatches(moment, field):
            ranks, first = {mismatch.rank for mismatch in mismatches}, mismatches[0].rank
            reason = causes.of_field(field, moment, mismatches)
            expected, record = drill.reference_lineage.at(first, moment.step), moment.records[first]
            reason = of_turns(reason, expected, record)
            if moment.attempt.by == "chaosrun" and moment.restored_right:
                reason = of_updates(reason, expected, record)
            if field == "ids":
                # Ranks whose samples are unknown: another rank's loader may hand them out.
                other_batches = {mismatch.rank for mismatch in _mismatches(moment, "batch")}
                ranks |= {rank for rank in other_batches if not moment.records[rank].knows_ids}
            seen = {name: getattr(mismatches[0], name) for name in ("tensor", "micro_batch", "expected", "seen")}
            return _found(moment, KINDS[field], ranks, reason, **seen)
    return None


def _mismatches(moment: Moment, field: Field) -> list[Mismatch]:
    """By rank, the mismatches between the records of this step and the reference's in this field."""
    drill = moment.drill
    return [
        mismatch
        for rank, record in moment.records.items()
        if drill.differs(record)
        and (expected := drill.reference_lineage.at(rank, moment.step))
        and (mismatch := drill.mismatch(expected, record, (field,)))
    ]


def _position(moment: Moment) -> Divergence | None:
    """The position that ranks resumed at, if it is not the requested one and the reference's."""
    starts = moment.attempt.starts
    found = {rank: cause for rank, start in starts.items() if (cause := causes.of_position(moment, start))}
    if not found:
        return None
    rank = min(found)
    expected = {"restored": moment.attempt.resume, "step": moment.attempt.resume_step}
    seen = {"restored": starts[rank].restored, **to_plain(starts[rank].position)}
    return _found(moment, "position", found, found[rank], expected=expected, seen=seen)


def _weights(moment: Moment) -> Divergence | None:
    """Parameters before the attempt's first step; before a later one they are those after the step before, already compared."""
    drill, attempt = moment.drill, moment.attempt
    if not drill.exact_weights:
        return None
    step = moment.step - 1
    starts = {rank: start for rank, start in attempt.starts.items() if start.position.step == step}
    held = {rank: parameters_expected(drill, attempt, rank) for rank in starts}
    found = [rank for rank in starts if held[rank] is not None]
    if not found:
        return None
    rank = found[0]
    start = starts[rank]
    seen = {"tensor": _first_tensor(drill, rank, start, step), "expected": held[rank], "seen": start.param}
    return _found(moment, "weights", found, causes.of_weights(moment, rank, start.param), **seen)


def _first_tensor(drill: Drill, rank: int, start: StartRecord, step: int) -> str | None:
    """The first parameter that is not the reference's after `step`; None if it is not known."""
    record = drill.reference_lineage.at(rank, step)
    if record is None:
        return None
    index = (
        first_difference(_words(record.params), _words(start.params)) if record.params else _unlike(drill, rank, start, step)
    )
    return start.tensors[index] if index is not None and index < len(start.tensors) else None


def _unlike(drill: Drill, rank: int, start: StartRecord, step: int) -> int | None:
    """If the reference recorded no digests of single parameters after `step`: the first one that differs from its initial value
    although it never changes, or still has its initial value although it does change."""
    begun = drill.reference.attempts[0].traces[rank].start
    steps = drill.reference_lineage.of(rank).values()
    later = next((record.params for record in steps if record.step > step and record.params), b"")
    if begun is None or begun.tensors != start.tensors or not len(begun.params) == len(later) == len(start.params):
        return None
    words = zip(_words(begun.params), _words(later), _words(start.params), strict=True)
    return next((index for index, (first, then, seen) in enumerate(words) if (first == then) != (first == seen)), None)


def _words(params: bytes) -> memoryview:
    return memoryview(params).cast("I")


def _of_state(
    moment: Moment, found: StateDifference | None, cause: Callable[[Moment, StateDifference], Cause]
) -> Divergence | None:
    if found is None:
        return None
    name, kind = found.names[0], "learning rate" if found.only_rates else COMPONENTS[found.component][1]
    seen = {"tensor": name, "expected": found.expected.get(name), "seen": found.seen.get(name)}
    return _found(moment, kind, found.ranks, cause(moment, found), **seen)
