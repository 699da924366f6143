"""Where runs are kept, and how a command names one, or its root, so that it finds it from here."""

import os
import shlex
from pathlib import Path

from chaosrun.records.layout import RunLayout


def default_root() -> Path:
    """Where runs are kept: $CHAOSRUN_ROOT, else .chaosrun in the working directory."""
    return Path(os.environ.get("CHAOSRUN_ROOT") or ".chaosrun")


def run_arguments(run: RunLayout) -> tuple[str, ...]:
    """The run's id, then the --root that is needed, if any; the path alone of a run that lies under none."""
    if run.path.parent.name != "runs":
        return (str(run.path),)
    return run.run_id, *root_arguments(run.path.parent.parent)


def run_argument(run: RunLayout) -> str:
    """`run_arguments` as part of a command line."""
    return shlex.join(run_arguments(run))


def root_arguments(root: Path) -> tuple[str, ...]:
    """`--root ROOT`; nothing for the root that every command looks under."""
    return () if root.absolute() == default_root().absolute() else ("--root", shortest(root.absolute()))


def shortest(path: Path) -> str:
    """As seen from the working directory, where the path lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
