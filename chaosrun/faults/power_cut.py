"""A power cut: rebuilds the script's outputs, from the recorded operations of its save, as if unsynced changes were lost.

`take` copies the outputs before the save, since files that a save overwrites or removes may reappear. When every process of the
attempt is gone, the supervisor, which must be able to access the outputs, calls `cut_power`: it replaces them by the contents
that the disk would have, journalled before and after. A file's bytes are its current ones; if it was written to after its last
sync, the synced part is assumed to be its beginning.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.faults.disk_model import Content, Model, State, after_power_cut
from chaosrun.faults.tracer import SaveNote
from chaosrun.records.codec import DamagedRecordError
from chaosrun.records.events import OutputsReplaced, OutputsReplacing
from chaosrun.records.filesystem import remove
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import Marker, read_marker, read_note
from chaosrun.records.operations import FileOperation, read_operations

if TYPE_CHECKING:
    from chaosrun.faults.fault import FaultPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """Paths of the outputs that a power cut changed."""

    gone: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    """Names that reappeared after the save had removed or renamed them."""
    torn: tuple[str, ...] = ()
    """Files whose contents changed."""


def take(outputs: Sequence[str], into: Path) -> None:
    """Copy the outputs to `into`. Raises OSError, for example when the disk is full."""
    into.mkdir(parents=True)
    for number, output in enumerate(outputs):
        if os.path.isdir(output):
            shutil.copytree(output, into / str(number), symlinks=True)
        elif os.path.lexists(output):
            shutil.copy2(output, into / str(number), follow_symlinks=False)


def cut_power(leg: LegLayout, plan: FaultPlan, attempt: int, outputs: tuple[str, ...], record: Callable[..., None]) -> None:
    """Apply each power cut of this attempt to the script's outputs."""
    for fault in plan.faults:
        note = read_note(leg, fault.id, SaveNote) if fault.kind == "power_cut" else None
        marker = read_marker(leg, fault.id)
        if note is None or note.struck_s is None or marker is None or marker.attempt != attempt:
            continue
        unsynced = fault.option("unsynced")
        record(OutputsReplacing(fault=fault.id, attempt=attempt, unsynced=unsynced))
        before, about = leg.outputs_before(fault.id), {"fault": fault.id, "attempt": attempt}
        try:
            done, scratch = _done(leg, marker, note), before.with_suffix(".rebuilt")
            change = rebuild(outputs, before, done, unsynced, taken_s=marker.time_s, scratch=scratch)
        except (OSError, DamagedRecordError) as error:
            record(OutputsReplaced(**about, problem=f"they could not be rebuilt: {error}"))
        else:
            record(OutputsReplaced(**about, gone=change.gone, back=change.back, torn=change.torn))


def _done(leg: LegLayout, marker: Marker, note: SaveNote) -> list[FileOperation]:
    """The operations of all ranks in that save before the power was cut."""
    files = leg.attempt(marker.attempt).path.glob("rank-*.operations.jsonl")
    of_save = (each for path in files for each in read_operations(path) if each.save == note.save)
    return [each for each in of_save if each.time_s <= (note.struck_s or 0.0)]


def rebuild(
    outputs: Sequence[str], before: Path, operations: Sequence[FileOperation], unsynced: str, *, taken_s: float, scratch: Path
) -> Rebuilt:
    """Put the outputs into the state that the disk would have after these operations. `before`: the copy made by `take`, at
    `taken_s`.

    The new state is complete in `scratch` before anything is replaced.
    """
    replay = _Replay()
    made = {path for each in operations if each.time_s < taken_s for path in _given(each)}
    for number, output in enumerate(outputs):
        replay.begin(Path(output), before / str(number), made)
    for operation in sorted(operations, key=lambda each: each.time_s):
        replay.do(operation)
    replay.look()
    names = unsynced != "lost"
    state = after_power_cut(replay.model, names, "torn" if unsynced == "torn" else False if names is False else "empty")
    if scratch.exists():
        shutil.rmtree(scratch)
    scratch.mkdir(parents=True)
    changes = _compare(state, outputs)
    for number, output in enumerate(outputs):
        _build(state, Path(*Path(output).parts[1:]), scratch / str(number))
    for number, output in enumerate(outputs):
        remove(Path(output))
        if os.path.lexists(scratch / str(number)):
            shutil.move(scratch / str(number), output)
    return changes


@dataclass(slots=True)
class _Replay:
    model: Model = field(default_factory=Model)
    written: Counter[int] = field(default_factory=Counter)
    """Bytes written to each file since it was created."""
    synced: dict[int, int] = field(default_factory=dict)
    """How many bytes of each file were synced in this save."""
    touched: set[int] = field(default_factory=set)

    def begin(self, output: Path, kept: Path, made: Collection[str]) -> None:
        """Enter the files from before the save as durable."""
        self._folder(output.parent)
        for path in (kept, *sorted(kept.rglob("*"))):
            real = output / path.relative_to(kept)
            if not os.path.lexists(path) or str(real) in made:
                continue
            is_folder = path.is_dir() and not path.is_symlink()
            self._folder(real.parent)
            self.model.new(_parts(real), folder=is_folder).durable = True
            if not is_folder:
                file = self.model.files[self.model.numbers]
                file.now = file.durable = path

    def do(self, each: FileOperation) -> None:
        path = Path(each.path)
        if each.failed is not None:
            return
        if each.path == "/":
            for node in (*self.model.folders, *self.model.files):
                self._sync(node)
            return
        node = self.model.find(_parts(path))
        if each.kind in ("create", "symlink", "mkdir") or (each.kind in ("write", "truncate") and node is None):
            self._create(each, path, node)
        elif each.kind in ("write", "truncate") and node in self.model.files:
            self._write(node, each.size)
        elif node is None:
            pass  # created and removed unseen
        elif each.kind == "sync":
            self._sync(node)
        elif each.kind == "rename" and each.target is not None:
            self._folder(Path(each.target).parent)
            self.model.rename(_parts(path), _parts(Path(each.target)))
        elif each.kind == "link" and each.target is not None:
            self._folder(Path(each.target).parent)
            self.model.change(_parts(Path(each.target)), node)
        elif each.kind in ("remove", "rmdir"):
            self.model.change(_parts(path), None)

    def look(self) -> None:
        """Read the bytes of each changed file from its current path."""
        paths = self.model.paths()
        for node in self.touched:
            file, path = self.model.files[node], Path("/") / paths[node] if node in paths else None
            if path is None or not os.path.lexists(path):
                continue
            file.now = path
            if file.is_synced:
                file.durable = path
            elif node in self.synced:
                file.durable = path.read_bytes()[: self.synced[node]]

    def _create(self, each: FileOperation, path: Path, node: int | None) -> None:
        if node is None:
            self._folder(path.parent)
            self.model.new(_parts(path), folder=each.kind == "mkdir")
            node = self.model.numbers
        if node in self.model.files:
            self._write(node, 0)
            self.written[node] = 0
            self.model.files[node].is_synced = each.kind == "symlink"

    def _write(self, node: int, size: int) -> None:
        self.touched.add(node)
        self.written[node] += size
        self.model.files[node].is_synced = False

    def _sync(self, node: int) -> None:
        self.model.sync(node)
        if node in self.touched:
            self.synced[node] = self.written[node]

    def _folder(self, path: Path) -> None:
        """Enter a folder and all folders above it as durable."""
        for folder in (*reversed(path.parents), path):
            if self.model.find(_parts(folder)) is None:
                self.model.new(_parts(folder), folder=True).durable = True


def _parts(path: Path) -> tuple[str, ...]:
    return path.parts[1:]


def _given(each: FileOperation) -> Iterator[str]:
    if each.kind in ("create", "mkdir", "symlink"):
        yield each.path
    if each.target is not None:
        yield each.target


def _compare(state: State, outputs: Sequence[str]) -> Rebuilt:
    there = {path for output in outputs for path in (Path(output), *Path(output).rglob("*")) if os.path.lexists(path)}
    wanted = {Path("/") / path: content for path, content in state.items()}
    ours = {path for path in wanted if any(path.is_relative_to(output) for output in outputs)}
    torn = sorted(str(path) for path in there & ours if _differs(wanted[path], path))
    return Rebuilt(gone=tuple(sorted(map(str, there - ours))), back=tuple(sorted(map(str, ours - there))), torn=tuple(torn))


def _differs(content: Content | None, path: Path) -> bool:
    if content is None or path.is_symlink() or path.is_dir() or content == path:
        return False
    if isinstance(content, Path):
        return content.is_symlink() or content.read_bytes() != path.read_bytes()
    return content != path.read_bytes()


def _build(state: State, output: Path, into: Path) -> None:
    for path, content in state.items():
        if not path.is_relative_to(output):
            continue
        place = into / path.relative_to(output)
        if content is None:
            place.mkdir()
        elif isinstance(content, bytes):
            place.write_bytes(content)
        else:
            shutil.copy2(content, place, follow_symlinks=False)
