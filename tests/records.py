"""Records of a run: as plain JSON values, as any other program would read and write them, and built with what is left out."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from chaosrun.records.codec import convert, to_plain
from chaosrun.records.manifest import Manifest, ManifestPosition
from chaosrun.records.order import WorkerOrder
from chaosrun.records.trace_blocks import frames
from chaosrun.records.trace_reader import all_records
from chaosrun.records.trace_writer import TraceWriter
from chaosrun.records.traces import Line


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Of a file of JSON lines, or of a trace."""
    if path.suffix == ".trace":
        return (to_plain(record) for record in all_records(path, 0, 0))
    return (json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """A trace anew."""
    path.unlink(missing_ok=True)
    writer = PlainTraceWriter(path)
    for line in lines:
        writer.put(**line)
    writer.close()


def order_of(leg: Path | str, **values: Any) -> WorkerOrder:
    """For the only rank of a job, unless `values` say otherwise."""
    about: dict[str, Any] = dict.fromkeys(("rank", "local_rank", "node_rank", "master_port", "seed"), 0)
    about |= dict.fromkeys(("attempt", "world_size", "local_world_size", "threads", "every_steps"), 1)
    about |= {"leg": "chaos", "leg_path": str(leg), "storage_path": None, "master_addr": "127.0.0.1", "keep": 2}
    about |= {"script": "/nowhere.py", "cwd": str(leg), "deterministic": "strict"}
    return WorkerOrder(**{**about, **values})


def manifest_of(step: int, **values: Any) -> Manifest:
    """Of a checkpoint in the first epoch."""
    about = {"world_size": 2, "attempt": 1, "time_s": 0.0, "job_fingerprint": "job", "files": {}, "digests": {}}
    about["position"] = ManifestPosition(epoch=0, batches=step, step=step)
    return Manifest(step=step, **{**about, **values})


def torn(path: Path) -> bytes:
    """A trace's last record, as far as it was written when its writer was killed in it."""
    data = path.read_bytes()
    ends = [0, *(end for end, _ in frames(data))]
    return data[ends[-2] : -5]


class PlainTraceWriter(TraceWriter):
    """Takes JSON values; what is no record is written as it is."""

    def put(self, kind: str, **fields: Any) -> None:
        plain = {"kind": kind, **fields}
        try:
            record = convert(plain, Line)
        except ValueError:
            self._others.append(len(self._region))
            self._append(msgspec.msgpack.encode(plain))
        else:
            self.write(record)
