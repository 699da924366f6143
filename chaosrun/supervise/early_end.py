"""When a chaos leg may end before its training does: what its attempts are told, and what their end is called.

What "settled" rests on says docs/exactness.md; whether a leg that says so was right, `verify.early_end`.
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


def settle_in(template: WorkerOrder, attempt: int, plan: FaultPlan, observed: Collection[str]) -> Settle:
    """What the ranks of an attempt are told. Nothing while a fault may still strike: all of the plan, and all that was
    injected, has to have been seen before."""
    faults = {fault.id for fault in plan.faults}
    return template.settle if attempt > 1 and faults and faults <= {*observed} else ""


def ending(finish: Finish, leg: LegLayout, attempt: int, world_size: int) -> Finish:
    """How a leg ended whose ranks completed it, or all left it because it was decided."""
    ends = [read_end(leg.attempt(attempt), rank) for rank in range(world_size)] if finish.outcome == "completed" else []
    how, step = {end.status for end in ends if end}, max((end.step for end in ends if end), default=0)
    if how == {SETTLED}:
        return structs.replace(finish, outcome="settled", message=f"settled at step {step}: complete state equal")
    if how == {DIFFERED}:
        return structs.replace(finish, outcome="differed", message=f"ended at step {step}: its state differs for good")
    return finish


LONG = 1000
"""Steps of a job from which on a drill that is submitted ends early by itself."""


def asked(spec: JobSpec, early: Early, plan: FaultPlan, reference: LegLayout) -> Settle:
    """What the chaos leg of a run is told once its faults are over.

    Nothing where no end is ever shown to follow: a script that resumes by itself keeps its place, its schedule and its loaders
    where no digest looks; tolerances have no equal state; an injected corruption is looked for to the end.
    """
    if any(undecided(spec, None)) or corrupts(plan):
        return ""
    if early == "never" or (early == "long" and final_step(reference) <= LONG):
        return ""
    if early == "watch" or not reference.repeats.is_file():
        return "watch"
    return "stop" if spec.verify.on_difference == "stop" else "go_on"


def told(template: WorkerOrder, spec: JobSpec, early: Early, plan: FaultPlan, reference: LegLayout) -> WorkerOrder:
    """The orders of a leg. From which step on its checkpoints say what an early end rests on: of a job that is only taken for a
    long one when it has come so far, from there. A leg of which that is never asked does not look, nor listen."""
    settle = asked(spec, early, plan, reference) if template.leg == "chaos" else ""
    if template.leg == "chaos":
        is_asked = settle != ""
    else:
        is_asked = spec.by == "chaosrun" and early != "never" and not (early == "long" and (spec.max_steps or LONG + 1) <= LONG)
    return replace(template, looks_after=(LONG if early == "long" else 0) if is_asked else None, settle=settle)


def reference_keys(key: str, early: Early) -> tuple[str, ...]:
    """Of a run's reference in the cache: under the first it is kept, under any it is found. One whose checkpoints say all that
    an early end rests on does for other runs, too."""
    return (key, f"{key}-early") if early in ("never", "long") else (f"{key}-early",)


def has_repeated(reference: LegLayout, run_id: str) -> None:
    """Write down that the job was run twice, from its first step to its last, and did the same."""
    write_durably(reference.repeats, json.dumps({"v": 1, "run": run_id}).encode())
