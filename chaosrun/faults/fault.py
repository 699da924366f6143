"""A fault, and the plan that lists faults: values, their JSON, and their words for people.

Must not know the spec, a clock or a process: workers import this.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from chaosrun.errors import UsageError
from chaosrun.faults.kind import OPTIONS, Kind, Phase, Value
from chaosrun.faults.kinds import FaultKind, kind_at
from chaosrun.records.codec import convert
from chaosrun.records.run_file import read_object

PLAN_VERSION = 2
INJECTED = "inject"
"""The source of a fault that was asked for while the job ran."""
BY_DEFAULT = "the default plan"
_HINT = "the plan was written by another version of chaosrun, or by hand"

_MOMENTS: dict[str, tuple[str, ...]] = {
    "rendezvous": ("at the rendezvous", "at its {nth} rendezvous"),
    "restore.begin": ("before restoring the checkpoint of step {step}", "before its {nth} restore"),
    "restore.end": ("right after restoring the checkpoint of step {step}", "right after its {nth} restore"),
    "fetch": ("after fetching a batch of step {step}", "after fetching its {nth} batch"),
    "forward": ("before the backward pass of step {step}", "before its {nth} backward pass"),
    "reduce": ("inside the gradient all-reduce of step {step}", "inside its {nth} gradient all-reduce"),
    "optimizer": ("before the optimizer applies step {step}", "before the optimizer applies its {nth} step"),
    "record": ("right after the record of step {step}", "right after the record of its {nth} step"),
    "checkpoint.begin": ("before it writes {saved}",),
    "checkpoint.file": ("while it writes {saved}",),
    "checkpoint.fsync.before": ("before the {again}fsync of {file} in {saved}", "before its {nth} fsync of {file}"),
    "checkpoint.fsync.after": ("after the {again}fsync of {file} in {saved}", "after its {nth} fsync of {file}"),
    "checkpoint.precommit": ("between write and commit of {saved}",),
    "checkpoint.rename.before": ("right before the rename that commits {saved}",),
    "checkpoint.rename.after": ("after the rename that commits {saved}",),
    "checkpoint.postcommit": ("right after the commit of {saved}",),
    "checkpoint.retention": ("after the retention that follows {saved}",),
    "step": ("after step {step}", "after its {nth} step"),
    "save": ("inside the script's save after step {step}", "inside the script's {nth} save"),
}
"""Per phase, the words for a fault at a given step and for the n-th time; once where they are the same."""
_ONCE_AN_ATTEMPT: dict[str, str] = {
    "rendezvous": "at the rendezvous of attempt {attempt}",
    "restore.begin": "before the restore of attempt {attempt}",
    "restore.end": "right after the restore of attempt {attempt}",
}
_T = TypeVar("_T", "Fault", "FaultPlan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planned strike. Its identity is `id`, not its step: after a rollback the job crosses the same step again.

    With a `phase` it strikes when its rank reaches that point and all other given fields match; without one it strikes from
    outside, `after_s` seconds after the leg's first attempt has started.
    """

    id: str
    kind: FaultKind = "kill"
    rank: int
    """The rank it strikes; for faults of a node a rank on that node, for those of the control plane the rank that waits for
    it."""
    phase: Phase | None = "step"
    at_step: int | None = None
    """The step computed, done (record, step), saved (checkpoint.*) or restored (restore.*); None: any."""
    occurrence: int = 1
    """Strike at the n-th match of all other fields. Points that an attempt reaches once (rendezvous, restore.*) are counted
    over the leg, all others within the attempt."""
    attempt: int | None = None
    """Only in this attempt; None: in any."""
    target: str | None = None
    """For checkpoint.fsync.*: only at this file of the checkpoint (a relative path; "." is the directory itself)."""
    after_s: float | None = None
    group: str | None = None
    """Faults of one group strike together: each waits until all of them have arrived."""
    required: bool = True
    """False if the training may end before it is due, and need not wait for it (drawn or replayed times)."""
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)
    source: str
    """The entry of the spec that defines it, such as "faults.schedule[0]"."""

    @property
    def facts(self) -> Kind:
        return kind_at(self.kind, self.phase)

    def option(self, name: str) -> Any:
        """The option's value, else the kind's default."""
        return self.options[name] if name in self.options else self.facts.options[name]  # type: ignore[index]

    def describe(self) -> str:
        """The fault in words: "SIGKILL rank 1 after step 7"."""
        options = {**self.facts.options, **self.options}
        words = self.facts.words.format(rank=f"rank {self.rank}", **options)
        together = "" if self.group is None else f", {self.group.rpartition('/')[2]} ranks at once"
        return f"{words} {self.moment()}{together}"

    def moment(self) -> str:
        """When it strikes, in words: "after step 7"."""
        if self.phase is None:
            return f"{self.after_s:g} s after the start"
        if self.attempt is not None and self.at_step is None and self.occurrence == 1 and self.phase in _ONCE_AN_ATTEMPT:
            return _ONCE_AN_ATTEMPT[self.phase].format(attempt=self.attempt)
        order = _ordinal(self.occurrence)
        words = _MOMENTS[self.phase][-1 if self.at_step is None else 0].format(
            step=self.at_step,
            nth=order,
            again="" if self.occurrence == 1 else f"{order} ",
            saved=f"the {order} checkpoint it reaches" if self.at_step is None else f"the checkpoint of step {self.at_step}",
            file=self.target or "a file",
        )
        if self.phase == "save":
            words += "".join(
                f", {name} {self.options[key]}"
                for key, name in (("file", "in"), ("operation", "before operation"))
                if self.options.get(key) is not None
            )
        return words if self.attempt is None else f"{words} in attempt {self.attempt}"

    def digest(self) -> str:
        """SHA-256 of all its fields, by which the journal identifies it independent of plan.json."""
        return _digest([self])

    def to_json(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> "Fault":
        """Raises UsageError when the value is not a fault this version knows."""
        fault = _converted(value, cls, "a fault")
        fault.check()
        return fault

    def check(self) -> None:
        """Raises UsageError for a fault with neither phase nor time, or with an option that its kind does not have."""
        if self.phase is None and self.after_s is None:
            raise UsageError(f"fault {self.id}: neither a phase nor a time", hint=_HINT)
        for name, given in self.options.items():
            default = self.facts.options.get(name)  # type: ignore[call-overload]
            if name not in OPTIONS or (isinstance(default, int | float) and not isinstance(given, int | float)):
                raise UsageError(f"fault {self.id} of kind {self.kind} has no option {name}: {given!r}", hint=_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Every fault of a drill, in the order the job meets them, injected ones last; plan.json has it before any can strike."""

    version: int = PLAN_VERSION
    seed: int
    faults: tuple[Fault, ...] = ()

    def digest(self) -> str:
        """SHA-256 of its faults without injected ones, so that an injection does not change it."""
        return _digest([fault for fault in self.faults if fault.source != INJECTED])

    def to_json(self) -> dict[str, Any]:
        return {"version": self.version, "seed": self.seed, "faults": [fault.to_json() for fault in self.faults]}

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> "FaultPlan":
        """Raises UsageError when the value is not a plan of this version."""
        plan = _converted(value, cls, "a plan")
        if plan.version != PLAN_VERSION:
            raise UsageError(
                f"the plan has version {plan.version!r}, this chaosrun reads version {PLAN_VERSION}",
                hint="read the run with the chaosrun that wrote it",
            )
        for fault in plan.faults:
            fault.check()
        return plan

    @classmethod
    def read(cls, path: Path) -> "FaultPlan":
        """Read a run's plan.json. Raises UsageError when it is missing, damaged, or of another version."""
        value = read_object(path)
        try:
            return cls.from_json(value)
        except UsageError as error:
            raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def _ordinal(number: int) -> str:
    if number <= 3:
        return ("first", "second", "third")[number - 1]
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _digest(faults: Sequence[Fault]) -> str:
    # A time that is read back from JSON is a float, even if a whole number was written.
    plain = [{**fault.to_json(), "after_s": None if fault.after_s is None else float(fault.after_s)} for fault in faults]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _converted(value: Any, of: type[_T], what: str) -> _T:
    """Parse. Raises UsageError where a field is missing, unknown or of another type: written again, it must be the same."""
    try:
        found = convert(value, of)
    except ValueError as error:
        raise UsageError(f"not {what}: {error}", hint=_HINT) from error
    if found.to_json() != value:
        raise UsageError(f"not {what}: it has other fields than {', '.join(found.to_json())}, or other types", hint=_HINT)
    return found
