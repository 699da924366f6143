"""What a supervisor needs from a cluster, what wakes it, and what it tells each worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from chaosrun.cluster.messages import NodeEvent, RankStack
from chaosrun.faults.fault import Fault
from chaosrun.faults.outside import StrikeOrder
from chaosrun.processes import ProcessIdentity
from chaosrun.records.events import Outcome, PlacementAcquired
from chaosrun.records.heartbeat import Activity
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.run_file import RunInfo
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.reference import job_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptLeg:
    """End the leg in order."""

    to: object
    """The supervisor that is meant: it may be over when this comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegResult:
    outcome: Outcome
    message: str
    hint: str | None
    final_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFaults:
    """Strike these, too."""

    to: object
    faults: tuple[Fault, ...]


Woken = InterruptLeg | AddFaults


class Workers(Protocol):
    """What the supervisor needs from a cluster: `cluster.workers.ClusterWorkers`, or a fake in tests."""

    def acquire(self) -> PlacementAcquired:
        """Get places for all ranks, anew when a node was lost. Raises ResourcesError."""
        ...

    @property
    def nodes(self) -> Sequence[str]: ...

    @property
    def ray(self) -> str:
        """ "private", "joined" or "borrowed"."""
        ...

    def devices(self) -> str:
        """The GPU models that the job may run on, or "cpu"."""
        ...

    def place(self, order: WorkerOrder) -> WorkerOrder:
        """Fill in node, local rank and devices."""
        ...

    def start(self, orders: Sequence[WorkerOrder]) -> tuple[dict[int, int], str]:
        """Fork all ranks of an attempt; returns their pids by rank (none where a command starts them,
        which is told by events), and the rendezvous address. Raises ResourcesError."""
        ...

    def stop(self, attempt: int) -> None:
        """Begin to kill an attempt; each node reports when it has stopped."""
        ...

    def next_event(self, timeout_s: float) -> tuple[str, NodeEvent | Woken] | None:
        """The next event, and its node, None when none came in time; Stopped comes once from each node."""
        ...

    def wake(self, event: Woken) -> None:
        """Have `next_event` return this; safe from signal handlers and other threads."""
        ...

    # What hangs

    def activities(self, leg: LegLayout, attempt: int) -> Mapping[int, Activity] | None:
        """What there is to see of every rank; None when that cannot be said now, because an agent has just died."""
        ...

    def stacks(self, leg: LegLayout, attempt: int, *, wait_s: float) -> Mapping[int, RankStack] | None:
        """Have all live ranks write their stacks to their logs, and say where each is; None likewise."""
        ...

    # What strikes

    def node_of(self, rank: int) -> str: ...

    def identify_rank(self, attempt: int, rank: int, *, listening: bool = False) -> tuple[int, int] | None:
        """(pid, start time) of a rank that runs in this attempt; None when it does not, or is not `listening` for notices."""
        ...

    def strike(self, orders: Sequence[StrikeOrder]) -> list[bool]:
        """Carry these out at once; False for one whose rank was gone, and nothing was done."""
        ...

    def lose(self, node: str) -> None:
        """The agent of this node is gone; it will not be told again."""
        ...

    def avoid(self, node: str, why: str) -> None:
        """Place nothing on this node any more."""
        ...

    def lives_beside(self, rank: int) -> bool:
        """Whether this rank is on the node that this process itself depends on."""
        ...

    def head(self) -> ProcessIdentity | None:
        """Ray's head process, where it is this process's own."""
        ...


def order_template(name: str, leg: LegLayout, spec: JobSpec, info: RunInfo, *, reference: Path | None = None) -> WorkerOrder:
    """What every worker of a leg is told; attempt and rank are filled in later. `reference`: the leg that this one is to be
    compared with."""
    own = LegLayout(leg.path.resolve())
    itself = spec.by == "script"
    return WorkerOrder(
        leg=name,
        leg_path=str(own.path),
        storage_path=str(leg.storage) if leg.storage else None,
        attempt=0,
        rank=0,
        world_size=spec.workers,
        local_rank=0,
        local_world_size=spec.workers,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
        script=info.script,
        args=tuple(map(own.filled_in, spec.args)),
        cwd=str(own.work) if itself else info.directory,
        directory=info.directory,
        drill_began_s=info.created_s,
        by=spec.by,
        module=spec.module,
        command=spec.command or (),
        resume_args=tuple(map(own.filled_in, spec.resume.args)),
        resume_env={name: own.filled_in(value) for name, value in spec.resume.env.items()},
        outputs=(str(own.output), str(own.work)) if itself else (),
        prime_buckets=spec.prime_buckets,
        reference_path=str(reference.resolve()) if reference and itself else None,
        seed=spec.seed,
        deterministic=spec.deterministic,
        threads=spec.threads,
        max_steps=spec.max_steps,
        every_steps=spec.checkpoint.every_steps,
        keep=spec.checkpoint.keep,
        classes=spec.checkpoint.classes,
        data_resume=spec.data.resume,
        probe=spec.data.probe,
        job_fingerprint=job_fingerprint(spec),
    )


def resume_values(template: WorkerOrder, attempt: int) -> dict[str, Any]:
    """What an order of this attempt has of `resume.args` and `resume.env`: only a restart is told to resume."""
    restart = attempt > 1
    args = (*template.args, *(template.resume_args if restart else ()))
    return {"args": args, "resume_args": (), "resume_env": template.resume_env if restart else {}}
