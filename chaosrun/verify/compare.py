"""Field-by-field comparison of two step records: what "equal" means, bitwise or within a tolerance. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, eq
from typing import Any, Literal

from chaosrun.records.history import LegHistory
from chaosrun.records.layout import LegLayout
from chaosrun.records.traces import NO_INPUTS, StartRecord, StepRecord
from chaosrun.spec.model import JobSpec, Tolerance, VerifySpec

Field = Literal["ids", "batch", "position", "rng", "loss", "grad", "lr", "param", "state"]
FIELDS: tuple[Field, ...] = ("ids", "batch", "position", "rng", "loss", "grad", "lr", "param", "state")
"""In the order of diagnosis: an earlier one that differs makes the later ones differ."""
Kind = Literal[
    "data order",
    "batch",
    "position",
    "rng",
    "weights",
    "buffers",
    "registered",
    "loss",
    "gradient",
    "learning rate",
    "optimizer",
    "saved state",
]

KINDS: Mapping[Field, Kind] = {
    "ids": "data order",
    "batch": "batch",
    "position": "position",
    "rng": "rng",
    "loss": "loss",
    "grad": "gradient",
    "lr": "learning rate",
    "param": "optimizer",
    "state": "optimizer",
}

EXACT = Tolerance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    field: Field
    step: int
    rank: int
    attempt: int
    expected: Any
    """JSON value; floats as float.hex() text."""
    seen: Any
    micro_batch: int | None = None
    """Index within the step, from 0."""
    tensor: str | None = None

    @property
    def place(self) -> str:
        return f"step {self.step} rank {self.rank} attempt {self.attempt}"


class Envelope(Tolerance):
    """Relative to the larger of the two."""


ENVELOPES: Mapping[str, tuple[Envelope, Envelope]] = {
    "standard": (Envelope(atol=1e-5, rtol=2e-3), Envelope(atol=5e-3, rtol=2e-3)),
    "relaxed": (Envelope(atol=1e-4, rtol=7.5e-3), Envelope(atol=1e-2, rtol=7.5e-3)),
}
"""How far `verify.profile` lets losses differ: in the first step after a restart, which depends only on the restored state, and
in later steps, over which rounding accumulates. The numbers of NeMo Automodel's resume test
(tests/functional_tests/checkpoint_robustness), |seen - expected| <= atol + rtol * max(|seen|, |expected|)."""


def exact_weights(verify: VerifySpec) -> bool:
    """Whether weights must be equal bit for bit. Fingerprints can show that, but not equality within a tolerance."""
    return verify.weights.exact and verify.profile == "strict"


def undecided(spec: JobSpec, reference: LegLayout | None) -> Iterator[str]:
    """Why equal state would not show that the remaining steps are equal; `reference`: None for a leg that ran to its end."""
    if spec.by == "script":
        yield "a script that resumes by itself keeps more than chaosrun knows of"
    if not (exact_weights(spec.verify) and spec.verify.losses.exact):
        yield "a tolerance was given"
    if reference and not reference.repeats.is_file():
        yield "the job was never shown to repeat itself"


def compared_fields(spec: JobSpec) -> tuple[Field, ...]:
    """Fields of a step that can be compared: for a script that resumes by itself, `state` instead of `position`."""
    other = {"state"} if spec.by == "chaosrun" else {"position"}
    if not exact_weights(spec.verify):
        other |= {"grad", "param", "state"}
    return tuple(name for name in FIELDS if name not in other)


_EVERYTHING = attrgetter(
    *("ids", "batch", "epoch", "batches", "rng", "loss", "grad", "grads", "lr", "param", "params", "state", "settings", "began")
)
_RESULTS = attrgetter("loss", "grad", "lr", "param", "state", "settings")
_COMPUTED = attrgetter("batch", "loss", "grad", "grads", "lr", "param", "params", "state", "settings")


def alike(expected: StepRecord, seen: StepRecord) -> bool:
    """Whether two records are equal in everything that `compare` reads, so that no field differs under any tolerance."""
    return _EVERYTHING(expected) == _EVERYTHING(seen)


def completes(expected: StepRecord, seen: StepRecord) -> bool:
    """Whether `seen` is the last part of the step `expected`, with the same result: the first part had no effect (an evaluation
    in training mode), or an earlier attempt did it and saved the gradients."""
    left_out = len(expected.batch) - len(seen.batch)
    whole = (expected.grad, expected.lr, expected.param, expected.state, expected.settings)
    same = whole == (seen.grad, seen.lr, seen.param, seen.state, seen.settings)
    ends = expected.batch[left_out:] == seen.batch and expected.loss[len(expected.loss) - len(seen.loss) :] == seen.loss
    return 0 < left_out < len(expected.batch) and bool(seen.grad) and same and ends


def comes_to_the_same(
    expected: StepRecord, seen: StepRecord, next_expected: StepRecord | None, next_seen: StepRecord | None
) -> bool:
    """Whether the first step of an attempt has the same result as the reference's, although their records differ: it completes
    that step; or only the random streams at its beginning differ, while its results and the next step's streams are equal. One
    leg then recorded the streams before a pass without effect, which a restart from a later checkpoint does not repeat."""
    if completes(expected, seen):
        return True
    if next_expected is None or next_seen is None or not seen.grad or _COMPUTED(expected) != _COMPUTED(seen):
        return False
    return (next_expected.rng, next_expected.batch) == (next_seen.rng, next_seen.batch)


def compare(
    field: Field, expected: StepRecord, seen: StepRecord, history: LegHistory, losses: Tolerance = EXACT
) -> Mismatch | None:
    """Compare one field of the same step; `history` is the leg of `seen`, for the names of tensors. `ids` are compared where
    both are known; losses as float.hex() text, so that 0.0 differs from -0.0 and NaN equals NaN."""
    match field:
        case "ids":
            return _ids(expected, seen, history)
        case "batch":
            return None if same_batches(expected, seen) or ends_alike(expected, seen) else _batches(expected, seen)
        case "loss":
            return _loss(expected, seen, losses)
        case "position" | "rng" | "state" | "lr":
            left, right = (
                [each.epoch, each.batches] if field == "position" else getattr(each, field) for each in (expected, seen)
            )
            return None if left == right else _mismatch(field, seen, left, right)
        case "grad":
            return _fingerprint(field, seen, (expected.grad, expected.grads), (seen.grad, seen.grads), history)
        case "param":
            return _fingerprint(field, seen, (expected.param, expected.params), (seen.param, seen.params), history)


def same_batches(expected: StepRecord, seen: StepRecord) -> bool:
    """Whether the batches are equal, or their tensors are and the other inputs of the model (a list that is logged, say) had no
    effect: with a loss and gradients, the step gave the same bits."""
    if expected.batch == seen.batch:
        return True
    tensors = expected.tensors == seen.tensors and all(seen.tensors)
    computes = bool(seen.grad) and any(float.fromhex(loss) for loss in seen.loss)
    return tensors and computes and _RESULTS(expected) == _RESULTS(seen)


def left_out(expected: StepRecord, seen: StepRecord) -> int:
    """How many passes `seen` left out before those that both made; negative: made in addition. An evaluation with gradients
    before a save counts to the step after it, and a restart does not repeat it."""
    fewer = len(expected.batch) - len(seen.batch)
    trains_alike = len(expected.loss) == len(seen.loss) > 0
    return fewer if fewer and trains_alike and seen.batch and expected.batch[:1] != seen.batch[:1] else 0


def ends_alike(expected: StepRecord, seen: StepRecord) -> bool:
    """Whether the batches differ only in passes left out before them, and so do not explain that the results differ."""
    fewer = left_out(expected, seen)
    same = expected.batch[max(fewer, 0) :] == seen.batch[max(-fewer, 0) :]
    return fewer != 0 and same and _RESULTS(expected) != _RESULTS(seen)


def close(expected: float, seen: float, tolerance: Tolerance) -> bool:
    """|seen - expected| <= atol + rtol * |expected|, as numpy.isclose, or as an `Envelope` says; NaN equals NaN."""
    if math.isnan(expected) or math.isnan(seen):
        return math.isnan(expected) and math.isnan(seen)
    scale = max(abs(expected), abs(seen)) if isinstance(tolerance, Envelope) else abs(expected)
    return expected == seen or abs(seen - expected) <= tolerance.atol + tolerance.rtol * scale


def first_difference(expected: Sequence[Any], seen: Sequence[Any], *, alike: Callable[[Any, Any], bool] = eq) -> int | None:
    """Index of the first element that is not alike, a missing one included; None when the sequences are alike."""
    for index, (left, right) in enumerate(zip(expected, seen, strict=False)):
        if not alike(left, right):
            return index
    return None if len(expected) == len(seen) else min(len(expected), len(seen))


def differing_keys(expected: Mapping[str, object], seen: Mapping[str, object]) -> list[str]:
    """Keys whose values differ or that only one side has, in the order of `expected`."""
    keys = [*expected, *(key for key in seen if key not in expected)]
    missing = object()
    return [key for key in keys if expected.get(key, missing) != seen.get(key, missing)]


def unlike_orders(starts: Iterable[StartRecord]) -> str | None:
    """The difference of the first one that holds the same parameters in another order (hazard O5); None if all orders are
    equal."""
    first: StartRecord | None = None
    for start in starts:
        first = first or start
        if start.tensors != first.tensors and sorted(start.tensors) == sorted(first.tensors):
            pairs = enumerate(zip(first.tensors, start.tensors, strict=True))
            number, (expected, seen) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
            return f"parameter {number} is {seen} on rank {start.rank} of attempt {start.attempt}, {expected} elsewhere"
    return None


def _mismatch(field: Field, seen: StepRecord, expected: Any, value: Any, **more: Any) -> Mismatch:
    return Mismatch(field=field, step=seen.step, rank=seen.rank, attempt=seen.attempt, expected=expected, seen=value, **more)


def _batches(expected: StepRecord, seen: StepRecord) -> Mismatch | None:
    fewer = left_out(expected, seen)
    values = expected.batch[max(fewer, 0) :], seen.batch[max(-fewer, 0) :]
    if values[0] == values[1]:
        return _sequence("batch", seen, expected.batch, seen.batch)
    found = _sequence("batch", seen, *values)
    return found and replace(found, micro_batch=(found.micro_batch or 0) + max(-fewer, 0))


def _ids(expected: StepRecord, seen: StepRecord, history: LegHistory) -> Mismatch | None:
    """Compare sample ids. For a script that resumes by itself, samples with other ids are the same if they hold the same bits:
    it may cut its dataset to the rest of the epoch."""
    if expected.ids is None or seen.ids is None:
        return None
    fewer = left_out(expected, seen)
    ids = expected.ids[max(fewer, 0) :], seen.ids[max(-fewer, 0) :]
    if len(ids[0]) != len(ids[1]):
        return _mismatch("ids", seen, f"{len(expected.ids)} micro-batches", f"{len(seen.ids)} micro-batches")
    for index, (left, right) in enumerate(zip(*ids, strict=True), start=max(-fewer, 0)):
        if left is not None and right is not None and left != right:
            contents = expected.batch[index + fewer :][:1]
            if history.by_script and contents == seen.batch[index:][:1] not in ((), (NO_INPUTS,)):
                continue
            return _mismatch("ids", seen, left, right, micro_batch=index)
    return None


def _sequence(
    field: Field, seen: StepRecord, left: Sequence[str], right: Sequence[str], alike: Callable[[str, str], bool] = eq
) -> Mismatch | None:
    if (index := first_difference(left, right, alike=alike)) is None:
        return None
    value = [values[index] if index < len(values) else None for values in (left, right)]
    return _mismatch(field, seen, value[0], value[1], micro_batch=index)


def _loss(expected: StepRecord, seen: StepRecord, tolerance: Tolerance) -> Mismatch | None:
    if len(expected.loss) != len(seen.loss) or tolerance.exact:
        return _sequence("loss", seen, expected.loss, seen.loss)

    def alike(one: str, other: str) -> bool:
        return close(float.fromhex(one), float.fromhex(other), tolerance)

    return _sequence("loss", seen, expected.loss, seen.loss, alike)


def _fingerprint(
    field: Field, seen: StepRecord, left: tuple[str, bytes], right: tuple[str, bytes], history: LegHistory
) -> Mismatch | None:
    known = bool(left[1] and right[1])
    if left == right or (left[0] == right[0] and not known):
        return None
    index = first_difference(*(memoryview(words).cast("I") for words in (left[1], right[1]))) if known else None
    trace = history.trace(seen.attempt, seen.rank)
    tensor = trace.tensor(index) if trace and index is not None else None
    return _mismatch(field, seen, left[0], right[0], tensor=tensor)
