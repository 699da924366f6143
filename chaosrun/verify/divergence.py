"""The first place where the chaos leg left the reference, and what that suggests. Pure.

First in time: attempts in order, steps within them, cut-off tails included. Within the step, the order of diagnosis: an earlier
kind that differs explains the later ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chaosrun.verify.check import Drill
from chaosrun.verify.compare import Field, Mismatch, compare, compared_fields
from chaosrun.verify.history import Attempt
from chaosrun.verify.ledger import displacement
from chaosrun.verify.recovery import layout_at
from chaosrun.verify.steps import reference_parameters
from chaosrun.verify.traces import StepRecord

__all__ = ["Divergence", "Kind", "first_divergence"]

Kind = Literal["data order", "batch", "position", "rng", "weights", "loss", "gradient", "learning rate", "optimizer"]

_KINDS: Mapping[Field, Kind] = {
    "ids": "data order",
    "batch": "batch",
    "position": "position",
    "rng": "rng",
    "loss": "loss",
    "grad": "gradient",
    "lr": "learning rate",
    "param": "optimizer",
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
    cause: str
    """In a few words: "RNG not restored", "1 batch skipped", "gradient reduction (bucket layout)"."""
    hint: str
    tensor: str | None = None
    micro_batch: int | None = None
    expected: Any = None
    seen: Any = None

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rank": self.rank,
            "ranks": list(self.ranks),
            "attempt": self.attempt,
            "kind": self.kind,
            "cause": self.cause,
            "hint": self.hint,
            "tensor": self.tensor,
            "micro_batch": self.micro_batch,
            "expected": self.expected,
            "seen": self.seen,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """One step of one attempt of the chaos leg, on all ranks that recorded it."""

    drill: Drill
    attempt: Attempt
    step: int
    records: Mapping[int, StepRecord]

    @property
    def restored(self) -> bool:
        """The attempt went on from a checkpoint."""
        return self.attempt.resume is not None

    @property
    def first_after_restore(self) -> bool:
        return self.restored and all(self.step == self.attempt.start_of(rank) + 1 for rank in self.records)


def first_divergence(drill: Drill) -> Divergence | None:
    for attempt in drill.chaos.attempts:
        moments = list(_moments(drill, attempt))
        for moment in moments:
            found = _at(moment)
            if found:
                return found
        if not moments and (found := _weights(_Moment(drill=drill, attempt=attempt, step=attempt.resume_step + 1, records={}))):
            return found
    return None


def _moments(drill: Drill, attempt: Attempt) -> Iterator[_Moment]:
    by_step: dict[int, dict[int, StepRecord]] = {}
    for rank, trace in sorted(attempt.traces.items()):
        for record in trace.steps:
            by_step.setdefault(record.step, {})[rank] = record
    for step, records in sorted(by_step.items()):
        yield _Moment(drill=drill, attempt=attempt, step=step, records=records)


def _at(moment: _Moment) -> Divergence | None:
    verify = moment.drill.spec.verify
    for field in compared_fields(verify.weights):
        if field == "loss" and (found := _weights(moment)):
            return found
        mismatches = [
            mismatch
            for rank, record in moment.records.items()
            if (expected := moment.drill.reference_lineage.at(rank, moment.step))
            and (mismatch := compare(field, expected, record, moment.drill.chaos, verify.losses))
        ]
        if mismatches:
            cause, hint = _explain(field, moment, mismatches)
            first = mismatches[0]
            return Divergence(
                step=moment.step,
                rank=first.rank,
                ranks=tuple(mismatch.rank for mismatch in mismatches),
                attempt=moment.attempt.number,
                kind=_KINDS[field],
                cause=cause,
                hint=hint,
                tensor=first.tensor,
                micro_batch=first.micro_batch,
                expected=first.expected,
                seen=first.seen,
            )
    return None


def _weights(moment: _Moment) -> Divergence | None:
    """Parameters before the attempt's first step; before a later one they are those after the step before, already compared."""
    drill, attempt = moment.drill, moment.attempt
    if not drill.spec.verify.weights.exact:
        return None
    found: dict[int, tuple[str, str]] = {}
    for rank, trace in sorted(attempt.traces.items()):
        if trace.start and trace.start.position.step + 1 == moment.step:
            expected = reference_parameters(drill, rank, trace.start.position.step)
            if expected is not None and expected != trace.start.param:
                found[rank] = (expected, trace.start.param)
    if not found:
        return None
    rank = min(found)
    expected, seen = found[rank]
    cause, hint = _explain_weights(moment, rank, seen)
    return Divergence(
        step=moment.step,
        rank=rank,
        ranks=tuple(sorted(found)),
        attempt=attempt.number,
        kind="weights",
        cause=cause,
        hint=hint,
        expected=expected,
        seen=seen,
    )


def _explain(field: Field, moment: _Moment, mismatches: list[Mismatch]) -> tuple[str, str]:
    """Cause and hint of a field that is the first to differ."""
    first = mismatches[0]
    match field:
        case "ids" | "batch":
            return _explain_data(field, moment, first)
        case "position":
            return (
                "position not restored",
                "the samples are right, their count is not: epoch or batches done went wrong",
            )
        case "rng":
            return _explain_rng(moment, first)
        case "loss":
            return _explain_loss(moment)
        case "grad":
            return _explain_gradient(moment, mismatches)
        case "lr":
            return _explain_lr(moment, first)
        case "param":
            return _explain_update(moment)


def _explain_data(field: Field, moment: _Moment, first: Mismatch) -> tuple[str, str]:
    record = moment.records[first.rank]
    if field == "batch" and record.knows_ids:
        return (
            "batch contents",
            "the same samples came with other contents: augmentation or a loader worker draws from a random stream that is not "
            "restored (draw from chaosrun.sample_rng(index) in __getitem__)",
        )
    found = displacement(moment.drill, record, first.micro_batch or 0)
    return found.cause, found.hint


def _explain_rng(moment: _Moment, first: Mismatch) -> tuple[str, str]:
    origin = moment.drill.reference_lineage.at(first.rank, 1)
    trace = moment.drill.reference.trace(origin.attempt, first.rank) if origin else None
    fresh = {origin.rng if origin else None, trace.start.rng if trace and trace.start else None}
    if moment.restored and first.seen in fresh:
        return "RNG not restored", "the random streams stand where they stood before step 1: freshly seeded instead of restored"
    if moment.first_after_restore:
        return "RNG not restored", "the random streams do not stand where they stood when the checkpoint was saved"
    return (
        "RNG drifted",
        "something drew random numbers on one side only: evaluation, logging, an iterator seeded from the global stream",
    )


def _explain_weights(moment: _Moment, rank: int, seen: str) -> tuple[str, str]:
    drill = moment.drill
    if not moment.restored:
        return "initial weights", "the job began with other weights: they depend on something besides the seed"
    if seen == reference_parameters(drill, rank, 0):
        return "weights not restored", "the weights are the initial ones: the checkpoint was not loaded"
    for step in range(1, drill.reference_lineage.final_step + 1):
        if seen == reference_parameters(drill, rank, step):
            return "weights of another step", f"the weights are those after step {step}: another checkpoint was loaded"
    return "weights not restored", "the weights are not those saved: the checkpoint was loaded in part, or changed"


def _explain_loss(moment: _Moment) -> tuple[str, str]:
    if moment.restored:
        return (
            "forward pass",
            "same data, weights and RNG, another loss: state beside the parameters was not restored (BatchNorm statistics, "
            "something to pass to run.register), or a kernel is not deterministic",
        )
    return (
        "forward pass",
        "same data, weights and RNG, another loss: a kernel is not deterministic, or the thread count differs",
    )


def _explain_gradient(moment: _Moment, mismatches: list[Mismatch]) -> tuple[str, str]:
    everywhere = len(mismatches) == len(moment.records) and len({str(mismatch.seen) for mismatch in mismatches}) == 1
    if len(moment.records) > 1 and everywhere and _layout_suspect(moment):
        return (
            "gradient reduction (bucket layout)",
            "same data, weights and loss on every rank, another sum: gradients were reduced in another bucket layout than "
            "in the reference (buckets not primed)",
        )
    if moment.first_after_restore:
        return (
            "gradient",
            "same data, weights and loss, another gradient right after a restore: gradients accumulated before the checkpoint "
            "were lost (save only at the end of an accumulation window), or a backward kernel is not deterministic",
        )
    return "gradient", "same data, weights and loss, another gradient: a backward kernel is not deterministic"


def _layout_suspect(moment: _Moment) -> bool:
    for rank, record in moment.records.items():
        expected = moment.drill.reference_lineage.at(rank, moment.step)
        seen_layout = layout_at(moment.drill.chaos, record)
        reference_layout = layout_at(moment.drill.reference, expected) if expected else None
        if seen_layout is None or reference_layout is None or seen_layout.layout is None:
            continue
        if seen_layout.layout != reference_layout.layout or not seen_layout.primed:
            return True
    return False


def _explain_lr(moment: _Moment, first: Mismatch) -> tuple[str, str]:
    seen = moment.records[first.rank].lr
    by_step = moment.drill.reference_lineage.steps[first.rank]
    found = [step for step in sorted(by_step) if by_step[step].lr == seen]
    where = (
        f"the optimizer used the learning rate of step {found[0]}"
        if found
        else "no step of the reference has this learning rate"
    )
    if moment.restored:
        return (
            "LR scheduler not restored",
            f"{where}: prepare the scheduler, or pass it to run.register",
        )
    return "learning rate", f"{where}: the schedule depends on something that is not in the job's state"


def _explain_update(moment: _Moment) -> tuple[str, str]:
    if moment.first_after_restore:
        return (
            "optimizer state not restored",
            "same weights, gradients and learning rate, another update: the optimizer's moments were not restored",
        )
    return "optimizer update", "same weights, gradients and learning rate, another update: the optimizer is not deterministic"
