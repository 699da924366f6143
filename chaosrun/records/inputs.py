"""A leg's inputs.json: digests of the script and of the job's modules that it imported, as they were after the first step of
each attempt and at the leg's end."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from chaosrun.records.run_file import read_json

_BETWEEN_VERSIONS = " "


def read_inputs(path: Path) -> Mapping[str, str] | None:
    """Digests by file, of a file that was edited meanwhile those of all its versions in their order; None if there is no such
    list, or a damaged one."""
    with suppress(OSError, ValueError):
        value = read_json(path.read_bytes())
        if isinstance(value, dict) and all(isinstance(digest, str) and "\0" not in name for name, digest in value.items()):
            return value
    return None


def with_version(known: str | None, digest: str) -> str:
    """The entry of a file that has this digest now."""
    versions = known.split(_BETWEEN_VERSIONS) if known else []
    return _BETWEEN_VERSIONS.join(versions if digest in versions[-1:] else [*versions, digest])


def was_edited(entry: str) -> bool:
    """Whether the file of this entry had several versions."""
    return _BETWEEN_VERSIONS in entry
