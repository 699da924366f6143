"""Where runs are kept, and the arguments by which a command finds a run, or its root, from the working directory."""

import os
import shlex
from pathlib import Path

from chaosrun.records.layout import RunLayout


def default_root() -> Path:
    """Where runs are kept: $CHAOSRUN_ROOT, else .chaosrun in the working directory."""
    return Path(os.environ.get("CHAOSRUN_ROOT") or ".chaosrun")


def run_arguments(run: RunLayout) -> tuple[str, ...]:
    """The run's id, followed by --root if needed; only the path if the run is under no root."""
    if run.path.parent.name != "runs":
        return (str(run.path),)
    return run.run_id, *root_arguments(run.path.parent.parent)


def run_argument(run: RunLayout) -> str:
    """`run_arguments` as part of a command line."""
    return shlex.join(run_arguments(run))


def root_arguments(root: Path) -> tuple[str, ...]:
    """`--root ROOT`; nothing for the default root."""
    try:
        return () if root.absolute() == default_root().absolute() else ("--root", shortest(root.absolute()))
    except OSError:  # the working directory is gone
        return "--root", str(root)


def shortest(path: Path) -> str:
    """The path relative to the working directory if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
