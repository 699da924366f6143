"""Folders of runs, sweeps and suites, named by name and time: makes a new one, and finds the one that a user means."""

import time
from collections.abc import Mapping
from pathlib import Path

from chaosrun.errors import UsageError, of_the_machine
from chaosrun.wording import listed

MOST_AT_ONCE = 100
"""The most folders of one name in one second."""


def new_folder(parent: Path, name: str) -> Path:
    """Make a new folder in `parent`, whose name is the plural of its content. Raises UsageError if that fails, ResourcesError
    if the disk is full."""
    for number in range(1, MOST_AT_ONCE + 1):
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime())
        path = parent / (f"{name}-{stamp}" + (f"-{number}" if number > 1 else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise of_the_machine(error) or UsageError(
                f"cannot write {parent.name} to {parent}: {error.strerror}", hint="name a writable directory with --root"
            ) from error
        return path
    raise UsageError(f"could not find a free name under {parent}", hint=f"remove old {parent.name}")


def called(ref: str, created_s: Mapping[Path, float]) -> Path | None:
    """The folder called `ref`: a name, a unique prefix, or "latest". Raises UsageError when it could be several."""
    if ref == "latest":
        return max(created_s, key=lambda path: (created_s[path], path.name), default=None)
    matches = [path for path in created_s if path.name == ref] or [path for path in created_s if path.name.startswith(ref)]
    if len(matches) > 1:
        some = listed(sorted(path.name for path in matches))
        of_all = f"any of {len(matches)} {matches[0].parent.name}"
        raise UsageError(f"{ref!r} could be {of_all}: {some}", hint="write more of the name")
    return matches[0] if matches else None
