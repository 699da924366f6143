"""How a worker ended, by its end record, fault marker, wait status and trace; and how a command did, by what its fork server
saw. Reads files, decides nothing."""

import errno
import itertools
import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from chaosrun import errors
from chaosrun.checkpoint.storage_errors import before_again, refusal
from chaosrun.cluster.messages import Exited, LauncherFailed
from chaosrun.faults.observed import signal_name
from chaosrun.records.announcements import LauncherCode
from chaosrun.records.events import EndCode, Outcome, RaisedError
from chaosrun.records.heartbeat import STAGES, Heartbeat, read_heartbeat
from chaosrun.records.layout import AttemptLayout, LegLayout
from chaosrun.records.markers import WorkerEnd, read_end
from chaosrun.records.trace_reader import read_ends
from chaosrun.supervise.failure import Failure, Reach
from chaosrun.wording import count

OWN_TYPES = (errors.UserScriptError.__name__, errors.MisuseError.__name__)
"""Errors that chaosrun raises in the script's place: a sentence each, complete without a type."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals by which a process crashes by itself."""


def last_step(leg: LegLayout, attempt: int, rank: int) -> int:
    """The last step in a rank's trace of this attempt, the restored step when it made none, 0 without a trace."""
    return _ends(leg, attempt, rank)[1]


def went_on_from(leg: LegLayout, attempt: int, world_size: int) -> int:
    """The step that this attempt began from, as its ranks recorded it: 0 before the first attempt, and when one of them never
    began."""
    return min(_ends(leg, attempt, rank)[0] for rank in range(world_size))


def _ends(leg: LegLayout, attempt: int, rank: int) -> tuple[int, int]:
    """The step that a rank began from, and the last one that it recorded."""
    path = leg.attempt(attempt).trace(rank)
    if not path.exists():
        return 0, 0
    # Whether the records are damaged is for the verdict; a restart needs only the step.
    trace = read_ends(path, attempt, rank, [])
    begun = trace.start.position.step if trace.start else 0
    return begun, trace.steps.last or begun


def reach_of(beat: Heartbeat | None) -> Reach:
    """How far a rank had come at its last heartbeat: before the restore, in it, or beyond."""
    if beat is None or list(STAGES).index(beat.stage) < list(STAGES).index("restoring"):
        return "before"
    return "in" if beat.stage == "restoring" else "beyond"


def failure_of(leg: LegLayout, exited: Exited) -> Failure | None:
    """Why this rank failed, None when it completed. Exit codes after a completed training are noise (hazard P8)."""
    beat = read_heartbeat(leg.attempt(exited.attempt).heartbeat(exited.rank))
    failure = _failure_of(leg, exited, beat)
    return None if failure is None else replace(failure, reach=reach_of(beat))


def _failure_of(leg: LegLayout, exited: Exited, beat: Heartbeat | None) -> Failure | None:
    attempt, rank, exit_code, killed_by = exited.attempt, exited.rank, exited.exit_code, exited.signal
    end = read_end(leg.attempt(attempt), rank)
    log = leg.attempt(attempt).log(rank)
    refused = _refused_record(leg, exit_code, beat) if end is None or end.completed else None
    if end is not None and end.completed and exit_code in (None, 0, end.exit_code) and refused is None:
        return None
    if end is not None and end.told is not None:
        return _of_notice(end, end.told)
    if end is not None and end.error is not None:
        failure = _of_error(end, end.error, rank, log)
        if failure.outcome == "user_error" and (left := _rank_that_had_ended(leg.attempt(attempt), end, rank)):
            failure = replace(failure, hint=f"{left}; {failure.hint}")
        return replace(failure, refused=True) if attempt == 1 and _comes_each_time(failure) else failure
    step = last_step(leg, attempt, rank)
    failed = partial(Failure, rank=rank, step=step)
    launchers = sorted(log.parent.glob("launcher-*.log"))
    if refused is not None:
        message = f"rank {rank} stopped at step {step}: its records cannot be written to {leg.path}: {refused.strerror}"
        hint = f"{before_again(refused, leg.path)}, or put the run elsewhere with --root; see {log}"
        return failed(message=message, hint=hint, outcome="resources")
    if killed_by in CRASHES:
        message = f"rank {rank} crashed with {signal_name(killed_by)} at step {step}"
        hint, error = f"a crash in native code; the Python traceback is in {log}", ("signal", signal_name(killed_by))
        return failed(message=message, hint=hint, outcome="user_error", error=error)
    if killed_by is not None:
        message = f"rank {rank} was killed by {signal_name(killed_by)} at step {step}"
        hint = f"the kernel (out of memory?), the cluster or a person did it; see {log}"
        if launchers:
            hint = f"its launcher ends ranks when another one fails: see {', '.join(map(str, launchers))}; or {hint}"
        return failed(code="killed", message=message, hint=hint)
    if exited.collected:
        message = f"rank {rank} was gone at step {step}, without an error; only its launcher knows how it ended"
        return failed(message=message, hint=f"see {log}, and the output of its launcher", error=("gone", ""))
    if exit_code is None:
        message = f"rank {rank} was lost at step {step}: its node's fork server died and took it along"
        return failed(code="node_lost", message=message, hint=f"see {log}", of_node=True)
    message = f"rank {rank} left with exit code {exit_code} at step {step}, before the training was complete"
    hint, error = f"os._exit or a crash in native code; see {log}", ("exit", str(exit_code))
    if exit_code == 0:
        itself = "; drill a script that starts itself again as a command: `chaosrun submit … -- python SCRIPT`"
        hint = f"os._exit(0), or another program in its place (os.exec…{'' if launchers else itself}); see {log}"
    if end is not None and end.completed:
        message = f"rank {rank} left with exit code {exit_code} after step {end.step}, without an error"
        hint = f"sys.exit({exit_code}), perhaps of an exit handler: only 0 says that the training is complete; see {log}"
    return failed(message=message, hint=hint, outcome="user_error", error=error)


def _refused_record(leg: LegLayout, exit_code: int | None, beat: Heartbeat | None) -> OSError | None:
    """Why the disk refused the record of a rank's end; None if it did not. Where its heartbeat is not seen, as on another node,
    its exit code and a full disk tell."""
    unrecorded = beat is not None and beat.stage == "unrecorded"
    if not unrecorded and exit_code != errors.ResourcesError.exit_code:
        return None
    return refusal(leg.path) or (OSError(errno.EIO, "its log may say why") if unrecorded else None)


def _rank_that_had_ended(attempt: AttemptLayout, failed: WorkerEnd, rank: int) -> str | None:
    """For a rank that died of a closed connection: the rank it waited for, whose script had already ended."""
    if failed.error is None or not _GONE.search(failed.error.message):
        return None
    ranks = itertools.takewhile(lambda other: attempt.heartbeat(other).exists(), itertools.count())
    ends = [(other, read_end(attempt, other)) for other in ranks if other != rank]
    left = [(end.time_s, other, end.step) for other, end in ends if end and end.completed and end.time_s < failed.time_s]
    if not left:
        return None
    _, first, step = min(left)
    return f"rank {first} had left at step {step} with exit code 0"


def _comes_each_time(failure: Failure) -> bool:
    """Whether an error that the script raised in the first attempt, before its first step, would recur in every attempt."""
    name = failure.error[0] if failure.error else ""
    sure = name == errors.UserScriptError.__name__ or errors.comes_each_time(name)
    return sure and not failure.step and failure.outcome == "user_error" and failure.code is None


def _of_notice(end: WorkerEnd, told: int) -> Failure:
    """The failure of ranks that left on a preemption notice: the same for each where they leave together."""
    return Failure(
        code="told_to_leave",
        message=(
            f"rank {told} was told to leave (SIGTERM): all ranks took a checkpoint after step {end.step} and left"
            if end.handled is None
            else f"rank {told} was told to leave ({end.handled}): it left after step {end.step}"
        ),
        hint="the cluster or a person took away its resources",
        rank=told,
        step=end.step,
        leaving=True,
    )


def _code_of(error: RaisedError, outcome: Outcome) -> EndCode | None:
    """A more precise code than the outcome: from the error's type, and for the script's own errors from words of the
    message."""
    if outcome != "user_error":
        return _OF_TYPES.get(error.type)
    if error.ours:
        return "failed_inside_chaosrun"
    memory = error.type in ("OutOfMemoryError", "MemoryError") or _SHORT_OF.search(error.message)
    return "out_of_memory" if memory else None


_OF_TYPES: Mapping[str, EndCode] = {
    errors.UnsafeCheckpointError.__name__: "unsafe_checkpoint",
    errors.InvalidCheckpointError.__name__: "checkpoint_damaged",
    errors.LeftApartError.__name__: "left_apart",
    errors.RegisteredStateError.__name__: "registered_state_changed_on_load",
    errors.ParameterOrderError.__name__: "parameter_order",
    errors.HookedStateError.__name__: "hook_changes_state",
    errors.OptimizerCastError.__name__: "optimizer_state_cast_on_load",
}
_SHORT_OF = re.compile(r"out of memory|\[Errno 5\]")
_GONE = re.compile(r"[Cc]onnection (closed|reset) by peer")
_WITHOUT_RANK = re.compile(
    r"'(LOCAL_)?(RANK|WORLD_SIZE)'|environment variable (RANK|WORLD_SIZE|MASTER_\w+) expected, but not set"
)
"""What Python and torch say of a variable that a launcher sets for several workers."""
_ALONE = (
    "a single worker's script runs as by `python train.py`, without RANK and its like: to have them, launch it by torchrun "
    "(`chaosrun submit -- torchrun --nproc_per_node 1 train.py`)"
)


def _of_error(end: WorkerEnd, error: RaisedError, rank: int, log: Path) -> Failure:
    step = end.step
    of_reducer = reducer_error(error.message)
    alone = _ALONE if not error.ours and _WITHOUT_RANK.fullmatch(error.message.rpartition(": ")[2]) else None
    outcome: Outcome
    if error.exit_code == errors.RestoreMismatchError.exit_code:
        outcome, message = "inexact_restore", error.message
    elif error.exit_code == errors.ResourcesError.exit_code:
        outcome, message = "resources", error.message
    else:
        outcome = "user_error" if error.exit_code == errors.UserScriptError.exit_code else "recovery_failed"
        inside = " inside chaosrun" if error.ours else ""
        when = f"at step {step}" if step else "before its first step"
        raised = f" raised {error.type}{inside} {when}" if error.type not in OWN_TYPES else ""
        message = f"rank {rank}{raised}: {of_reducer[0] if of_reducer else in_brief(error.message)}"
    return Failure(
        code=_code_of(error, outcome),
        message=message,
        hint=of_reducer[1] if of_reducer else error.hint or alone or f"the traceback is in {log}",
        outcome=outcome,
        rank=rank,
        step=step,
        error=(error.type, error.message),
        reducer=of_reducer is not None,
        refused=error.type == errors.MisuseError.__name__,
        raised_s=end.time_s,
    )


def in_brief(message: str) -> str:
    """Shorten a message that holds another process's traceback (of a data loader worker or a collective save): its beginning,
    and the error raised there."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{lines[0]} … {lines[-1]}" if "Traceback (most recent call last):" in message else message


_FIND_UNUSED = "DistributedDataParallelKwargs(find_unused_parameters=True)"
_HINTS = {
    "Expected to mark a variable ready only once": (
        "the parameter was used outside the wrapped model's forward: with find_unused_parameters=True, DDP marks what forward "
        "leaves unused as ready at once, and the gradient that arrives all the same marks it again. Use parameters through the "
        "wrapped model only, never by model.module; or pass find_unused_parameters=False if each gets a gradient in every step "
        "(in several reentrant checkpoints: use_reentrant=False); or static_graph=True (_set_static_graph) if the graph never "
        "changes"
    ),
    "Expected to have finished reduction in the prior iteration": (
        "a parameter got no gradient, so DDP never averaged its bucket and the replicas part: ranks take other branches, or "
        f"forward leaves a parameter out. Pass {_FIND_UNUSED}; a parameter that no rank ever uses: requires_grad_(False)"
    ),
    "Your training graph has changed in this iteration": (
        f"static_graph=True promises the same graph in every step: pass {_FIND_UNUSED} instead"
    ),
    "expect_autograd_hooks_ INTERNAL ASSERT FAILED": (
        "a static graph cannot begin in no_sync: with static_graph=True, DDP reduces the very first backward pass, even of a "
        f"micro-batch whose gradients are only to be accumulated. Accumulate without it, or pass {_FIND_UNUSED} instead"
    ),
}
"""What DDP's reducer complains about, by words of torch's message, and the remedy: the script's doing (hazards C8, C9).

TORCH_DISTRIBUTED_DEBUG=DETAIL has torch add the names of parameters."""
_ABOUT = re.compile(
    r"(?P<twice>Parameter at index \d+(?: with name \S+)? has been marked as ready twice)"
    r"|(?P<lacking>Parameters which did not receive grad for rank \d+: [^\n]+)"
    r"|(?P<indices>Parameter indices which did not receive grad for rank \d+: [\d ]+)"
)


def reducer_error(message: str) -> tuple[str, str] | None:
    """The beginning of an error of DDP's reducer with the parameters it names, and a hint; None for any other error."""
    for words, hint in _HINTS.items():
        if words in message:
            # Names tell more than indices, so they come first.
            about = _ABOUT.search(message)
            said = f"{words} ({about.group().strip()})" if about else words
            return said, hint
    return None


_MISUSES: Mapping[LauncherCode, tuple[str, str]] = {
    "launcher_restarts": (
        "a second process of attempt {failed.attempt} began to train as rank {failed.rank}",
        "one command is one training, and chaosrun restarts it as a whole: let the launcher restart nothing "
        "(torchrun --max-restarts 0), and drill trainings that follow one another each by itself",
    ),
    "other_world_size": (
        "rank {failed.rank} trains in a world of {failed.seen}, the job has {workers}",
        "let `workers` be the number of processes that the command starts on all nodes together "
        "(torchrun --nproc-per-node {{workers_per_node}}, accelerate launch --multi_gpu --num_processes {world_size})",
    ),
    "other_node": (
        "a process on node {failed.node_rank} began to train as rank {failed.rank}, which is placed on another node",
        "give the launcher its place: torchrun --nnodes {{nodes}} --node-rank {{node_rank}} --master-addr {{master_addr}} "
        "--master-port {{master_port}}",
    ),
    "signals_ignored": (
        "rank {failed.rank} was started with SIGTERM ignored: no preemption notice can reach it",
        "the command, or a shell in it, ignores SIGTERM (trap '' TERM), and what it starts inherits that",
    ),
}


def failure_of_launcher(failed: LauncherFailed, layout: AttemptLayout, world_size: int) -> Failure:
    """The failure for the lifecycle to decide by. If no rank ever began to train, another attempt would fail the same way."""
    log = layout.launcher_log(failed.node_rank)
    if failed.code != "launcher_ended":
        about = {"failed": failed, "workers": count(world_size, "worker"), "world_size": world_size}
        message, hint = (text.format(**about) for text in _MISUSES[failed.code])
        return Failure(code="launcher_misused", message=message, hint=hint, outcome="user_error", refused=True)
    if failed.signal is not None:
        message = f"the command was killed by {signal_name(failed.signal)}"
        return Failure(code="killed", message=message, hint=f"the kernel (out of memory?) or a person did it; see {log}")
    began = f"after {count(failed.announced, 'rank')} had begun" if failed.announced else "before any rank began"
    message = f"the command ended with exit code {failed.exit_code} {began} to train"
    last = failed.said.strip().splitlines()
    hint = f"its last lines, of {log}:\n{failed.said}" if last else f"it printed nothing; run it by hand ({log})"
    if failed.exit_code == 0:
        hint = (
            "it has to stay until its ranks are done, and to run them here, with Python's start-up hook (no python -I, -E or "
            f"-S, no env -i); {hint}"
        )
    return Failure(
        code="launcher_ended",
        message=message + (f": {last[-1].strip()}" if last else ""),
        hint=hint,
        outcome="user_error",
        error=("launcher", str(failed.exit_code)),
        refused=failed.attempt == 1 and not failed.announced,
        reach="beyond" if failed.announced else "before",
    )
