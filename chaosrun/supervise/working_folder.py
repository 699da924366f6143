"""The working folder of a leg whose script saves by itself: its entries link to those of the job's folder, except the outputs,
so that relative paths find the inputs and each leg has its own outputs. The two folders above it are made in the same way."""

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from chaosrun.errors import UsageError
from chaosrun.records.layout import LegLayout

MOST_BESIDE = 4000
"""Entries of a folder above the job's that are shown."""
_PLACEHOLDERS = frozenset({".gitignore", ".gitkeep"})
"""What a folder holds that is empty but for git."""


def lay_out(leg: LegLayout, directory: Path, outputs: Sequence[str]) -> None:
    """Make the leg's working folder, once: a restarted attempt finds the files of the one before. Raises OSError."""
    if leg.work.exists():
        return
    left_out = [PurePath(os.path.normpath(path)).parts for path in outputs]
    path = leg.path.resolve()
    if path.is_relative_to(directory):
        # Runs are no inputs, and the folder must not contain a link to itself.
        parts = path.relative_to(directory).parts
        left_out.append(parts[: max(1, parts.index("runs"))] if "runs" in parts else parts)
    here, seen = leg.work, directory.resolve()
    for folder in (here.parent, here.parent.parent):
        folder.mkdir(parents=True, exist_ok=True)
        _link_above(seen, folder, here)
        here, seen = folder, seen.parent
    incoming = leg.path / "work.incoming"
    incoming.mkdir(exist_ok=True)
    _link(directory, incoming, left_out)
    os.rename(incoming, leg.work)


def check_paths_above(words: Sequence[str], directory: Path, work: Path) -> None:
    """Check a leg that is laid out. Raises UsageError for an argument that names a file out of reach of its working folder."""
    for word in words:
        path = word.rpartition("=")[2]
        if os.pardir in PurePath(path).parts and (directory / path).exists() and not (work / path).exists():
            raise UsageError(
                f"{path} lies more than {len(work.relative_to(work.parents[1]).parts)} folders above {directory}",
                hint=f"each leg runs in a working folder of its own: write {os.path.realpath(directory / path)}",
            )


def _link_above(directory: Path, target: Path, own: Path) -> None:
    """Link at `target` the siblings of `directory`, whose place there is taken by `own`."""
    if directory.name:
        beside = itertools.islice(os.scandir(directory.parent), MOST_BESIDE) if os.access(directory.parent, os.R_OK) else ()
        for entry in beside:
            with suppress(FileExistsError):
                os.symlink(own.name if entry.name == directory.name else entry.path, target / entry.name)


def _link(source: Path, target: Path, left_out: Sequence[tuple[str, ...]]) -> None:
    """Make a folder at `target` that links to the entries of `source`; an empty folder, an output as well, becomes a real
    one, to be filled."""
    target.mkdir(exist_ok=True)
    for entry in os.scandir(source):
        below = [parts[1:] for parts in left_out if parts[:1] == (entry.name,)]
        place = target / entry.name
        is_folder = entry.is_dir()
        if () in below:
            if is_folder and _PLACEHOLDERS.issuperset(os.listdir(entry.path)):
                place.mkdir(exist_ok=True)
            continue
        if is_folder and (below or not os.listdir(entry.path)):
            _link(Path(entry.path), place, below)
        elif not place.is_symlink():
            place.symlink_to(os.path.realpath(entry.path) if entry.is_symlink() else entry.path)
