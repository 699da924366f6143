"""Faults of the storage: damage to a committed checkpoint, and writes that fail or take their time.

A damage strikes nothing but the newest checkpoint of this very leg: whatever leads out of it, by a link, a second name of the
same file or "..", is refused and the note says so. What a damage does shows when the checkpoint is read.
"""

import errno
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaosrun.checkpoint.manifest import MANIFEST_NAME, Manifest
from chaosrun.faults.strike import Strike
from chaosrun.records.filesystem import Filesystem, Moment, Operation
from chaosrun.records.layout import checkpoint_name, checkpoint_step

TAIL_BYTES = 4096
FULL_DEVICE = "/dev/full"


class RefusedError(Exception):
    """There is nothing here that may be damaged; the message says why."""


def truncate(strike: Strike) -> None:
    _damage(strike, _largest_file, lambda path: os.truncate(path, path.stat().st_size // 2))


def zero_tail(strike: Strike) -> None:
    _damage(strike, _largest_file, _zero_tail)


def flip_file_bit(strike: Strike) -> None:
    _damage(strike, _largest_file, _flip_bit)


def missing_file(strike: Strike) -> None:
    _damage(strike, _file_of_rank, Path.unlink)


def missing_manifest(strike: Strike) -> None:
    _damage(strike, _manifest, Path.unlink)


def foreign_manifest(strike: Strike) -> None:
    """The manifest of the checkpoint before; of the first one its own, made out for the step before."""

    def replace(path: Path) -> None:
        names = sorted(entry.name for entry in path.parents[1].iterdir() if checkpoint_step(entry.name) is not None)
        older = [name for name in names if name < path.parent.name]
        if older:
            foreign = (path.parents[1] / older[-1] / MANIFEST_NAME).read_bytes()
        else:
            manifest = Manifest.from_bytes(path.read_bytes())
            step = manifest.step - 1
            position = manifest.position.model_copy(update={"step": step})
            foreign = manifest.model_copy(update={"step": step, "position": position}).to_bytes()
        path.write_bytes(foreign)

    _damage(strike, _manifest, replace)


def stale_staging(strike: Strike) -> None:
    """A folder as an attempt leaves it that was killed while it wrote: one file whole, one cut off, no manifest."""
    folder = strike.leg.staging / f"{checkpoint_name(strike.step)}.attempt-{strike.order.attempt - 1}"
    try:
        _expect_own(strike, folder.parent)
        folder.mkdir()
    except (RefusedError, OSError) as error:
        strike.note(problem=f"no folder was left behind: {error}")
        return
    files = {"model.safetensors": 4096, "chaosrun-rank-0.pt": 100}
    for name, size in files.items():
        (folder / name).write_bytes(bytes(size))
    strike.note(staged=folder.name, path=_relative(strike, folder), files=files)


def no_space(strike: Strike) -> None:
    """The kernel's own ENOSPC, in the middle of the file: from here on its descriptor leads to a device that is always full.
    Devices are not synced, so at an fsync it is said in the kernel's words."""
    descriptor = strike.at.get("descriptor")
    if descriptor is None or not os.path.exists(FULL_DEVICE):
        raise _failure(strike, errno.ENOSPC)
    full = os.open(FULL_DEVICE, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(full, descriptor, inheritable=False)
    os.close(full)


def io_error(strike: Strike) -> None:
    raise _failure(strike, errno.EIO)


def failed_rename(strike: Strike) -> None:
    raise _failure(strike, errno.EIO)


def slow_storage(strike: Strike) -> None:
    """Wait before each fsync that this rank makes for the checkpoint, until it is saved."""
    disk: Filesystem = strike.at["disk"]
    waits: list[float] = []

    def wait(operation: Operation, moment: Moment) -> None:
        if operation.kind == "fsync" and moment == "before":
            began = time.monotonic()
            time.sleep(strike.option("duration_s"))
            waits.append(time.monotonic() - began)

    def tell(*, final: bool) -> None:
        problem = None if waits else "nothing was synced meanwhile"
        strike.note(final=final, waits=len(waits), waited_s=sum(waits), longest_s=max(waits, default=0.0), problem=problem)

    def stop() -> None:
        disk.listeners.remove(wait)
        tell(final=True)

    tell(final=False)
    # First of all: what is slow is slow before any other fault strikes there.
    disk.listeners.insert(0, wait)
    strike.at["until_saved"].callback(stop)


def _damage(strike: Strike, choose: Callable[[Strike, Path], str], spoil: Callable[[Path], object]) -> None:
    checkpoint: Path | None = strike.at.get("checkpoint") or strike.newest_checkpoint()
    if checkpoint is None:
        strike.note(problem="there was no checkpoint to damage yet")
        return
    try:
        name = strike.fault.options.get("file") or choose(strike, checkpoint)
        path = checkpoint / name
        _expect_own(strike, checkpoint)
        _expect_inside(checkpoint, path)
        before = _look(path)
        if before is None:
            held = ", ".join(sorted(entry.name for entry in checkpoint.iterdir()))
            raise RefusedError(f"{checkpoint.name} has no file {name}, it holds {held}")
        spoil(path)
    except RefusedError as error:
        strike.note(checkpoint=checkpoint.name, problem=f"nothing was damaged: {error}")
        return
    after = _look(path)
    found = {"checkpoint": checkpoint.name, "file": name, "path": _relative(strike, path), "before": before, "after": after}
    strike.note(**found, problem=f"{name} is what it was before" if before == after else None)


def _largest_file(strike: Strike, checkpoint: Path) -> str:
    sizes = {path.relative_to(checkpoint).as_posix(): path.lstat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    sizes.pop(MANIFEST_NAME, None)
    if not sizes:
        raise RefusedError(f"{checkpoint.name} is empty")
    return min(sizes, key=lambda name: (-sizes[name], name))


def _file_of_rank(strike: Strike, checkpoint: Path) -> str:
    return f"chaosrun-rank-{strike.fault.rank}.pt"


def _manifest(strike: Strike, checkpoint: Path) -> str:
    return MANIFEST_NAME


def _zero_tail(path: Path) -> None:
    """As after a power cut: the size is right, the last page was never written. More than that where it held zeros anyway."""
    size = path.stat().st_size
    tail = min(TAIL_BYTES, size)
    with path.open("r+b") as file:
        while True:
            file.seek(size - tail)
            if tail == size or any(file.read()):
                break
            tail = min(2 * tail, size)
        file.seek(size - tail)
        file.write(bytes(tail))


def _flip_bit(path: Path) -> None:
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        if byte:
            file.seek(middle)
            file.write(bytes([byte[0] ^ 1]))


def _look(path: Path) -> dict[str, Any] | None:
    """Size and sha256 of a file, None when there is none."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _expect_own(strike: Strike, path: Path) -> None:
    """Raises RefusedError unless `path` lies in this leg's own folders."""
    resolved = path.resolve()
    if not any(resolved.is_relative_to(folder.resolve()) for folder in _own_folders(strike)):
        raise RefusedError(f"{path} leads to {resolved}, outside the run's own folder")


def _expect_inside(checkpoint: Path, path: Path) -> None:
    """Raises RefusedError unless `path` lies in the checkpoint, by every name it has."""
    resolved = path.resolve()
    if not resolved.is_relative_to(checkpoint.resolve()):
        raise RefusedError(f"{path} leads to {resolved}, outside the checkpoint")
    if resolved.is_file() and resolved.stat().st_nlink > 1:
        raise RefusedError(f"{path} has another name elsewhere (a hard link): its contents are not this run's alone")


def _relative(strike: Strike, path: Path) -> str:
    own = next((folder for folder in _own_folders(strike) if path.is_relative_to(folder)), None)
    return str(path.relative_to(own) if own else path)


def _own_folders(strike: Strike) -> tuple[Path, ...]:
    return (strike.leg.path, strike.leg.checkpoints.parent)


def _failure(strike: Strike, code: int) -> OSError:
    return OSError(code, os.strerror(code), str(strike.at["path"]))
