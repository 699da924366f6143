"""The kinds of faults: a closed set. What each does, who does it, at which moments, with which options, how chaosrun knows that
it happened, and what it means for the verdict.

Values only; what strikes is in `faults.arms` (inside the worker) and `faults.outside`. A kind that is
not here does not exist, and a test holds the arms, this table and docs/faults.md's against each other.
"""

import signal
from collections.abc import Mapping

from chaosrun.faults.kind import CHECKPOINT_PHASES, PHASES, PREEMPTED_EXIT_CODE, TRAINING_PHASES, Kind, Option

_SIGKILL, _SIGSEGV = int(signal.SIGKILL), int(signal.SIGSEGV)
_EVERYWHERE = frozenset(PHASES)
_IN_TRAINING = TRAINING_PHASES
_AT_STEPS = frozenset({"step"})
_COMMITTED = frozenset({"checkpoint.postcommit", "step"})
_BEFORE_UPDATE = frozenset({"optimizer"})
_STORAGE_FAILED = r"^ResourcesError: checkpoint storage failed at .*: "

_FILE: Mapping[Option, None] = {"file": None}
_DAMAGES: tuple[tuple[str, str, Mapping[Option, None]], ...] = (
    ("truncate", "truncate a file of the newest checkpoint", _FILE),
    ("zero_tail", "zero the tail of a file of the newest checkpoint", _FILE),
    ("flip_file_bit", "flip one bit in a file of the newest checkpoint", _FILE),
    ("missing_file", "remove a file of {rank} from the newest checkpoint", _FILE),
    ("missing_manifest", "remove the manifest of the newest checkpoint", {}),
    ("foreign_manifest", "give the newest checkpoint the manifest of another step", {}),
)

KINDS: Mapping[str, Kind] = {
    "kill": Kind(
        family="process",
        words="SIGKILL {rank}",
        timed=True,
        signals=frozenset({_SIGKILL}),
        proof="its process was seen to die of SIGKILL",
    ),
    "preempt": Kind(
        family="process",
        words="preemption notice (SIGTERM, {grace_s:g} s of grace) to {rank}",
        phases=_IN_TRAINING,
        timed=True,
        signals=frozenset({_SIGKILL}),
        exit_codes="preempted",
        error=r"^Preempted: rank \d+ was told to leave",
        options={"grace_s": 30.0},
        proof=f"its process left with exit code {PREEMPTED_EXIT_CODE}, saying so, or died of SIGKILL when grace had run out",
    ),
    "stop": Kind(
        family="process",
        words="SIGSTOP {rank}",
        timed=True,
        evidence="hang",
        proof="its process was seen stopped (state T) when the hang was declared",
    ),
    "pause": Kind(
        family="process",
        words="SIGSTOP {rank}, SIGCONT after {duration_s:g} s",
        timed=True,
        evidence="note",
        options={"duration_s": 1.0},
        ends_attempt=False,
        proof="its process was seen stopped (state T), and running again after SIGCONT",
    ),
    "segfault": Kind(
        family="process",
        words="segmentation fault in {rank}",
        timed=True,
        signals=frozenset({_SIGSEGV}),
        proof="its process was seen to die of SIGSEGV",
    ),
    "exception": Kind(
        family="process",
        words="an exception raised in {rank}",
        exit_codes="failure",
        error=r"^InjectedError: fault {fault}\b",
        proof="its end record names that very exception",
    ),
    "exit": Kind(
        family="process",
        words="{rank} leaves silently with exit code 0",
        exit_codes="zero",
        proof="its process was seen to leave with exit code 0 and without an end record",
    ),
    "memory": Kind(
        family="process",
        words="{rank} runs out of memory within {mebibytes} MiB more",
        exit_codes="failure",
        error=r"^MemoryError: fault {fault}\b",
        options={"mebibytes": 256},
        proof="its end record names the MemoryError at the limit that was set for it alone",
    ),
    "loader_worker": Kind(
        family="process",
        words="SIGKILL a loader worker of {rank}",
        phases=_IN_TRAINING,
        exit_codes="failure",
        error=r"^RuntimeError: DataLoader worker \(pid.*\b{victim}\b",
        proof="its end record names torch's error about that very loader worker",
    ),
    "slow": Kind(
        family="process",
        words="{rank} takes {factor:g} times as long for {steps} steps",
        phases=_AT_STEPS,
        evidence="note",
        options={"factor": 3.0, "steps": 10},
        ends_attempt=False,
        proof="its steps were timed before and during",
    ),
    "hang": Kind(
        family="process",
        words="{rank} hangs, holding Python's global lock",
        phases=_IN_TRAINING | CHECKPOINT_PHASES,
        evidence="hang",
        proof="the hang was declared and this rank named as the first to stop",
    ),
    "node": Kind(
        family="node",
        words="SIGKILL every process of the node of {rank}",
        striker="supervisor",
        phases=_EVERYWHERE - {"rendezvous"},
        timed=True,
        evidence="node",
        proof="its agent and every process below were seen to be gone",
    ),
    "raylet": Kind(
        family="node",
        words="SIGKILL the raylet of the node of {rank}",
        striker="supervisor",
        phases=_EVERYWHERE - {"rendezvous"},
        timed=True,
        evidence="node",
        proof="the raylet, its agent and every process below were seen to be gone",
    ),
    "drain": Kind(
        family="node",
        words="drain notice ({grace_s:g} s of grace) to the node of {rank}",
        striker="supervisor",
        waits=False,
        phases=_AT_STEPS,
        timed=True,
        evidence="node",
        options={"grace_s": 30.0},
        proof="its ranks checkpointed and left, and its agent was seen to be gone",
    ),
    "supervisor": Kind(
        family="control",
        words="SIGKILL the supervisor, {rank} waiting",
        striker="supervisor",
        phases=_EVERYWHERE - {"rendezvous"},
        timed=True,
        evidence="successor",
        proof="the supervisor that took over found its predecessor gone",
    ),
    "agent": Kind(
        family="control",
        words="SIGKILL the agent of the node of {rank}",
        striker="supervisor",
        phases=_EVERYWHERE - {"rendezvous"},
        timed=True,
        evidence="node",
        proof="the agent's process was seen to be gone",
    ),
    "head": Kind(
        family="control",
        words="SIGKILL Ray's head, {rank} waiting",
        striker="supervisor",
        phases=_EVERYWHERE - {"rendezvous"},
        timed=True,
        evidence="successor",
        proof="the supervisor that took over found Ray's head gone",
    ),
    "flip_bit": Kind(
        family="memory",
        words="flip one bit of a {state} on {rank}",
        phases=_BEFORE_UPDATE | _AT_STEPS,
        default_phase="optimizer",
        evidence="note",
        options={"state": "parameter", "tensor": None, "bit": None},
        ends_attempt=False,
        verdict="FAIL",
        proof="the element's bits were read before and after",
    ),
    "nan": Kind(
        family="memory",
        words="write NaN into a {state} on {rank}",
        phases=_BEFORE_UPDATE | _AT_STEPS,
        default_phase="optimizer",
        evidence="note",
        options={"state": "gradient", "tensor": None},
        ends_attempt=False,
        verdict="FAIL",
        proof="the element's bits were read before and after",
    ),
    "diverge": Kind(
        family="memory",
        words="make the replica of {rank} unequal",
        phases=_AT_STEPS,
        evidence="note",
        options={"tensor": None},
        ends_attempt=False,
        verdict="FAIL",
        proof="the tensor's fingerprint was taken before and after",
    ),
    **{
        name: Kind(
            family="storage",
            words=words,
            phases=_COMMITTED,
            default_phase="checkpoint.postcommit",
            evidence="note",
            options=options,
            ends_attempt=False,
            proof="the file was looked at before and after, and the checkpoint went to quarantine",
        )
        for name, words, options in _DAMAGES
    },
    "stale_staging": Kind(
        family="storage",
        words="leave a half-written staging folder behind",
        phases=_COMMITTED,
        default_phase="checkpoint.postcommit",
        evidence="note",
        ends_attempt=False,
        proof="the folder was there, and it was gone after the next start",
    ),
    "no_space": Kind(
        family="storage",
        words="ENOSPC while {rank} writes a checkpoint",
        phases=frozenset({"checkpoint.file", "checkpoint.fsync.before"}),
        default_phase="checkpoint.file",
        exit_codes="failure",
        error=f"{_STORAGE_FAILED}No space left on device",
        proof="its end record names ENOSPC",
    ),
    "io_error": Kind(
        family="storage",
        words="EIO while {rank} writes a checkpoint",
        phases=frozenset({"checkpoint.file", "checkpoint.fsync.before"}),
        default_phase="checkpoint.file",
        exit_codes="failure",
        error=f"{_STORAGE_FAILED}Input/output error",
        proof="its end record names EIO",
    ),
    "slow_storage": Kind(
        family="storage",
        words="{rank} waits {duration_s:g} s for the storage at every fsync of a checkpoint",
        phases=frozenset({"checkpoint.begin"}),
        default_phase="checkpoint.begin",
        evidence="note",
        options={"duration_s": 0.2},
        ends_attempt=False,
        proof="the waits were counted and timed",
    ),
    "failed_rename": Kind(
        family="storage",
        words="the rename that commits a checkpoint fails (EIO)",
        phases=frozenset({"checkpoint.rename.before"}),
        default_phase="checkpoint.rename.before",
        exit_codes="failure",
        error=f"{_STORAGE_FAILED}Input/output error",
        proof="rank 0's end record names EIO, and nothing was committed",
    ),
    "port_taken": Kind(
        family="rendezvous",
        words="a stranger takes the rendezvous port of {rank}",
        phases=frozenset({"rendezvous"}),
        default_phase="rendezvous",
        exit_codes="failure",
        error=r"^DistNetworkError: .*\bport: {port}\b.*\bEADDRINUSE\b",
        proof="the end record of rank 0 names EADDRINUSE, of the very port that it was to host the rendezvous at",
    ),
    "no_arrival": Kind(
        family="rendezvous",
        words="{rank} never arrives",
        phases=frozenset({"rendezvous"}),
        default_phase="rendezvous",
        evidence="hang",
        proof="the hang was declared and this rank named as the one that never arrived",
    ),
}
