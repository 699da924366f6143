"""Commands that write files to start from, or to run elsewhere: parse, call `chaosrun.api`, print, return the exit code."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from chaosrun import api
from chaosrun.cli.options import OUT, Out, Overrides
from chaosrun.report.output import as_json, warn, write_json, write_out, write_product


def init(
    directory: Annotated[Path, Parameter(name="DIR", help="Where to write (default: here); made if missing.")] = Path(),
    /,
    *,
    template: Annotated[
        Literal["accelerate", "trainer", "lightning", "torch"],
        Parameter(help="The script to start from: for accelerate, transformers' Trainer, Lightning, or a plain torch loop."),
    ] = "accelerate",
    ci: Annotated[Literal["github", "none"], Parameter(help="Write a GitHub Actions workflow, or none.")] = "github",
    force: Annotated[bool, Parameter(help="Overwrite files of the same names.")] = False,
    out: Out = OUT,
) -> int:
    """Write a job to start from: job.yaml, train.py and a CI workflow, which pass as they are."""
    made = api.init(directory, template=template, ci=ci, force=force)
    following = shlex.join(["chaosrun", "submit", str(made.job)])
    if out.is_json:
        files = [str(path) for path in made.files]
        about = {"directory": str(directory), "template": template, "files": files}
        write_json({"v": 1, **about, "next": following, "warning": made.warning})
    else:
        write_out("".join(f"wrote     {path}\n" for path in made.files))
        write_out("" if out.quiet else f"next      {following}\n")
        warn([] if made.warning is None else [made.warning])
    return 0


def schema(
    of: Annotated[
        Literal["job", "suite", "verdict", "preflight"],
        Parameter(name="OF", help="job.yaml, a suite, verdict.json, or a preflight's result."),
    ],
    /,
    *,
    out: Out = OUT,
) -> int:
    """Print the JSON Schema of a job, a suite, a verdict or a preflight's result, for editors and programs."""
    # The same for people and for programs: a schema is JSON anyway.
    return write_product(as_json(api.schema(of)))


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
    to: Annotated[Path | None, Parameter(help="Write to this file (default: to stdout).")] = None,
    shards: Annotated[int | None, Parameter(help="github: how many parallel jobs, each with a part of the suite.")] = None,
    nodes: Annotated[int | None, Parameter(help="slurm: how many nodes the workers are spread over (default: 1).")] = None,
    image: Annotated[str | None, Parameter(help="rayjob: container image with chaosrun and the job.")] = None,
    out: Out = OUT,
) -> int:
    """Print what runs a job or a suite elsewhere: in GitHub Actions, as a Ray job, in Slurm."""
    made = api.export(kind, path, overrides, to=to, shards=shards, nodes=nodes, image=image)
    if out.is_json:
        where = None if made.path is None else str(made.path)
        write_json({"v": 1, "kind": kind, "path": where, "text": made.text, "next": made.following})
    elif made.path is None:
        return write_product(made.text)
    else:
        write_out(f"wrote     {made.path}\n" + ("" if out.quiet else f"next      {made.following}\n"))
    return 0
