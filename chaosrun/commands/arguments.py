"""The arguments that commands share: names, types and what --help says of them."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

__all__ = ["Address", "Format", "Job", "Overrides", "Quiet", "Root", "Run"]

Format = Annotated[
    Literal["text", "json"], Parameter(name=["--output", "-o"], help="text for people, json for programs (on stdout).")
]
Root = Annotated[Path | None, Parameter(name="--root", help="Where runs are kept (default: $CHAOSRUN_ROOT, else ./.chaosrun).")]
Address = Annotated[str | None, Parameter(name="--address", help="Ray cluster to join (default: start a local Ray).")]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], help="No progress on stderr.")]
Run = Annotated[str, Parameter(help="A run id, its unique beginning, or 'latest'.")]
Job = Annotated[Path, Parameter(help="The job file (YAML).")]
Overrides = Annotated[str, Parameter(help="Changes to the job file: workers=4 faults.seed=7 'faults.schedule[0].rank=1'.")]
