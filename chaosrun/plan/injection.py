"""Turns the arguments of `chaosrun inject` into faults that are added to the plan and struck at once, from outside. Pure."""

import random
from collections.abc import Sequence
from dataclasses import replace

from chaosrun.errors import UsageError
from chaosrun.faults.fault import INJECTED, Fault, FaultPlan
from chaosrun.faults.kind import Kind
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.entries import MAX_FAULTS, RefusedError, at_one_moment
from chaosrun.plan.rules import objections
from chaosrun.spec.faults import FaultOptions
from chaosrun.spec.fields import seconds_of
from chaosrun.spec.model import JobSpec
from chaosrun.spec.validation import nearest

MOST_DIGITS = 9
"""Most digits of a rank; no cluster needs more."""
OUTSIDE_KINDS: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.timed)


def injected(
    spec: JobSpec, plan: FaultPlan, *, kind: str, rank: str, settings: Sequence[str], seed: int, after_s: float
) -> tuple[Fault, ...]:
    """The faults, with new ids, that strike `after_s` seconds after the leg's first start. `rank`: a number, "all" or "random"
    (by `seed`); `settings`: key=value. Raises UsageError."""
    about = _kind(kind)
    entry = FaultOptions.model_validate({"kind": kind, "rank": _rank(rank), **_options(kind, about, settings)})
    try:
        faults = list(at_one_moment(spec, entry, INJECTED, random.Random(seed), phase=None, after_s=after_s))
    except RefusedError as error:
        raise UsageError(error.objection.why, hint="one rank at a time: --rank 1") from error
    if len(plan.faults) + len(faults) > MAX_FAULTS:
        raise UsageError(f"the plan has {len(plan.faults)} faults, more than {MAX_FAULTS} are too many for a drill")
    if found := objections(spec, faults):
        raise UsageError("; ".join(each.why for each in found), hint="name another rank, or other options")
    first = 1 + max((_number(fault.id) for fault in plan.faults), default=0)
    groups = {fault.group.partition("/")[0] for fault in plan.faults if fault.group}
    group = f"G{1 + max(map(_number, groups), default=0)}/{len(faults)}" if len(faults) > 1 else None
    return tuple(replace(fault, id=f"F{first + place}", group=group) for place, fault in enumerate(faults))


def _kind(name: str) -> Kind:
    outside = ", ".join(OUTSIDE_KINDS)
    if name not in KINDS:
        close = nearest(name, OUTSIDE_KINDS)
        hint = f"did you mean {close}?" if close else f"kinds that strike from outside are {outside}"
        raise UsageError(f"there is no kind of fault called {name!r}", hint=hint)
    if not KINDS[name].timed:
        raise UsageError(
            f"a fault of kind {name} is made inside the worker, at a point that has to be known before it starts",
            hint=f"plan it in the job file; from outside strike {outside}",
        )
    return KINDS[name]


def _rank(text: str) -> int | str:
    if text in ("all", "random"):
        return text
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
        raise UsageError(f"{text!r:.40} is not a rank", hint="write a number, counted from 0, or all, or random")
    return int(text)


def _options(name: str, kind: Kind, settings: Sequence[str]) -> dict[str, object]:
    """Parse key=value settings: every option of a fault from outside is a time."""
    known = [option.removesuffix("_s") for option in kind.options]
    takes = f"{name} takes {', '.join(f'{key}=TIME' for key in known)}" if known else f"{name} takes no options"
    options: dict[str, object] = {}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise UsageError(f"{setting!r} is not of the form key=value", hint=takes)
        if key not in known:
            raise UsageError(f"a fault of kind {name} has no {key}", hint=takes)
        try:
            options[key] = seconds_of(value)
        except ValueError as error:
            raise UsageError(f"{setting!r}: {key} must be {error}", hint=takes) from error
    return options


def _number(name: str) -> int:
    """The number in "F12" or "G3"; 0 for any other name."""
    return int(name[1:]) if name[1:].isdecimal() else 0
