"""Models the contents of a disk after a power failure, from all changes that were not yet synced.

The model guarantees what POSIX does, and no more: a file's bytes survive once the file was synced, a name in a directory once
the directory was synced. Of everything else any part may survive and any other be lost. A rename is atomic; if only the new
directory was synced, the file may be found under both names. Contents are bytes, or the path of a file that holds them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = 0
Content = bytes | Path
State = dict[Path, Content | None]
"""Contents by path; None for a directory."""


@dataclass(slots=True)
class Change:
    """One name in one directory, given to a `node` or removed (None)."""

    folder: int
    name: str
    node: int | None
    durable: bool = False
    after: "Change | None" = None
    """Set where a rename removes the old name: the change that adds the new one, which must come first."""


@dataclass(slots=True)
class File:
    now: Content = b""
    durable: Content = b""
    """Contents at the last sync."""
    is_synced: bool = True
    """Whether nothing was written since the last sync."""


@dataclass(slots=True)
class Model:
    changes: list[Change] = field(default_factory=list)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    """The current entries of each folder."""
    files: dict[int, File] = field(default_factory=dict)
    numbers: int = 0

    def find(self, parts: tuple[str, ...]) -> int | None:
        node = ROOT
        for part in parts:
            if part not in self.folders.get(node, {}):
                return None
            node = self.folders[node][part]
        return node

    def change(self, parts: tuple[str, ...], node: int | None, after: Change | None = None) -> Change:
        folder = self.find(parts[:-1])
        assert folder is not None, parts
        if node is None:
            del self.folders[folder][parts[-1]]
        else:
            self.folders[folder][parts[-1]] = node
        made = Change(folder, parts[-1], node, after=after)
        self.changes.append(made)
        return made

    def new(self, parts: tuple[str, ...], *, folder: bool) -> Change:
        self.numbers += 1
        if folder:
            self.folders[self.numbers] = {}
        else:
            self.files[self.numbers] = File()
        return self.change(parts, self.numbers)

    def rename(self, parts: tuple[str, ...], target: tuple[str, ...]) -> None:
        node = self.find(parts)
        assert node is not None, parts
        given = self.change(target, node)
        self.change(parts, None, after=given)

    def sync(self, node: int) -> None:
        if node in self.files:
            file = self.files[node]
            file.durable, file.is_synced = file.now, True
        for change in self.changes:
            if change.folder == node:
                change.durable = True
                if change.after is not None:
                    change.after.durable = True

    def paths(self) -> dict[int, Path]:
        """The current path of each file and folder."""
        found: dict[int, Path] = {ROOT: Path()}
        todo = [ROOT]
        while todo:
            folder = todo.pop()
            for name, node in self.folders.get(folder, {}).items():
                found[node] = found[folder] / name
                todo.append(node)
        return found


def after_power_cut(model: Model, survives: Callable[[], bool], content: Callable[[File], Content]) -> State:
    """The disk's contents after the cut. `survives`: whether an unsynced name does, asked for each; `content`: what is found of
    a file that was written to since its last sync."""
    folders: dict[int, dict[str, int]] = {}
    survived: set[int] = set()
    for change in model.changes:
        if not (change.durable or survives()) or (change.after is not None and id(change.after) not in survived):
            continue
        survived.add(id(change))
        entries = folders.setdefault(change.folder, {})
        if change.node is None:
            entries.pop(change.name, None)
        else:
            entries[change.name] = change.node

    state: State = {}

    def find(node: int, path: Path) -> None:
        if node in model.files:
            file = model.files[node]
            state[path] = file.now if file.is_synced or file.now == file.durable else content(file)
            return
        state[path] = None
        for name, below in folders.get(node, {}).items():
            find(below, path / name)

    find(ROOT, Path())
    return state


def bytes_of(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()
