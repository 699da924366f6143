"""The last run of a job that went through: which one it is, and what its checkpoints came to. Read from its files."""

import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaosrun.errors import UsageError
from chaosrun.preflight.costs import costs_of
from chaosrun.preflight.model import Facts
from chaosrun.records.history import read_leg
from chaosrun.records.layout import LegLayout, RunLayout, checkpoint_step
from chaosrun.records.run_file import read_json, read_object, read_run, recorded_leg
from chaosrun.records.tail import Tail
from chaosrun.spec.source import Job

TAIL_BYTES = 1 << 20
"""Of a trace: its last steps say enough."""


def last_run(root: Path, job: Job) -> RunLayout | None:
    """The newest run of this job file, with as many workers, that went through."""
    folder, found = root / "runs", list[tuple[float, RunLayout]]()
    with suppress(OSError):
        for path in folder.iterdir():
            run = RunLayout(path)
            try:
                info = read_run(run)
                same = info["job"] == str(job.path.resolve()) and info["spec"].get("workers") == job.spec.workers
                if same and read_object(run.verdict_json).get("outcome") == "completed":
                    found.append((info["created_s"], run))
            except UsageError:
                continue  # one that goes on, was interrupted, or is damaged
    return max(found, key=lambda entry: entry[0], default=(0.0, None))[1]


def saves_of(run: RunLayout) -> Facts:
    """{run, folder, bytes and files (of its newest checkpoint, None: none is left), step_s and save_s (medians, None where its
    trace does not say)}."""
    told: Facts = {"run": run.run_id, "folder": str(run.path)}
    nothing = {"bytes": None, "files": None, "step_s": None, "save_s": None}
    with suppress(UsageError, OSError):
        info = read_run(run)
        for name in ("chaos", "reference"):
            leg = recorded_leg(run, info, name)
            if (size := _newest_checkpoint(leg)) is not None:
                return {**told, **size, **_times(leg)}
    return {**told, **nothing}


def costs_of_run(folder: str) -> Facts:
    """What its steps, saves and restarts took: see `costs`."""
    run = RunLayout(Path(folder))
    info = read_run(run)
    return costs_of([read_leg(recorded_leg(run, info, name)) for name in ("reference", "chaos")])


def _newest_checkpoint(leg: LegLayout) -> dict[str, int] | None:
    if not leg.checkpoints.is_dir():
        return None
    for name in sorted(filter(lambda name: checkpoint_step(name) is not None, os.listdir(leg.checkpoints)), reverse=True):
        files = [path for path in (leg.checkpoints / name).rglob("*") if path.is_file() and not path.is_symlink()]
        if files:
            return {"bytes": sum(path.stat().st_size for path in files), "files": len(files)}
    return None


def _times(leg: LegLayout) -> dict[str, float | None]:
    """Of rank 0 in its last attempt that says."""
    for number in reversed(leg.attempts()):
        records = list(_last_records(leg.attempt(number).trace(0)))
        # A step with a save before it has the save in it.
        steps = [
            after["time_s"] - before["time_s"]
            for before, after in pairwise(records)
            if before.get("kind") == after.get("kind") == "step"
        ]
        saves = [record["duration_s"] for record in records if record.get("kind") == "checkpoint"]
        if steps:
            return {"step_s": statistics.median(steps), "save_s": statistics.median(saves) if saves else None}
    return {"step_s": None, "save_s": None}


def _last_records(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in Tail(path, last_bytes=TAIL_BYTES).lines(2 * TAIL_BYTES):
        with suppress(ValueError):
            record = read_json(line)
            if isinstance(record, dict) and isinstance(record.get("time_s"), float):
                yield record
