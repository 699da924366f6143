"""Whether random streams that a script did not restore may be the cause of a difference. Pure."""

from itertools import islice
from operator import attrgetter

from chaosrun.records.history import Attempt
from chaosrun.verify.alignment import AttemptStart
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.compare import Kind

SHOWN = 8
"""This many steps that drew from other streams than the reference's and still gave the same bits show that nothing depends on
their draws."""
_RESULTS = attrgetter("batch", "loss", "grad", "param")


def may_explain(drill: Drill, attempt: Attempt, rank: int, step: int, kind: Kind) -> bool:
    """Whether the streams may explain a difference of this `kind`, the first in this step of a rank. Batches may have been
    drawn earlier, a whole epoch's at once. A learning rate does not depend on random numbers: batch, loss and gradients of its
    step agree."""
    if kind == "learning rate":
        return False
    if kind in ("data order", "batch"):
        before, here = (drill.reference_lineage.at(rank, each) for each in (step - 1, step))
        return (before is not None and here is not None and before.rng != here.rng) or _draws(drill, rank, step)
    return _draws(drill, rank, step) and not _stream_is_idle(drill, attempt, rank, step)


def past_the_order(drill: Drill, began: AttemptStart, rank: int, reason: Cause) -> bool:
    """Whether the order is an earlier epoch's that streams of a later step, with which the attempt began, cannot give again."""
    stands, epoch = began.nearest("rng"), reason.params.get("epoch")
    steps = [each.step for each in drill.reference_lineage.of(rank).values() if each.epoch == epoch]
    return reason.code == "sampler_epoch_not_set" and bool(stands) and bool(steps) and max(steps) <= stands


def _draws(drill: Drill, rank: int, step: int) -> bool:
    """Whether this step itself draws from the streams in the reference run: a loader that is opened for a new epoch draws its
    seed, too. For an epoch's last step, the step before it decides."""
    known = [drill.reference_lineage.at(rank, each) for each in (step - 1, step, step + 1)]
    for one, other in ((known[1], known[2]), (known[0], known[1])):
        if one and other and one.epoch == other.epoch:
            return one.rng != other.rng
    return len({record.rng for record in known if record}) > 1


def _stream_is_idle(drill: Drill, attempt: Attempt, rank: int, before: int) -> bool:
    """Whether earlier steps of this attempt drew from other streams than the reference's without any other difference."""
    drew = (
        seen
        for step, seen in attempt.traces[rank].steps.items()
        if step < before
        and (expected := drill.reference_lineage.at(rank, step))
        and expected.rng != seen.rng
        and _RESULTS(expected) == _RESULTS(seen)
        and _draws(drill, rank, step)
    )
    return len(list(islice(drew, SHOWN))) == SHOWN
