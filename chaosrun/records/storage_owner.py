"""Whose the directory is that a run makes for its checkpoints outside its own: owner.json there names the run and a nonce that
its run.json has too. Nothing else may be cleared on the word of a run.json, which may be a copy of another's."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaosrun.errors import UsageError
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_object

VERSION = 1
NONCE = "storage_nonce"
"""In run.json."""


def claim(storage: Path, run: RunLayout) -> str:
    """Write down that the run has made this directory; returns the nonce. Raises OSError."""
    nonce = secrets.token_hex(16)
    about = {"v": VERSION, "run": str(run.path.resolve()), "nonce": nonce}
    write_durably(_owner_json(storage), json.dumps(about).encode())
    return nonce


def is_owner(storage: Path, path: Path, info: Mapping[str, Any]) -> bool:
    """The run that lies, or lay, at `path` and whose run.json says `info` has made this directory."""
    file = _owner_json(storage)
    if storage.is_symlink() or file.is_symlink() or not isinstance(info.get(NONCE), str):
        return False
    try:
        about = read_object(file)
    except UsageError:
        return False
    return about.get("nonce") == info[NONCE] and about.get("run") == str(path.resolve())


def disown(storage: Path) -> None:
    """Remove the directory, if nothing but the word of its owner is left in it."""
    if [entry.name for entry in storage.iterdir()] == [_owner_json(storage).name]:
        _owner_json(storage).unlink()
        storage.rmdir()


def _owner_json(storage: Path) -> Path:
    return storage / "owner.json"
