"""JobSpec: everything a job file may say, with types, bounds and defaults.

Owns the meaning of one file on its own. Must not know YAML, places in a file, or what a plan can do with it.
Each field's description is what an error shows as its hint.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import InitErrorDetails

from chaosrun.records.order import DataResume
from chaosrun.spec.faults import FaultsSpec
from chaosrun.spec.fields import (
    Argument,
    ClassName,
    Confirmations,
    Count,
    Device,
    Duration,
    Flag,
    JobName,
    Kept,
    Memory,
    Number,
    Output,
    Positive,
    Section,
    Seed,
    Standby,
    Text,
    Variables,
    conflict,
    some,
)

SHORTEST_HANG_S = 20.0
"""A rank is never taken for hung before, unless recovery.hang_timeout says so. Longer than healthy machines pause: an fsync on
a busy disk, a page-in, TCP's retransmissions (0.2 s, doubled: 13 s)."""
VERBATIM = frozenset({"args", "env", "command", "resume.args", "resume.env"})
"""Keys whose scalars are text as written in the file: `0.10` stays "0.10" and `off` stays "off"."""


class PerWorker(Section):
    cpu: Number = Field(default=1.0, gt=0, description="CPU cores of a worker; its threads are this, rounded down, at least 1")
    gpu: Device = Field(default="auto", description="GPUs of a worker, 0 or 1; auto: one each where there are GPUs, else none")


class CheckpointSpec(Section):
    every_steps: Positive = Field(default=50, description="optimizer steps between checkpoints; one is also saved at the end")
    keep: Annotated[int, Field(strict=True, ge=2)] = Field(
        default=3, description="checkpoints kept; at least 2, so that one damaged checkpoint never is the only one"
    )
    keep_reference: Kept = Field(
        default="auto",
        description="checkpoints that the reference run keeps, for other drills to begin at: a number, or all; auto: all in "
        "sweeps and suites, else as many as keep says",
    )
    mode: Literal["auto", "sync", "async"] = Field(
        default="auto",
        description="sync: the training waits until a checkpoint is committed; async: only until its state is copied into "
        "shared memory, from which a process beside each rank saves it (takes as much memory as rank 0's state); auto: async "
        "from 32 MiB of state on; below that a save takes milliseconds, and where a restart begins does not depend on timing",
    )
    memory: Memory = Field(
        default="auto",
        description="what each rank may take of its node's memory for the copies of asynchronous saves, such as 8GiB; restarts "
        "are restored from these, as long as their nodes live. With room for two, the newest checkpoint's is kept until the "
        "next is committed. auto: as much as is free, for the second one where that leaves as much as it takes; `chaosrun run` "
        "restores from them, drills from the storage, which is what they are to prove",
    )
    storage: Text | None = Field(
        default=None,
        description="directory for checkpoints, or s3://bucket/prefix, gs://bucket/prefix, file:///directory; by default they "
        "lie in the run's directory",
    )
    classes: tuple[ClassName, ...] = Field(
        default=(),
        description="classes of your own that checkpoints may hold, such as [package.module.Class]; anything but tensors and "
        "plain values is refused otherwise",
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


class ResumeSpec(Section):
    by: Literal["auto", "chaosrun", "script"] = Field(
        default="auto",
        description="who saves and resumes: chaosrun (chaosrun.attach), or the script with checkpoints of its own; auto: "
        "chaosrun where the script imports it, else script",
    )
    args: tuple[Argument, ...] = Field(default=(), description="arguments added from the second attempt on, to have it resume")
    env: Variables = Field(default={}, description="environment variables set from the second attempt on")


class RecoverySpec(Section):
    max_restarts: Count = Field(default=3, description="restarts after unplanned deaths; planned faults do not count")
    acquire_timeout: Duration = Field(default=60.0, description="longest wait for the cluster's resources, such as 60s")
    hang_timeout: Duration | None = Field(
        default=None,
        description="longest time without progress before an attempt counts as hung, such as 60s; by default ten times the "
        "longest that the job's steps and checkpoints have taken, at least 20 s",
    )
    start_timeout: Duration = Field(
        default=300.0, description="the same before the first step, and where nothing is known yet of how long it takes"
    )
    backoff: Duration = Field(
        default=1.0,
        description="rest before the second unplanned restart without progress, such as 1s; doubled each time, at most 30 s",
    )
    on_divergence: Literal["stop", "warn"] = Field(
        default="stop",
        description="of `chaosrun run`: when what an attempt restores, or does again, is not what was recorded before: stop "
        "with everything kept, or warn and go on; the verdict is FAIL either way",
    )
    standby: Standby = Field(
        default=0,
        description="free nodes, a number or all, on which everything is imported ahead, so that the ranks of a lost node are "
        "there at once; nothing of them is reserved",
    )
    preload: tuple[Text, ...] = Field(
        default=(), description="modules imported once, before the workers are forked, so that a restart need not import them"
    )


class Tolerance(Section):
    atol: Number = Field(default=0.0, ge=0, description="largest absolute difference")
    rtol: Number = Field(default=0.0, ge=0, description="largest difference relative to the reference")

    @property
    def exact(self) -> bool:
        """No tolerance: bits must be equal."""
        return self.atol == 0 and self.rtol == 0


class VerifySpec(Section):
    profile: Literal["strict", "standard", "relaxed"] = Field(
        default="strict",
        description="how equal the legs have to be: strict: bit for bit; standard, relaxed: losses to 0.2 % and 0.75 %, for "
        "jobs that cannot be exact (docs/exactness.md has the numbers); what a restart begins with is exact in each",
    )
    losses: Tolerance = Field(default=Tolerance(), description="tolerance {atol, rtol} of step losses; default: equal bits")
    weights: Tolerance = Field(default=Tolerance(), description="tolerance {atol, rtol} of final weights; default: equal bits")
    confirm: Confirmations = Field(
        default=1,
        description="after a difference, run the reference again, so many times (true: once), to see whether it repeats itself",
    )
    begin: Literal["auto", "fault", "beginning"] = Field(
        default="auto",
        description="where the run under faults begins: at the reference run's checkpoint before the first fault, or at the "
        "beginning; auto: the former in sweeps, shrinks and suites, and for jobs of more than 1,000 steps",
    )
    on_difference: Literal["stop", "go_on"] = Field(
        default="stop",
        description="of a drill that may end early: once the state of two checkpoints is not the reference's, stop, or go on "
        "to the end",
    )


class JobSpec(Section):
    """One job file, complete. Only `name`, `workers` and one of `script`, `module` and `command` are required."""

    name: JobName = Field(description="the job's name, part of run ids")
    script: Text | None = Field(default=None, description="the training script, relative to the directory")
    module: Text | None = Field(default=None, description="in the place of script: a module, run as python -m would")
    command: Annotated[tuple[Argument, ...] | None, BeforeValidator(some)] = Field(
        default=None,
        description="in the place of script: the command that starts all ranks of a node, such as [torchrun, train.py]",
        json_schema_extra={"minItems": 1},
    )
    args: tuple[Argument, ...] = Field(default=(), description="a list of command line arguments for the script")
    env: Variables = Field(default={}, description="environment variables of every worker")
    workers: Positive = Field(description="number of workers, one rank each (the world size)")
    per_worker: PerWorker = Field(default=PerWorker(), description="resources of one worker: cpu, gpu")
    seed: Seed = Field(default=0, description="seed of the job: python, numpy, torch, data order")
    deterministic: Literal["strict", "warn", "off"] = Field(
        default="strict",
        description="strict: an operation that cannot be deterministic is an error; warn: it is logged; off: allowed",
    )
    max_steps: Positive | None = Field(default=None, description="stop after so many steps; default: when the script ends")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="when checkpoints are saved, and where")
    data: DataSpec = Field(default=DataSpec(), description="how the data order is resumed")
    resume: ResumeSpec = Field(default=ResumeSpec(), description="who saves and resumes, and what a restart is told")
    outputs: tuple[Output, ...] = Field(
        default=(), description="files and folders that the script writes, relative to the directory; each leg gets its own"
    )
    directory: Text | None = Field(
        default=None,
        description="where the script, outputs and the job's other relative paths start; default: the job file's own",
    )
    prime_buckets: Flag = Field(
        default=True,
        description="have DDP rebuild its gradient buckets before the first step of every attempt; false: as torch does it, "
        "which is not exact across a restart at three or more workers",
    )
    faults: FaultsSpec = Field(default=FaultsSpec(), description="what is done to the job: schedule, random, seed")
    recovery: RecoverySpec = Field(default=RecoverySpec(), description="how long and how often recovery is tried")
    verify: VerifySpec = Field(default=VerifySpec(), description="how the two legs are compared")
    timeout: Duration | None = Field(default=None, description="longest time before the run is stopped, such as 2h")

    @property
    def threads(self) -> int:
        """Compute threads of one worker."""
        return max(1, int(self.per_worker.cpu))

    @property
    def by(self) -> Literal["chaosrun", "script"]:
        """Who saves and resumes; `auto` was resolved when the job was loaded."""
        return "chaosrun" if self.resume.by != "script" and self.script else "script"

    def conflicts(self) -> Iterator[InitErrorDetails]:
        ways = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if not ways:
            yield conflict(None, "a job needs a script, a module or a command", "such as script: train.py")
        elif len(ways) > 1:
            yield conflict(ways[1], f"{' and '.join(ways)} exclude each other", "keep one of them")
        elif ways != ["script"] and self.resume.by == "chaosrun":
            yield conflict("resume", f"resume.by: chaosrun needs a script, not a {ways[0]}", "leave it out")
