"""A leg's inputs.json: digests of the script and of the job's modules that it imported, as they were when the leg ended."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from chaosrun.records.run_file import read_json


def read_inputs(path: Path) -> Mapping[str, str] | None:
    """Digests by file; None if there is no such list, or a damaged one."""
    with suppress(OSError, ValueError):
        value = read_json(path.read_bytes())
        if isinstance(value, dict) and all(isinstance(digest, str) and "\0" not in name for name, digest in value.items()):
            return value
    return None
