"""Turns the end of a command, as the fork server saw it, into a `Failure` with message and hint. Decides nothing."""

from collections.abc import Mapping

from chaosrun.cluster.messages import LauncherFailed
from chaosrun.faults.observed import signal_name
from chaosrun.records.announcements import LauncherCode
from chaosrun.records.layout import AttemptLayout
from chaosrun.supervise.failure import Failure
from chaosrun.wording import count

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
        message = f"the command was killed by {signal_name(failed.signal)}, and no fault was planned for it"
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
