"""The cause of a difference between the legs, as a code of the table (see `codes`). Pure: names what `divergence` finds."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from chaosrun.records.history import Attempt
from chaosrun.records.traces import BucketsRecord, StartRecord, StepRecord
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.compare import Field, Mismatch, differing_keys, unlike_orders
from chaosrun.verify.ledger import of_data
from chaosrun.verify.moment import Moment
from chaosrun.verify.rates import of_schedule, stays, where_used
from chaosrun.verify.recovery import layout_at, reduces_alike, wrong_position
from chaosrun.verify.restored import COMPONENTS, StateDifference, is_scaler, is_setting, lost_buffers, reference_state
from chaosrun.verify.steps import reference_parameters
from chaosrun.verify.ulp import float_distances

Place = Literal["start", "step", "checkpoint"]
"""Where a difference was found: in the weights that an attempt resumed with, in a step, or in the state saved after it."""


def of_save(drill: Drill, number: int, step: int, at: Place) -> Cause | None:
    """A save that changed live state and explains the first difference, in `step` of attempt `number`."""
    resumed = {attempt.number: attempt.resume_step for attempt in drill.chaos.attempts}
    for attempt in drill.chaos.attempts:
        kept = min((resumed[later] for later in resumed if attempt.number < later <= number), default=step)
        for rank, trace in sorted(attempt.traces.items()):
            for saved in trace.checkpoints if attempt.number <= number else ():
                if not saved.changed or saved.step > min(kept, step):
                    continue
                alone = reference_state(drill, rank, saved.step) is None
                here = saved.step == {"start": step - 1, "step": None, "checkpoint": step}[at]
                unsaved = "mode" in saved.changed and attempt.number < number
                if here or unsaved or (alone and saved.step < step):
                    because = "by_itself" if saved.by_itself else None
                    return Cause.of("save_changes_state", because=because, step=saved.step, effect=saved.effect)
    return None


def of_field(field: Field, moment: Moment, mismatches: list[Mismatch]) -> Cause:
    first = mismatches[0]
    match field:
        case "ids" | "batch":
            return of_data(field, moment, first)
        case "position":
            return Cause.of("position_not_restored")
        case "rng":
            return _rng(moment, first)
        case "loss":
            return _loss(moment)
        case "grad":
            return _gradient(moment, mismatches)
        case "lr":
            return _lr(moment, first)
        case "param" | "state":
            return _update(moment)


def of_position(moment: Moment, start: StartRecord) -> Cause | None:
    """The cause if a rank resumed at a position that is neither the requested one nor the reference's."""
    ordered, step = moment.attempt.resume, start.position.step
    whole = reference_parameters(moment.drill, start.rank, step) == start.param
    if start.restored != ordered or (step != moment.attempt.resume_step and whole):
        restored = start.restored if start.restored != ordered else f"the state of step {step}" if step else None
        return Cause.of("checkpoint_not_newest", rank=start.rank, restored=restored or "nothing", ordered=ordered)
    if step != moment.attempt.resume_step:
        problem = f"resumed from step {step} after restoring {ordered}"
    else:
        problem = wrong_position(start.position, start.rank, moment.drill)
    if problem is None:
        return None
    return Cause.of("position_not_restored", because="start", rank=start.rank, problem=problem)


def of_weights(moment: Moment, rank: int, seen: str) -> Cause:
    """Parameters that are wrong before the first step of an attempt."""
    drill = moment.drill
    if message := other_order(drill, moment.attempt):
        return Cause.of("parameter_order", message=message)
    if not moment.restored:
        return Cause.of("initial_weights")
    if seen == reference_parameters(drill, rank, 0):
        return Cause.of("weights_not_restored", because="of_the_beginning")
    if seen == reference_parameters(drill, rank, moment.step - 1):
        return Cause.of("weights_not_restored", because="unchanged")
    for step in range(1, drill.reference_lineage.final_step + 1):
        if seen == reference_parameters(drill, rank, step):
            return Cause.of("weights_of_another_step", because="start", step=step)
    for other in drill.ranks:
        if seen == reference_parameters(drill, other, moment.step - 1):
            return Cause.of("weights_of_another_rank", rank=rank, other=other, scope="")
    return Cause.of("weights_not_restored", because="partly")


def other_order(drill: Drill, attempt: Attempt) -> str | None:
    """How the order of this attempt's parameters differs from the reference's; None if it does not."""
    return unlike_orders([*drill.reference.attempts[0].starts.values(), *attempt.starts.values()])


def of_restored_state(moment: Moment, found: StateDifference) -> Cause:
    """The cause if a restore left one component wrong."""
    about = {"rank": found.rank, "name": found.names[0], "streams": _streams(found.names), "scope": _scope(moment, found)}
    place = found.held_by(moment.drill)
    if place is not None and place != (found.rank, found.step):
        rank, step = place
        which = "rank" if step == found.step else "step"
        return Cause.of(f"{COMPONENTS[found.component][0]}_of_another_{which}", **about, other=rank, step=step)
    if found.permuted:
        return Cause.of(f"{_part(found)}_renamed", **about)
    fresh = found.component == "rng" and moment.attempt.starts[found.rank].rng in _fresh(moment, found.rank)
    return Cause.of(f"{_part(found)}_not_restored", because="freshly_seeded" if fresh else None, **about)


def of_saved_state(moment: Moment, found: StateDifference) -> Cause:
    """The cause if a checkpoint's state differs from the reference's although every step up to it agrees."""
    if found.component == "rng":
        return _drifted(found.names)
    return Cause.of(f"{_part(found)}_drifted", step=found.step, scope=_scope(moment, found))


def _part(found: StateDifference) -> str:
    """The part of the state that the differing values belong to."""
    if found.component != "optimizer":
        return COMPONENTS[found.component][0]
    if is_scaler(found.names[0]):
        return "grad_scaler"
    if found.only_rates:
        return "learning_rate"
    return "optimizer_settings" if all(map(is_setting, found.names)) else "optimizer_state"


def _scope(moment: Moment, found: StateDifference) -> str:
    """Which ranks are right, and what else is wrong: the end of a hint."""
    parts: list[str] = []
    right = [str(rank) for rank in moment.drill.ranks if rank not in found.ranks]
    if right:
        are = f"rank {right[0]} is" if len(right) == 1 else f"ranks {', '.join(right)} are"
        parts.append(f"; {are} as {'it' if len(right) == 1 else 'they'} should be")
    if found.also:
        parts.append(f"; wrong, too: {', '.join(found.also)}")
    return "".join(parts)


def _fresh(moment: Moment, rank: int) -> set[str | None]:
    """The state of the reference's random streams before its first step."""
    first, start = moment.drill.reference_lineage.at(rank, 1), moment.drill.reference_start(rank)
    return {first and first.rng, start and start.rng} - {None}


def _rng(moment: Moment, first: Mismatch) -> Cause:
    if moment.restored and first.seen in _fresh(moment, first.rank):
        return Cause.of("rng_not_restored", because="freshly_seeded", scope="")
    if moment.first_after_restore and not moment.restored_right:
        return Cause.of("rng_not_restored", because="elsewhere")
    return _drifted(_differing_streams(moment, first.rank))


def _streams(names: Sequence[str]) -> str:
    return f"the random stream{'s' if len(names) > 1 else ''} of {', '.join(names)}"


def _drifted(names: list[str]) -> Cause:
    which = f" ({_streams(names)})" if names else ""
    return Cause.of("rng_drifted", because="drawn", which=which, streams=names)


def _differing_streams(moment: Moment, rank: int) -> list[str]:
    """The streams that differ in the next recorded state of this attempt after the step; empty if there is none."""
    trace = moment.attempt.traces[rank]
    for saved in trace.checkpoints:
        expected = reference_state(moment.drill, rank, saved.step) if saved.step >= moment.step else None
        if expected and saved.digests:
            return differing_keys(expected.get("rng", {}), saved.digests.get("rng", {}))
    return []


def _loss(moment: Moment) -> Cause:
    if moment.restored and _rescaled(moment) and (moment.attempt.by == "script" or not moment.restored_right):
        return Cause.of("grad_scaler_not_restored", because="of_losses")
    if moment.attempt.number > 1 and any(_changed_before(moment, rank, record) for rank, record in moment.records.items()):
        return Cause.of("forward_pass", because="changed_between")
    if cause := _buffers(moment):
        return cause
    if moment.restored and moment.drill.hash_seeds:
        return Cause.of("forward_pass", because="hashes", where=moment.drill.hash_order)
    right = moment.restored_right
    return Cause.of("forward_pass", because=_beside_streams(moment) if right else "restored" if moment.restored else None)


def _buffers(moment: Moment) -> Cause | None:
    """Buffers that a restart began without, if all else is as saved: the first pass reads them, forward or backward."""
    first = moment.restored_right and moment.first_after_restore
    lost = lost_buffers(moment.drill, moment.attempt, moment.records.keys()) if first else None
    return Cause.of("buffers_not_restored", because="at_start", rank=lost[0], name=lost[1], by="script") if lost else None


def _rescaled(moment: Moment) -> bool:
    """Every loss that differs is the expected one times the same power of two: it was scaled differently before the backward
    pass, perhaps on some ranks only. One loss alone may be that by chance where it counts something."""
    pairs = [
        (float.fromhex(expected), float.fromhex(seen))
        for rank, record in moment.records.items()
        if (other := moment.drill.reference_lineage.at(rank, moment.step))
        for expected, seen in zip(other.loss, record.loss, strict=False)
    ]
    unlike = [(expected, seen) for expected, seen in pairs if seen != expected]
    factors = {seen / expected if expected else math.nan for expected, seen in unlike}
    if len(factors) != 1 or math.frexp(factors.pop())[0] != 0.5:
        return False
    is_small_integer = (16 * math.frexp(unlike[0][0])[0]).is_integer()  # but for a power of two
    return len(unlike) > 1 or not is_small_integer


def _changed_before(moment: Moment, rank: int, record: StepRecord) -> bool:
    """Whether the rank's weights were changed between the last step and this one, unlike in the reference run."""
    other = moment.drill.reference_lineage.at(rank, moment.step)
    if other is None or record.began == other.began:
        return False
    start = moment.attempt.traces[rank].start
    if record.began or start is None or moment.step != moment.attempt.start_of(rank) + 1:
        return True
    # A start that is recorded within the first step may come after the change.
    return start.param != other.began


def _beside_streams(moment: Moment) -> str:
    """The variant of a row by the random streams before this step and before the next one."""
    here, after = (
        any(
            seen.rng != expected.rng
            for rank in moment.records
            if (seen := moment.attempt.traces[rank].steps.get(step))
            and (expected := moment.drill.reference_lineage.at(rank, step))
        )
        for step in (moment.step, moment.step + 1)
    )
    return "streams_at_rest" if here else "drew_before" if after else "restored_right"


def _gradient(moment: Moment, mismatches: list[Mismatch]) -> Cause:
    everywhere = len(mismatches) == len(moment.records) and len({str(mismatch.seen) for mismatch in mismatches}) == 1
    if len(moment.records) > 1 and everywhere and _layout_suspect(moment):
        left = moment.drill.left_unprimed
        if left and left.left == "hook_state":
            return Cause.of("hook_state_not_restored", hook=left.left_by)
        layouts = [*_layouts(moment)]
        primed = all(seen.primed and expected.primed and not _as_built(seen) for seen, expected in layouts)
        wrapped = primed and any(not reduces_alike(seen, expected) for seen, expected in layouts)
        return Cause.of("bucket_layout", because="wrapped" if wrapped else None, apart=_loss_distance(moment))
    return _buffers(moment) or Cause.of("gradient", because=_since_restore(moment))


def _since_restore(moment: Moment) -> str | None:
    """The variant of a row for the first step after a restore, a later one, or one of an attempt without a restore."""
    if moment.first_after_restore:
        return "first_after_restore"
    return "restored" if moment.restored else None


def _loss_distance(moment: Moment) -> str:
    """Distance of this attempt's losses from the reference's, in units in the last place."""
    pairs = [
        (float.fromhex(left), float.fromhex(right))
        for records in moment.attempt.steps.values()
        for seen in records.values()
        if (expected := moment.drill.reference_lineage.at(seen.rank, seen.step)) and len(expected.loss) == len(seen.loss)
        for left, right in zip(expected.loss, seen.loss, strict=True)
    ]
    found, _ = float_distances([left for left, _ in pairs], [right for _, right in pairs])
    largest = max((distance for distance in found if distance is not None), default=0)
    return f"losses up to {largest} ULP" if largest else "in the last bits"


def _layout_suspect(moment: Moment) -> bool:
    if moment.attempt.by == "script" and (moment.drill.left_unprimed or not moment.drill.spec.prime_buckets):
        return moment.first_after_restore
    return any(not reduces_alike(seen, expected) or not seen.primed for seen, expected in _layouts(moment))


def _as_built(buckets: BucketsRecord) -> bool:
    """Whether each bucket holds its parameters in the order of their registration, as DDP has them before it rebuilds them."""
    return all(list(bucket) == sorted(bucket) for bucket in buckets.layout or ())


def _layouts(moment: Moment) -> Iterator[tuple[BucketsRecord, BucketsRecord]]:
    """By rank, the bucket layout in which this step reduced its gradients, and the reference's; without unknown ones."""
    for rank, record in moment.records.items():
        expected = moment.drill.reference_lineage.at(rank, moment.step)
        seen_layout = layout_at(moment.drill.chaos, record)
        reference_layout = layout_at(moment.drill.reference, expected) if expected else None
        if seen_layout and reference_layout and seen_layout.layout is not None:
            yield seen_layout, reference_layout


def _lr(moment: Moment, first: Mismatch) -> Cause:
    seen = moment.records[first.rank].lr
    where = where_used(moment.drill, first.rank, moment.step, seen)
    if moment.restored and not moment.restored_right:
        return Cause.of("lr_scheduler_not_restored", because="used", where=where)
    by_script = moment.restored and moment.attempt.by == "script"
    scheduled = of_schedule(moment.drill, moment.attempt, first.rank, moment.step) if by_script else None
    stands = stays(moment.drill, moment.attempt, first.rank)
    return scheduled or Cause.of("learning_rate", because=stands, where=where)


def _update(moment: Moment) -> Cause:
    for rank, record in moment.records.items():
        expected = moment.drill.reference_lineage.at(rank, moment.step)
        if expected and moment.restored and expected.settings != record.settings:
            if moment.attempt.by == "chaosrun" and moment.restored_right:
                return Cause.of("optimizer_settings_drifted", step=moment.step - 1)
            return Cause.of("optimizer_settings_not_restored", name="one of its settings (weight decay, betas, momentum, …)")
    if moment.first_after_restore and not moment.restored_right:
        return Cause.of("optimizer_state_not_restored", because="update")
    return Cause.of("optimizer_update", because=_since_restore(moment))
