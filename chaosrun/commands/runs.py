"""Commands about runs that are there: parse, call `chaosrun.api`, print, return the exit code."""

import time
from typing import Annotated, Literal

from cyclopts import Parameter

from chaosrun.commands.arguments import Format, Root, Run
from chaosrun.commands.terminal import page
from chaosrun.report.output import write_json, write_out

__all__ = ["list_", "logs", "status"]


def list_(*, root: Root = None, output: Format = "text") -> int:
    """List the runs, newest first."""
    from chaosrun import api

    runs = api.list_runs(root)
    if output == "json":
        fields = [
            {"run": s.run_id, "name": s.name, "status": s.status, "created_s": s.created_s, "path": str(s.path)} for s in runs
        ]
        write_json({"v": 1, "runs": fields})
    else:
        from chaosrun.report.text import render_runs

        write_out(page(render_runs(runs, now_s=time.time())))
    return 0


def status(run: Run, /, *, root: Root = None, output: Format = "text") -> int:
    """Say what a run is doing, or how it ended."""
    from chaosrun import api
    from chaosrun.report.status import read_status, status_lines
    from chaosrun.supervise.drill import is_supervised

    layout = api.find_run(run, root)
    seen = read_status(layout, supervised=is_supervised(layout))
    if output == "json":
        write_json(seen.to_json())
    else:
        write_out("".join(f"{line}\n" for line in status_lines(seen, now_s=time.time())))
    return 0


def logs(
    run: Run,
    /,
    *,
    leg: Annotated[
        Literal["reference", "chaos", "confirm"] | None, Parameter(help="Default: the chaos leg, once it has begun.")
    ] = None,
    attempt: Annotated[int | None, Parameter(help="Default: the leg's last attempt.")] = None,
    rank: Annotated[int | None, Parameter(help="Default: every rank.")] = None,
    root: Root = None,
    output: Format = "text",
) -> int:
    """Print what the workers wrote to stdout and stderr."""
    from chaosrun import api
    from chaosrun.report.logs import read_log, select_logs

    chosen = select_logs(api.find_run(run, root), leg=leg, attempt=attempt, rank=rank)
    if output == "json":
        about = [
            {"leg": log.leg, "attempt": log.attempt, "rank": log.rank, "path": str(log.path), "text": read_log(log)}
            for log in chosen
        ]
        write_json({"v": 1, "run": run, "logs": about})
        return 0
    for log in chosen:
        # As tail(1) has it: a single file needs no heading.
        heading = f"==> {log.leg}, attempt {log.attempt}, rank {log.rank} <==\n" if len(chosen) > 1 else ""
        text = read_log(log)
        write_out(heading + text + ("" if text.endswith("\n") or not text else "\n"))
    return 0
