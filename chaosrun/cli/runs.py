"""Commands about runs that are there: parse, call `chaosrun.api`, print, return the exit code."""

import sys
import time
from typing import Annotated, Literal

from cyclopts import Parameter

from chaosrun.cli.arguments import Format, Quiet, Root, Run
from chaosrun.cli.terminal import page
from chaosrun.cli.watching import follow_logs, print_events, print_logs, watch_status
from chaosrun.errors import InterruptedRunError
from chaosrun.report.output import write_json, write_out


def list_(*, root: Root = None, quiet: Quiet = False, output: Format = "text") -> int:
    """List the runs, newest first."""
    from chaosrun import api

    runs = api.list_runs(root)
    if output == "json":
        fields = [
            {
                "run": s.run_id,
                "name": s.name,
                "status": s.status,
                "outcome": s.outcome,
                "exit_code": s.exit_code,
                "created_s": s.created_s,
                "path": str(s.path.absolute()),
            }
            for s in runs
        ]
        write_json({"v": 1, "runs": fields})
    else:
        from chaosrun.report.text import render_runs

        write_out(page(render_runs(runs, now_s=time.time())))
    return 0


def status(
    run: Run,
    /,
    *,
    watch: Annotated[bool, Parameter(name=["--watch", "-w"], help="Show it live until the run ends.")] = False,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Say what a run is doing, or how it ended.

    With --watch and -o json: a JSON object whenever something has changed, one a line. Ctrl-C leaves a watched run as it is.
    """
    from chaosrun import api
    from chaosrun.report.status import read_status, status_lines
    from chaosrun.supervise.drill import is_supervised

    layout = api.find_run(run, root)
    if watch:
        try:
            watch_status(layout, quiet=quiet, output=output)
        except KeyboardInterrupt:
            if output != "json":
                print(f"run {layout.run_id} goes on", file=sys.stderr)
            return InterruptedRunError.exit_code  # nothing has ended but the looking
        if output == "json":
            return 0
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
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Go on with what is yet to come, until the run ends.")
    ] = False,
    events: Annotated[bool, Parameter(help="What happened, as sentences, instead of what the workers wrote.")] = False,
    leg: Annotated[
        Literal["reference", "chaos", "confirm"] | None, Parameter(help="Default: the chaos leg, once it has begun.")
    ] = None,
    attempt: Annotated[int | None, Parameter(help="Default: the leg's last attempt.")] = None,
    rank: Annotated[int | None, Parameter(help="Default: every rank.")] = None,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Print what the workers wrote to stdout and stderr.

    With --follow: later attempts and legs, too, each line after its leg/attempt/rank; of a run that has ended, all of them.
    With --events: all events, or those about this leg, attempt, rank. With --follow and -o json: a JSON object a line.
    """
    from chaosrun import api

    layout = api.find_run(run, root)
    try:
        if events:
            print_events(layout, leg=leg, attempt=attempt, rank=rank, follow=follow, output=output)
        elif follow:
            follow_logs(layout, leg=leg, attempt=attempt, rank=rank, output=output)
        else:
            print_logs(layout, leg=leg, attempt=attempt, rank=rank, quiet=quiet, output=output)
    except KeyboardInterrupt:
        if not follow:
            raise
        return InterruptedRunError.exit_code
    return 0
