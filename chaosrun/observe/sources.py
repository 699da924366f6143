"""The job's own sources, as the ranks of a leg ran them: the leg's inputs.json."""

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from chaosrun.observe.held import file_of_module, is_installed, real_path
from chaosrun.records.inputs import read_inputs, with_version
from chaosrun.records.journal import write_durably


def imported_files(script: Path, made: Path) -> dict[str, str]:
    """sha256 of the script and of every imported file next to or below it, on which a cached reference depends.

    Installed packages are left out, even in an environment next to the script: their versions are in the key. So are files in
    the leg's folder, `made`: the script has written them in this leg, while those of the job are only linked from there.
    """
    folder = script.resolve().parent
    others = Path(sys.prefix).resolve(), made.resolve()
    origins = [file_of_module(module) for module in list(sys.modules.values())]
    beside = os.path.join(folder, "")
    paths = {real_path(origin) for origin in origins if origin and origin.endswith(".py")}
    found = {script.resolve(), *(Path(path) for path in paths if path.startswith(beside) and not is_installed(path))}
    digests = {}
    for path in sorted(path for path in found if not any(map(path.is_relative_to, others))):
        with suppress(OSError):  # removed since it was imported
            digests[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def record_sources(inputs: Path, script: Path) -> None:
    """Add to a leg's inputs.json what this process has imported. Asked for after an attempt's first step and at its end: a file
    that was edited in between, or since an earlier attempt, has several versions there. Raises OSError if it cannot be
    written."""
    known = read_inputs(inputs) or {}
    imported = imported_files(script, inputs.parent).items()
    found = {**known, **{name: with_version(known.get(name), digest) for name, digest in imported}}
    if found != known:
        write_durably(inputs, json.dumps(found, indent=1).encode())
