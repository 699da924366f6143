"""Commands to begin with: parse, call `chaosrun.api`, print, return the exit code."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from chaosrun.cli.arguments import Format, Quiet
from chaosrun.report.output import as_json, warn, write_json, write_out, write_product


def init(
    directory: Annotated[
        Path, Parameter(name="DIR", help="Where to (default: the working directory); made if need be.")
    ] = Path(),
    /,
    *,
    template: Annotated[
        Literal["accelerate", "trainer", "torch"],
        Parameter(help="The script to begin with: of accelerate, of transformers' Trainer, or a plain torch loop."),
    ] = "accelerate",
    ci: Annotated[Literal["github", "none"], Parameter(help="Write a GitHub Actions workflow, or none.")] = "github",
    force: Annotated[bool, Parameter(help="Overwrite files of the same names.")] = False,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Write a job to begin with: job.yaml, train.py and a CI workflow, which pass as they are."""
    from chaosrun import api

    made = api.init(directory, template=template, ci=ci, force=force)
    following = shlex.join(["chaosrun", "submit", str(made.job)])
    if output == "json":
        files = [str(path) for path in made.files]
        about = {"directory": str(directory), "template": template, "files": files}
        write_json({"v": 1, **about, "next": following, "warning": made.warning})
    else:
        write_out("".join(f"wrote     {path}\n" for path in made.files))
        write_out("" if quiet else f"next      {following}\n")
        warn([] if made.warning is None else [made.warning])
    return 0


def schema(
    of: Annotated[
        Literal["job", "suite", "verdict", "preflight"],
        Parameter(name="OF", help="job.yaml, a suite, verdict.json, or a preflight's result."),
    ],
    /,
    *,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Print the JSON Schema of a job, a suite, a verdict or a preflight's result, for editors and programs."""
    from chaosrun import api

    # The same for people and for programs: it is a file of its own kind.
    return write_product(as_json(api.schema(of)))
