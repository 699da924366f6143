"""The names of fault kinds, phases and options, and what there is to say of a kind; the kinds are in `faults.kinds`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Phase = Literal[
    "rendezvous",
    "restore.begin",
    "restore.end",
    "fetch",
    "forward",
    "reduce",
    "optimizer",
    "record",
    "checkpoint.begin",
    "checkpoint.file",
    "checkpoint.fsync.before",
    "checkpoint.fsync.after",
    "checkpoint.precommit",
    "checkpoint.rename.before",
    "checkpoint.rename.after",
    "checkpoint.postcommit",
    "checkpoint.retention",
    "step",
]
"""The named points in a worker, in the order in which an attempt comes by them."""
PHASES: tuple[str, ...] = get_args(Phase)
CHECKPOINT_PHASES = frozenset(phase for phase in PHASES if phase.startswith("checkpoint."))
RESTORE_PHASES = frozenset({"restore.begin", "restore.end"})
TRAINING_PHASES = frozenset({"fetch", "forward", "reduce", "optimizer", "record", "step"})

FaultKind = Literal[
    # process
    "kill",
    "preempt",
    "stop",
    "pause",
    "segfault",
    "exception",
    "exit",
    "memory",
    "loader_worker",
    "slow",
    "hang",
    # node
    "node",
    "raylet",
    "drain",
    # control
    "supervisor",
    "agent",
    "head",
    # memory
    "flip_bit",
    "nan",
    "diverge",
    # storage
    "truncate",
    "zero_tail",
    "flip_file_bit",
    "missing_file",
    "missing_manifest",
    "foreign_manifest",
    "stale_staging",
    "no_space",
    "io_error",
    "slow_storage",
    "failed_rename",
    # rendezvous
    "port_taken",
    "no_arrival",
]

Option = Literal["grace_s", "duration_s", "factor", "steps", "mebibytes", "state", "tensor", "bit", "file"]
OPTIONS: tuple[str, ...] = get_args(Option)

Evidence = Literal["death", "note", "hang", "node", "successor"]
"""How a fault is known to have happened.

death: the very process it was meant for was seen, from outside, to end in the way of this kind.
note: the process goes on, and whoever struck wrote down what it found before and after.
hang: the supervisor declared the hang, and named this rank as the one that stopped first.
node: the agent, and with it every process below, was seen to be gone, from outside.
successor: the supervisor itself was gone; the one after it says so.
"""

PREEMPTED_EXIT_CODE = 85
"""What a rank leaves with after a preemption notice, its checkpoint committed."""
LEFT_ON_NOTICE = "preempted"
"""The status in the end record of such a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    family: Literal["process", "node", "control", "memory", "storage", "rendezvous"]
    words: str
    """What it does; {rank} stands for "rank 1", {option} for an option's value."""
    striker: Literal["worker", "supervisor"] = "worker"
    """Who does it. The supervisor learns from the marker that a rank has come to the point that was asked for."""
    phases: frozenset[str] = frozenset(PHASES)
    """Where it may strike; `default_phase` is one of them."""
    default_phase: Phase = "step"
    timed: bool = False
    """May also strike after a delay, from outside."""
    evidence: Evidence = "death"
    signals: frozenset[int] = frozenset()
    """Of evidence "death": signals that the process may end by."""
    exit_codes: Literal["none", "zero", "failure", "preempted"] = "none"
    """Of evidence "death": exit codes that the process may end with. After zero there is no end record: it left silently."""
    error: str | None = None
    """Of evidence "death": how the error in the end record of a process that left reads, as "Type: message", a regular
    expression. {fault} stands for the fault's id, other names for values of its note. None: whatever it says."""
    options: Mapping[Option, float | int | str | None] = field(default_factory=dict)
    """With their defaults; None: chosen where it strikes, or not at all."""
    waits: bool = True
    """Of the supervisor's kinds: the rank waits at its point until it is done."""
    ends_attempt: bool = True
    """The job goes on from a checkpoint afterwards."""
    verdict: Literal["PASS", "FAIL"] = "PASS"
    """Of a job that comes back exactly."""
    proof: str
    """For people: how chaosrun knows that it happened."""
