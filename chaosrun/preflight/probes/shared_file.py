"""Whether a file that was written elsewhere is seen on this node: {"path", "text", "wait_s"} → {"seen", "why"}."""

import time
from pathlib import Path
from typing import Any

from chaosrun.preflight.model import Facts

POLL_S = 0.1


def probe(**parameters: Any) -> Facts:
    path, deadline = Path(parameters["path"]), time.monotonic() + parameters["wait_s"]
    while True:
        why = _missing(path, parameters["text"])
        if why is None or time.monotonic() > deadline:
            return {"seen": why is None, "why": why}
        time.sleep(POLL_S)


def _missing(path: Path, text: str) -> str | None:
    try:
        found = path.read_text()
    except OSError as error:
        return f"{path.parent}: {error.strerror}"
    return None if found == text else f"{path} holds something else"
