"""Commands about many drills: parse, call `chaosrun.api`, print, return the exit code."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from chaosrun.commands.arguments import Address, Format, Job, Overrides, Quiet, Root, Run
from chaosrun.commands.terminal import page, progress, ticking
from chaosrun.errors import UsageError
from chaosrun.report.output import write_json, write_out

__all__ = ["shrink", "suite", "sweep"]

MORE_THAN_NONE = "a number, 1 or more"


def suite(
    path: Annotated[Path, Parameter(name="SUITE", help="The suite file (YAML): drills and what is expected of each.")],
    /,
    *,
    only: Annotated[list[str] | None, Parameter(help="Run this drill alone; may be given several times.")] = None,
    address: Address = None,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Run several drills and compare each verdict with the expected one: exit code 0 when all are as expected, else 3."""
    from chaosrun import api

    with progress(quiet=quiet) as live:
        on_event = None if live is None else live.on_event
        result = api.suite(path, only=only or (), root=root, address=address, on_event=on_event)
    if output == "json":
        write_json(result.to_json())
    else:
        from chaosrun.report.suite import render_suite

        write_out(page(render_suite(result, root=root)))
    return result.exit_code


def sweep(
    job: Job,
    /,
    *overrides: Overrides,
    steps: Annotated[
        str,
        Parameter(help="Steps at which the training's phases are tried, such as 1,27,66 (default: five that stand for all)."),
    ] = "",
    only: Annotated[
        list[str] | None,
        Parameter(
            help="Points to try, by phase or by name, such as 'checkpoint.*' or 'recovery/*'; may be given several times."
        ),
    ] = None,
    at_once: Annotated[int | None, Parameter(help="Most drills at the same time (default: as many as fit).")] = None,
    keep: Annotated[bool, Parameter(help="Keep the runs that pass, too.")] = False,
    resume: Annotated[str | None, Parameter(help="Go on with a sweep: its id, the beginning of it, or 'latest'.")] = None,
    address: Address = None,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Kill the job once at every point that it comes by, one drill each: exit code 0 when all PASS, 3 when one does not, 6 when
    none fails and one is inconclusive."""
    from chaosrun import api

    if at_once is not None and at_once < 1:
        raise UsageError(f"--at-once {at_once} is no number of drills", hint=f"give --at-once {MORE_THAN_NONE}")
    with ticking(quiet=quiet) as ticker:
        swept = api.sweep(
            job,
            overrides=overrides,
            steps=_steps(steps),
            only=only or (),
            at_once=at_once,
            keep=keep,
            resume=resume,
            root=root,
            address=address,
            on_event=None if ticker is None else ticker.on_event,
        )
    if output == "json":
        write_json({**swept.to_json(), "exit_code": swept.exit_code})
    else:
        from chaosrun.report.sweep import render_sweep

        write_out(page(render_sweep(swept, root=root)))
    return swept.exit_code


def shrink(
    run: Run,
    /,
    *,
    max_drills: Annotated[int | None, Parameter(help="Stop with the smallest plan found by then (default: 100).")] = None,
    address: Address = None,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Reduce the faults of a run that failed to a smallest plan that fails in the same way, and print it as part of a job file:
    exit code 0, or 6 when the run does not fail again."""
    from chaosrun import api

    if max_drills is not None and max_drills < 1:
        raise UsageError(f"--max-drills {max_drills} is no number of drills", hint=f"give --max-drills {MORE_THAN_NONE}")
    layout = api.find_run(run, root)
    with ticking(quiet=quiet) as ticker:
        on_event = None if ticker is None else ticker.on_event
        shrunk = api.shrink(layout, max_drills=max_drills, address=address, on_event=on_event)
    if output == "json":
        write_json(shrunk.to_json())
    else:
        from chaosrun.report.shrink import render_shrunk

        write_out(page(render_shrunk(shrunk, root=root)))
    return shrunk.exit_code


def _steps(text: str | None) -> tuple[int, ...]:
    """`1,27,66`. Raises UsageError."""
    try:
        steps = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise UsageError(f"--steps {text!r} is no list of steps", hint="write numbers, such as --steps 1,27,66") from error
    if any(step < 1 for step in steps):
        raise UsageError(f"--steps {text!r}: steps count from 1", hint="write numbers, such as --steps 1,27,66")
    return steps
