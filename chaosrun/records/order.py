"""The worker order: everything one rank of one attempt is told, as one JSON value, from the supervisor to the worker."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from chaosrun.records.opened import TrainingTime

DataResume = Literal["seedable", "plain", "skip", "stateful", "stateful_skip"]
"""How a restarted attempt finds its place in the data; see `protocol.strategies`."""

COPIES = 2
"""Of its state that a rank may keep in memory, in turns: the newest checkpoint's, and that of the save under way."""
ASYNC_FROM_BYTES = 32 << 20
"""Of state. Below it a save takes milliseconds, and a restart point that does not depend on timing is worth more."""
Settle = Literal["", "watch", "stop", "go_on"]
"""Nothing; writes down how it stands; ends where all is equal, and where it is not (stop) or only where it is (go_on)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    leg: str
    """"reference" or "chaos"."""
    leg_path: str
    storage_path: str | None
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int = 1
    """Of the placement."""
    master_addr: str
    master_port: int
    script: str
    """Absolute path."""
    args: tuple[str, ...] = ()
    cwd: str
    directory: str = ""
    """The job's own, absolute: what lies there is not this leg's to change."""
    drill_began_s: float = 0.0
    """Files that were last changed before are of other runs."""
    by: Literal["chaosrun", "script"] = "chaosrun"
    """Who saves and resumes: chaosrun.attach, or the script with checkpoints of its own."""
    module: str | None = None
    """Run in the place of the script, as `python -m` would."""
    command: tuple[str, ...] = ()
    """The launcher that starts all ranks of a node, in the place of the script."""
    resume_args: tuple[str, ...] = ()
    """Added to args from the second attempt on."""
    resume_env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Set from the second attempt on."""
    outputs: tuple[str, ...] = ()
    """Absolute paths: what the script writes in this leg."""
    prime_buckets: bool = True
    reference_path: str | None = None
    """The reference's leg folder, whose traces tell where an attempt stands that resumed by itself; None in the reference."""
    seed: int
    deterministic: Literal["strict", "warn", "off"]
    threads: int
    gpus: tuple[int, ...] = ()
    """Device ids of this node that belong to the job, by local rank; empty on CPU."""
    max_steps: int | None = None
    every_steps: int
    keep: int
    mode: Literal["auto", "sync", "async"] = "sync"
    """Whether the training waits for a checkpoint, or only for a copy of its state; auto: from ASYNC_FROM_BYTES on a copy."""
    memory_limit: int | None = None
    """Bytes that such a copy may take; None: as many as are free."""
    from_memory: bool = False
    """Whether a restore may come from the copies that nodes keep: see `protocol.memory`."""
    memory: tuple[int, ...] = ()
    """File descriptors, in this process, of the node's memory for copies: two of this rank's; two with what ranks share."""
    classes: tuple[str, ...] = ()
    """Classes of the user's own that checkpoints may hold; see `protocol.plain_values`."""
    data_resume: DataResume = "seedable"
    probe: bool = True
    """Whether samples are fetched to see what they depend on (observe.probe)."""
    resume: str | None = None
    """Checkpoint name to restore, None to start from the beginning."""
    audited: str = ""
    """Its signature (`checkpoint.audit.signature_of`) from before the supervisor hashed its files for this attempt."""
    faults: tuple[dict[str, Any], ...] = ()
    """Faults armed for this rank in this attempt (plan.faults.Fault as JSON)."""
    passed: dict[str, int] = dataclasses.field(default_factory=dict)
    """How often attempts before this one came by a phase that an attempt comes by once (rendezvous, restore.*)."""
    distributed_debug: bool = False
    """Run with TORCH_DISTRIBUTED_DEBUG=DETAIL, so that DDP's errors name parameters."""
    announcements: str = ""
    """Of a command: the socket on which its ranks announce themselves; see `records.announcements`."""
    survey: bool = False
    """Write down every point that is reached (`rank-R.points.jsonl`): only to find out what a sweep has to try."""
    settle: Settle = ""
    """What is done where its complete state is, or is not, the reference's, after the last fault: see `protocol.early_end`."""
    looks_after: int | None = None
    """The step from which on checkpoints say what an early end rests on, which takes time; None: never."""
    inspect: tuple[int, ...] = ()
    """Steps whose every quantity is written down (`records.inspection`): only in a replay for `chaosrun diagnose`."""
    earlier: tuple[TrainingTime, ...] = ()
    """Legs whose files are none of this one's."""
    job_fingerprint: str = ""
    """What a checkpoint must agree on to be restored, as far as the spec says it: script, args, world size, seed."""
