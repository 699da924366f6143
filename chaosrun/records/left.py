"""left.json: what the files below a leg's outputs held when it had come to its end, of those that hold tensors or arrays."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from chaosrun.errors import UsageError
from chaosrun.records.codec import Record
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LegLayout
from chaosrun.records.run_file import read_record
from chaosrun.records.tensor_files import Entry, entries, is_one

MOST_BYTES = 1 << 29
"""Of all files that are read, the newest first; others are left out."""


class Left(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[1] = 1
    files: Mapping[str, Mapping[str, Entry]] = msgspec.field(default_factory=dict)
    """By path below the outputs and entry, its bytes, how many and their digest; see `tensor_files.entries`."""
    left_out: tuple[str, ...] = ()
    """Files that were not read, as there were too many bytes."""


NOTHING_LEFT = Left()


def note_left(leg: LegLayout) -> None:
    """Raises OSError where it cannot be written."""
    found: dict[str, Mapping[str, Entry]] = {}
    left_out: list[str] = []
    room = MOST_BYTES
    for _, size, path, name in sorted(_files(leg), reverse=True):
        if size > room:
            left_out.append(name)
            continue
        room -= size
        try:
            held = entries(path)
        except OSError:  # gone, or not to be read: nothing is told of it
            continue
        if held:
            found[name] = held
    write_durably(leg.left, msgspec.json.encode(Left(files=found, left_out=tuple(sorted(left_out)))))


def _files(leg: LegLayout) -> Iterator[tuple[float, int, Path, str]]:
    """Those that may hold tensors, no links: when each was changed, its size, and its path below the outputs."""
    for output in (leg.output, leg.work):
        for folder, _, names in os.walk(output):
            for path in (Path(folder, name) for name in names):
                try:
                    if path.is_symlink() or not path.is_file():
                        continue
                    with path.open("rb") as file:
                        head = file.read(8)
                    about = path.stat()
                except OSError:
                    continue
                if is_one(head, path.suffix):
                    yield about.st_mtime, about.st_size, path, str(path.relative_to(output))


def read_left(leg: LegLayout, problems: list[str]) -> Left:
    """Empty of a leg that has none; what is no such file becomes a problem."""
    try:
        return read_record(leg.left, Left) if leg.left.exists() else NOTHING_LEFT
    except UsageError as error:
        problems.append(error.message)
        return NOTHING_LEFT
