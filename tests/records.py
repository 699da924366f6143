"""Records of a run as plain JSON values, as any other program would read and write them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaosrun.records.traces import TraceWriter


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))


class PlainTraceWriter(TraceWriter):
    """Takes JSON values, whatever they are."""

    def put(self, kind: str, **fields: Any) -> None:
        os.write(self._file, json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n")
