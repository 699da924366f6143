"""Whose the directory is that a run makes for its checkpoints outside its own: owner.json there names the run and a nonce that
its run.json has too. Nothing else may be cleared on the word of a run.json, which may be a copy of another's."""

import secrets
from pathlib import Path
from typing import Literal

from chaosrun.errors import UsageError
from chaosrun.records.codec import Record
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import RunInfo, read_record, write_record


class Owner(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[1] = 1
    run: str
    """Absolute path."""
    nonce: str


def claim(storage: Path, run: RunLayout) -> str:
    """Write down that the run has made this directory; returns the nonce. Raises OSError."""
    owner = Owner(run=str(run.path.resolve()), nonce=secrets.token_hex(16))
    write_record(_owner_json(storage), owner)
    return owner.nonce


def is_owner(storage: Path, path: Path, info: RunInfo) -> bool:
    """The run that lies, or lay, at `path` and whose run.json says `info` has made this directory."""
    file = _owner_json(storage)
    if storage.is_symlink() or file.is_symlink() or info.storage_nonce is None:
        return False
    try:
        return read_record(file, Owner) == Owner(run=str(path.resolve()), nonce=info.storage_nonce)
    except UsageError:
        return False


def disown(storage: Path) -> None:
    """Remove the directory, if nothing but the word of its owner is left in it."""
    if [entry.name for entry in storage.iterdir()] == [_owner_json(storage).name]:
        _owner_json(storage).unlink()
        storage.rmdir()


def _owner_json(storage: Path) -> Path:
    return storage / "owner.json"
