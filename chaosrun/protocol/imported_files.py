"""The files of a job that its processes have imported: a cached reference depends on them."""

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path


def imported_files(script: Path) -> dict[str, str]:
    """sha256 of the script and of every imported file next to or below it, on which a cached reference depends.

    Installed packages are left out, even in an environment next to the script: their versions are in the key.
    """
    folder = script.resolve().parent
    installed = Path(sys.prefix).resolve()
    origins = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    resolved = _resolver()
    beside = os.path.join(folder, "")
    paths = {resolved(origin) for origin in origins if origin and origin.endswith(".py")}
    found = {script.resolve(), *(Path(path) for path in paths if path.startswith(beside))}
    local = [path for path in found if not path.is_relative_to(installed) and path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(local)}


def _resolver() -> Callable[[str], str]:
    """`os.path.realpath`, for thousands of files in a few hundred folders: resolves each folder once."""
    real_folder = functools.cache(os.path.realpath)

    def resolved(path: str) -> str:
        folder, name = os.path.split(path)
        found = os.path.join(real_folder(folder), name)
        return os.path.realpath(found) if os.path.islink(found) else found

    return resolved
