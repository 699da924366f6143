"""left.json: content of the files of tensors or arrays at the end of a leg. For a script that resumes by itself, those below
its outputs; for one that attached, those that it wrote. Also the numbers in them, and in text files below the outputs."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from chaosrun.records.codec import Record, encode
from chaosrun.records.figures import SUFFIXES, Figures, figures, figures_beside_tensors
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import read_end
from chaosrun.records.run_file import read_record, readable
from chaosrun.records.tensor_files import WHOLE, Entry, contents, is_one

MOST_BYTES = 1 << 29
"""Total size of the files that are read, newest first; others are left out."""
MOST_FILES_OF_FIGURES = 200
_CLOCK_S = 0.1
"""How far the clocks of ranks and file systems may differ."""


class Left(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[1] = 1
    files: Mapping[str, Mapping[str, Entry]] = msgspec.field(default_factory=dict)
    """By path (relative if below the outputs) and entry, size and digest of its bytes; see `tensor_files.contents`."""
    left_out: tuple[str, ...] = ()
    """Files that were not read, since their total size is over MOST_BYTES."""
    ranks: Mapping[str, int] = msgspec.field(default_factory=dict)
    """For a script that attached: which rank wrote each file."""
    saves: Mapping[str, tuple[tuple[int, float], ...]] = msgspec.field(default_factory=dict)
    """For a script that attached, files that it wrote only during the training: after which steps, and when."""
    changed: Mapping[str, float] = msgspec.field(default_factory=dict)
    """When each file was last written, or its link was made."""
    figures: Mapping[str, Figures] = msgspec.field(default_factory=dict)
    """By path, the numbers in these files, and in JSON and CSV files below the outputs."""


NOTHING_LEFT = Left()


def note_left(leg: LegLayout, attached: int = 0, known: Iterable[str] = ()) -> None:
    """Write left.json. `attached`: how many ranks attached and recorded what they wrote; 0: none, so
    all files below the outputs count. `known`: files that another leg left. Raises OSError if it cannot be written."""
    found: dict[str, Mapping[str, Entry]] = {}
    written: dict[str, _File] = {}
    left_out: list[str] = []
    numbers, changed = _figures(leg)
    room = MOST_BYTES
    for file in sorted(_results(leg, attached, known) if attached else _files(leg), reverse=True):
        if file.size > room:
            left_out.append(file.name)
            continue
        room -= file.size
        try:
            held = contents(file.path)
        except OSError:  # gone or unreadable: it is left out
            continue
        if held.entries:
            found[file.name] = held.entries
        beside = figures_beside_tensors(held.numbers) if len(numbers) < MOST_FILES_OF_FIGURES else {}
        if beside:
            numbers[file.name] = beside
        if held.entries or beside:
            written[file.name] = file
    ranks = {name: file.rank for name, file in written.items() if file.rank is not None}
    saves = {name: file.saves for name, file in written.items() if file.saves}
    changed |= {name: file.changed_s for name, file in written.items()}
    out = tuple(sorted(left_out))
    left = Left(files=found, left_out=out, ranks=ranks, saves=saves, changed=changed, figures=numbers)
    write_durably(leg.left, encode(left))


class _File(NamedTuple):
    changed_s: float
    size: int
    path: Path
    name: str
    rank: int | None = None
    saves: tuple[tuple[int, float], ...] = ()


def _below_outputs(leg: LegLayout) -> Iterator[tuple[Path, str]]:
    """Each file's path, and its name in the record."""
    for output in (leg.output, leg.work):
        for folder, _, names in os.walk(output):
            yield from ((path, str(path.relative_to(output))) for path in (Path(folder, name) for name in names))


def _figures(leg: LegLayout) -> tuple[dict[str, Figures], dict[str, float]]:
    """The numbers in each file, and when it was written."""
    found: dict[str, Figures] = {}
    changed: dict[str, float] = {}
    # Links lead to files from before the drill.
    ours = ((path, name) for path, name in _below_outputs(leg) if path.suffix in SUFFIXES and not path.is_symlink())
    for path, name in islice(ours, MOST_FILES_OF_FIGURES):
        with suppress(OSError):  # gone or unreadable: it is left out
            if numbers := figures(path):
                found[name], changed[name] = numbers, path.stat().st_mtime
    return found, changed


def _files(leg: LegLayout) -> Iterator[_File]:
    for path, name in _below_outputs(leg):
        yield from _file(path, name)


def _results(leg: LegLayout, workers: int, known: Iterable[str]) -> Iterator[_File]:
    """Files that ranks of the last attempt wrote, each under the first rank that did; `known` files, which killed ranks may
    have written; and all others below the outputs: links, files of other processes."""
    attempt, seen, ended_s = leg.attempt(leg.attempts()[-1]), set[str](), 0.0
    for rank in range(workers):
        if (end := read_end(attempt, rank)) is None:
            continue
        for path in map(Path, {**dict.fromkeys(end.results), **end.saves}):
            own = path.is_relative_to(leg.output)
            name = str(path.relative_to(leg.output) if own else path)
            if name not in seen:
                seen.add(name)
                # Another drill may since have written a file outside the outputs.
                files = (file for file in _file(path, name) if own or file.changed_s <= end.time_s + _CLOCK_S)
                saves = () if str(path) in end.results else end.saves[str(path)]
                yield from (file._replace(rank=rank, saves=saves) for file in files)
        ended_s = max(ended_s, end.time_s)
    for name in known:
        if name not in seen:
            seen.add(name)
            path = leg.output / name  # an absolute name stays as it is
            yield from (file for file in _file(path, name) if file.changed_s <= ended_s + _CLOCK_S)
    yield from (file for file in _files(leg) if file.name not in seen)


def _file(path: Path, name: str) -> Iterator[_File]:
    """The file if it may hold tensors. Its time is the later of its own and that of the link to it."""
    try:
        if not path.is_file() or (path.suffix in WHOLE and path.is_symlink()):
            return  # a link to raw numbers leads to the job's data
        with path.open("rb") as file:
            head = file.read(8)
        about, changed_s = path.stat(), path.lstat().st_mtime
    except OSError:
        return
    if is_one(head, path.suffix):
        yield _File(max(about.st_mtime, changed_s), about.st_size, path, name)


def read_left(leg: LegLayout, problems: list[str]) -> Left:
    """Read left.json; empty if there is none. A damaged file becomes a problem."""
    found = readable(lambda: read_record(leg.left, Left), problems) if leg.left.exists() else None
    return found or NOTHING_LEFT
