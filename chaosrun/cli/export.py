"""Running drills elsewhere: parse, call `chaosrun.api`, print, return the exit code."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from chaosrun.cli.arguments import Format, Overrides, Quiet
from chaosrun.report.output import write_json, write_out, write_product


def export(
    kind: Annotated[
        Literal["github", "ray", "rayjob", "slurm"],
        Parameter(
            name="KIND",
            help="github: an Actions workflow; ray: a script with `ray job submit`; rayjob: KubeRay's; slurm: a batch script.",
        ),
    ],
    path: Annotated[Path, Parameter(name="FILE", help="The job file, or a suite.")],
    /,
    *overrides: Overrides,
    to: Annotated[Path | None, Parameter(help="Write it there (default: to stdout).")] = None,
    shards: Annotated[int | None, Parameter(help="github: as many jobs side by side, each a part of the suite.")] = None,
    nodes: Annotated[int | None, Parameter(help="slurm: nodes that the workers are spread over (default: 1).")] = None,
    image: Annotated[str | None, Parameter(help="rayjob: container image with chaosrun and the job.")] = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Print what runs a job or a suite elsewhere: in GitHub Actions, as a Ray job, in Slurm."""
    from chaosrun import api

    made = api.export(kind, path, overrides, to=to, shards=shards, nodes=nodes, image=image)
    if output == "json":
        where = None if made.path is None else str(made.path)
        write_json({"v": 1, "kind": kind, "path": where, "text": made.text, "next": made.following})
    elif made.path is None:
        return write_product(made.text)
    else:
        write_out(f"wrote     {made.path}\n" + ("" if quiet else f"next      {made.following}\n"))
    return 0
