"""Runs of any length, written rather than trained: for what reads records and has to stay quick and small."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.codec import convert
from chaosrun.records.events import JournalEvent
from chaosrun.records.journal import Journal
from chaosrun.records.layout import LegLayout, RunLayout, checkpoint_name
from tests.records import write_lines
from tests.unit.run_files import write_info

__all__ = ["write_long_run"]

WORDS = "AAAAAA=="
"""Of one tensor."""
STEP_S, DOWN_S = 0.05, 0.3


def write_long_run(
    root: Path,
    *,
    steps: int,
    workers: int,
    every_steps: int,
    kills: Sequence[int] = (),
    differing: Sequence[int] = (),
    name: str = "long",
) -> RunLayout:
    """`kills`: steps after which rank 1 is killed; `differing`: whose loss is an ULP off under faults, on the last rank."""
    run = RunLayout(root / "run")
    faults = tuple(
        Fault(id=f"F{number}", rank=1 % workers, phase="step", at_step=step, source=f"faults.schedule[{number - 1}]")
        for number, step in enumerate(kills, start=1)
    )
    shape = {"steps": steps, "workers": workers, "every_steps": every_steps}
    _leg(run.leg("reference"), (), frozenset(), **shape)
    _leg(run.leg("chaos"), faults, frozenset(differing), **shape)
    spec = {"name": name, "workers": workers, "checkpoint": {"every_steps": every_steps}}
    write_info(run, FaultPlan(seed=0, faults=faults), spec=spec)
    return run


def loss_at(step: int, rank: int) -> float:
    return 2.0 * math.exp(-step / 4000) + 0.2 * math.sin(step / 7 + rank) + 0.5


def _leg(
    leg: LegLayout, faults: Sequence[Fault], differing: frozenset[int], *, steps: int, workers: int, every_steps: int
) -> None:
    now_s = 1000.0
    journal = Journal(leg.journal, clock=lambda: now_s)

    def told(event: str, **fields: Any) -> None:
        journal.append(convert({"event": event, **fields}, JournalEvent), durable=False)

    leg.environment.write_text(json.dumps({"torch": "2.13.0", "threads": 1}))
    told("leg.started", leg=leg.path.name, workers=workers, supervisor_pid=1)
    done = 0
    for attempt, fault in enumerate((*faults, None), start=1):
        base = done // every_steps * every_steps
        resume = checkpoint_name(base) if base else None
        armed = [other.id for other in faults]
        told("attempt.starting", attempt=attempt, resume=resume, resume_step=base, armed=armed)
        told("attempt.started", attempt=attempt, pids={str(rank): 100 * attempt + rank for rank in range(workers)}, address="")
        now_s += DOWN_S
        done = steps if fault is None or fault.at_step is None else fault.at_step
        for rank in range(workers):
            _trace(leg, attempt, rank, range(base + 1, done + 1), differing if rank == workers - 1 else frozenset(), now_s,
                   workers=workers, every_steps=every_steps, resume=resume, last=fault is None)  # fmt: skip
        now_s += STEP_S * (done - base)
        for rank in range(workers):
            killed = {"exit_code": None, "signal": 9} if fault else {"exit_code": 0, "signal": None}
            told("worker.exited", attempt=attempt, rank=rank, pid=100 * attempt + rank, died_s=now_s, **killed)
        if fault is not None:
            about = {"attempt": attempt, "rank": fault.rank}
            told("fault.requested", fault=fault.id, step=fault.at_step, phase="step", **about)
            seen = {"pid": 100 * attempt + fault.rank, "how": "death", "found": None, "exit_code": None, "signal": 9}
            told("fault.observed", fault=fault.id, died_s=now_s, **seen, **about)
        told("attempt.stopped", attempt=attempt, reason="a rank died" if fault else "all ranks ended", killed=[])
    told("leg.finished", outcome="completed", message="", hint=None, final_step=steps)
    journal.close()


def _trace(
    leg: LegLayout,
    attempt: int,
    rank: int,
    steps: range,
    differing: frozenset[int],
    began_s: float,
    *,
    workers: int,
    every_steps: int,
    resume: str | None,
    last: bool,
) -> None:
    path = leg.attempt(attempt).trace(rank)
    base = steps.start - 1
    start = {"kind": "start", "v": 3, "attempt": attempt, "rank": rank, "world_size": workers, "pid": 100 * attempt + rank}
    start |= {"entered_s": began_s - 0.1, "time_s": began_s, "position": {"epoch": 0, "batches": base, "step": base}}
    start |= {"restored": resume, "rng": "r", "param": f"p{base}", "params": WORDS, "tensors": ["w"], "digests": None}
    lines = [start]
    for number, step in enumerate(steps, start=1):
        loss = loss_at(step, rank)
        text = (math.nextafter(loss, math.inf) if step in differing else loss).hex()
        first = (step * workers + rank) * 4
        line = {"kind": "step", "step": step, "epoch": 0, "batches": step, "time_s": began_s + STEP_S * number}
        line |= {"ids": [list(range(first, first + 4))], "batch": [f"b{step}r{rank}"], "rng": f"r{step}", "loss": [text]}
        line |= {"lr": ["0x1p-7"], "grad": f"g{step}", "grads": WORDS, "param": f"p{step}", "params": WORDS}
        lines.append(line)
        if step % every_steps == 0:
            saved = {"kind": "checkpoint", "step": step, "name": checkpoint_name(step), "duration_s": 0.01}
            lines.append({**saved, "time_s": line["time_s"]})
    if last:
        end = {
            "kind": "end",
            "step": steps.stop - 1,
            "position": {"epoch": 0, "batches": steps.stop - 1, "step": steps.stop - 1},
        }
        end |= {"time_s": began_s + STEP_S * len(steps), "digests": {"model": {"w": "x"}}, "checkpoint": None}
        lines.append(end)
    write_lines(path, lines)
