"""What a rank was seen to do to files while its script saved: a line for each operation that changed something below the
outputs, in the kernel's order, whoever asked for it (a thread, a child process)."""

from pathlib import Path
from typing import Literal

import msgspec

from chaosrun.records.codec import Count, Record, read_records

OperationKind = Literal["create", "write", "truncate", "sync", "rename", "link", "symlink", "remove", "mkdir", "rmdir"]


class FileOperation(Record, frozen=True, kw_only=True):
    number: Count
    """Of this save on this rank, counted from 1; 0 of one that was made to fail."""
    save: Count
    """The step after which the script began to save."""
    kind: OperationKind
    path: str
    """Absolute; of a sync of everything "/"."""
    target: str | None = None
    """Of a rename or a link: the new name."""
    size: Count = 0
    """Bytes written; of a truncate the new size."""
    time_s: float
    process: int
    """The thread that asked for it."""
    failed: str | None = None
    """The error that a fault gave it in the place of doing it, such as ENOSPC."""


OPERATIONS = msgspec.json.Decoder(FileOperation)


def read_operations(path: Path) -> tuple[FileOperation, ...]:
    """Of one rank of one attempt; none where none was traced. Raises DamagedRecordError."""
    return tuple(read_records(path, OPERATIONS)) if path.exists() else ()


def operations_of_save(path: Path, save: int) -> tuple[FileOperation, ...]:
    """Of the save after this step."""
    return tuple(each for each in read_operations(path) if each.save == save)
