"""Folders named by a name and the time, one for each run, sweep or suite: a new one, and the one that a person means."""

import time
from collections.abc import Mapping
from pathlib import Path

from chaosrun.errors import UsageError

__all__ = ["named_folder", "new_folder"]

MOST_AT_ONCE = 100
"""Folders of one name in one second."""


def new_folder(parent: Path, name: str) -> Path:
    """A folder of its own in `parent`, whose name is the plural of what lies there. Raises UsageError when none can be made."""
    for number in range(1, MOST_AT_ONCE + 1):
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime())
        path = parent / (f"{name}-{stamp}" + (f"-{number}" if number > 1 else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"cannot write {parent.name} to {parent}: {error.strerror}", hint="name a writable directory with --root"
            ) from error
        return path
    raise UsageError(f"could not find a free name under {parent}", hint=f"remove old {parent.name}")


def named_folder(parent: Path, ref: str, created_s: Mapping[Path, float], *, of: Path, otherwise: str) -> Path:
    """The folder in `parent` called `ref`: its name, a unique prefix of it, or "latest".

    `created_s` has all that are of the file `of`, and when they were made. Raises UsageError, with the
    hint `otherwise` where there is none at all.
    """
    matches = [path for path in created_s if path.name == ref] or [path for path in created_s if path.name.startswith(ref)]
    if ref == "latest":
        matches = sorted(created_s, key=lambda path: (created_s[path], path.name))[-1:]
    if len(matches) == 1:
        return matches[0]
    if matches:
        some = ", ".join(sorted(path.name for path in matches)[:5])
        raise UsageError(f"{ref!r} could be any of {len(matches)} {parent.name}: {some}", hint="write more of the name")
    names = ", ".join(sorted(path.name for path in created_s)[-5:])
    raise UsageError(
        f"no {parent.name.removesuffix('s')} {ref!r} of {of} under {parent.parent}",
        hint=f"there are {names}" if names else otherwise,
    )
