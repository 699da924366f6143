"""The arguments that commands share: names, types and what --help says of them."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from chaosrun.errors import UsageError

__all__ = ["Address", "Format", "Job", "Overrides", "Quiet", "Root", "Run", "duration_s"]


def duration_s(option: str, text: str) -> float:
    """`90s`, `10m`, `2h` as seconds. Raises UsageError, naming the option."""
    from chaosrun.spec.fields import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} must be {error}", hint=f"such as {option} 90s") from error


def _names_of_runs(context: Any) -> list[str]:
    """What a shell may complete the name of a run to: nothing of a run is read."""
    from chaosrun.records.runs import default_root

    given = next((argument.value for name in ("root", "--root") if (argument := context.get(name)) is not None), None)
    folder = (given if isinstance(given, Path) else default_root()) / "runs"
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir()] if folder.is_dir() else []
    return ["latest", *sorted(name for name in names if not name.startswith("."))]


Format = Annotated[
    Literal["text", "json"], Parameter(name=["--output", "-o"], help="text for people, json for programs (on stdout).")
]
Root = Annotated[Path | None, Parameter(name="--root", help="Where runs are kept (default: $CHAOSRUN_ROOT, else ./.chaosrun).")]
Address = Annotated[str | None, Parameter(name="--address", help="Ray cluster to join (default: start a local Ray).")]
Quiet = Annotated[
    bool, Parameter(name=["--quiet", "-q"], help="Neither progress nor what to type next: only what was asked for, and errors.")
]
Run = Annotated[str, Parameter(help="A run id, its unique beginning, or 'latest'.", completer=_names_of_runs)]
Job = Annotated[Path, Parameter(help="The job file (YAML).")]
Overrides = Annotated[str, Parameter(help="Changes to the job file: workers=4 faults.seed=7 'faults.schedule[0].rank=1'.")]
