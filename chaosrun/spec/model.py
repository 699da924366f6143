"""JobSpec: everything a job file may say, with types, bounds and defaults.

Owns the meaning of one file on its own. Must not know YAML, places in a file, or what a plan can do with it.
Each field's description is what an error shows as its hint.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from chaosrun.plan.faults import FaultKind, Phase
from chaosrun.records.order import DataResume

__all__ = [
    "VERBATIM",
    "CheckpointSpec",
    "Count",
    "DataSpec",
    "FaultsSpec",
    "JobName",
    "JobSpec",
    "Number",
    "PerWorker",
    "RandomFaults",
    "RecoverySpec",
    "ScheduledFault",
    "Section",
    "Text",
    "Tolerance",
    "VerifySpec",
    "conflict",
    "raise_conflicts",
    "wrong",
]

VERBATIM = frozenset({"args", "env"})
"""Keys whose scalars are text as written in the file: `0.10` stays "0.10" and `off` stays "off"."""

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DURATION = re.compile(r"(?P<amount>\d+(\.\d+)?)\s*(?P<unit>ms|s|m|h|d)")
DURATION_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
RENDEZVOUS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def wrong(expected: str) -> PydanticCustomError:
    """An error of one value: `expected` completes "<name> must be …"."""
    return PydanticCustomError("wrong_value", "{expected}", {"expected": expected})


def conflict(key: str | None, reason: str, hint: str) -> InitErrorDetails:
    """An error between fields, shown at `key` (None: at the whole mapping). `reason` is the sentence, `hint` the way out."""
    kind = PydanticCustomError("conflict", "{reason}", {"reason": reason, "hint": hint})
    return InitErrorDetails(type=kind, loc=() if key is None else (key,), input=None)


def raise_conflicts(title: str, conflicts: list[InitErrorDetails]) -> None:
    if conflicts:
        raise ValidationError.from_exception_data(title, conflicts)


def _seconds(value: Any) -> float:
    expected = "a time greater than 0: seconds, or text such as 90s, 10m, 2h"
    if isinstance(value, str) and (match := DURATION.fullmatch(value.strip())):
        value = float(match["amount"]) * DURATION_UNITS_S[match["unit"]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise wrong(expected)
    return float(value)


def _whole_or(word: str, what: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value == word or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise wrong(f"{word!r} or {what}")

    return BeforeValidator(check)


def _gpus(value: Any) -> Any:
    if value in ("auto", 0, 1) and not isinstance(value, bool | float):
        return value
    raise wrong("'auto', 0 or 1: a worker trains on one device")


def _job_name(value: str) -> str:
    if not JOB_NAME.fullmatch(value):
        raise wrong("1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise wrong("text without NUL characters")
    return value


def _variable_name(value: str) -> str:
    if not value or "=" in value or "\0" in value:
        raise wrong("the name of an environment variable")
    if value in RENDEZVOUS:
        raise PydanticCustomError(
            "conflict",
            "{reason}",
            {"reason": f"{value} is set by chaosrun, for each rank and attempt", "hint": "leave it out of env"},
        )
    return value


def _step_range(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2:
        return tuple(value)
    raise wrong("two steps, first and last, such as [1, 60]")


Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]  # numpy takes no larger one
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_no_nul)]
JobName = Annotated[str, Field(strict=True), AfterValidator(_job_name)]
Argument = Annotated[str, Field(strict=True), AfterValidator(_no_nul)]
Duration = Annotated[float, BeforeValidator(_seconds)]
"""Seconds. A job file may also write 500ms, 90s, 10m, 2h, 1d."""
Rank = Annotated[int | Literal["random"], _whole_or("random", "a rank, counted from 0")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PerWorker(Section):
    cpu: Number = Field(
        default=1.0, gt=0, description="CPU cores of one worker; its thread count is this, rounded down, at least 1"
    )
    gpu: Annotated[Literal["auto", 0, 1], BeforeValidator(_gpus)] = Field(
        default="auto", description="GPUs of one worker, 0 or 1; auto: one each where there are GPUs, else none"
    )


class CheckpointSpec(Section):
    every_steps: Positive = Field(default=50, description="optimizer steps between checkpoints; one is also saved at the end")
    keep: Annotated[int, Field(strict=True, ge=2)] = Field(
        default=3, description="checkpoints kept; at least 2, so that one damaged checkpoint never is the only one"
    )
    storage: Text | None = Field(
        default=None, description="directory for checkpoints; by default they lie in the run's directory"
    )


class DataSpec(Section):
    resume: DataResume = Field(
        default="seedable",
        description="how the data order is found again after a restart; only seedable is exact, the others are what scripts do",
    )
    probe: Flag = Field(
        default=True,
        description="fetch a few samples in a child process before the first batch, to see whether they depend on global "
        "random streams; false where fetching a sample changes something outside the process",
    )


class ScheduledFault(Section):
    """One entry of `faults.schedule`: a fault at one moment, or every so many steps."""

    kind: FaultKind = Field(default="kill", description="what is done to the rank; kill is SIGKILL")
    rank: Rank = Field(default="random", description="the rank it is done to, or random: drawn with faults.seed")
    at_step: Positive | None = Field(default=None, description="the step it happens at, counted from 1")
    every_steps: Positive | None = Field(default=None, description="repeat at each multiple of this many steps")
    until_step: Positive | None = Field(
        default=None, description="the last step that every_steps may reach; default: max_steps"
    )
    phase: Phase = Field(
        default="step", description="the point within the step: after it, in its all-reduce, in its checkpoint, …"
    )

    @model_validator(mode="after")
    def _one_trigger(self) -> Self:
        found: list[InitErrorDetails] = []
        if self.at_step is not None and self.every_steps is not None:
            found.append(conflict("every_steps", "at_step and every_steps exclude each other", "keep one of the two"))
        if self.until_step is not None and self.every_steps is None:
            found.append(
                conflict("until_step", "until_step needs every_steps", "add every_steps, or write at_step for a single fault")
            )
        if self.until_step is not None and self.every_steps is not None and self.until_step < self.every_steps:
            found.append(
                conflict(
                    "until_step",
                    f"until_step {self.until_step} comes before the first fault, at step {self.every_steps}",
                    "raise until_step or lower every_steps",
                )
            )
        if self.every_steps is not None and self.phase == "restore.end":
            found.append(
                conflict("every_steps", "a fault at restore.end cannot repeat by steps", "add one entry for each restore")
            )
        if self.phase in ("step", "reduce") and self.at_step is None and self.every_steps is None:
            reason = f"a fault at phase {self.phase} needs at_step or every_steps"
            found.append(conflict(None, reason, "say when, such as at_step: 7"))
        raise_conflicts("ScheduledFault", found)
        return self


class RandomFaults(Section):
    """`faults.random`: faults at steps drawn with `faults.seed`, a fixed count or so many steps apart on average."""

    kind: FaultKind = Field(default="kill", description="what is done to the rank; kill is SIGKILL")
    rank: Rank = Field(default="random", description="the rank it is done to, or random: drawn with faults.seed")
    count: Positive | None = Field(default=None, description="how many faults, each at another step")
    mean_steps: Annotated[Number, Field(ge=1)] | None = Field(default=None, description="mean number of steps between faults")
    between: Annotated[tuple[Positive, Positive], BeforeValidator(_step_range)] | None = Field(
        default=None, description="first and last step that may be drawn; default: [1, max_steps]"
    )
    phase: Literal["step", "reduce"] = Field(
        default="step", description="the point within the step: after it, or in its all-reduce"
    )

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        found: list[InitErrorDetails] = []
        if self.count is not None and self.mean_steps is not None:
            found.append(conflict("mean_steps", "count and mean_steps exclude each other", "keep one of the two"))
        if self.count is None and self.mean_steps is None:
            found.append(conflict(None, "random faults need count or mean_steps", "say how many, such as count: 3"))
        if self.between is not None and self.between[0] > self.between[1]:
            first, last = self.between
            found.append(conflict("between", f"no step lies between {first} and {last}", f"write [{last}, {first}]"))
        raise_conflicts("RandomFaults", found)
        return self


class FaultsSpec(Section):
    seed: Count = Field(default=0, description="seed of everything random in the plan")
    schedule: tuple[ScheduledFault, ...] = Field(default=(), description="faults at known moments")
    random: RandomFaults | None = Field(default=None, description="faults at random steps")


class RecoverySpec(Section):
    max_restarts: Count = Field(
        default=3, description="restarts after deaths that were not planned; planned faults do not count"
    )
    acquire_timeout: Duration = Field(default=60.0, description="longest wait for the cluster's resources, such as 60s")
    hang_timeout: Duration = Field(default=300.0, description="longest time without a step before the attempt counts as hung")
    preload: tuple[Text, ...] = Field(
        default=(), description="modules imported once, before the workers are forked, so that a restart need not import them"
    )


class Tolerance(Section):
    atol: Number = Field(default=0.0, ge=0, description="largest absolute difference")
    rtol: Number = Field(default=0.0, ge=0, description="largest difference relative to the reference")

    @property
    def exact(self) -> bool:
        """Nothing is tolerated: equality of bits is asked for."""
        return self.atol == 0 and self.rtol == 0


class VerifySpec(Section):
    losses: Tolerance = Field(
        default=Tolerance(), description="tolerance {atol, rtol} of every step's loss; default: equal bits"
    )
    weights: Tolerance = Field(
        default=Tolerance(), description="tolerance {atol, rtol} of the final weights; default: equal bits"
    )
    confirm: Flag = Field(
        default=True, description="after a difference, run the reference again to see whether the job repeats itself"
    )


class JobSpec(Section):
    """One job file, complete. Only `name`, `script` and `workers` are required."""

    name: JobName = Field(description="the job's name, part of run ids")
    script: Text = Field(description="the training script, relative to the job file")
    args: tuple[Argument, ...] = Field(default=(), description="a list of command line arguments for the script")
    env: dict[Annotated[str, AfterValidator(_variable_name)], Argument] = Field(
        default={}, description="environment variables of every worker"
    )
    workers: Positive = Field(description="number of workers, one rank each (the world size)")
    per_worker: PerWorker = Field(default=PerWorker(), description="resources of one worker: cpu, gpu")
    seed: Seed = Field(default=0, description="seed of the job: python, numpy, torch, data order")
    deterministic: Literal["strict", "warn", "off"] = Field(
        default="strict",
        description="strict: an operation that cannot be deterministic is an error; warn: it is logged; off: allowed",
    )
    max_steps: Positive | None = Field(
        default=None, description="stop after this many optimizer steps; default: when the script ends"
    )
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="when checkpoints are saved, and where")
    data: DataSpec = Field(default=DataSpec(), description="how the data order is resumed")
    faults: FaultsSpec = Field(default=FaultsSpec(), description="what is done to the job: schedule, random, seed")
    recovery: RecoverySpec = Field(default=RecoverySpec(), description="how long and how often recovery is tried")
    verify: VerifySpec = Field(default=VerifySpec(), description="how the two legs are compared")
    timeout: Duration | None = Field(default=None, description="longest time before the run is stopped, such as 2h")

    @property
    def threads(self) -> int:
        """Compute threads of one worker."""
        return max(1, int(self.per_worker.cpu))
