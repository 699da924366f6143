"""Faults of a rank's memory: one bit of one element flipped, one element made NaN, a whole tensor moved away from its replicas.

The rank trains on silently: only the note records the damage, with the bits before and after. Where there is nothing to damage
(no gradient at this point, no moment before the first step) the note says so, and nothing is changed. Random choices use a
separate generator, never the training's.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from chaosrun.faults.kind import AT_STEPS, Kind
from chaosrun.faults.observed import Disproof, Observation, brief
from chaosrun.faults.strike import DamageableTraining, Strike
from chaosrun.records.markers import Note

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RELATIVE_SHIFT = 2.0**-6
"""How far `diverge` moves a tensor, relative to its largest absolute value: far above rounding in every floating type."""


class MemoryNote(Note, frozen=True, kw_only=True):
    state: str | None = None
    """parameter, gradient, or the name that the optimizer gives its moment."""
    tensor: str | None = None
    dtype: str | None = None
    element: int | None = None
    """None: all elements."""
    bit: int | None = None
    before: str | None = None
    """Bits of the element, or the tensor's fingerprint."""
    after: str | None = None
    value_before: str | None = None
    value_after: str | None = None

    @property
    def place(self) -> str:
        """ "0.weight", "gradient of 0.weight", "exp_avg of 0.weight"."""
        whose = {"parameter": "", "gradient": "gradient of "}.get(str(self.state), f"{self.state} of ")
        return f"{whose}{self.tensor}"


class _NothingToDamageError(Exception):
    """Why the fault cannot strike here; written into the note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    name: str
    state: str
    """parameter, gradient, or the name that the optimizer gives its moment."""
    values: Tensor


def diverge(strike: Strike) -> None:
    """Add the same number to every element of one parameter."""
    try:
        target = _draw(strike, "parameter", _stream(strike))[0]
    except _NothingToDamageError as problem:
        strike.note(MemoryNote(state="parameter", problem=str(problem)))
        return
    values = target.values
    before = _fingerprint(values)
    # In double: the small dtypes have no arithmetic.
    wide = values.double()
    largest = float(wide.abs().max())
    values.copy_(wide + (RELATIVE_SHIFT * largest or 1.0))
    after = _fingerprint(values)
    unchanged = "no element of it changed" if before == after else None
    strike.note(
        MemoryNote(state="parameter", tensor=target.name, dtype=_dtype(values), before=before, after=after, problem=unchanged)
    )


def _corrupt(strike: Strike, *, bit: bool) -> None:
    """Damage one element: one of its bits, or all of it."""
    import torch

    state, stream = str(strike.option("state")), _stream(strike)
    try:
        target, place = _draw(strike, state, stream)
        element = _element(target.values, place)
        number = _bit(strike, target.values, stream) if bit else None
    except _NothingToDamageError as problem:
        strike.note(MemoryNote(state=state, problem=str(problem)))
        return
    before, value_before = _hexadecimal(element), str(element.item())
    if number is None:
        element.copy_(torch.tensor([float("nan")]))
    else:
        element.view(torch.uint8)[number // 8] ^= 1 << number % 8
    # Read back from the tensor itself, not from the value written.
    element = _element(target.values, place)
    after, value_after = _hexadecimal(element), str(element.item())
    strike.note(
        MemoryNote(
            state=target.state,
            tensor=target.name,
            dtype=_dtype(target.values),
            element=place,
            bit=number,
            before=before,
            after=after,
            value_before=value_before,
            value_after=value_after,
            problem="its bits are the same as before" if before == after else None,
        )
    )


def _stream(strike: Strike) -> random.Random:
    return random.Random(f"{strike.order.seed}/{strike.fault.id}/{strike.fault.kind}")


def _draw(strike: Strike, state: str, stream: random.Random) -> tuple[_Target, int]:
    """Draw a tensor and the index of one of its elements, each element of all candidates with the same probability."""
    import torch

    if strike.training is None:
        raise _NothingToDamageError("the script had not attached yet: there was nothing to damage")
    found = [
        target
        for target in _targets(strike.training, state)
        if target.values.numel() and target.values.layout is torch.strided and target.values.is_floating_point()
    ]
    if not found:
        raise _NothingToDamageError(_why_none(state, strike))
    wanted = strike.option("tensor")
    if wanted is not None:
        names = sorted({target.name for target in found})
        found = [target for target in found if target.name == wanted]
        if not found:
            close = difflib.get_close_matches(wanted, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names[:8])}"
            raise _NothingToDamageError(f"no {state} of a tensor called {wanted!r}: {hint}")
    place = stream.randrange(sum(target.values.numel() for target in found))
    for target in found:
        if place < target.values.numel():
            return target, place
        place -= target.values.numel()
    raise AssertionError("the place lies in one of the tensors")


def _targets(training: DamageableTraining, state: str) -> Iterator[_Target]:
    for name, parameter in training.parameters():
        match state:
            case "parameter":
                yield _Target(name=name, state=state, values=_here(parameter))
            case "gradient":
                if parameter.grad is not None:
                    yield _Target(name=name, state=state, values=_here(parameter.grad))
            case _:
                yield from _moments(training, name, parameter)


def _here(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor. `.data`, so that autograd does not notice, as its version counters stay."""
    return getattr(tensor, "_local_tensor", tensor).data


def _moments(training: DamageableTraining, name: str, parameter: torch.nn.Parameter) -> Iterator[_Target]:
    """Running averages of this parameter that the optimizers keep; counters of steps are left out."""
    import torch

    for optimizer in training.optimizers():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and (value.dim() or value.shape == parameter.shape) and key != "step":
                yield _Target(name=name, state=str(key), values=_here(value))


def _why_none(state: str, strike: Strike) -> str:
    match state:
        case "gradient":
            return f"no parameter had a gradient at phase {strike.fault.phase} of step {strike.step}"
        case "moment":
            return f"the optimizer held no moment at phase {strike.fault.phase} of step {strike.step}"
        case _:
            return "the model has no floating-point parameter"


def _element(values: Tensor, place: int) -> Tensor:
    """One element as a separate tensor, in the same memory."""
    index: list[int] = []
    for size in reversed(values.shape):
        place, at = divmod(place, size)
        index.append(at)
    return values[tuple(reversed(index))].reshape(1)


def _bit(strike: Strike, values: Tensor, stream: random.Random) -> int:
    bits = values.element_size() * 8
    wanted = strike.option("bit")
    if wanted is None:
        return stream.randrange(bits)
    if wanted >= bits:
        raise _NothingToDamageError(f"bit {wanted} of a {_dtype(values)}: it has {bits} bits, 0 to {bits - 1}")
    return int(wanted)


def _hexadecimal(element: Tensor) -> str:
    """The element's bits, most significant first (torch runs on little-endian machines only)."""
    import torch

    return bytes(reversed(element.view(torch.uint8).tolist())).hex()


def _fingerprint(values: Tensor) -> str:
    import torch
    import xxhash

    return xxhash.xxh3_64_hexdigest(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _damaged(seen: Observation) -> Disproof | None:
    note: MemoryNote = seen.note
    if not (note.tensor and note.before and note.after):
        return Disproof("damage_not_named", "the note does not say what was damaged")
    if note.before == note.after:
        return Disproof("bits_unchanged", "its bits are the same before and after")
    return None


def _describe(seen: Observation) -> str:
    note: MemoryNote = seen.note
    if note.element is None:
        return f"{note.place}: {brief(note.before)}, now {brief(note.after)}"
    bit = "" if note.bit is None else f"bit {note.bit} of "
    return f"{bit}{note.place}[{note.element}]: {_number(note.value_before)}, now {_number(note.value_after)}"


def _number(value: str | None) -> str:
    try:
        return f"{float(value or 'nan'):.6g}"
    except ValueError:
        return brief(value)


_corruption = partial(
    Kind,
    family="memory",
    verdict="FAIL",
    phases=frozenset({"optimizer"}) | AT_STEPS,
    default_phase="optimizer",
    evidence="note",
    note=MemoryNote,
    shows=_damaged,
    tell=_describe,
)

KINDS = (
    _corruption(
        name="flip_bit",
        words="flip one bit of a {state} on {rank}",
        proof="the element's bits were read before and after",
        options={"state": "parameter", "tensor": None, "bit": None},
        inside=partial(_corrupt, bit=True),
    ),
    _corruption(
        name="nan",
        words="write NaN into a {state} on {rank}",
        proof="the element's bits were read before and after",
        options={"state": "gradient", "tensor": None},
        inside=partial(_corrupt, bit=False),
    ),
    _corruption(
        name="diverge",
        words="make the replica of {rank} unequal",
        proof="the tensor's fingerprint was taken before and after",
        phases=AT_STEPS,
        default_phase="step",
        options={"tensor": None},
        needs_peers="has no replicas",
        inside=diverge,
    ),
)
