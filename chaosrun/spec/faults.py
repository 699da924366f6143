"""The faults section of a job file: `faults.schedule`, `faults.random`, `faults.replay`, `faults.preset`, `faults.seed`.

Owns which keys go together. The planner decides whether a fault can ever fire.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import InitErrorDetails

from chaosrun.faults.kind import ONCE_AN_ATTEMPT, OPTIONS, Kind, Option, Phase, Value
from chaosrun.faults.kinds import KINDS, LOSSES, FaultKind, LossKind, kind_at
from chaosrun.spec.fields import (
    Count,
    Duration,
    Flag,
    Number,
    Positive,
    Rank,
    Section,
    Share,
    StepRange,
    Stretch,
    Text,
    conflict,
    must,
    some,
)

_OPTION_KEYS: dict[str, Option] = {option.removesuffix("_s"): option for option in OPTIONS}
"""Key in the file → option of the fault."""


class FaultOptions(Section):
    """What is done, and to which rank: the part that scheduled and random faults share."""

    kind: FaultKind = Field(default="kill", description="what is done; kill is SIGKILL, docs/faults.md has all kinds")
    rank: Rank = Field(default="random", description="the rank it is done to, random: drawn with faults.seed, or all at once")
    at_once: Positive | None = Field(default=None, description="with rank random: how many ranks it is done to at once")
    phase: Phase | None = Field(default=None, description="the point in the step: after it, its all-reduce, its checkpoint, …")
    grace: Duration | None = Field(default=None, description="time between a notice and SIGKILL, such as 5s")
    duration: Duration | None = Field(default=None, description="how long it lasts, such as 2s")
    factor: Annotated[Number, Field(gt=1)] | None = Field(default=None, description="how many times as long a step takes")
    steps: Positive | None = Field(default=None, description="how many steps it lasts")
    mebibytes: Positive | None = Field(default=None, description="memory that the rank may still take, in MiB")
    state: Literal["parameter", "gradient", "moment"] | None = Field(default=None, description="what is corrupted")
    tensor: Text | None = Field(default=None, description="name of the parameter concerned; default: drawn")
    bit: Annotated[Count, Field(le=63)] | None = Field(default=None, description="which bit, 0 the lowest; default: drawn")
    file: Text | None = Field(default=None, description="file of the checkpoint, relative to it; at phase save a pattern")
    operation: Positive | None = Field(default=None, description="at phase save: strike before this file operation, from 1 on")
    unsynced: Literal["lost", "empty", "torn"] | None = Field(
        default=None,
        description="after a power cut, what was not synced is lost with its name, or its files are empty, or torn",
    )

    @property
    def moment(self) -> Phase:
        """The phase, given or implied."""
        return self.phase or KINDS[self.kind].default_phase

    @property
    def options(self) -> dict[str, Value]:
        given = {option: getattr(self, key) for key, option in _OPTION_KEYS.items() if getattr(self, key) is not None}
        if "file" not in self.facts.options:
            given.pop("file", None)
        return given

    @property
    def target(self) -> str | None:
        """The file of a checkpoint at whose fsync it strikes."""
        return None if "file" in self.facts.options else self.file

    @property
    def facts(self) -> Kind:
        return kind_at(self.kind, self.moment)

    def conflicts(self) -> Iterator[InitErrorDetails]:
        kind = self.facts
        for key, option in _OPTION_KEYS.items():
            if getattr(self, key) is None or option in kind.options:
                continue
            if key == "file" and self.moment.startswith("checkpoint.fsync"):
                continue
            known = [name for name, own in _OPTION_KEYS.items() if own in kind.options]
            hint = f"{self.kind} takes {', '.join(known)}" if known else f"{self.kind} takes no options"
            yield conflict(key, f"a fault of kind {self.kind} has no {key}", hint)
        if self.phase is not None and self.phase not in kind.phases:
            yield conflict(
                "phase",
                f"a fault of kind {self.kind} cannot strike at {self.phase}",
                f"it can at {', '.join(sorted(kind.phases))}",
            )
        if self.file is not None and self.operation == 1 and "operation" in kind.options:
            hint = "operation: 2 strikes when the file has been created"
            yield conflict("operation", "the first operation on a file is known when it has been done", hint)
        if self.at_once is not None and self.rank != "random":
            yield conflict("at_once", "at_once counts ranks that are drawn", "leave rank out, or write rank: all")

    def not_timed(self, key: str) -> Iterator[InitErrorDetails]:
        if not KINDS[self.kind].timed:
            timed = ", ".join(name for name, kind in KINDS.items() if kind.timed)
            yield conflict(key, f"a fault of kind {self.kind} is made inside the worker", f"{key} works with {timed}")


class ScheduledFault(FaultOptions):
    """One entry of `faults.schedule`: a fault at one moment, or every so many steps."""

    at_step: Positive | None = Field(default=None, description="the step it happens at, counted from 1")
    every_steps: Positive | None = Field(default=None, description="repeat at each multiple of this many steps")
    until_step: Positive | None = Field(default=None, description="the last step of every_steps; default: max_steps")
    occurrence: Positive | None = Field(default=None, description="the n-th time the rank reaches the phase, counted from 1")
    attempt: Positive | None = Field(default=None, description="only in this attempt, counted from 1")
    after: Duration | None = Field(default=None, description="time after the first attempt has started, such as 5s")

    def conflicts(self) -> Iterator[InitErrorDetails]:
        yield from super().conflicts()
        moment = self.moment
        if self.at_step is not None and self.every_steps is not None:
            yield conflict("every_steps", "at_step and every_steps exclude each other", "keep one of the two")
        if self.until_step is not None and self.every_steps is None:
            hint = "add every_steps, or write at_step for a single fault"
            yield conflict("until_step", "until_step needs every_steps", hint)
        if self.until_step is not None and self.every_steps is not None and self.until_step < self.every_steps:
            reason = f"until_step {self.until_step} comes before the first fault, at step {self.every_steps}"
            yield conflict("until_step", reason, "raise until_step or lower every_steps")
        if self.every_steps is not None and moment in ONCE_AN_ATTEMPT:
            reason = f"a fault at {moment} cannot repeat by steps"
            yield conflict("every_steps", reason, "add one entry for each, with occurrence or attempt")
        if self.at_step is not None and moment == "rendezvous":
            yield conflict("at_step", "a rendezvous comes before any step", "write occurrence: 2 for the second attempt's")
        if self.after is not None:
            yield from self._outside()
        elif moment in ("step", "reduce") and not any((self.at_step, self.every_steps, self.occurrence, self.attempt)):
            reason = f"a fault at phase {moment} needs at_step, every_steps, occurrence or attempt"
            yield conflict(None, reason, "say when, such as at_step: 7")
        if self.occurrence is not None and (self.at_step or self.every_steps) and not moment.startswith("checkpoint.fsync"):
            reason = f"occurrence and steps exclude each other: a step has one {moment}"
            yield conflict("occurrence", reason, "keep one of the two")

    def _outside(self) -> Iterator[InitErrorDetails]:
        others = [key for key in ("at_step", "every_steps", "occurrence", "attempt", "phase") if getattr(self, key) is not None]
        if others:
            yield conflict(
                "after", f"after and {others[0]} exclude each other", "a fault after a delay comes from outside, at no step"
            )
        yield from self.not_timed("after")


class RandomFaults(FaultOptions):
    """`faults.random`: faults at drawn steps or times."""

    count: Positive | None = Field(default=None, description="how many faults, each at another step")
    mean_steps: Annotated[Number, Field(ge=1)] | None = Field(default=None, description="mean number of steps between faults")
    rate: Annotated[Number, Field(gt=0, le=1)] | None = Field(default=None, description="probability of a fault at each step")
    mtbf: Duration | None = Field(default=None, description="mean time between faults, exponential, such as 30s")
    between: StepRange | None = Field(default=None, description="first and last step to be drawn; default: [1, max_steps]")
    within: Duration | None = Field(default=None, description="with mtbf: time to draw faults for; default: ten times mtbf")

    def conflicts(self) -> Iterator[InitErrorDetails]:
        yield from super().conflicts()
        amounts = [key for key in ("count", "mean_steps", "rate", "mtbf") if getattr(self, key) is not None]
        if len(amounts) > 1:
            yield conflict(amounts[1], f"{amounts[0]} and {amounts[1]} exclude each other", "keep one of the two")
        if not amounts:
            yield conflict(None, "random faults need count, mean_steps, rate or mtbf", "say how many, such as count: 3")
        if self.between is not None and self.between[0] > self.between[1]:
            first, last = self.between
            yield conflict("between", f"no step lies between {first} and {last}", f"write [{last}, {first}]")
        if self.within is not None and self.mtbf is None:
            yield conflict("within", "within needs mtbf", "between bounds faults that are drawn by steps")
        if self.mtbf is not None:
            if self.phase is not None or self.between is not None:
                key = "phase" if self.phase is not None else "between"
                yield conflict(key, f"mtbf and {key} exclude each other", "a fault in time comes from outside, at no step")
            yield from self.not_timed("mtbf")
        elif self.moment not in ("step", "reduce", "fetch", "forward", "optimizer", "record"):
            yield conflict(
                "phase" if self.phase else "kind",
                f"no random step has a {self.moment}",
                "random faults strike at step, reduce, …",
            )


class ReplaySpec(Section):
    """`faults.replay`: a recorded preemption trace, played again in compressed time."""

    trace: Text = Field(description="the recorded trace, relative to the job file")
    format: Literal["auto", "bamboo", "parcae", "skypilot"] = Field(default="auto", description="how the file is written")
    unit: Literal["seconds", "hours"] = Field(default="seconds", description="unit of a bamboo file's first column")
    compress: Annotated[Number, Field(gt=0)] = Field(default=1.0, description="how much faster: 3600 makes an hour a second")
    start: Duration | None = Field(default=None, description="recorded time to begin at; default: its beginning")
    until: Duration | None = Field(default=None, description="recorded time to end at; default: its end")
    onto: Literal["ranks", "nodes"] = Field(default="ranks", description="what a recorded node stands for: a rank or a node")
    kind: LossKind | None = Field(
        default=None,
        description="what is done at a loss: " + ", ".join(f"{' or '.join(kinds)} to {lost}" for lost, kinds in LOSSES.items()),
    )

    @property
    def strikes(self) -> FaultKind:
        """The kind, given or implied."""
        return self.kind or ("kill" if self.onto == "ranks" else "node")

    def conflicts(self) -> Iterator[InitErrorDetails]:
        if self.strikes not in LOSSES[self.onto]:
            known = " or ".join(LOSSES[self.onto])
            yield conflict("kind", f"a fault of kind {self.strikes} is not done to {self.onto}", f"{self.onto} take {known}")
        if self.start is not None and self.until is not None and self.start >= self.until:
            reason = f"no time lies between start, {self.start:g} s, and until, {self.until:g} s"
            yield conflict("until", reason, "raise until or lower start")
        if self.unit != "seconds" and self.format not in ("auto", "bamboo"):
            yield conflict("unit", f"the format {self.format} has its own unit of time", "unit is for bamboo's files")


class FollowingFault(FaultOptions):
    """A further fault of a preset on the same rank, later in the same step."""

    kind: FaultKind = Field(default="kill", description="what is done then")
    phase: Phase | None = Field(default=None, description="the point within the step; default: after it")

    def conflicts(self) -> Iterator[InitErrorDetails]:
        yield from super().conflicts()
        if self.moment in ONCE_AN_ATTEMPT:
            yield conflict("phase", f"a step has no {self.moment}", "write an entry of its own")


class PresetFault(FaultOptions):
    """An entry of a preset: faults at drawn steps, given as shares of the training, so that it fits any length."""

    within: Stretch = Field(default=(0.0, 1.0), description="the part of the training that it comes in, such as [20%, 80%]")
    count: Positive | None = Field(default=None, description="how many, each at another step; default: 1")
    mean: Share | None = Field(default=None, description="instead of count: mean distance, as a part of the training: 20%")
    chance: Share = Field(default=1.0, description="probability that the entry counts at all, such as 50%")
    occurrence: Positive | None = Field(default=None, description="of a restore or rendezvous: the n-th of the run, from 1 on")
    then: FollowingFault | None = Field(default=None, description="what strikes the same rank at the same step, after this")

    def conflicts(self) -> Iterator[InitErrorDetails]:
        yield from super().conflicts()
        if self.count is not None and self.mean is not None:
            yield conflict("mean", "count and mean exclude each other", "keep one of the two")
        if self.mean == 0:
            yield conflict("mean", "faults cannot be 0% apart", "write how far apart they come, such as 20%")
        if self.within[0] >= self.within[1]:
            yield conflict("within", "it ends before it begins", "write the smaller part first, such as [20%, 80%]")
        once = self.moment in ONCE_AN_ATTEMPT
        if once and self.occurrence is None:
            yield conflict("phase", f"no step has a {self.moment}", "say which one, such as occurrence: 1")
        if self.occurrence is not None and not once:
            yield conflict("occurrence", f"{self.moment} is placed by its step", "occurrence is for restore.* and rendezvous")
        if once and (self.count is not None or self.mean is not None or self.then is not None):
            yield conflict("phase", f"no step has a {self.moment}", "leave out count, mean and then")


class PresetSpec(Section):
    """Faults that fit any job of known length; written once, called by name."""

    name: Text = Field(default="inline", description="what it is called")
    description: Text | None = Field(default=None, description="what it stands for")
    one_rank: Flag = Field(default=False, description="draw one rank, and let all its faults strike that one")
    faults: Annotated[tuple[PresetFault, ...], BeforeValidator(some)] = Field(
        description="what is drawn", json_schema_extra={"minItems": 1}
    )


_preset = must(
    lambda value: value is None or isinstance(value, dict | PresetSpec),
    "the name of a preset, its file, or a mapping with faults",
)
"""A name stands for a file, which `spec.preset` reads when the job is loaded."""


class FaultsSpec(Section):
    seed: Count = Field(default=0, description="seed of everything random in the plan")
    schedule: tuple[ScheduledFault, ...] = Field(default=(), description="faults at known moments")
    random: RandomFaults | None = Field(default=None, description="faults at random steps or times")
    replay: ReplaySpec | None = Field(default=None, description="faults as they were recorded on a cluster")
    preset: Annotated[PresetSpec | None, BeforeValidator(_preset, json_schema_input_type=str | PresetSpec | None)] = Field(
        default=None,
        description="in the place of schedule, random and replay: a preset's name (spot, flaky-node, torture) or file; "
        "needs max_steps",
    )
    allow_inject: Flag = Field(
        default=False, description="let `chaosrun inject` strike a `chaosrun run` of this job, as on a game day; drills take it"
    )
    allow_cluster_faults: Flag = Field(default=False, description="let faults of kind raylet strike a cluster that was joined")
