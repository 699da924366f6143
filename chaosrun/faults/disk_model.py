"""Models the contents of a disk after a power failure, from all changes that were not yet synced.

The model guarantees what POSIX does, and no more: a file's bytes survive once the file was synced, a name in a directory once
the directory was synced. Of everything else any part may survive and any other be lost. A rename is atomic; if only the new
directory was synced, the file may be found under both names. Contents are bytes, or the path of a file that holds them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

ROOT = 0
Content = bytes | Path
State = dict[Path, Content | None]
"""Contents by path; None for a directory."""
Fate = Random | bool
"""What happens to unsynced changes: True keeps them all, as after a SIGKILL, False none, a Random any part."""


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
    kept: int = 0
    """After a truncation: how many of the synced first bytes remain. A power cut cannot lose them."""


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


def after_power_cut(model: Model, names: Fate, data: Fate | str | None = None) -> State:
    """The disk's contents after the cut. `names`: the fate of unsynced names; `data`: the fate of unsynced contents, by default
    the same; "torn": their second half holds zeros."""

    def kept() -> bool:
        return names if isinstance(names, bool) else names.random() < 0.5

    folders: dict[int, dict[str, int]] = {}
    survived: set[int] = set()
    for change in model.changes:
        if not (change.durable or kept()) or (change.after is not None and id(change.after) not in survived):
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
            state[path] = _content(model.files[node], names if data is None else data)
            return
        state[path] = None
        for name, below in folders.get(node, {}).items():
            find(below, path / name)

    find(ROOT, Path())
    return state


def _content(file: File, fate: Fate | str) -> Content:
    if fate is True or file.is_synced or file.now == file.durable:
        return file.now
    if fate is False:
        return file.durable
    durable, now = _bytes(file.durable), _bytes(file.now)
    begins = min(len(durable), len(now))
    if not isinstance(fate, Random):
        # A file that was only appended to keeps its earlier bytes.
        begins = begins if now.startswith(durable) else min(begins, file.kept)
        kept = begins + (len(now) - begins) // 2
        return now[:kept] + bytes(len(now) - kept) if fate == "torn" else now[:begins]
    first, last = sorted(fate.randint(begins, len(now)) for _ in range(2))
    # The new size may reach the disk before the pages: the last pages, or some in the middle, hold zeros.
    cut_off, no_tail = now[:first], now[:first] + bytes(len(now) - first)
    with_a_hole = now[:first] + bytes(last - first) + now[last:]
    return fate.choice([durable, now, cut_off, no_tail, with_a_hole])


def _bytes(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()
