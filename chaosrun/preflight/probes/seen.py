"""Which files written on other nodes are visible on this one, complete, and how soon.

The folder is reopened for each check, as only then an NFS client queries its server instead of its cache.
"""

import hashlib
import os
import time
from pathlib import Path

from msgspec import Struct

POLL_S = 0.05


class SeenFiles(Struct, frozen=True, kw_only=True):
    """By path."""

    after_s: dict[str, float] = {}
    """Since the first check."""
    missing: dict[str, str] = {}
    """Why a file was not seen in time."""
    torn: dict[str, str] = {}
    """The first contents seen of a file, if they were not as written."""


def probe(*, digests: dict[str, str], wait_s: float) -> SeenFiles:
    """`digests`: sha256 of the written files, by path."""
    found, began = SeenFiles(), time.monotonic()
    while True:
        found.missing.clear()
        for path, digest in digests.items():
            if path not in found.after_s:
                _look(found, path, digest, time.monotonic() - began)
        if not found.missing or time.monotonic() - began > wait_s:
            return found
        time.sleep(POLL_S)


def _look(found: SeenFiles, path: str, digest: str, now_s: float) -> None:
    folder = Path(path).parent
    try:
        for each in (folder.parent, folder):
            os.close(os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        data = Path(path).read_bytes()
    except OSError as error:
        found.missing[path] = f"{folder}: {error.strerror}"
        return
    if hashlib.sha256(data).hexdigest() == digest:
        found.after_s[path] = now_s
    else:
        found.missing[path] = f"{path} holds something else: {len(data)} bytes"
        found.torn.setdefault(path, f"{len(data)} bytes that are not what was written")
