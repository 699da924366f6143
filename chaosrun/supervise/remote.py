"""Waits for, cancels and injects faults into a run from another process, through its files and its control socket alone."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from chaosrun.errors import InterruptedRunError, RunTimeoutError, UsageError
from chaosrun.processes import where_stopped
from chaosrun.records.layout import RUN, RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.supervision import looks, read_supervision
from chaosrun.supervise.control import Answer, Cancel, Command, Inject, NobodyListensError, control_directory, request
from chaosrun.supervise.drill import has_ended
from chaosrun.verify.verdict import Verdict, judge

SOCKET_LIMIT_S = 5.0
"""For a supervisor that has just taken the run to open its control socket."""


def unsupervised(run: RunLayout, timeout_s: float | None = None) -> bool:
    """Wait until a run is not supervised; False when `timeout_s` passes first."""
    return next(end for end in looks(run, timeout_s) if end) == "over"


def outcome(run: RunLayout) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict on a run that is no longer supervised, and its supervisor's warnings.

    Raises the error that ended its supervisor before the verdict, InterruptedRunError when the supervisor was killed,
    UsageError when the run no longer exists.
    """
    try:
        ended = has_ended(run)
        seen = read_supervision(run, judged=ended)
        error = None if seen is None or seen.error is None else seen.error.again(run)
        warnings = () if seen is None else seen.warnings
        if ended:
            late = () if error is None else (f"its reports were not all written: {error.message}",)
            return judge(run), (*warnings, *late)
        if error is not None:
            raise error
        if seen is not None and seen.ended_s is not None and run.verdict_json.is_file():
            return judge(run), warnings
        who = "nobody has supervised it" if seen is None else f"the process that supervised it (pid {seen.pid}) was killed"
        raise InterruptedRunError(
            f"run {run.run_id} has come to no verdict: {who}", hint=f"`chaosrun resume {run_argument(run)}` continues the run"
        )
    finally:
        # Checked last: what was read while the run was being removed is not reliable.
        if not run.run_json.is_file():
            raise UsageError(
                f"run {run.run_id} has ended and no longer exists",
                hint="`chaosrun sweep` removes its drills that pass, without --keep, and `chaosrun shrink` all of its own",
            )


def wait(run: RunLayout, timeout_s: float | None) -> tuple[Verdict, tuple[str, ...]]:
    """Wait for the run's end and return its `outcome`, raising as that does; RunTimeoutError when `timeout_s` passes first."""
    if not unsupervised(run, timeout_s):
        raise RunTimeoutError(
            f"run {run.run_id} has not ended within {timeout_s:g} s",
            hint=f"it is still running: `chaosrun status {run_argument(run)}`",
        )
    return outcome(run)


def until(run: RunLayout, reached: Callable[[], bool], *, what: str, timeout_s: float | None) -> None:
    """Wait until `reached` returns true; `what` names the goal in an error: "step 40".

    Raises RunTimeoutError when `timeout_s` passes first; when the run ends first, the error that ended it, or UsageError.
    """
    goal = what if run.main == RUN else f"{what} of its chaos leg"
    for end in looks(run, timeout_s):
        if reached():
            return
        if end == "over":
            verdict, _ = outcome(run)
            raise UsageError(
                f"run {run.run_id} has ended ({verdict.status}), and never came to {goal}",
                hint=f"`chaosrun verify {run_argument(run)}` shows its verdict",
            )
        if end == "late":
            raise RunTimeoutError(
                f"run {run.run_id} has not come to {goal} within {timeout_s:g} s",
                hint=f"it is still running: `chaosrun status {run_argument(run)}`",
            )


def cancel(run: RunLayout, *, timeout_s: float | None = None) -> None:
    """End a run that another process supervises, cleanly, as SIGINT there would; `resume` continues it. Returns at once, or
    with `timeout_s` when the run is no longer supervised. Raises UsageError when it is not supervised, RunTimeoutError."""
    send_command(run, Cancel())
    if timeout_s is not None and not unsupervised(run, timeout_s):
        seen = read_supervision(run)
        looking = f"`chaosrun status {run_argument(run)}` shows what it does"
        raise RunTimeoutError(
            f"run {run.run_id} was told to end, and is still being supervised after {timeout_s:g} s",
            hint=(where_stopped(seen.pid) or f"{looking}; `kill -9 {seen.pid}` ends its process at once") if seen else looking,
        )


def send_command(run: RunLayout, command: Command) -> Answer:
    """Send a command to a run's supervisor and return its answer. Raises UsageError when there is no supervisor, or it
    refuses."""
    for end in looks(run, SOCKET_LIMIT_S):
        if end == "over":
            break
        try:
            return request(run, command)
        except NobodyListensError as error:
            # A killed supervisor leaves its socket behind, for its successor to replace.
            if end == "late":
                seen, socket = read_supervision(run), control_directory(run) / "socket"
                ending = f"; `kill -INT {seen.pid}` ends its process cleanly" if seen else ""
                stopped = where_stopped(seen.pid) if seen else None
                raise UsageError(
                    f"the supervisor of run {run.run_id} cannot be reached: nothing listens on {socket}",
                    hint=f"{stopped}; then say it again" if stopped else f"its file system may have no sockets{ending}",
                ) from error
    if has_ended(run):
        raise UsageError(
            f"run {run.run_id} is not being supervised: it has ended",
            hint=f"`chaosrun verify {run_argument(run)}` shows its verdict",
        )
    raise UsageError(
        f"run {run.run_id} is not being supervised: it was interrupted",
        hint=f"`chaosrun resume {run_argument(run)}` continues the run",
    )


def inject(run: RunLayout, *, kind: str, rank: str, settings: Sequence[str] = (), seed: int | None = None) -> dict[str, Any]:
    """Inject a fault into a live run: {faults: [{id, kind, rank, what}], seed}. They are in its plan when this returns. Raises
    UsageError for what `plan.injection` refuses, and when the run or its leg takes no faults."""
    if rank == "random" and seed is None:
        seed = secrets.randbelow(2**31)
    answer = send_command(run, Inject(kind=kind, rank=rank, settings=tuple(settings), seed=seed))
    return {"faults": [msgspec.to_builtins(fault) for fault in answer.faults], "seed": answer.seed}
