"""What a disk may hold after the power fails: a model of everything that was changed and not yet synced.

`RecordingDisk` does the real thing and writes it down; `after_power_cut` tells one state that the disk may
be found in after what was done so far. The model is that of POSIX and no kinder: the bytes of a file are there once the
file was synced, a name in a directory is there once the directory was synced, and of all that was not, any part may be there
and any other part missing. A rename is atomic; synced in the new directory alone, its file may be found under both names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaosrun.records.filesystem import Filesystem, Moment, Operation

ROOT = 0


@dataclass(slots=True)
class Change:
    """One name in one directory given (`node`) or taken away (None)."""

    folder: int
    name: str
    node: int | None
    durable: bool = False
    after: "Change | None" = None
    """Of the old name of a rename: it goes no sooner than the new one is there."""


@dataclass(slots=True)
class File:
    now: bytes = b""
    durable: bytes | None = b""
    """As it was last synced."""


@dataclass(slots=True)
class Model:
    changes: list[Change] = field(default_factory=list)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    """What each holds now."""
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

    def new(self, parts: tuple[str, ...], *, folder: bool) -> None:
        self.numbers += 1
        if folder:
            self.folders[self.numbers] = {}
        else:
            self.files[self.numbers] = File()
        self.change(parts, self.numbers)

    def sync(self, node: int) -> None:
        if node in self.files:
            self.files[node].durable = self.files[node].now
        for change in self.changes:
            if change.folder == node:
                change.durable = True
                if change.after is not None:
                    change.after.durable = True


class RecordingDisk(Filesystem):
    """The real file system below `root`, and a model of what of it would survive."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.model = Model()
        self.on_operation: Callable[[], None] = lambda: None
        """Called after each."""
        self.listeners.append(self._record)

    def sync(self, path: Path, descriptor: int) -> None:
        """In the model alone, which is what the power is cut of: real ones would be most of the time that a test takes."""
        self._do(Operation(kind="fsync", path=path), lambda: None)

    def put(self, path: Path, data: bytes) -> None:
        """Write a file as a training script does, without syncing anything."""
        if not path.parent.exists():
            self.mkdir(path.parent)
        if path.exists():
            self.unlink(path)
        descriptor = self.open(path)
        with open(descriptor, "wb"):
            self.write(path, descriptor, data)

    def _record(self, operation: Operation, moment: Moment) -> None:
        if moment == "before":
            return
        parts = operation.path.relative_to(self.root).parts
        node = self.model.find(parts)
        match operation.kind:
            case "mkdir" | "open":
                if node is None:
                    self.model.new(parts, folder=operation.kind == "mkdir")
            case "write":
                assert node is not None
                self.model.files[node].now += operation.data
            case "truncate":
                assert node is not None
                self.model.files[node].now = operation.path.read_bytes()
            case "fsync":
                assert node is not None
                self.model.sync(node)
            case "rename":
                assert node is not None and operation.target is not None
                given = self.model.change(operation.target.relative_to(self.root).parts, node)
                self.model.change(parts, None, after=given)
            case "unlink" | "rmdir":
                self.model.change(parts, None)
        self.on_operation()


State = dict[Path, bytes | None]
"""Contents by path, of a directory None."""


def after_power_cut(model: Model, fate: Random | bool) -> State:
    """What is found afterwards. `fate` decides over what was not synced: True keeps all of it, as after a SIGKILL, False
    none, a Random any part."""

    def kept() -> bool:
        return fate if isinstance(fate, bool) else fate.random() < 0.5

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
            state[path] = _content(model.files[node], fate)
            return
        state[path] = None
        for name, below in folders.get(node, {}).items():
            find(below, path / name)

    find(ROOT, Path())
    return state


def build(state: State, into: Path) -> None:
    for path, content in state.items():
        if content is None:
            (into / path).mkdir()
        else:
            (into / path).write_bytes(content)


def _content(file: File, fate: Random | bool) -> bytes:
    if file.now == file.durable or fate is True:
        return file.now
    durable = file.durable or b""
    if fate is False:
        return durable
    begins = min(len(durable), len(file.now))
    first, last = sorted(fate.randint(begins, len(file.now)) for _ in range(2))
    # Its size may be right already and its pages not: never written are the last ones, or one in the middle.
    cut_off, no_tail = file.now[:first], file.now[:first] + bytes(len(file.now) - first)
    with_a_hole = file.now[:first] + bytes(last - first) + file.now[last:]
    return fate.choice([durable, file.now, cut_off, no_tail, with_a_hole])
