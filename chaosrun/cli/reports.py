"""The command that writes a run's reports: parse, call `chaosrun.api`, print, return the exit code."""

from typing import Annotated, Literal

from cyclopts import Parameter

from chaosrun.cli.arguments import Format, Quiet, Root, Run
from chaosrun.errors import UsageError
from chaosrun.report.output import write_json, write_out, write_product


def report(
    run: Run,
    /,
    *,
    format: Annotated[
        Literal["html", "junit", "markdown", "tensorboard", "text"],
        Parameter(
            help="html: one page that needs nothing else; junit: XML for CI systems; markdown: for a job summary; tensorboard: "
            "event files (needs chaosrun[tensorboard]); text: what `verify` prints."
        ),
    ] = "html",
    to: Annotated[
        str | None,
        Parameter(
            help="A file, a directory for tensorboard, or - for stdout. Default: a file in the run's own directory.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Write a report of a run, judged again from its files, and print where it is.

    Exit code 0 when it is written, whatever the verdict: `chaosrun verify` ends with the verdict's own.
    """
    from chaosrun import api

    if to is not None and to.startswith("-") and to != "-":
        raise UsageError(f"--to {to}: not a path", hint=f"a file of that name is ./{to}")
    if to == "-" and output == "json":
        raise UsageError("the report and JSON would both go to stdout", hint="leave out --to - or -o json")
    made = api.report(api.find_run(run, root), format=format, to=to)
    if made.text is not None:
        return write_product(made.text)
    elif output == "json":
        about = {
            "run": made.run_id,
            "format": format,
            "path": str(made.path and made.path.absolute()),
            "verdict": made.verdict.status,
        }
        write_json({"v": 1, **about})
    else:
        write_out(f"{made.path}\n")
    return 0
