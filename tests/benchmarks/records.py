"""What judging a drill costs by its records: synthetic legs of many ranks and steps, written with the real types and judged by
the real verdict, each size in a process of its own.

The chaos leg is killed halfway and goes on from its last checkpoint. Its ranks hold replicas of a model and shards of the data.
"""

import argparse
import json
import multiprocessing
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import xxhash

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.codec import to_plain
from chaosrun.records.journal import Journal
from chaosrun.records.layout import LegLayout, RunLayout, checkpoint_name
from chaosrun.records.manifest import Manifest
from chaosrun.records.position import Position
from chaosrun.records.trace_blocks import frames, is_footer, is_step
from chaosrun.records.trace_writer import TraceWriter
from chaosrun.records.traces import (
    TRACE_VERSION,
    BucketsRecord,
    CheckpointRecord,
    EndRecord,
    Line,
    SourceRecord,
    StartRecord,
    StepRecord,
)
from tests.unit.events import event
from tests.unit.run_files import write_info

__all__ = ["SIZES", "TARGETS", "each_rank", "measure_records", "met"]

SIZES = ((4, 2000), (64, 2000), (256, 2000), (1000, 2000))
"""Ranks and steps."""
TENSORS = 100
BATCH = 8
EVERY_STEPS = 100
STEPS_AN_EPOCH = 500
TARGETS = {"per_s": 300_000.0, "seconds": 60.0, "peak_bytes": 1e9, "bytes_a_step": 80.0, "per_rank": 0.2}
"""Of the largest size; `per_rank`: by how much what a rank more costs, from one size to the next, is off the middle."""


def measure_records(sizes: tuple[tuple[int, int], ...], progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """For each size: seconds and peak memory of the verdict, records of both legs, bytes of trace a step and rank."""
    found: list[dict[str, Any]] = []
    for ranks, steps in sizes:
        with tempfile.TemporaryDirectory(prefix="records-") as folder:
            began = time.perf_counter()
            run = write_run(Path(folder), ranks, steps)
            progress(f"records: {ranks} ranks x {steps} steps written in {time.perf_counter() - began:.1f} s")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                measured = pool.apply(_judged, (run.path,))
            found.append({"ranks": ranks, "steps": steps, **measured, **_sizes(run, ranks, steps)})
            progress(f"records: {found[-1]}")
    return found


def each_rank(sizes: list[dict[str, Any]]) -> tuple[float, list[float]]:
    """Processor seconds of a verdict whatever its ranks, and for each rank more from one size to the next. (Seconds by ranks
    are no cost of a rank: for warnings the first two alone are looked at.)"""
    more = [(after["cpu_s"] - before["cpu_s"]) / (after["ranks"] - before["ranks"]) for before, after in pairwise(sizes)]
    return sizes[0]["cpu_s"] - sizes[0]["ranks"] * more[0], more


def met(sizes: list[dict[str, Any]]) -> dict[str, tuple[float, bool]]:
    """By target, what was measured, and whether that meets it."""
    largest, (_, more) = sizes[-1], each_rank(sizes)
    found = {"per_s": largest["records"] / largest["seconds"], "per_rank": (max(more) - min(more)) / (max(more) + min(more))}
    found |= {name: largest[name] for name in TARGETS if name in largest}
    return {
        name: (found[name], found[name] >= most if name == "per_s" else found[name] <= most) for name, most in TARGETS.items()
    }


def _judged(path: Path) -> dict[str, Any]:
    from chaosrun.verify.verdict import judge

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.perf_counter(), time.process_time()
    verdict = judge(RunLayout(path))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "status": verdict.status,
        "cause": verdict.cause,
        "seconds": seconds,
        "cpu_s": cpu,
        "at": verdict.divergence and (verdict.divergence.rank, verdict.divergence.step),
        "peak_bytes": peak * 1024,
        "before_bytes": before * 1024,
    }


def _sizes(run: RunLayout, ranks: int, steps: int) -> dict[str, Any]:
    """`bytes_a_step`: between checkpoints, with what sums blocks up; `all_bytes_a_step`: with the digests and words of every
    tensor at checkpoints, too, and what is written once."""
    attempts = run.leg("reference").attempt(1)
    size = sum(attempts.trace(rank).stat().st_size for rank in range(ranks))
    plain = footers = count = at = 0
    for end, content in frames(attempts.trace(ranks - 1).read_bytes()):
        worded = len(content) > 4 * TENSORS
        plain += (end - at) * (is_step(content) and not worded)
        count += is_step(content) and not worded
        footers += (end - at) * is_footer(content)
        at = end
    rolled_back = _killed_at(steps) - _went_on_at(steps)
    about = {"bytes_a_step": plain / count + footers / steps, "all_bytes_a_step": size / ranks / steps}
    return {"records": ranks * (2 * steps + rolled_back), **about}


def write_run(root: Path, ranks: int, steps: int, differs: tuple[int, int] | None = None, tensors: int = TENSORS) -> RunLayout:
    """A drill of one SIGKILL. `differs`: rank and step from which on the chaos leg's parameters are others in one tensor."""
    run = RunLayout(root / "run")
    fault = Fault(id="F1", rank=1, phase="step", at_step=_killed_at(steps), source="faults.schedule[0]")
    spec = {"workers": ranks, "checkpoint": {"every_steps": EVERY_STEPS}}
    for leg in ("reference", "chaos"):
        with patch("os.fsync"):
            _write_leg(run.leg(leg), ranks, steps, fault if leg == "chaos" else None, tensors)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        todo = [(run.path, rank, ranks, steps, differs, tensors) for rank in range(ranks)]
        for _ in pool.imap_unordered(_write_rank, todo, chunksize=4):
            pass
    write_info(run, FaultPlan(seed=0, faults=(fault,)), spec=spec)
    return run


def _killed_at(steps: int) -> int:
    return steps // 2 + EVERY_STEPS // 3


def _went_on_at(steps: int) -> int:
    return _killed_at(steps) // EVERY_STEPS * EVERY_STEPS


def _write_leg(leg: LegLayout, ranks: int, steps: int, fault: Fault | None, tensors: int) -> None:
    """Its journal and its final checkpoint."""
    leg.path.mkdir(parents=True)
    leg.environment.write_text(json.dumps({"torch": "2.13.0", "threads": 1}))
    journal = Journal(leg.journal, clock=lambda: 1000.0)
    journal.append(event("leg.started", leg=leg.path.name, workers=ranks, supervisor_pid=1))
    attempts = [(1, None, 0), (2, checkpoint_name(_went_on_at(steps)), _went_on_at(steps))][: 1 if fault is None else 2]
    for number, resume, resume_step in attempts:
        armed = [fault.id] if fault and number == 1 else []
        journal.append(event("attempt.starting", attempt=number, armed=armed, resume=resume, resume_step=resume_step))
        pids = {rank: _pid(number, rank) for rank in range(ranks)}
        journal.append(event("attempt.started", attempt=number, pids=pids, address="127.0.0.1:1"))
        if armed and fault:
            about: dict[str, Any] = {"fault": fault.id, "attempt": 1, "rank": fault.rank}
            died: dict[str, Any] = {"pid": _pid(1, fault.rank), "exit_code": None, "signal": 9, "died_s": 1000.0}
            journal.append(event("fault.requested", **about, step=fault.at_step, phase=fault.phase))
            journal.append(event("worker.exited", attempt=1, rank=fault.rank, **died))
            journal.append(event("fault.observed", **about, how="death", found=None, **died))
            journal.append(event("attempt.stopped", attempt=1, reason="a rank died", killed=[]))
    journal.append(event("leg.finished", outcome="completed", message="", hint=None, final_step=steps))
    journal.close()
    store = CheckpointStore(leg, keep=3)
    staging = store.stage(steps, len(attempts))
    (staging / "rng.bin").write_bytes(b"streams")
    manifest = Manifest(
        step=steps,
        position=to_plain(_position(steps)),  # type: ignore[arg-type]
        world_size=ranks,
        attempt=len(attempts),
        time_s=1000.0,
        job_fingerprint="job",
        files=store.seal(staging, ["rng.bin"]),
        digests={str(rank): _digests(rank, steps, tensors) for rank in range(ranks)},
    )
    store.write_manifest(staging, manifest)
    store.commit(staging, steps)


def _write_rank(todo: tuple[Path, int, int, int, tuple[int, int] | None, int]) -> None:
    path, rank, ranks, steps, differs, tensors = todo
    run, killed, resumed = RunLayout(path), _killed_at(steps), _went_on_at(steps)
    for leg, number, first, last in (("reference", 1, 0, steps), ("chaos", 1, 0, killed), ("chaos", 2, resumed, steps)):
        writer = TraceWriter(run.leg(leg).attempt(number).trace(rank))
        other = differs[1] if differs and leg == "chaos" and differs[0] == rank else None
        for record in _records(rank, ranks, number, first, last, tensors, other):
            writer.write(record)
        if last == steps:
            position, digests = _position(steps), _digests(rank, steps, tensors)
            end = EndRecord(
                step=steps, position=position, time_s=_time(steps), digests=digests, checkpoint=checkpoint_name(steps)
            )
            writer.write(end)
        writer.close()


def _records(rank: int, ranks: int, number: int, first: int, last: int, tensors: int, other: int | None) -> Iterator[Line]:
    names = tuple(f"blocks.{index}.attention.weight" for index in range(tensors))
    yield StartRecord(
        v=TRACE_VERSION,
        attempt=number,
        rank=rank,
        world_size=ranks,
        pid=_pid(number, rank),
        entered_s=_time(first),
        time_s=_time(first),
        position=_position(first),
        restored=checkpoint_name(first) if first else None,
        rng=_digest("rng", rank, first),
        canary=_digest("canary"),
        param=_digest("param", first),
        params=_words("params", first, tensors),
        tensors=names,
        digests=_digests(rank, first, tensors) if first else None,
    )
    yield BucketsRecord(step=first, layout=(tuple(range(tensors)),), primed=True)
    for step in range(first + 1, last + 1):
        place = _position(step)
        if place.batches == 1 or step == first + 1:
            yield SourceRecord(epoch=place.epoch, own=None, held={})
        share = (place.batches - 1) * ranks * BATCH + rank * BATCH
        changed = other is not None and step >= other
        params = _words("params", step, tensors)
        # As `observe.trace` keeps the words of tensors.
        worded = step == first + 1 or step % EVERY_STEPS == 1
        yield StepRecord(
            step=step,
            epoch=place.epoch,
            batches=place.batches,
            time_s=_time(step) + rank / 1e5 + number,
            ids=(
                tuple(
                    ((share + index) * 7919 + place.epoch * 104_729) % (STEPS_AN_EPOCH * ranks * BATCH)
                    for index in range(BATCH)
                ),
            ),
            batch=(_digest("batch", rank, step),),
            rng=_digest("rng", rank, step - 1),
            # Of a model in float32.
            loss=(((xxhash.xxh3_64_intdigest(f"loss {rank} {step}".encode()) >> 40) / 2**24).hex(),),
            lr=((0.1 * min(1.0, step / 100)).hex(),),
            grad=_digest("grad", step),
            grads=_words("grads", step, tensors) if worded else b"",
            param=_digest("param", step, "other") if changed else _digest("param", step),
            params=b"" if not worded else params[:28] + b"ohno" + params[32:] if changed else params,
        )
        if step % EVERY_STEPS == 0:
            name, digests = checkpoint_name(step), _digests(rank, step, tensors)
            yield CheckpointRecord(step=step, name=name, time_s=_time(step), duration_s=0.01, digests=digests)


def _digest(*values: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(values).encode())


def _words(what: str, step: int, tensors: int) -> bytes:
    seed = xxhash.xxh3_64_intdigest(f"{what} {step}".encode())
    return b"".join(struct.pack("<Q", (seed + index) * 0x9E3779B97F4A7C15 % 2**64) for index in range((tensors + 1) // 2))[
        : 4 * tensors
    ]


def _digests(rank: int, step: int, tensors: int) -> Mapping[str, Mapping[str, str]]:
    return {
        "model": {f"blocks.{index}.attention.weight": _digest("weight", step, index) for index in range(tensors)},
        "buffers": {"norm.mean": _digest("buffer", rank, step)},
        "optimizer": {f"0/state/{index}/exp_avg": _digest("moment", step, index) for index in range(tensors)},
        "scheduler": {"0.last_epoch": _digest("schedule", step)},
        "rng": {"torch": _digest("torch", rank, step), "python": _digest("python", rank, step)},
        "registered": {},
    }


def _position(step: int) -> Position:
    """The end of an epoch is not written as the beginning of the next one."""
    if not step:
        return Position()
    epoch, batches = divmod(step - 1, STEPS_AN_EPOCH)
    return Position(epoch=epoch, batches=batches + 1, step=step)


def _time(step: int) -> float:
    return 1000.0 + 0.25 * step


def _pid(number: int, rank: int) -> int:
    return 10_000 * number + rank


def _main() -> int:
    """`python -m tests.benchmarks.records RANKS STEPS`: one size alone; `--differs RANK STEP` for legs that are not equal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--differs", type=int, nargs=2)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--keep", type=Path, help="write the run here, and leave it there")
    arguments = parser.parse_args()
    root = arguments.keep or Path(tempfile.mkdtemp(prefix="records-"))
    differs = tuple(arguments.differs) if arguments.differs else None
    if not (root / "run").exists():
        write_run(root, arguments.ranks, arguments.steps, differs, arguments.tensors)
    run = RunLayout(root / "run")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        measured = pool.apply(_judged, (run.path,))
    found = {**measured, **_sizes(run, arguments.ranks, arguments.steps)}
    print(json.dumps({**found, "records_per_s": round(found["records"] / found["seconds"])}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
