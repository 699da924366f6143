"""What a surveyed rank came by: each point a line of its own, with the kernel before the rank goes on. Strikes nothing."""

import json
import os
from pathlib import Path


class Survey:
    """The points of one rank in one attempt, in the order in which it reaches them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def note(self, phase: str, step: int, target: str | None) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # Not fsynced: a rank that is killed at this very point leaves the line all the same, and that is all it has to survive.
        os.write(self._file, json.dumps({"phase": phase, "step": step, "target": target}).encode() + b"\n")
