"""Compare two inspected replays: the first quantity that differs, on which ranks, in which tensor, by how much.

First in time, and within a step in the order of diagnosis. Reads the files of `records.inspection`, without torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chaosrun.errors import UsageError
from chaosrun.records.grouping import grouped
from chaosrun.records.inspection import QUANTITIES, InspectedMoment, InspectedValue, Quantity
from chaosrun.records.layout import LegLayout
from chaosrun.verify.codes import Params
from chaosrun.verify.compare import differing_keys
from chaosrun.verify.ulp import TensorDifference, tensor_difference

AFTER_THE_LOSSES = ("local gradients", "reduced gradients", "learning rate", "parameters after")
"""Compared after batch, random streams and loss of all micro-batches; those are compared micro-batch by micro-batch."""

Key = tuple[Quantity, int]
Entries = Mapping[Key, Mapping[str, InspectedValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityDifference:
    """One wrong quantity, with the values of the lowest of `ranks`."""

    quantity: Quantity
    step: int
    at_end: bool
    """After the last step, not in it."""
    attempt: int
    rank: int
    ranks: tuple[int, ...]
    micro_batch: int | None
    """None for a quantity of the whole step."""
    tensor: str
    """The first that differs: gradients in order of arrival, others in the model's order. Empty if there is only one value."""
    tensors: int
    of: int
    expected: str | None
    """The value if it is a text; None if it is a tensor, or absent."""
    seen: str | None
    difference: TensorDifference | None
    """None for texts, and if dtype or shape differ or one side has no such tensor, which `problem` then says."""
    problem: str | None
    worst: str | None
    """The tensor with the largest distance in ULP, and that distance, over all that differ on this rank."""
    worst_ulp: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityComparison:
    """One quantity of the finding's step: equal on every rank if `finding` is None."""

    quantity: Quantity
    micro_batch: int | None
    compared: int
    """Number of values, over all ranks."""
    finding: QuantityDifference | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A variable of the script, or an attribute of a prepared object, that no checkpoint holds and that differs between the
    replays."""

    name: str
    values: int
    expected: str
    seen: str

    @property
    def words(self) -> str:
        return f"{self.name} ({self.seen}, reference: {self.expected})"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionComparison:
    moments: int
    """Number of inspected steps and ends that both replays have, over all attempts."""
    candidates: tuple[Candidate, ...] = ()
    """Variables that differed when the step of the finding began; without a finding, at the first inspected step."""
    quantities: tuple[QuantityComparison, ...] = ()
    """Of the first moment that differs, in the order of diagnosis."""

    @property
    def finding(self) -> QuantityDifference | None:
        return next((entry.finding for entry in self.quantities if entry.finding), None)

    @property
    def at_end(self) -> bool:
        return self.finding is not None and self.finding.at_end


def compare_inspections(reference: LegLayout, chaos: LegLayout, ranks: range) -> InspectionComparison:
    """Compare the moments that both replays recorded. Raises UsageError when one of them cannot be read."""
    moments = 0
    kept: tuple[Candidate, ...] = ()
    for attempt in chaos.attempts():
        first: tuple[Candidate, ...] = ()
        for name in _names(chaos, attempt, ranks):
            pairs = _pairs(reference, chaos, attempt, name, ranks)
            if not pairs:
                continue
            moments += 1
            here = _candidates(next(iter(pairs.values())))
            first = first or here
            quantities = tuple(_quantities(reference, chaos, attempt, name, pairs))
            if any(entry.finding for entry in quantities):
                # A variable that differs since the restore is a likelier cause than one that first differs in this step.
                lasting = tuple(entry for entry in here if entry.name in {other.name for other in first})
                return InspectionComparison(moments=moments, quantities=quantities, candidates=lasting or here or first)
        kept = kept or first
    return InspectionComparison(moments=moments, candidates=kept)


def _candidates(pair: "_Pair") -> tuple[Candidate, ...]:
    """Candidates by variable, without those that one side has not set yet: a loop sets them before it reads them."""
    apart = grouped(differing_keys(pair.expected_script, pair.seen_script), _variable)
    both = {_variable(path) for path in pair.expected_script} & {_variable(path) for path in pair.seen_script}
    return tuple(
        Candidate(
            name=paths[0] if len(paths) == 1 else name,
            values=len(paths),
            expected=pair.expected_script.get(paths[0], "absent"),
            seen=pair.seen_script.get(paths[0], "absent"),
        )
        for name, paths in apart.items()
        if name in both
    )


def _variable(path: str) -> str:
    """The variable of a name; each attribute of a prepared object ("model 0/…") counts as one."""
    first, _, rest = path.partition("/")
    return f"{first}/{rest.partition('/')[0]}" if " " in first else first


def _names(leg: LegLayout, attempt: int, ranks: range) -> list[str]:
    """Names of the moments of an attempt, in time: "end.json" sorts before "step-…"."""
    found = {path.name for rank in ranks for path in leg.attempt(attempt).inspection(rank).glob("[se]*.json")}
    return sorted(found, key=lambda name: (name.startswith("end"), name))


@dataclass(frozen=True, slots=True)
class _Pair:
    step: int
    expected: Entries
    seen: Entries
    expected_script: Mapping[str, str]
    seen_script: Mapping[str, str]


def _pairs(reference: LegLayout, chaos: LegLayout, attempt: int, name: str, ranks: range) -> dict[int, _Pair]:
    pairs: dict[int, _Pair] = {}
    for rank in ranks:
        path = chaos.attempt(attempt).inspection(rank) / name
        # If the reference was killed, the last attempt has written it.
        others = [reference.attempt(number).inspection(rank) / name for number in reversed(reference.attempts())]
        other = next((candidate for candidate in others if candidate.exists()), None)
        if other is None or not path.exists():
            continue
        (step, seen, seen_script), (expected_step, expected, expected_script) = _read(path), _read(other)
        if step == expected_step:
            pairs[rank] = _Pair(step, expected, seen, expected_script, seen_script)
    return pairs


def _read(path: Path) -> tuple[int, Entries, Mapping[str, str]]:
    try:
        moment = msgspec.json.decode(path.read_bytes(), type=InspectedMoment)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}", hint="`chaosrun diagnose` makes it again") from error
    entries: dict[Key, dict[str, InspectedValue]] = {}
    for entry in moment.entries:
        entries.setdefault((entry.quantity, entry.micro_batch), {})[entry.name] = entry
    return moment.step, entries, moment.script


def _quantities(
    reference: LegLayout, chaos: LegLayout, attempt: int, name: str, pairs: Mapping[int, _Pair]
) -> Iterator[QuantityComparison]:
    keys = {key for pair in pairs.values() for side in (pair.expected, pair.seen) for key in side}
    several = {quantity for quantity, micro_batch in keys if micro_batch}
    for quantity, micro_batch in sorted(keys, key=_order):
        key = (quantity, micro_batch)
        differing: dict[int, list[str]] = {}
        compared = 0
        for rank, pair in pairs.items():
            expected, seen = pair.expected.get(key, {}), pair.seen.get(key, {})
            names = list(dict.fromkeys([*expected, *seen]))
            compared += len(names)
            apart = [entry for entry in names if expected.get(entry) != seen.get(entry)]
            if apart:
                differing[rank] = apart
        number = micro_batch if quantity in several else None
        finding = None
        if differing:
            rank = min(differing)
            place = {"step": pairs[rank].step, "at_end": name == "end.json", "attempt": attempt, "ranks": tuple(differing)}
            details = _details(reference, chaos, pairs[rank], key, differing[rank])
            finding = QuantityDifference(quantity=quantity, rank=rank, micro_batch=number, **place, **details)
        yield QuantityComparison(quantity=quantity, micro_batch=number, compared=compared, finding=finding)


def _order(key: Key) -> tuple[bool, int, int, int]:
    """The order of comparison: micro-batch by micro-batch up to the losses, then the gradients and updates of the step."""
    quantity, micro_batch = key
    late = quantity in AFTER_THE_LOSSES
    return late, 0 if late else micro_batch, QUANTITIES.index(quantity), micro_batch


def _details(reference: LegLayout, chaos: LegLayout, pair: _Pair, key: Key, apart: list[str]) -> Params:
    expected, seen = pair.expected.get(key, {}), pair.seen.get(key, {})
    differences = {name: _difference(reference, chaos, expected.get(name), seen.get(name)) for name in apart}
    # A missing value says more than the one in its place.
    first = next((name for name in apart if name in expected), apart[0])
    measured = {name: found.max_ulp for name, found in differences.items() if found and found.max_ulp is not None}
    worst = max(measured, key=lambda name: measured[name]) if measured else None
    left, right = expected.get(first), seen.get(first)
    return {
        "tensor": first,
        "tensors": len(apart),
        "of": len(expected.keys() | seen.keys()),
        "expected": left and left.text,
        "seen": right and right.text,
        "difference": differences[first],
        "problem": _problem(left, right),
        "worst": worst,
        "worst_ulp": measured[worst] if worst is not None else None,
    }


def _problem(left: InspectedValue | None, right: InspectedValue | None) -> str | None:
    if left is None or right is None:
        return "only the chaos leg has it" if left is None else "the chaos leg does not have it"
    if (left.text is None) != (right.text is None):
        kinds = [f"{side.dtype} {tuple(side.shape or ())}" if side.text is None else side.text for side in (left, right)]
        return f"{kinds[0]} in the reference, {kinds[1]} in the chaos leg"
    for what in ("dtype", "shape"):
        expected, seen = getattr(left, what), getattr(right, what)
        if expected != seen:
            return f"{what} {expected} in the reference, {seen} in the chaos leg"
    return None


def _difference(
    reference: LegLayout, chaos: LegLayout, left: InspectedValue | None, right: InspectedValue | None
) -> TensorDifference | None:
    if left is None or right is None or not left.bytes or not right.bytes or _problem(left, right):
        return None
    raw = [(reference.tensors / left.bytes).read_bytes(), (chaos.tensors / right.bytes).read_bytes()]
    return tensor_difference(raw[0], raw[1], left.dtype or "", tuple(left.shape or ()))
