"""Whether a file that was written elsewhere is seen on this node."""

import time
from pathlib import Path

from msgspec import Struct

POLL_S = 0.1


class SharedFile(Struct, frozen=True, kw_only=True):
    missing: str
    """Why it is not seen; empty: it is."""


def probe(*, path: str, text: str, wait_s: float) -> SharedFile:
    deadline = time.monotonic() + wait_s
    while (missing := _missing(Path(path), text)) and time.monotonic() <= deadline:
        time.sleep(POLL_S)
    return SharedFile(missing=missing)


def _missing(path: Path, text: str) -> str:
    try:
        found = path.read_text()
    except OSError as error:
        return f"{path.parent}: {error.strerror}"
    return "" if found == text else f"{path} holds something else"
