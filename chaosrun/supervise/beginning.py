"""Where the chaos leg of a drill begins: at the reference's checkpoint before the first fault, if the verdict can rest on it.

The conditions for that are in docs/exactness.md ("Where a drill begins"); `verify.check` decides whether a leg that began there
may be judged.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from chaosrun.checkpoint.retention import FEWEST_KEPT
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import ChaosrunError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kind import RESTORE_PHASES
from chaosrun.records.began import Began, digest_of, read_began, saved_in
from chaosrun.records.layout import AttemptLayout, LegLayout, RunLayout, checkpoint_name
from chaosrun.records.order import WorkerOrder
from chaosrun.records.run_file import Early, RunInfo, read_run, recorded_leg, write_record
from chaosrun.records.trace_reader import read_trace
from chaosrun.records.traces import Digests, RankTrace
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.early_end import LONG
from chaosrun.supervise.objects import give_objects, remove_objects
from chaosrun.supervise.reference import final_step
from chaosrun.verify.compare import undecided
from chaosrun.verify.corruption import corrupts

EVERY_ONE = 10**9


def keeping(template: WorkerOrder, spec: JobSpec, early: Early) -> WorkerOrder:
    """The orders of a reference leg, with how many checkpoints it keeps for other legs to begin at, and from which step they
    record what that needs (`looks_after`)."""
    if template.leg != "reference":
        return template
    if spec.verify.begin == "fault" and spec.by == "chaosrun":
        template = replace(template, looks_after=0)
    kept = spec.checkpoint.keep_reference
    if isinstance(kept, int):
        return replace(template, keep=max(kept, spec.checkpoint.keep))
    return replace(template, keep=EVERY_ONE) if kept == "all" or early in ("always", "watch") else template


def wanted(spec: JobSpec, early: Early, reference: LegLayout) -> bool:
    """Whether the chaos leg is to begin at a checkpoint: as the job says; by default whenever early ends are used."""
    by_rule = early == "always" or (early == "long" and final_step(reference) > LONG)
    return by_rule if spec.verify.begin == "auto" else spec.verify.begin == "fault"


def begin(info: RunInfo, spec: JobSpec, plan: FaultPlan, reference: LegLayout, chaos: LegLayout) -> Began:
    """Make a chaos leg that has not started yet begin at the reference's checkpoint before its first fault, or record why it
    does not."""
    if chaos.checkpoints.exists():  # a supervisor was killed while it was copying
        shutil.rmtree(chaos.checkpoints)
        remove_objects(chaos)
    found = _give(info, spec, plan, reference, chaos)
    began = found if isinstance(found, Began) else Began(why=found)
    chaos.path.mkdir(parents=True, exist_ok=True)
    write_record(chaos.began, began)
    return began


def _give(info: RunInfo, spec: JobSpec, plan: FaultPlan, reference: LegLayout, chaos: LegLayout) -> Began | str:
    """Copy as many checkpoints as the reference leg had at this step (copies, as faults may damage them), or return why not."""
    if why := next(_refusals(spec, plan, reference), None):
        return why
    number = reference.attempts()[-1]
    traces = [read_trace(reference.attempt(number).trace(rank), number, rank, []) for rank in range(spec.workers)]
    if why := next(_outside(reference.attempt(number), traces), None):
        return why
    kept = _kept(info, reference)
    before = min(fault.at_step for fault in plan.faults if fault.at_step is not None)
    steps = [step for step in sorted(CheckpointStore(kept, EVERY_ONE).steps()) if step < before]
    if not steps:
        return f"the reference keeps no checkpoint before step {before}"
    names = [checkpoint_name(step) for step in steps[-max(FEWEST_KEPT, spec.checkpoint.keep) :]]
    try:
        states = {name: _given(kept, chaos, name, saved_in(traces, name)) for name in names}
        for name in names:
            give_objects(chaos, name)
    except (ChaosrunError, OSError, LookupError) as error:
        shutil.rmtree(chaos.checkpoints, ignore_errors=True)
        remove_objects(chaos)
        return f"the reference's checkpoints are not as it saved them ({error})"
    return Began(step=steps[-1], states=states)


def has_begun_there(leg: LegLayout) -> bool:
    """Whether the leg began at a checkpoint of the reference, so that its trace lacks the first steps."""
    began = read_began(leg, [])
    return began is not None and bool(began.states)


def _refusals(spec: JobSpec, plan: FaultPlan, reference: LegLayout) -> Iterator[str]:
    yield from undecided(spec, reference)
    if corrupts(plan):
        yield "the plan corrupts memory"
    if not any(fault.facts.ends_attempt for fault in plan.faults):
        yield "no fault makes the job restart"
    if not any(fault.at_step for fault in plan.faults):
        yield "no fault has a step"
    yield from (f"{fault.id} may strike before any checkpoint" for fault in plan.faults if _any_time(fault))


def _outside(attempt: AttemptLayout, traces: Sequence[RankTrace]) -> Iterator[str]:
    """What the script does outside its process, where no checkpoint records it: a leg that skips these steps may diverge."""
    if not all(any(saved.own or saved.unseen for saved in trace.checkpoints) for trace in traces):
        yield "what its script does outside its process was not recorded"
    told = [attempt.effects(trace.rank) for trace in traces]
    yield from (f"rank {rank}: {path.read_text(errors='replace')}" for rank, path in enumerate(told) if path.exists())


def _any_time(fault: Fault) -> bool:
    """Whether the fault may come before any checkpoint: after a delay, at no certain step, at the first rendezvous, or at the
    restore with which the leg would begin."""
    if fault.phase == "rendezvous":
        return max(fault.occurrence, fault.attempt or 1) == 1
    return fault.phase is None or fault.phase in RESTORE_PHASES or fault.at_step is None


def _kept(info: RunInfo, reference: LegLayout) -> LegLayout:
    """The leg that holds the checkpoints: a copied reference has only its last one."""
    if info.reference.source is None:
        return reference
    if info.reference.mode == "auto":
        return LegLayout(Path(info.reference.source))
    other = RunLayout(Path(info.reference.mode))
    return recorded_leg(other, read_run(other), "reference")


def _given(kept: LegLayout, chaos: LegLayout, name: str, saved: list[Digests]) -> str:
    """Copy a checkpoint and verify that it is whole and holds what the reference saved. Raises ChaosrunError, LookupError and
    OSError."""
    shutil.copytree(kept.checkpoints / name, chaos.checkpoints / name, copy_function=shutil.copyfile)
    told = CheckpointStore(chaos, EVERY_ONE).audit(name).digests
    alike: Mapping[str, Digests] = {key: told[key] for key in ("model", "optimizer", "scheduler")}
    if [{**alike, **own} for own in told["ranks"]] != [dict(rank) for rank in saved]:
        raise LookupError(f"{name} holds another state")
    return digest_of(saved)
