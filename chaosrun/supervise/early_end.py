"""When a chaos leg may end before its training does: which orders its attempts get, and what their end is called.
docs/exactness.md has the conditions of "settled"; `verify.early_end` checks afterwards whether they were met.
"""

import json
from collections.abc import Collection
from dataclasses import replace

from msgspec import structs

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.early_end import DIFFERED, SETTLED
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import read_end
from chaosrun.records.order import Settle, WorkerOrder
from chaosrun.records.run_file import Early
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.lifecycle import Finish
from chaosrun.supervise.reference import final_step
from chaosrun.verify.compare import undecided
from chaosrun.verify.corruption import corrupts


def early_end_orders(template: WorkerOrder, attempt: int, plan: FaultPlan, observed: Collection[str]) -> Settle:
    """The early-end orders for the ranks of an attempt; none while a fault may still strike, that is until every planned and
    injected fault has been observed."""
    faults = {fault.id for fault in plan.faults}
    return template.settle if attempt > 1 and faults and faults <= {*observed} else ""


def ending(finish: Finish, leg: LegLayout, attempt: int, world_size: int) -> Finish:
    """The end of a leg whose ranks completed it, or all left early because the result was decided."""
    ends = [read_end(leg.attempt(attempt), rank) for rank in range(world_size)] if finish.outcome == "completed" else []
    how, step = {end.status for end in ends if end}, max((end.step for end in ends if end), default=0)
    if how == {SETTLED}:
        return structs.replace(finish, outcome="settled", message=f"settled at step {step}: complete state equal")
    if how == {DIFFERED}:
        return structs.replace(finish, outcome="differed", message=f"ended at step {step}: its state differs for good")
    return finish


LONG = 1000
"""A submitted drill may end early if its job has more steps than this, unless told otherwise."""


def asked(spec: JobSpec, early: Early, plan: FaultPlan, reference: LegLayout) -> Settle:
    """The early-end orders of a run's chaos leg once its faults are over.

    Empty where equal state at a checkpoint would not prove that the rest is equal: a script that resumes by itself keeps its
    position, schedule and loaders outside the digests; with tolerances states are not equal; an injected corruption is searched
    for until the end.
    """
    if any(undecided(spec, None)) or corrupts(plan):
        return ""
    if early == "never" or (early == "long" and final_step(reference) <= LONG):
        return ""
    if early == "watch" or not reference.repeats.is_file():
        return "watch"
    return "stop" if spec.verify.on_difference == "stop" else "go_on"


def with_early_end(template: WorkerOrder, spec: JobSpec, early: Early, plan: FaultPlan, reference: LegLayout) -> WorkerOrder:
    """The early-end orders of a leg. `looks_after`: the step from which its checkpoints record what an early end needs; if only
    long jobs end early, step LONG. None for a leg that will not end early."""
    settle = asked(spec, early, plan, reference) if template.leg == "chaos" else ""
    if template.leg == "chaos":
        is_asked = settle != ""
    else:
        is_asked = spec.by == "chaosrun" and early != "never" and not (early == "long" and (spec.max_steps or LONG + 1) <= LONG)
    return replace(template, looks_after=(LONG if early == "long" else 0) if is_asked else None, settle=settle)


def reference_keys(key: str, early: Early) -> tuple[str, ...]:
    """Keys of a run's reference in the cache: it is kept under the first, and found under any. A reference whose checkpoints
    record what an early end needs also serves runs without early ends."""
    return (key, f"{key}-early") if early in ("never", "long") else (f"{key}-early",)


def has_repeated(reference: LegLayout, run_id: str) -> None:
    """Record that the job was run twice, from first step to last, with equal results."""
    write_durably(reference.repeats, json.dumps({"v": 1, "run": run_id}).encode())
