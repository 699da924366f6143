"""Checks that a checkpoint directory holds exactly what its manifest lists. Reads every byte, changes nothing.

Refuses symbolic links and special files: their targets can change while the checkpoint does not.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import xxhash

from chaosrun.checkpoint.storage_errors import storage_errors
from chaosrun.errors import InvalidCheckpointError
from chaosrun.records.layout import MANIFEST_NAME
from chaosrun.records.manifest import FileEntry, Manifest

HINT = "nothing to do when an older valid checkpoint is used instead; if this repeats, suspect the storage"
THREADS = min(8, os.cpu_count() or 1)
"""Threads that hash files in parallel, one thread for each file."""
WORTH_THREADS = 1 << 20
"""Bytes from which on hashing in threads pays off."""


def audit_directory(directory: Path, step: int, *, hashed: Collection[str] | None = None) -> Manifest:
    """Return the manifest of the checkpoint of `step` in `directory` after hashing every file that it names, or only
    those in `hashed`.

    Raises InvalidCheckpointError, with file and reason, at the first defect; ResourcesError if the storage cannot be read.
    """
    with storage_errors(directory):
        found = list_members(directory)
        if found.pop(MANIFEST_NAME, None) is None:
            raise InvalidCheckpointError(f"{directory.name}: {MANIFEST_NAME} is missing", hint=HINT)
        manifest = _read_manifest(directory)
        if manifest.step != step:
            raise _invalid(directory, MANIFEST_NAME, f"belongs to step {manifest.step}, not {step}")
        for name in manifest.files.keys() - found.keys():
            raise _invalid(directory, name, "is missing")
        for name in found.keys() - manifest.files.keys():
            raise _invalid(directory, name, "is not in the manifest")
        # Sizes first: they are free, and a truncated file needs no hashing.
        for name, entry in manifest.files.items():
            if found[name].st_size != entry.size:
                raise _invalid(directory, name, f"has {found[name].st_size} bytes instead of {entry.size}")
        _expect_hashes(directory, {name: it for name, it in manifest.files.items() if hashed is None or name in hashed})
        return manifest


def signature_of(directory: Path) -> str:
    """A digest of all sizes, modification times and inodes below. Unchanged: nothing was written through the file system.

    Raises as `list_members`.
    """
    members = list_members(directory)
    found = [(name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in members.items()]
    return xxhash.xxh3_128_hexdigest(repr(found).encode())


def _expect_hashes(directory: Path, files: Mapping[str, FileEntry]) -> None:
    names = sorted(files, key=lambda name: -files[name].size)
    worth = sum(entry.size for entry in files.values()) > WORTH_THREADS
    with ThreadPoolExecutor(THREADS) as pool:
        found = (pool.map if worth else map)(lambda name: hash_member(directory, name), names)
        for name, entry in zip(names, found, strict=True):
            if entry != files[name]:
                raise _invalid(directory, name, "has the right size but other contents (its hash differs)")


def list_members(directory: Path) -> dict[str, os.stat_result]:
    """Every regular file below `directory`, by its relative path with slashes, sorted; the manifest included.

    Raises InvalidCheckpointError when `directory` is not a real directory or anything below it is a link or special file.
    """
    try:
        mode = os.lstat(directory).st_mode
    except FileNotFoundError as error:
        raise InvalidCheckpointError(f"{directory.name}: there is no such checkpoint in {directory.parent}") from error
    if not stat.S_ISDIR(mode):
        raise InvalidCheckpointError(f"{directory.name}: is {_kind(mode)}, not a directory", hint=HINT)
    members: dict[str, os.stat_result] = {}
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(directory / prefix) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(f"{prefix}{entry.name}/")
                elif stat.S_ISREG(status.st_mode):
                    members[prefix + entry.name] = status
                else:
                    raise _invalid(directory, prefix + entry.name, f"is {_kind(status.st_mode)}, not a file")
    return dict(sorted(members.items()))


def open_member(directory: Path, name: str) -> int:
    """File descriptor of a regular file of the checkpoint. Raises InvalidCheckpointError for any other file."""
    try:
        # Non-blocking: opening a named pipe in place of a file must not hang. It has no effect on files.
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise _invalid(directory, name, "is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _invalid(directory, name, "is a symbolic link, not a file") from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _invalid(directory, name, f"is {_kind(mode)}, not a file")
    return descriptor


def hash_member(directory: Path, name: str, *, sync: Callable[[Path, int], None] | None = None) -> FileEntry:
    """Size and hash of one file. `sync` is called with its path and descriptor to flush it to the disk; for a large file this
    runs while it is hashed from memory."""
    with open(open_member(directory, name), "rb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        if sync is None:
            return _hash(directory, name, file)
        large = os.fstat(file.fileno()).st_size >= WORTH_THREADS
        early = beside.submit(_hash, directory, name, file) if large else None
        sync(directory / name, file.fileno())
        return early.result() if early else _hash(directory, name, file)


def _hash(directory: Path, name: str, file: FileIO) -> FileEntry:
    try:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    except OSError as error:
        if error.errno == errno.EIO:
            raise _invalid(directory, name, "cannot be read (input/output error)") from error
        raise
    return FileEntry(size=file.tell(), xxh3=digest.hexdigest())


def _read_manifest(directory: Path) -> Manifest:
    with open(open_member(directory, MANIFEST_NAME), "rb") as file:
        data = file.read()
    try:
        return Manifest.from_bytes(data)
    except ValueError as error:
        raise _invalid(directory, MANIFEST_NAME, f"is damaged: {error}") from error


def _invalid(directory: Path, name: str, reason: str) -> InvalidCheckpointError:
    return InvalidCheckpointError(f"{directory.name}: {name} {reason}", hint=HINT)


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISREG(mode):
        return "a file"
    return "a directory" if stat.S_ISDIR(mode) else "a special file"
