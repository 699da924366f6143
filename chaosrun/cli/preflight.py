"""The command that checks a cluster before a job uses it: parse, call `chaosrun.api`, print, return the exit code."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from chaosrun import api
from chaosrun.cli.options import Address, Overrides, Quiet, Root, duration_s, names, numbers, ticking
from chaosrun.errors import UsageError
from chaosrun.records.destination import expect_writable
from chaosrun.report.output import WIDEST, has_colour, page_width, write_out

if TYPE_CHECKING:
    from chaosrun.preflight.result import Result


PreflightFormat = Annotated[
    Literal["text", "json", "junit", "html"],
    Parameter(
        name=["--output", "-o"],
        help="text for people, json for programs and as a baseline, junit for CI systems, html: one page (on stdout).",
    ),
]


def preflight(
    job: Annotated[Path | None, Parameter(name="JOB", help="A job file: is the cluster fit for it? Else for any job.")] = None,
    /,
    *overrides: Overrides,
    level: Annotated[
        Literal["quick", "standard", "deep"],
        Parameter(help="quick: seconds, for a node's start-up; standard: a minute or two; deep: hours if you like."),
    ] = "standard",
    only: Annotated[
        list[str] | None,
        Parameter(help="Run only these checks, whatever their level: one name, or several as host,bits; repeatable."),
    ] = None,
    skip: Annotated[list[str] | None, Parameter(help="Leave these checks out; names as for --only.")] = None,
    duration: Annotated[str | None, Parameter(help="How long a deep preflight may take, such as 2h.")] = None,
    baseline: Annotated[Path | None, Parameter(help="Compare with an earlier preflight: the file of its -o json.")] = None,
    write_good_nodes: Annotated[
        Path | None, Parameter(help="Write the names of the nodes that can be used here, one a line, for a scheduler.")
    ] = None,
    strict: Annotated[bool, Parameter(help="A WARN makes a node unfit, as a FAIL does.")] = False,
    mtbf: Annotated[
        str | None, Parameter(help="Mean time between failures of a node, such as 5000h, for the forecast.")
    ] = None,
    nodes: Annotated[str, Parameter(help="Numbers of nodes to forecast for, such as 64,512.")] = "",
    to: Annotated[Path | None, Parameter(help="Write what -o asks for into this file, and the table to stdout.")] = None,
    address: Address = None,
    root: Root = None,
    quiet: Quiet = False,
    output: PreflightFormat = "text",
) -> int:
    """Check whether every node of the cluster is fit to train on, and to be preempted on: exit code 0 when all are, 8 when a
    check fails or could not be made."""
    from chaosrun.preflight.conduct import Request
    from chaosrun.preflight.model import Level

    _refuse_nonsense(job, level, duration, to)
    request = Request(
        job=job,
        overrides=overrides,
        level=Level(level),
        only=names(only),
        skip=names(skip),
        baseline=baseline,
        good_nodes=write_good_nodes,
        strict=strict,
        seconds=None if duration is None else duration_s("--duration", duration),
        mtbf_s=None if mtbf is None else duration_s("--mtbf", mtbf),
        forecast_nodes=numbers("--nodes", nodes, "nodes"),
    )
    with ticking(preflight=True, quiet=quiet) as on_event:
        result = api.preflight(request, root=root, address=address, on_event=on_event)
    _show(result, output, to, quiet=quiet, good_file=write_good_nodes)
    return result.exit_code


def _refuse_nonsense(job: Path | None, level: str, duration: str | None, to: Path | None) -> None:
    if duration is not None and level != "deep":
        raise UsageError(f"--duration {duration} goes with --level deep", hint="add --level deep, or leave it out")
    if job is not None and "=" in job.name and not job.exists():
        raise UsageError(f"{job} is a change to no job file", hint="name the job file first")
    if to is not None:
        expect_writable("--to", to)


def _show(result: "Result", output: str, to: Path | None, *, quiet: bool, good_file: Path | None) -> None:
    from chaosrun.preflight.conduct import write_named
    from chaosrun.preflight.report.text import render_text

    good = None if good_file is None else str(good_file)

    def table(width: int, colour: bool, quiet: bool = False) -> str:
        return render_text(result, width=width, colour=colour, good_file=good, quiet=quiet)

    def asked_for() -> str:
        if output == "json":
            from chaosrun.preflight.result import to_json

            return json.dumps(to_json(result), indent=2) + "\n"
        if output == "junit":
            from chaosrun.preflight.report.junit import render_junit

            return render_junit(result)
        if output == "html":
            from chaosrun.preflight.report.html import render_html

            return render_html(result, good_file=good)
        return table(WIDEST, False)

    if to is not None:
        write_named("--to", to, asked_for())
    if to is not None or output == "text":
        write_out(table(page_width(), has_colour(sys.stdout, os.environ), quiet))
    else:
        write_out(asked_for())
