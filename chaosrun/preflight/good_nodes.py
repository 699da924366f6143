"""The file of good nodes, for a scheduler or a start-up script: one a line, by the name that the report calls it.

That is its hostname, wherever one Ray node runs on a host.
"""

from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.preflight.result import Result
from chaosrun.records.destination import expect_folder, is_stream, write_to


def make_way(path: Path) -> None:
    """Remove an older list: it would be taken for this preflight's, should this one not come to its end. Raises UsageError
    where the new one could not be written."""
    try:
        expect_folder(path)
        if not is_stream(path):
            write_to(path, b"")
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_good_nodes(path: Path, result: Result) -> None:
    """Whole or not at all; empty when no node is good. Raises UsageError."""
    try:
        write_to(path, "".join(f"{name}\n" for name in result.good()).encode())
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"--write-good-nodes {path} cannot be written: {error.strerror}", hint="name another file")
