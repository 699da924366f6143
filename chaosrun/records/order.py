"""The worker order: all instructions for one rank of one attempt, sent from the supervisor to the worker as one JSON value."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from chaosrun.records.opened import TrainingTime

DataResume = Literal["seedable", "plain", "skip", "stateful", "stateful_skip"]
"""How a restarted attempt finds its position in the data; see `protocol.strategies`."""

COPIES = 2
"""Copies of its state that a rank keeps in memory in turns: the newest checkpoint's, and that of the save in progress."""
ASYNC_FROM_BYTES = 32 << 20
"""Size of the state. A smaller one is saved within milliseconds, and a restart point independent of timing is worth more."""
HASH_ORDER = "CHAOSRUN_HASH_ORDER"
"""Environment variable of attempts with a new hash seed: the place where the script depends on it, see `spec.hash_order`."""
Settle = Literal["", "watch", "stop", "go_on"]
""""": no comparison; watch: only record it; go_on: end if the state is equal; stop: end also if it differs for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    leg: str
    """One of `layout.LEGS`."""
    leg_path: str
    storage_path: str | None
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int = 1
    """Number of nodes in the placement."""
    master_addr: str
    master_port: int
    script: str
    """Absolute path."""
    args: tuple[str, ...] = ()
    cwd: str
    directory: str = ""
    """The job's own directory, absolute path: this leg must not change files in it."""
    drill_began_s: float = 0.0
    """Files last changed before this time belong to other runs."""
    by: Literal["chaosrun", "script"] = "chaosrun"
    """Who saves and resumes: chaosrun.attach, or the script with its own checkpoints."""
    module: str | None = None
    """A module to run instead of the script, as by `python -m`."""
    command: tuple[str, ...] = ()
    """The launcher that starts all ranks of a node, run instead of the script."""
    resume_args: tuple[str, ...] = ()
    """Arguments that are added from the second attempt on."""
    resume_env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables that are set from the second attempt on."""
    outputs: tuple[str, ...] = ()
    """Absolute paths of the script's outputs in this leg."""
    prime_buckets: bool = True
    reference_path: str | None = None
    """The reference's leg folder, whose traces show at which step a script resumed by itself; None in the reference."""
    seed: int
    deterministic: Literal["strict", "warn", "off"]
    threads: int
    gpus: tuple[int, ...] = ()
    """Device ids of this node that belong to the job, by local rank; empty on CPU."""
    max_steps: int | None = None
    every_steps: int
    keep: int
    mode: Literal["auto", "sync", "async"] = "sync"
    """The training waits for a save (sync) or only for a copy of its state (async); auto: async from ASYNC_FROM_BYTES on."""
    memory_limit: int | None = None
    """Bytes that the copy of an async save may take; None: as many as are free."""
    from_memory: bool = False
    """Whether a restore may come from the copies that nodes keep: see `protocol.snapshot`."""
    memory: tuple[int, ...] = ()
    """File descriptors, in this process, of the node's memory for copies: two for this rank, two for what ranks share."""
    classes: tuple[str, ...] = ()
    """Classes of the user's own that checkpoints may hold; see `protocol.plain_values`."""
    data_resume: DataResume = "seedable"
    probe: bool = True
    """Whether samples are fetched to test what they depend on (observe.probe)."""
    resume: str | None = None
    """Checkpoint name to restore, None to start from the beginning."""
    audited: str = ""
    """That checkpoint's signature (`checkpoint.audit.signature_of`) from before the supervisor hashed its files."""
    faults: tuple[dict[str, Any], ...] = ()
    """Faults armed for this rank in this attempt (`faults.fault.Fault` as JSON)."""
    passed: dict[str, int] = dataclasses.field(default_factory=dict)
    """For phases that an attempt passes once (rendezvous, restore.*), how often earlier attempts passed them."""
    distributed_debug: bool = False
    """Run with TORCH_DISTRIBUTED_DEBUG=DETAIL, so that DDP's errors name parameters."""
    announcements: str = ""
    """The socket on which the ranks of a command announce themselves; see `records.announcements`."""
    survey: bool = False
    """Record every point that is reached (`rank-R.points.jsonl`), to find the points that a sweep must try."""
    settle: Settle = ""
    """How to react if, after the last fault, the complete state equals the reference's or not; see `protocol.early_end`."""
    looks_after: int | None = None
    """From this step on, checkpoints record the state by which an early end is decided, which takes time; None: never."""
    inspect: tuple[int, ...] = ()
    """Steps of which every quantity is recorded (`records.inspection`); only in a replay for `chaosrun diagnose`."""
    earlier: tuple[TrainingTime, ...] = ()
    """Other legs, whose files this leg should not read."""
    job_fingerprint: str = ""
    """Digest of the parts of the spec that a restored checkpoint must match; see `supervise.reference`."""
