"""The first place where the chaos leg left the reference, and what that suggests. Pure.

First in time: attempts in order; in each, what it restored, then its steps, cut-off tails included, and what it saved. Within a
step, the order of diagnosis: an earlier kind that differs explains the later ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chaosrun.records.codec import to_plain
from chaosrun.records.history import Attempt
from chaosrun.records.traces import StartRecord, StepRecord
from chaosrun.verify import causes
from chaosrun.verify.causes import Moment
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.compare import KINDS, Field, Kind, compare, first_difference, starts_of, unlike_orders
from chaosrun.verify.evidence import Standing, cause_of, standing
from chaosrun.verify.kept import comparable, kept_difference
from chaosrun.verify.restored import StateDifference, restored_difference, saved_difference
from chaosrun.verify.steps import reference_parameters

_COMPONENT_KINDS: Mapping[str, Kind] = {
    "model": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer",
    "scheduler": "learning rate",
    "registered": "registered",
    "rng": "rng",
}
_QUANTITY_KINDS: Mapping[str, Kind] = {
    "weights": "weights",
    "optimizer": "optimizer",
    "data": "data order",
    "rates": "learning rate",
    "rng": "rng",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    step: int
    rank: int
    """The lowest of `ranks`."""
    ranks: tuple[int, ...]
    """Ranks on which this kind differs at this step."""
    attempt: int
    kind: Kind
    reason: Cause
    tensor: str | None = None
    micro_batch: int | None = None
    expected: Any = None
    seen: Any = None

    @property
    def cause(self) -> str:
        """In a few words: "RNG not restored", "1 batch skipped", "gradient reduction (bucket layout)"."""
        return self.reason.sentence

    @property
    def hint(self) -> str:
        return self.reason.hint or ""

    def to_json(self) -> dict[str, object]:
        return {
            "step": self.step,
            "rank": self.rank,
            "ranks": list(self.ranks),
            "attempt": self.attempt,
            "kind": self.kind,
            "code": self.reason.code,
            "cause": self.cause,
            "hint": self.hint,
            "tensor": self.tensor,
            "micro_batch": self.micro_batch,
            "expected": self.expected,
            "seen": self.seen,
        }


def first_divergence(drill: Drill) -> Divergence | None:
    for attempt in drill.chaos.attempts:
        for found, at in _divergences(drill, attempt):
            if found is not None:
                saved = causes.of_save(drill, attempt.number, found.step, at)
                return found if saved is None else replace(found, reason=saved)
    # What only its checkpoints show.
    kept = comparable(drill) if drill.by_script else frozenset()
    moments = (moment for attempt in drill.chaos.attempts if kept for moment in _moments(drill, attempt))
    return next(filter(None, (_at_own_save(moment, kept) for moment in moments)), None)


def _divergences(drill: Drill, attempt: Attempt) -> Iterator[tuple[Divergence | None, causes.Place]]:
    """What differs in an attempt, in time, and where it was looked for."""
    if attempt.by == "script":
        yield _at_start(drill, attempt), "start"
    elif attempt.resume is not None:
        found = _at_restore(drill, attempt)
        yield found, "start" if found and found.kind == "weights" else "step"
    moments = list(_moments(drill, attempt))
    saved = {checkpoint.step for trace in attempt.traces.values() for checkpoint in trace.checkpoints}
    for moment in moments:
        yield _at_step(moment), "step"
        if moment.step in saved:
            yield _at_checkpoint(moment), "checkpoint"
    if not moments:
        yield _weights(_opening(drill, attempt)), "step"


def _opening(drill: Drill, attempt: Attempt) -> Moment:
    """What an attempt begins with, before its first step."""
    return Moment(drill=drill, attempt=attempt, step=attempt.resume_step + 1, records={})


def _moments(drill: Drill, attempt: Attempt) -> Iterator[Moment]:
    by_step: dict[int, dict[int, StepRecord]] = {}
    for rank, trace in sorted(attempt.traces.items()):
        for record in trace.steps:
            by_step.setdefault(record.step, {})[rank] = record
    for step, records in sorted(by_step.items()):
        yield Moment(drill=drill, attempt=attempt, step=step, records=records)


def _at_restore(drill: Drill, attempt: Attempt) -> Divergence | None:
    moment = _opening(drill, attempt)
    if found := _position(moment) or _weights(moment):
        return found
    difference = restored_difference(drill, attempt)
    if difference is None:
        return None
    return _of_state(moment, difference, causes.of_restored_state(moment, difference))


def _at_start(drill: Drill, attempt: Attempt) -> Divergence | None:
    """What a script that resumes by itself began with that is not all of one step of the reference."""
    found = standing(attempt)
    if found is None or not found.wrong:
        return None
    if found.wrong == ("rng",) and (drill.exact_weights or not drill.streams_count):
        return None  # that shows in the first number that was drawn from them
    quantity = found.wrong[0]
    if quantity == "data":
        # The batches of its first steps tell more.
        first = next((moment for moment in _moments(drill, attempt)), None)
        seen = None if first is None else _in_step(first)
        drawn = "rng" in found.wrong and seen is not None and seen.reason.code == "data_order_not_restored"
        if seen is not None and seen.kind in ("data order", "batch") and not drawn:
            return replace(seen, reason=seen.reason.explained(seen.reason.because, stood=found.words))
        # Batches that nobody ever saw are drawn from random streams that stand elsewhere.
        quantity = "rng" if drawn else quantity
    rank = found.ranks[quantity][0]
    start = attempt.traces[rank].start
    return Divergence(
        step=found.step + 1,
        rank=rank,
        ranks=found.ranks[quantity],
        attempt=attempt.number,
        kind=_QUANTITY_KINDS[quantity],
        reason=_of_other_order(drill, attempt, found) or cause_of(drill, attempt, found, quantity),
        tensor=_first_tensor(drill, rank, start, found.step) if start and quantity == "weights" else None,
        expected=f"all of step {found.step}",
        seen=found.words,
    )


def _of_other_order(drill: Drill, attempt: Attempt, found: Standing) -> Cause | None:
    """The same parameters in another order are other weights to whom counts them, as optimizers do."""
    message = unlike_orders([*starts_of(drill.reference.attempts[0]), *starts_of(attempt)])
    return Cause.of("parameter_order", message=message, stood=found.words) if message else None


def _at_checkpoint(moment: Moment) -> Divergence | None:
    difference = saved_difference(moment.drill, moment.attempt, moment.step)
    if difference is None:
        return None
    return _of_state(moment, difference, causes.of_saved_state(moment, difference))


def _at_own_save(moment: Moment, among: frozenset[tuple[str, str]]) -> Divergence | None:
    found = kept_difference(moment.drill, moment.attempt, moment.step, among)
    return found and Divergence(
        step=moment.step,
        rank=found.rank,
        ranks=(found.rank,),
        attempt=moment.attempt.number,
        kind="saved state",
        reason=found.cause,
        tensor=found.name,
        expected=found.expected,
        seen=found.seen,
    )


def _at_step(moment: Moment) -> Divergence | None:
    found = _in_step(moment)
    return found and (_of_streams(moment, found) or found)


def _of_streams(moment: Moment, found: Divergence) -> Divergence | None:
    """What a script's random streams explain of a difference: they were not the reference's, and were drawn from then."""
    drill, attempt = moment.drill, moment.attempt
    around = (drill.reference_lineage.at(found.rank, moment.step + offset) for offset in (-1, 0, 1))
    drawn = len({record.rng for record in around if record}) > 1 or moment.step == drill.reference_lineage.final_step
    if attempt.by == "chaosrun" or not drawn:
        return None
    began = standing(attempt)
    if began and began.wrong == ("rng",):
        ranks, reason = began.ranks["rng"], cause_of(drill, attempt, began, "rng")
        stood = {"expected": f"all of step {began.step}", "seen": began.words}
        return replace(found, rank=ranks[0], ranks=ranks, kind="rng", reason=reason, tensor=None, micro_batch=None, **stood)
    earlier = (each for each in _moments(drill, attempt) if each.step <= moment.step)
    return next(filter(None, (_in_step(each, ("rng",)) for each in earlier)), None)


def _in_step(moment: Moment, fields: Sequence[Field] = ()) -> Divergence | None:
    """The first of these fields that differs; none named: of all but a script's random streams."""
    drill = moment.drill
    all_but_streams: list[Field] = [each for each in drill.fields if each != "rng" or moment.attempt.by == "chaosrun"]
    for field in fields or all_but_streams:
        if field == "loss" and (found := _weights(moment)):
            return found
        mismatches = [
            mismatch
            for rank, record in moment.records.items()
            if (expected := drill.reference_lineage.at(rank, moment.step))
            and (mismatch := compare(field, expected, record, drill.chaos, drill.losses_of(record)))
        ]
        if mismatches:
            first = mismatches[0]
            return Divergence(
                step=moment.step,
                rank=first.rank,
                ranks=tuple(mismatch.rank for mismatch in mismatches),
                attempt=moment.attempt.number,
                kind=KINDS[field],
                reason=causes.of_field(field, moment, mismatches),
                tensor=first.tensor,
                micro_batch=first.micro_batch,
                expected=first.expected,
                seen=first.seen,
            )
    return None


def _position(moment: Moment) -> Divergence | None:
    """The place that ranks went on from, if it is not the one that was ordered and where the reference stood."""
    found = {
        rank: cause
        for rank, trace in sorted(moment.attempt.traces.items())
        if trace.start and (cause := causes.of_position(moment, trace.start))
    }
    if not found:
        return None
    rank = min(found)
    start = moment.attempt.traces[rank].start
    assert start is not None
    return Divergence(
        step=moment.step,
        rank=rank,
        ranks=tuple(found),
        attempt=moment.attempt.number,
        kind="position",
        reason=found[rank],
        expected={"restored": moment.attempt.resume, "step": moment.attempt.resume_step},
        seen={"restored": start.restored, **to_plain(start.position)},
    )


def _weights(moment: Moment) -> Divergence | None:
    """Parameters before the attempt's first step; before a later one they are those after the step before, already compared."""
    drill, attempt = moment.drill, moment.attempt
    if not drill.exact_weights:
        return None
    found: dict[int, tuple[str, StartRecord]] = {}
    for rank, trace in sorted(attempt.traces.items()):
        if trace.start and trace.start.position.step + 1 == moment.step:
            expected = reference_parameters(drill, rank, trace.start.position.step)
            if expected is not None and expected != trace.start.param:
                found[rank] = (expected, trace.start)
    if not found:
        return None
    rank = min(found)
    expected, start = found[rank]
    return Divergence(
        step=moment.step,
        rank=rank,
        ranks=tuple(sorted(found)),
        attempt=attempt.number,
        kind="weights",
        reason=causes.of_weights(moment, rank, start.param),
        tensor=_first_tensor(drill, rank, start, start.position.step),
        expected=expected,
        seen=start.param,
    )


def _first_tensor(drill: Drill, rank: int, start: StartRecord, step: int) -> str | None:
    """The first parameter that is not the reference's after `step`; None where it cannot be told."""
    record = drill.reference_lineage.at(rank, step)
    if record is None:
        return None
    index = first_difference(*(memoryview(words).cast("I") for words in (record.params, start.params)))
    return start.tensors[index] if index is not None and index < len(start.tensors) else None


def _of_state(moment: Moment, found: StateDifference, reason: Cause) -> Divergence:
    name = found.names[0]
    return Divergence(
        step=moment.step,
        rank=found.rank,
        ranks=found.ranks,
        attempt=moment.attempt.number,
        kind="learning rate" if found.only_rates else _COMPONENT_KINDS[found.component],
        reason=reason,
        tensor=name,
        expected=found.expected.get(name),
        seen=found.seen.get(name),
    )
