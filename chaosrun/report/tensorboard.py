"""A drill as scalars of TensorBoard: the runs `reference` and `chaos`, and `chaos/replayed-attempt-N` for the steps of attempt
N that were rolled back; a run in production as `run` instead.

Written with the tensorboard package's own writer; torch is not needed.
"""

import importlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.errors import UsageError
from chaosrun.records.events import AttemptStarting
from chaosrun.records.grouping import grouped
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_run, recorded_leg

if TYPE_CHECKING:
    from chaosrun.records.history import LegHistory
    from chaosrun.records.traces import StepRecord
    from chaosrun.verify.verdict import Verdict

Put = Callable[[str, int, float, float], None]
"""`put(tag, step, time_s, value)`."""


def write_tensorboard(run: RunLayout, verdict: "Verdict", directory: Path, *, replace: bool = False) -> None:
    """Write event files into `directory` atomically; older ones there, which would be shown together with them, are replaced or
    refused. Raises UsageError if refused, or if the package tensorboard is not installed."""
    _expect_tensorboard()
    if directory.exists() and not replace and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(
            f"{directory} is not empty: its event files would be shown together with these",
            hint="name a new directory with --to, or delete that one",
        )
    staging = directory.absolute().with_name(f".{directory.absolute().name}.{os.getpid()}.tmp")
    try:
        _write(run, verdict, staging)
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(run: RunLayout, verdict: "Verdict", directory: Path) -> None:
    from chaosrun.records.history import read_leg
    from chaosrun.verify.lineage import lineage

    info = read_run(run)
    reference, chaos = (read_leg(recorded_leg(run, info, name)) for name in ("reference", run.main))
    fault_free, chain = lineage(reference), lineage(chaos)
    expected, seen = _by_step(fault_free.records), _by_step(chain.records)
    if reference.attempts:
        with _run(directory / "reference") as put:
            _put_steps(put, expected)
            _put_checkpoints(put, reference)
    with _run(directory / run.main) as put:
        _put_steps(put, seen)
        _put_differences(put, expected, seen)
        _put_checkpoints(put, chaos)
        _put_recoveries(put, chaos, verdict)
    for attempt, records in grouped(chain.tails, lambda record: record.attempt).items():
        tail = _by_step(records)
        with _run(directory / run.main / f"replayed-attempt-{attempt}") as put:
            _put_steps(put, tail)
            _put_differences(put, expected, tail)


def _expect_tensorboard() -> None:
    try:
        _module("summary.writer.event_file_writer")
    except ImportError as error:
        raise UsageError(
            f"event files need the package tensorboard, which cannot be imported ({error})",
            hint="pip install 'chaosrun[tensorboard]'",
        ) from error


def _module(name: str) -> Any:
    """A module of an optional package, whose protocol buffers have no types for a checker."""
    return importlib.import_module(f"tensorboard.{name}")


@contextmanager
def _run(directory: Path) -> Iterator[Put]:
    events, summaries = (_module(f"compat.proto.{name}_pb2") for name in ("event", "summary"))
    writer = _module("summary.writer.event_file_writer").EventFileWriter(str(directory))

    def put(tag: str, step: int, time_s: float, value: float) -> None:
        summary = summaries.Summary(value=[summaries.Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(events.Event(wall_time=time_s, step=step, summary=summary))

    try:
        yield put
    finally:
        writer.close()


Steps = Mapping[int, Sequence["StepRecord"]]
"""The records of all ranks, by step, in the order of their ranks."""


def _by_step(records: "Iterable[StepRecord]") -> Steps:
    return grouped(sorted(records, key=lambda record: (record.step, record.rank)), lambda record: record.step)


def _put_steps(put: Put, steps: Steps) -> None:
    from chaosrun.verify.trajectory import loss_of

    for step, records in steps.items():
        time_s = max(record.time_s for record in records)
        put("loss", step, time_s, loss_of(records))
        for group, rate in enumerate(records[0].lr):
            put("lr" if len(records[0].lr) == 1 else f"lr/group-{group}", step, time_s, float.fromhex(rate))
        put("attempt", step, time_s, float(records[0].attempt))


def _put_differences(put: Put, expected: Steps, seen: Steps) -> None:
    """Differences of the losses, for the rank and micro-batch that is furthest off."""
    from chaosrun.verify.ulp import float_distance

    for step, records in seen.items():
        others = {record.rank: record for record in expected.get(step, ())}
        pairs = [
            (float.fromhex(left), float.fromhex(right))
            for record in records
            if record.rank in others
            for left, right in zip(others[record.rank].loss, record.loss, strict=False)
        ]
        distances = [float_distance(left, right) for left, right in pairs]
        if distances:
            worst = float("nan") if None in distances else max(float(distance or 0) for distance in distances)
            put("loss_difference_ulp", step, max(record.time_s for record in records), worst)


def _put_checkpoints(put: Put, leg: "LegHistory") -> None:
    saves = ((saved.step, trace.attempt, saved.duration_s, saved.time_s) for trace in leg.traces for saved in trace.checkpoints)
    # Of all ranks the slowest, which comes last.
    slowest = {(step, attempt): (time_s, duration_s) for step, attempt, duration_s, time_s in sorted(saves)}
    for (step, _), (time_s, duration_s) in slowest.items():
        put("checkpoint_s", step, time_s, duration_s)


def _put_recoveries(put: Put, leg: "LegHistory", verdict: "Verdict") -> None:
    starts = {record.attempt: record.time_s for record in leg.events(AttemptStarting)}
    for attempt in verdict.attempts:
        if attempt.recovery_s is not None:
            put("recovery_s", attempt.resumed_step, starts.get(attempt.attempt, 0.0), attempt.recovery_s)
