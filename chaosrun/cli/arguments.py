"""The arguments that commands share: names, types and what --help says of them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from chaosrun.errors import UsageError


def duration_s(option: str, text: str) -> float:
    """`90s`, `10m`, `2h` as seconds. Raises UsageError, naming the option."""
    from chaosrun.spec.fields import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} must be {error}", hint=f"such as {option} 90s") from error


def numbers(option: str, text: str, of: str) -> tuple[int, ...]:
    """`1,27,66`, each 1 or more. Raises UsageError, naming the option and what they are numbers of."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is no list of {of}", hint=f"write numbers, such as {option} 1,27,66") from error
    if any(number < 1 for number in found):
        raise UsageError(f"{option} {text!r}: {of} count from 1", hint=f"write numbers, such as {option} 1,27,66")
    return found


def names(given: Sequence[str] | None) -> tuple[str, ...]:
    """Of an option that may be given several times, with several names each, separated by commas."""
    return tuple(name for each in given or () for part in each.split(",") if (name := part.strip()))


def _names_of_runs(context: Any) -> list[str]:
    """What a shell may complete the name of a run to: nothing of a run is read."""
    from chaosrun.records.runs import default_root

    given = next((argument.value for name in ("root", "--root") if (argument := context.get(name)) is not None), None)
    folder = (given if isinstance(given, Path) else default_root()) / "runs"
    runs = [entry.name for entry in os.scandir(folder) if entry.is_dir()] if folder.is_dir() else []
    return ["latest", *sorted(run for run in runs if not run.startswith("."))]


Format = Annotated[
    Literal["text", "json"], Parameter(name=["--output", "-o"], help="text for people, json for programs (on stdout).")
]
Root = Annotated[Path | None, Parameter(name="--root", help="Where runs are kept (default: $CHAOSRUN_ROOT, else ./.chaosrun).")]
Address = Annotated[str | None, Parameter(name="--address", help="Ray cluster to join (default: start a local Ray).")]
Quiet = Annotated[
    bool, Parameter(name=["--quiet", "-q"], help="No progress, and nothing beyond what was asked for but errors.")
]
Run = Annotated[str, Parameter(help="A run id, its unique beginning, or 'latest'.", completer=_names_of_runs)]
Job = Annotated[Path, Parameter(help="The job file (YAML).")]
Overrides = Annotated[str, Parameter(help="Changes to the job file: workers=4 faults.seed=7 'faults.schedule[0].rank=1'.")]
