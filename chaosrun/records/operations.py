"""File operations of a rank while its script saved: a line for each operation that changed something below the outputs, in the
kernel's order, including those of threads and child processes."""

from pathlib import Path
from typing import Literal

import msgspec

from chaosrun.records.codec import Count, Record, read_records

OperationKind = Literal["create", "write", "truncate", "sync", "rename", "link", "symlink", "remove", "mkdir", "rmdir"]


class FileOperation(Record, frozen=True, kw_only=True):
    number: Count
    """Number of the operation in this save on this rank, from 1; 0 if a fault made it fail."""
    save: Count
    """The step after which the script began to save."""
    kind: OperationKind
    path: str
    """Absolute path; "/" for a sync of everything."""
    target: str | None = None
    """The new name in a rename or link."""
    size: Count = 0
    """Bytes written; for a truncate, the new size."""
    time_s: float
    process: int
    """Id of the thread that made it."""
    failed: str | None = None
    """The error that a fault returned in place of the operation, such as ENOSPC."""


OPERATIONS = msgspec.json.Decoder(FileOperation)


def read_operations(path: Path) -> tuple[FileOperation, ...]:
    """The operations of one rank of one attempt; empty if none was traced. Raises DamagedRecordError."""
    return tuple(read_records(path, OPERATIONS)) if path.exists() else ()
