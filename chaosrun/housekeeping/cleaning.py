"""Removes what `inventory.choose` chooses: renames each into a trash folder beside it, then deletes its contents.

So after an interruption every folder with a run's name is complete, and the next cleaning removes what is in the trash.
Checkpoints that `checkpoint.storage` put elsewhere are removed while the run.json that names them still exists.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chaosrun.errors import ResourcesError, UsageError
from chaosrun.housekeeping.inventory import (
    FILED,
    FOLDERS,
    CleaningChoice,
    Kept,
    KeptPlace,
    choose,
    inventory_of,
    is_real,
    look,
    storage_of,
)
from chaosrun.records.filesystem import remove
from chaosrun.records.layout import RunLayout
from chaosrun.records.locks import locked
from chaosrun.records.naming import default_root
from chaosrun.records.run_file import disown
from chaosrun.supervise.drill import lock_run
from chaosrun.supervise.objects import SilentStores, remove_all_objects
from chaosrun.supervise.reference import ReferenceCache

TRASH = ".trash"
LOCK = ".clean.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaning:
    root: Path
    choice: CleaningChoice
    sizes: tuple[int, ...]
    """Bytes on the disk, for each of `choice.removed`."""
    leftovers: int
    """How many things earlier cleanings left in the trash."""
    leftover_bytes: int
    done: bool
    """False: nothing is removed, only listed."""

    @property
    def freed_bytes(self) -> int:
        return sum(self.sizes) + self.leftover_bytes

    @property
    def spared(self) -> tuple[Path, ...]:
        """Checkpoints outside the root that removed runs name, but that may belong to other runs."""
        return tuple(dict.fromkeys(place for found in self.choice.removed for place in found.storage.doubtful))

    @property
    def empty(self) -> bool:
        return not self.choice.removed and not self.leftovers

    def to_json(self) -> dict[str, object]:
        removed = zip(self.choice.removed, self.sizes, strict=True)
        return {
            "v": 1,
            "root": str(self.root),
            "done": self.done,
            "removed": [{**found.to_json(), "bytes": size} for found, size in removed],
            "kept": [{**kept.found.to_json(), "why": kept.why} for kept in self.choice.kept],
            "spared": [str(place) for place in self.spared],
            "leftovers": self.leftovers,
            "freed_bytes": self.freed_bytes,
        }


def clean(
    root: Path | None = None, *, older_than_s: float, keep: int, failed: bool, agreed: Callable[[Cleaning], bool]
) -> Cleaning:
    """Remove old runs, references, sweeps and suites, if `agreed`, which is given the choice, returns True; those that did not
    pass only if `failed`. What has come into use meanwhile is kept.

    Raises UsageError while another process cleans there, ResourcesError when something cannot be removed.
    """
    place = (default_root() if root is None else root).resolve()
    try:
        return _clean(place, older_than_s, keep, failed, agreed)
    except OSError as error:
        raise _not_removed(error, place) from error


def _clean(root: Path, older_than_s: float, keep: int, failed: bool, agreed: Callable[[Cleaning], bool]) -> Cleaning:
    def chosen() -> CleaningChoice:
        return choose(inventory_of(root), now_s=time.time(), older_than_s=older_than_s, keep=keep, failed=failed)

    for folder in FOLDERS.values():
        _refuse_link(root / folder)
        _refuse_link(root / folder / TRASH)
    with locked(root / LOCK, f"{root} is being cleaned", hint="wait until it is done") if root.is_dir() else nullcontext():
        choice = chosen()
        bins = [root / folder / TRASH for folder in FOLDERS.values()]
        leftovers = [leftover for trash in bins if trash.is_dir() for leftover in sorted(trash.iterdir())]
        intended = Cleaning(
            root=root,
            choice=choice,
            sizes=tuple(_size(found.path, *found.storage.own) for found in choice.removed),
            leftovers=len(leftovers),
            leftover_bytes=_size(*leftovers),
            done=False,
        )
        if intended.empty or not agreed(intended):
            return intended
        failed_ones: list[ResourcesError] = []
        silent: SilentStores = {}
        for leftover in leftovers:
            with _kept_for_later(failed_ones, leftover):
                _delete_from_trash(leftover, silent)
        # The answer may have taken long.
        still = chosen().removed
        removed, sizes, kept = [], [], list(choice.kept)
        for found, size in zip(choice.removed, intended.sizes, strict=True):
            try:
                with _held(root, found):
                    if found not in still or look(found.kind, found.path, held=True) != found:
                        raise UsageError("used meanwhile")
                    place = _moved_to_trash(found)
                    with _kept_for_later(failed_ones, place):
                        _delete_from_trash(place, silent)
            except UsageError as error:
                kept.append(Kept(found=found, why=error.message))
            else:
                removed.append(found)
                sizes.append(size)
        for trash in bins:
            if trash.is_dir() and not any(trash.iterdir()):
                trash.rmdir()
        if failed_ones:
            first, more = failed_ones[0], len(failed_ones) - 1
            raise ResourcesError(first.message + (f"; nor can {more} more" if more else ""), hint=first.hint)
        choice = CleaningChoice(removed=tuple(removed), kept=tuple(kept))
        return replace(intended, choice=choice, sizes=tuple(sizes), done=True)


@contextmanager
def _kept_for_later(failed_ones: list[ResourcesError], place: Path) -> Iterator[None]:
    """What cannot be removed (its object store is gone, a file is held) must not keep the others from being removed."""
    try:
        yield
    except OSError as error:
        failed_ones.append(_not_removed(error, place))
    except ResourcesError as error:
        hint = f"the next `chaosrun clean` asks again; to leave there what the run has there, remove {place}"
        failed_ones.append(ResourcesError(error.message, hint=hint))


def _not_removed(error: OSError, place: Path) -> ResourcesError:
    return ResourcesError(
        f"{os.fsdecode(error.filename or place)} cannot be removed: {error.strerror}",
        hint="check its permissions; the next `chaosrun clean` removes what is left",
    )


def _refuse_link(folder: Path) -> None:
    """Raises UsageError for a link: its target does not belong to this root."""
    if folder.is_symlink():
        raise UsageError(f"{folder} is a symbolic link: nothing is removed through it", hint="name what it leads to: --root")


def _held(root: Path, found: KeptPlace) -> AbstractContextManager[Any]:
    """Lock it, so that no other process uses it; raises UsageError if one does."""
    match found.kind:
        case "run":
            return lock_run(RunLayout(found.path))
        case "reference":
            return ReferenceCache(root).locked()
        case "sweep" | "suite":
            return FILED[found.kind](found.path).locked()


def _moved_to_trash(found: KeptPlace) -> Path:
    """Rename it into a new folder in the trash, keeping its name, by which its checkpoints elsewhere are recognised."""
    trash = found.path.parent / TRASH
    _refuse_link(trash)
    trash.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=trash, prefix=f"{found.kind}-"))
    os.rename(found.path, place / found.name)
    return place


def _delete_from_trash(place: Path, silent: SilentStores) -> None:
    """Delete a folder of the trash with its contents; for a link, only the link. `silent`: stores that do not answer."""
    for thrown in sorted(place.iterdir()) if is_real(place) else ():
        home = place.parent.parent / thrown.name
        for run in _runs_in(thrown, place.name.partition("-")[0]):
            storage = storage_of(run, home / run.path.relative_to(thrown))
            for checkpoints in storage.own:
                shutil.rmtree(checkpoints)
            for around in storage.around:
                disown(around)
            remove_all_objects(run, home / run.path.relative_to(thrown), silent)
            for entry in sorted(run.path.iterdir()):
                if entry != run.run_json:
                    remove(entry)
            # Last, as it says where the checkpoints are.
            run.run_json.unlink()
        remove(thrown)
    remove(place)


def _runs_in(thrown: Path, kind: str) -> list[RunLayout]:
    inside = thrown / "runs"
    places = [thrown] if kind == "run" else sorted(inside.iterdir()) if is_real(thrown) and is_real(inside) else []
    return [RunLayout(path) for path in places if is_real(path) and (path / "run.json").is_file()]


def _size(*paths: Path) -> int:
    """Bytes on the disk; files that vanish meanwhile count as 0."""
    total = 0
    for path in filter(is_real, paths):
        for folder, _, files in os.walk(path):
            for name in files:
                with suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
