"""Commands about a run that another process supervises: parse, call `chaosrun.api`, print, return the exit code."""

from typing import Annotated

from cyclopts import Parameter

from chaosrun.cli.arguments import Format, Quiet, Root, Run, duration_s
from chaosrun.cli.terminal import show_verdict
from chaosrun.errors import InterruptedRunError, RunTimeoutError, UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.report.escapes import harmless
from chaosrun.report.output import warn, write_json, write_out

Detach = Annotated[bool, Parameter(help="Return once the drill runs; it goes on without a terminal. See `chaosrun wait`.")]
Timeout = Annotated[str | None, Parameter(help="Such as 90s, 10m, 2h; exit code 124 when it passes.")]


def cancel(
    run: Run,
    /,
    *,
    timeout: Annotated[str, Parameter(help="How long to wait for its end, such as 90s.")] = "2m",
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """End a live run in order, wherever it runs; it can be gone on with."""
    from chaosrun import api
    from chaosrun.records.supervision import read_supervision
    from chaosrun.supervise.drill import has_ended

    layout, timeout_s = api.find_run(run, root), duration_s("--timeout", timeout)
    api.cancel(layout, timeout_s=timeout_s)
    try:
        ended, seen = has_ended(layout), read_supervision(layout)
    except UsageError:
        if layout.run_json.is_file():
            raise
        ended, seen = False, None  # removed meanwhile, by the command that had begun it
    error = None if seen is None or isinstance(seen.error, InterruptedRunError) else seen.error
    if output == "json":
        cancelled = not ended and error is None
        write_json({"v": 1, "run": layout.run_id, "path": str(layout.path.absolute()), "cancelled": cancelled})
    elif error is not None:
        write_out(f"run {layout.run_id} ended before it could be cancelled: {harmless(error.message)}\n")
        write_out("" if quiet else _line("look", "status", layout))
    elif ended:
        write_out(f"run {layout.run_id} came to its end before it could be cancelled\n")
        write_out("" if quiet else _line("look", "verify", layout))
    else:
        write_out(f"run {layout.run_id} is cancelled: none of its processes trains any more\n")
        write_out("" if quiet or not layout.run_json.is_file() else _line("go on", "resume", layout))
    return 0


def wait(run: Run, /, *, timeout: Timeout = None, root: Root = None, quiet: Quiet = False, output: Format = "text") -> int:
    """Wait until a run has ended; print its verdict and exit as `submit` would."""
    from chaosrun import api

    layout, timeout_s = api.find_run(run, root), None if timeout is None else duration_s("--timeout", timeout)
    result = api.wait(layout, timeout_s=timeout_s)
    show_verdict(result.run, result.verdict, output)
    warn(result.unwritten)
    return result.verdict.exit_code


def inject(
    run: Run,
    /,
    *,
    kind: Annotated[str, Parameter(help="What is done: kill, preempt, stop, pause, segfault, node, agent, …")] = "kill",
    rank: Annotated[str, Parameter(help="The rank it is done to, 'all' at once, or 'random'.")],
    set_: Annotated[
        list[str] | None, Parameter(name="--set", help="An option of the kind, such as grace=5s; may be given several times.")
    ] = None,
    seed: Annotated[int | None, Parameter(help="Of --rank random; default: drawn, and printed.")] = None,
    timeout: Annotated[str, Parameter(help="How long to wait until it is seen to have landed.")] = "2m",
    no_wait: Annotated[bool, Parameter(help="Return as soon as the fault is part of the run's plan.")] = False,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Strike a live drill now; the fault becomes part of its plan and of its verdict: exit code 0 once it has landed, 6 when it
    cannot be shown to, 124 when nothing of it is seen in time."""
    from chaosrun import api
    from chaosrun.verify.verdict import EXIT_CODES

    layout, timeout_s = api.find_run(run, root), duration_s("--timeout", timeout)
    asked = api.inject(layout, kind=kind, rank=rank, settings=set_ or (), seed=seed)
    if output == "text":
        drawn = f"  (drawn with --seed {asked['seed']})" if rank == "random" else ""
        write_out("".join(f"{fault['id']}  {fault['what']}{drawn}\n" for fault in asked["faults"]))
    names = [fault["id"] for fault in asked["faults"]]
    seen = () if no_wait else api.landings(layout, names, timeout_s=timeout_s)
    if output == "json":
        found = {each.fault: each.to_json() for each in seen}
        faults = [{**found.get(fault["id"], {}), **fault} for fault in asked["faults"]]
        write_json({"v": 1, "run": layout.run_id, "path": str(layout.path.absolute()), "seed": asked["seed"], "faults": faults})
    else:
        write_out("".join(f"{each.fault}  {harmless(each.sentence)}\n" for each in seen))
    if any(each.problem for each in seen):
        return EXIT_CODES["INCONCLUSIVE"]
    return 0 if all(each.landed for each in seen) else RunTimeoutError.exit_code


def show_detached(run: RunLayout, pid: int, *, quiet: bool, output: str) -> None:
    """That a drill goes on by itself, and how to follow it."""
    commands = {"follow": ("status", "-w"), "wait": ("wait",), "cancel": ("cancel",)}
    if output == "json":
        write_json({"v": 1, "run": run.run_id, "path": str(run.path.absolute()), "detached": True, "pid": pid})
        return
    write_out(f"run {run.run_id} goes on by itself (supervisor: process {pid})\n")
    for label, (command, *options) in () if quiet else commands.items():
        write_out(_line(label, command, run, *options))


def _line(label: str, command: str, run: RunLayout, *options: str) -> str:
    from chaosrun.records.naming import run_argument

    return f"  {label:<7} {' '.join(['chaosrun', command, *options, run_argument(run)])}\n"
