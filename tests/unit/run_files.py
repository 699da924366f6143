"""Files of a run for tests: what a test says nothing about is filled in."""

import json
import time
from typing import Any

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.journal import Journal
from chaosrun.records.layout import LEGS, RunLayout
from chaosrun.records.run_file import Reference, RunInfo, write_run
from tests.records import PlainTraceWriter
from tests.unit.events import event


def write_info(
    run: RunLayout, plan: FaultPlan | None = None, *, reference: str = "auto", source: str | None = None, **facts: Any
) -> None:
    """`reference`: its mode; `facts`: of run.json; of its spec only what is said."""
    about: dict[str, Any] = {"run_id": run.run_id, "created_s": 1000.0, "job": "/job.yaml", "directory": "/"}
    about |= {"script": "/train.py", "overrides": (), "storage": dict.fromkeys(LEGS), "irreproducible": None, **facts}
    about["spec"] = {"name": "toy", "script": "train.py", **facts.get("spec", {})}
    write_run(run, RunInfo(reference=Reference(mode=reference, source=source), **about))
    if plan is not None:
        run.plan_json.write_text(json.dumps(plan.to_json()))


def tell(run: RunLayout, *records: dict[str, Any], leg: str = "chaos", clock: Any = time.time) -> None:
    """Have these events in a leg's journal."""
    journal = Journal(run.leg(leg).journal, clock=clock)
    for record in records:
        journal.append(event(**record))
    journal.close()


def step_line(step: int, time_s: float) -> dict[str, Any]:
    words = {"rng": "r", "grad": "g", "param": "p", "params": "AAAAAA==", "grads": "AAAAAA==", "batch": ["b"], "ids": None}
    about = {"loss": ["0x1p-1"], "lr": ["0x1p-7"], "epoch": 0, "batches": step, "time_s": time_s}
    return {"kind": "step", "step": step, **words, **about}


def begin_trace(
    run: RunLayout, leg: str, attempt: int, rank: int, steps: range, *, step_s: float = 0.5, pid: int = 12
) -> PlainTraceWriter:
    """Of a rank that went on from the step before these."""
    writer = PlainTraceWriter(run.leg(leg).attempt(attempt).trace(rank))
    about = {"attempt": attempt, "rank": rank, "world_size": 3, "pid": pid, "time_s": 1.0, "restored": None, "rng": "r"}
    position = {"epoch": 0, "batches": 0, "step": steps.start - 1}
    writer.put("start", v=3, **about, position=position, param="p", params="AAAAAA==", tensors=["w"])
    for step in steps:
        writer.put(**step_line(step, 100.0 + step * step_s))
    return writer
