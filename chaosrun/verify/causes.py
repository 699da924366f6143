"""What a difference between the legs is called, and what it suggests to do about it. Pure: words for what `divergence` finds.

A cause is said in a few words, the same for the same mistake, so that it can be looked up; the hint holds the particulars.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from chaosrun.records.history import Attempt
from chaosrun.records.traces import StartRecord, StepRecord
from chaosrun.verify.check import Drill
from chaosrun.verify.compare import Field, Mismatch, differing_keys
from chaosrun.verify.ledger import displacement
from chaosrun.verify.loading import sample_finding, unrepeatable
from chaosrun.verify.recovery import layout_at, wrong_position
from chaosrun.verify.restored import StateDifference, reference_state, restored_difference, saved_before
from chaosrun.verify.steps import reference_parameters

WHOLE = {
    "model": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer state",
    "scheduler": "LR scheduler",
    "registered": "registered state",
    "rng": "RNG",
}
"""What a component is called."""


class Cause(NamedTuple):
    cause: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
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

    @property
    def restored_right(self) -> bool:
        """The attempt recorded what it restored, and that is the reference's state; where the reference saved none at that step
        (a job that leaves on notice saves out of turn), the state that was saved."""
        starts = [trace.start for trace in self.attempt.traces.values() if trace.start and trace.start.digests]
        known = starts and all(
            reference_state(self.drill, start.rank, start.position.step)
            or saved_before(self.drill, self.attempt, start.rank, start.position.step) == start.digests
            for start in starts
        )
        return bool(known) and restored_difference(self.drill, self.attempt) is None


def of_field(field: Field, moment: Moment, mismatches: list[Mismatch]) -> Cause:
    """A field of a step that is the first to differ."""
    first = mismatches[0]
    match field:
        case "ids" | "batch":
            return _data(field, moment, first)
        case "position":
            return Cause("position not restored", "the samples are right, their count is not: epoch or batches done went wrong")
        case "rng":
            return _rng(moment, first)
        case "loss":
            return _loss(moment)
        case "grad":
            return _gradient(moment, mismatches)
        case "lr":
            return _lr(moment, first)
        case "param":
            return _update(moment)


def of_position(moment: Moment, start: StartRecord) -> Cause | None:
    """Where a rank went on, if that is neither what was ordered nor where the reference stood."""
    ordered, step = moment.attempt.resume, start.position.step
    whole = reference_parameters(moment.drill, start.rank, step) == start.param
    if start.restored != ordered or (step != moment.attempt.resume_step and whole):
        restored = start.restored if start.restored != ordered else f"the state of step {step}" if step else "nothing"
        return Cause(
            "another checkpoint restored",
            f"rank {start.rank} restored {restored or 'nothing'}, ordered was {ordered}, the newest that had been committed",
        )
    if step != moment.attempt.resume_step:
        problem = f"went on from step {step} after restoring {ordered}"
    else:
        problem = wrong_position(start.position, start.rank, moment.drill)
    if problem is None:
        return None
    return Cause(
        "position not restored",
        f"rank {start.rank} {problem}: epoch, batches and steps belong together, their count was not restored as it was saved",
    )


def of_weights(moment: Moment, rank: int, seen: str) -> Cause:
    """Parameters that are wrong before the first step of an attempt."""
    drill = moment.drill
    if not moment.restored:
        return Cause("initial weights", "the job began with other weights: they depend on something besides the seed")
    if seen == reference_parameters(drill, rank, 0):
        return Cause("weights not restored", "the weights are the initial ones: the checkpoint was not loaded")
    for step in range(1, drill.reference_lineage.final_step + 1):
        if seen == reference_parameters(drill, rank, step):
            return Cause("weights of another step", f"the weights are those after step {step}: another checkpoint was loaded")
    return Cause("weights not restored", "the weights are not those saved: the checkpoint was loaded in part, or changed")


def of_restored_state(moment: Moment, found: StateDifference) -> Cause:
    """A restore that left one component as it should not be."""
    what, hint = _component(found)
    cause = f"{what} not restored"
    place = found.held_by(moment.drill)
    if place is not None and place != (found.rank, found.step):
        rank, step = place
        cause = f"{WHOLE[found.component]} of another {'rank' if step == found.step else 'step'}"
        whose = f"what rank {rank} holds" if step == found.step else f"what it held after step {step}"
        hint = f"rank {found.rank} restored {whose}: another file was loaded"
        if step == found.step and found.component in ("optimizer", "scheduler"):
            hint = f"rank {found.rank} restored {whose}, saved for all: ranks held different ones (reduce what they follow)"
    elif found.permuted:
        cause = f"{what} under other names"
        hint = "the values are all there, under each other's names: parameters or objects changed their order (hazard O5)"
    elif found.component == "rng" and _restored_rng(moment, found.rank) in _fresh(moment, found.rank):
        hint = "the random streams stand where they stood before step 1: freshly seeded instead of restored"
    return Cause(cause, "; ".join([hint, *_scope(moment, found)]))


def of_saved_state(moment: Moment, found: StateDifference) -> Cause:
    """A checkpoint that holds other state than the reference's, although every step up to it agrees."""
    what = _component(found).cause
    if found.component == "rng":
        return _drifted(found.names)
    hint = (
        f"the steps up to {found.step} agree, this does not: it follows something that no checkpoint holds, or was changed "
        "outside of the training steps"
    )
    return Cause(f"{what} drifted", "; ".join([hint, *_scope(moment, found)]))


def _component(found: StateDifference) -> Cause:
    """What the values that differ belong to, and what is known to go wrong with it."""
    name = found.names[0]
    match found.component:
        case "model":
            return Cause("weights", "the weights are not those saved")
        case "buffers":
            return Cause(
                "buffers",
                f"{name} is not as it was saved: BatchNorm statistics and other buffers belong to each rank (hazard C7), and "
                "the loss may never show them",
            )
        case "optimizer" if name.startswith("scaler/"):
            return Cause("GradScaler", "the loss scale, or its count of steps without overflow, is not as it was saved")
        case "optimizer" if found.only_rates:
            return Cause("learning rate", f"{name} was overwritten after the optimizer's state had been loaded")
        case "optimizer" if all("/param_groups/" in other for other in found.names):
            return Cause(
                "optimizer settings", f"{name} was overwritten after the optimizer's state had been loaded (hazard O4)"
            )
        case "optimizer":
            return Cause(
                "optimizer state", f"{name} is not as it was saved: the optimizer's moments or its step count are lost"
            )
        case "scheduler":
            return Cause("LR scheduler", f"{name} is not as it was saved: prepare the scheduler, or pass it to run.register")
        case "registered":
            return Cause(
                "registered state", f"{name} is not as it was saved: load_state_dict left it out, or ran on some ranks only"
            )
        case _:
            return Cause("RNG", f"not where it stood when the checkpoint was saved: {_streams(found.names)}")


def _scope(moment: Moment, found: StateDifference) -> Iterator[str]:
    if len(found.ranks) < len(moment.drill.ranks):
        others = ", ".join(str(rank) for rank in moment.drill.ranks if rank not in found.ranks)
        yield f"rank {others} is as it should be" if "," not in others else f"ranks {others} are as they should be"
    if found.also:
        yield f"wrong, too: {', '.join(found.also)}"


def _data(field: Field, moment: Moment, first: Mismatch) -> Cause:
    record = moment.records[first.rank]
    expected = moment.drill.reference_lineage.at(first.rank, moment.step)
    if expected and _one_begins_the_other(expected, record):
        return Cause(
            "accumulation window",
            f"the step took {len(record.batch)} micro-batches instead of {len(expected.batch)}: the place within the window "
            "was not restored, or the window's length changed",
        )
    if field == "batch" and record.knows_ids:
        return Cause(
            "batch contents",
            f"the same samples came with other contents: {_unlike_before(moment)}",
        )
    found = displacement(moment.drill, record, first.micro_batch or 0)
    return Cause(found.cause, found.hint)


def _unlike_before(moment: Moment) -> str:
    """Why a sample of the same id holds something else: as the probe saw it, else what is likely."""
    finding = sample_finding(moment.drill)
    if seen := unrepeatable(finding):
        return seen
    if finding is not None and finding.items in ("independent", "draws"):
        return (
            "they do not depend on the global random streams (the probe looked), so the dataset follows something that a "
            "restart loses: a cache of what was augmented in an earlier epoch, a generator or a counter of its own, the order "
            "of a set or a directory (sort it); or only some samples draw (draw from chaosrun.sample_rng(index))"
        )
    return (
        "augmentation or a loader worker draws from a random stream that is not restored (draw from chaosrun.sample_rng(index) "
        "in __getitem__), a cache holds what was augmented before, or the dataset lists its samples in another order (sort "
        "what comes from a set or a directory)"
    )


def _one_begins_the_other(expected: StepRecord, seen: StepRecord) -> bool:
    both = min(len(expected.batch), len(seen.batch))
    return len(expected.batch) != len(seen.batch) and expected.batch[:both] == seen.batch[:both]


def _fresh(moment: Moment, rank: int) -> set[str | None]:
    """Where the reference's random streams stood before its first step."""
    origin = moment.drill.reference_lineage.at(rank, 1)
    trace = moment.drill.reference.trace(origin.attempt, rank) if origin else None
    return {origin.rng if origin else None, trace.start.rng if trace and trace.start else None} - {None}


def _restored_rng(moment: Moment, rank: int) -> str | None:
    start = moment.attempt.traces[rank].start
    return start.rng if start else None


def _rng(moment: Moment, first: Mismatch) -> Cause:
    if moment.restored and first.seen in _fresh(moment, first.rank):
        return Cause(
            "RNG not restored", "the random streams stand where they stood before step 1: freshly seeded instead of restored"
        )
    if moment.first_after_restore and not moment.restored_right:
        return Cause("RNG not restored", "the random streams do not stand where they stood when the checkpoint was saved")
    return _drifted(_streams_apart(moment, first.rank))


def _drifted(names: list[str]) -> Cause:
    which = f" ({_streams(names)})" if names else ""
    return Cause(
        "RNG drifted",
        f"something drew random numbers on one side only{which}: evaluation, logging, an iterator seeded from the global "
        "stream",
    )


def _streams_apart(moment: Moment, rank: int) -> list[str]:
    """The streams that differ where this attempt's state was next recorded after the step; empty where it was not."""
    trace = moment.attempt.traces[rank]
    for saved in trace.checkpoints:
        expected = reference_state(moment.drill, rank, saved.step) if saved.step >= moment.step else None
        if expected and saved.digests:
            return differing_keys(expected.get("rng", {}), saved.digests.get("rng", {}))
    return []


def _streams(names: list[str]) -> str:
    return f"the random stream{'s' if len(names) > 1 else ''} of {', '.join(names)}"


def _loss(moment: Moment) -> Cause:
    if moment.restored_right and _drew_otherwise(moment):
        return Cause(
            "forward pass",
            "everything was restored as it was saved, another loss, and the random streams, equal before the step, differ "
            "after it: an evaluation or a log that this attempt alone made drew before the forward pass, or the model is in "
            "another mode (model.train() was not called)",
        )
    if moment.restored_right:
        return Cause(
            "forward pass",
            "everything was restored as it was saved, same data and RNG, another loss: the model is in another mode "
            "(model.train() was not called), its weights or buffers were changed after the restore, something that no "
            "checkpoint holds takes part (pass it to run.register), or a kernel is not deterministic",
        )
    if moment.restored:
        return Cause(
            "forward pass",
            "same data, weights and RNG, another loss: state beside the parameters was not restored (BatchNorm statistics, "
            "something to pass to run.register), or a kernel is not deterministic",
        )
    return Cause(
        "forward pass",
        "same data, weights and RNG, another loss: a kernel is not deterministic, or the thread count differs",
    )


def _drew_otherwise(moment: Moment) -> bool:
    """The random streams, which agree before this step, differ before the next one on some rank."""
    after = moment.step + 1
    seen = [record for rank in moment.records for record in moment.attempt.traces[rank].steps if record.step == after]
    expected = [moment.drill.reference_lineage.at(record.rank, after) for record in seen]
    return any(other and other.rng != record.rng for record, other in zip(seen, expected, strict=True))


def _gradient(moment: Moment, mismatches: list[Mismatch]) -> Cause:
    everywhere = len(mismatches) == len(moment.records) and len({str(mismatch.seen) for mismatch in mismatches}) == 1
    if len(moment.records) > 1 and everywhere and _layout_suspect(moment):
        return Cause(
            "gradient reduction (bucket layout)",
            "same data, weights and loss on every rank, another sum: gradients were reduced in another bucket layout than "
            "in the reference (buckets not primed)",
        )
    if moment.first_after_restore:
        return Cause(
            "gradient",
            "same data, weights and loss, another gradient right after a restore: gradients accumulated before the checkpoint "
            "were lost (save only at the end of an accumulation window), others were left over (zero_grad), clipping follows "
            "something that was not restored, a weight was changed after the restore, or a backward kernel is not "
            "deterministic",
        )
    if moment.restored:
        return Cause(
            "gradient",
            "same data, weights and loss, another gradient: clipping follows something that was not restored, or a backward "
            "kernel is not deterministic",
        )
    return Cause("gradient", "same data, weights and loss, another gradient: a backward kernel is not deterministic")


def _layout_suspect(moment: Moment) -> bool:
    for rank, record in moment.records.items():
        expected = moment.drill.reference_lineage.at(rank, moment.step)
        seen_layout = layout_at(moment.drill.chaos, record)
        reference_layout = layout_at(moment.drill.reference, expected) if expected else None
        if seen_layout is None or reference_layout is None or seen_layout.layout is None:
            continue
        if seen_layout.layout != reference_layout.layout or not seen_layout.primed:
            return True
    return False


def _lr(moment: Moment, first: Mismatch) -> Cause:
    seen = moment.records[first.rank].lr
    by_step = moment.drill.reference_lineage.steps[first.rank]
    found = [step for step in sorted(by_step) if by_step[step].lr == seen]
    where = (
        f"the optimizer used the learning rate of step {found[0]}"
        if found
        else "no step of the reference has this learning rate"
    )
    if moment.restored and not moment.restored_right:
        return Cause("LR scheduler not restored", f"{where}: prepare the scheduler, or pass it to run.register")
    return Cause(
        "learning rate",
        f"{where}: the schedule depends on something that is not in the job's state (a counter or a clock of the script's own: "
        "prepare a scheduler, or pass what it counts to run.register)",
    )


def _update(moment: Moment) -> Cause:
    if moment.first_after_restore and not moment.restored_right:
        return Cause(
            "optimizer state not restored",
            "same weights, gradients and learning rate, another update: the optimizer's moments were not restored",
        )
    if moment.first_after_restore:
        return Cause(
            "optimizer update",
            "the optimizer was restored as it was saved, same gradients and learning rate, another update: its state, or a "
            f"weight, was changed after the restore, or {_KEPT_BESIDE}",
        )
    if moment.restored:
        return Cause(
            "optimizer update",
            f"same weights, gradients and learning rate, another update steps after a restore: {_KEPT_BESIDE}",
        )
    return Cause(
        "optimizer update", "same weights, gradients and learning rate, another update: the optimizer is not deterministic"
    )


_KEPT_BESIDE = (
    "the optimizer keeps something that its state_dict leaves out (slow weights, a counter), or the loop changes weights by "
    "something that no checkpoint holds (pass it to run.register)"
)
