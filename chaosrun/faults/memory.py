"""Faults of a rank's memory: one bit of one element flipped, one element made NaN, a whole tensor moved away from its replicas.

The rank lives on and says nothing: what was damaged, and its bits before and after, stand in the note alone. Where there is
nothing to damage (no gradient at this point, no moment before the first step) the note says so, and nothing is touched.
Draws from a stream of its own, never from those of the training.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chaosrun.faults.kind import AT_STEPS, Kind
from chaosrun.faults.observed import Found, Observation, Problem, brief
from chaosrun.faults.strike import Strike, Training

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RELATIVE_SHIFT = 2.0**-6
"""By how much `diverge` moves a tensor, of its largest absolute value: far above rounding in every floating type."""


class _NothingToDamageError(Exception):
    """Why the fault cannot strike here; goes into the note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    name: str
    """The parameter's."""
    state: str
    """parameter, gradient, or the name that the optimizer gives its moment."""
    values: Tensor


def flip_bit(strike: Strike) -> None:
    _corrupt(strike, str(strike.option("state")), bit=True)


def nan(strike: Strike) -> None:
    _corrupt(strike, str(strike.option("state")), bit=False)


def diverge(strike: Strike) -> None:
    """Add the same number to every element of one parameter."""
    try:
        target = _draw(strike, "parameter", _stream(strike))[0]
    except _NothingToDamageError as problem:
        strike.note(state="parameter", problem=str(problem))
        return
    values = target.values
    before = _fingerprint(values)
    # In double: the small types know no arithmetic of their own.
    wide = values.double()
    largest = float(wide.abs().max())
    values.copy_(wide + (RELATIVE_SHIFT * largest or 1.0))
    after = _fingerprint(values)
    unchanged = "no element of it changed" if before == after else None
    strike.note(
        state="parameter",
        tensor=target.name,
        dtype=_dtype(values),
        elements=values.numel(),
        before=before,
        after=after,
        **_problem(unchanged),
    )


def _corrupt(strike: Strike, state: str, *, bit: bool) -> None:
    """Damage one element: one of its bits, or all of it."""
    import torch

    stream = _stream(strike)
    try:
        target, place = _draw(strike, state, stream)
        element = _element(target.values, place)
        number = _bit(strike, target.values, stream) if bit else None
    except _NothingToDamageError as problem:
        strike.note(state=state, problem=str(problem))
        return
    before, value_before = _hexadecimal(element), str(element.item())
    if number is None:
        element.copy_(torch.tensor([float("nan")]))
    else:
        element.view(torch.uint8)[number // 8] ^= 1 << number % 8
    # Read back from the tensor itself, not from what was written.
    element = _element(target.values, place)
    after, value_after = _hexadecimal(element), str(element.item())
    strike.note(
        state=target.state,
        tensor=target.name,
        dtype=_dtype(target.values),
        element=place,
        bit=number,
        before=before,
        after=after,
        value_before=value_before,
        value_after=value_after,
        **_problem("its bits are the same as before" if before == after else None),
    )


def _problem(problem: str | None) -> dict[str, Any]:
    return {} if problem is None else {"problem": problem}


def _stream(strike: Strike) -> random.Random:
    return random.Random(f"{strike.order.seed}/{strike.fault.id}/{strike.fault.kind}")


def _draw(strike: Strike, state: str, stream: random.Random) -> tuple[_Target, int]:
    """A tensor and the number of one of its elements, each element of all that could be meant as likely as any other."""
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


def _targets(training: Training, state: str) -> Iterator[_Target]:
    # `.data`: a damage from outside is none of autograd's business, its version counters stay as they are.
    for name, parameter in training.parameters():
        match state:
            case "parameter":
                yield _Target(name=name, state=state, values=parameter.data)
            case "gradient":
                if parameter.grad is not None:
                    yield _Target(name=name, state=state, values=parameter.grad.data)
            case _:
                yield from _moments(training, name, parameter)


def _moments(training: Training, name: str, parameter: torch.nn.Parameter) -> Iterator[_Target]:
    """Running averages of this parameter, as the optimizers keep them; a counter of steps is none."""
    import torch

    for optimizer in training.optimizers():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and (value.dim() or value.shape == parameter.shape) and key != "step":
                yield _Target(name=name, state=str(key), values=value.data)


def _why_none(state: str, strike: Strike) -> str:
    match state:
        case "gradient":
            return f"no parameter had a gradient at phase {strike.fault.phase} of step {strike.step}"
        case "moment":
            return f"the optimizer held no moment at phase {strike.fault.phase} of step {strike.step}"
        case _:
            return "the model has no floating-point parameter"


def _element(values: Tensor, place: int) -> Tensor:
    """One element as a tensor of its own, in the same memory."""
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
    """The element's bits, most significant first (Linux runs on little-endian machines only where torch does)."""
    import torch

    return bytes(reversed(element.view(torch.uint8).tolist())).hex()


def _fingerprint(values: Tensor) -> str:
    import torch
    import xxhash

    return xxhash.xxh3_64_hexdigest(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _damaged(seen: Observation) -> Problem | None:
    note = seen.found
    if not (note.get("tensor") and note.get("before") and note.get("after")):
        return Problem("damage_not_named", "the note does not say what was damaged")
    if note["before"] == note["after"]:
        return Problem("bits_unchanged", "its bits are the same before and after")
    return None


def place_of(found: Found) -> str:
    """ "0.weight", "gradient of 0.weight", "exp_avg of 0.weight"."""
    whose = {"parameter": "", "gradient": "gradient of "}.get(str(found.get("state")), f"{found.get('state')} of ")
    return f"{whose}{found.get('tensor')}"


def _tell(seen: Observation) -> str:
    found, place = seen.found, place_of(seen.found)
    if "element" not in found:
        return f"{place}: {brief(found.get('before'))}, now {brief(found.get('after'))}"
    bit = "" if found.get("bit") is None else f"bit {found['bit']} of "
    before, after = (found.get(when) if (told := found.get(f"value_{when}")) is None else told for when in ("before", "after"))
    return f"{bit}{place}[{found['element']}]: {_number(before)}, now {_number(after)}"


def _number(value: Any) -> str:
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError, OverflowError):
        return brief(value)


_BEFORE_UPDATE = frozenset({"optimizer"})

KINDS = (
    Kind(
        name="flip_bit",
        family="memory",
        words="flip one bit of a {state} on {rank}",
        proof="the element's bits were read before and after",
        verdict="FAIL",
        phases=_BEFORE_UPDATE | AT_STEPS,
        default_phase="optimizer",
        options={"state": "parameter", "tensor": None, "bit": None},
        inside=flip_bit,
        ends_attempt=False,
        evidence="note",
        shows=_damaged,
        tell=_tell,
    ),
    Kind(
        name="nan",
        family="memory",
        words="write NaN into a {state} on {rank}",
        proof="the element's bits were read before and after",
        verdict="FAIL",
        phases=_BEFORE_UPDATE | AT_STEPS,
        default_phase="optimizer",
        options={"state": "gradient", "tensor": None},
        inside=nan,
        ends_attempt=False,
        evidence="note",
        shows=_damaged,
        tell=_tell,
    ),
    Kind(
        name="diverge",
        family="memory",
        words="make the replica of {rank} unequal",
        proof="the tensor's fingerprint was taken before and after",
        verdict="FAIL",
        phases=AT_STEPS,
        options={"tensor": None},
        needs_peers="has no replicas",
        inside=diverge,
        ends_attempt=False,
        evidence="note",
        shows=_damaged,
        tell=_tell,
    ),
)
